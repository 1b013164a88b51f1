"""Eq. 2 of arXiv 2601.02360 on a whole model's tensors and payloads, behind one object.

`PlainCodec` is the reference, in torch on any device. `fused.FusedCodec` does the same with kernels.
`codec_for` chooses between them, once.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from isthmus import gpu
from isthmus.outer.aggregate import RunningMean, add_all
from isthmus.outer.feedback import feed_back
from isthmus.sparse.bundle import Bundle, SparseChunks
from isthmus.sparse.topk import TopK
from isthmus.sparse.wire import pack_all, unpack_all

Payloads = Mapping[str, SparseChunks]


def codec_for(
    device: torch.device | str, side: int = 64, keep: int = 32, values: str = "fp32"
) -> "PlainCodec":
    """The codec for tensors on this device: with kernels if they can run, else plain."""
    device = torch.device(device)
    if gpu.usable(device):
        from isthmus.outer.fused import FusedCodec  # needs Triton

        return FusedCodec(side, keep, values, device)
    return PlainCodec(side, keep, values, device)


class PlainCodec(TopK):
    """TOP-kappa and Q with error feedback, bytes, and the mean of payloads, for a whole model at once."""

    def __init__(
        self, side: int = 64, keep: int = 32, values: str = "fp32", device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(side, keep, values)
        self.device = torch.device(device)

    def warm(self) -> None:
        """Prepare whatever the first round would otherwise wait for; plain torch needs nothing."""

    @torch.no_grad()
    def contribute_all(
        self,
        anchor: Mapping[str, Tensor],
        params: Sequence[Mapping[str, Tensor]],
        feedback: Sequence[Mapping[str, Tensor]],
        decay: float,
        scale: float = 1.0,
        subtract: bool = True,
    ) -> list[Bundle]:
        """The payloads of several replicas; overwrites their feedback. See `feed_back`."""
        sent = []
        for own, e in zip(params, feedback, strict=True):
            pseudo_grads = {name: (anchor[name] - own[name]) * scale for name in anchor if name in own}
            sent.append(feed_back(pseudo_grads, e, self, decay, subtract=subtract))
        return sent

    def pack_all(self, replicas: Sequence[Payloads]) -> list[bytes]:
        """The bytes of each replica's payloads."""
        return pack_all(replicas)

    def unpack_all(self, strings: Sequence[bytes]) -> list[Bundle]:
        """Each replica's payloads on this codec's device; ValueError if one of the strings is malformed."""
        return unpack_all(strings, self.device)

    def pack_many(self, payloads: Payloads) -> bytes:
        return self.pack_all([payloads])[0]

    def unpack_many(self, data: bytes) -> Bundle:
        return self.unpack_all([data])[0]

    def running_mean(self, how: str = "contributors", weights: Sequence[int] | None = None) -> RunningMean:
        """An empty accumulator."""
        return RunningMean(how, weights)

    @torch.no_grad()
    def mean(
        self,
        replicas: Iterable[Payloads],
        how: str = "contributors",
        clip: str | None = None,
        weights: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """The mean of the replicas' payloads, by name; see `aggregate_many`."""
        return add_all(self.running_mean(how, weights), replicas, clip, weights).result()

    @torch.no_grad()
    def step(
        self,
        anchor: Mapping[str, Tensor],
        replicas: Sequence[Payloads],
        step_size: float,
        how: str = "contributors",
        clip: str | None = None,
        weights: Sequence[int] | None = None,
    ) -> None:
        """anchor -= step_size * mean; every holder of the anchor reaches the same bits."""
        add_all(self.running_mean(how, weights), replicas, clip, weights).step(anchor, step_size)
