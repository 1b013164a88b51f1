"""Eq. 2 of arXiv 2601.02360: from pseudo-gradients to payloads, from all payloads to the next anchor.

`plain_round` is the equation as the paper writes it, tensor by tensor. `SparseLoCo` does the same for a whole
model in the two halves between which payloads travel, with a codec for the anchor's device.
tests/outer/test_methods.py compares the two, bit by bit.
"""

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from isthmus.config import OuterConfig
from isthmus.outer.aggregate import aggregate
from isthmus.outer.clip import all_shrunk, median_clips, shrunk
from isthmus.outer.codec import Payloads, codec_for
from isthmus.sparse import Bundle, TopK, pack, unpack


@torch.no_grad()
def plain_round(
    anchor: Mapping[str, Tensor],
    params: Sequence[Mapping[str, Tensor]],
    feedback: Sequence[MutableMapping[str, Tensor]],
    config: OuterConfig,
    weights: Sequence[int] | None = None,
    factors: Sequence[float] | None = None,
) -> None:
    """Take the anchor from theta^(t-1) to theta^(t), and every replica's feedback from e^(t) to e^(t+1).

    `weights` and `factors` are 1 in eq. 2; see `weights.round_weights` and `clip.history_factor`.
    """
    top_k = TopK(config.chunk_side, config.keep, config.values)
    scale = config.step_size if config.feedback_lr_scaled else 1.0  # 1 in eq. 2
    clip = median_clips(config, len(params))  # none in eq. 2
    for name, theta in anchor.items():
        received = []
        for own, e in zip(params, feedback, strict=True):  # on replica m
            pseudo_grad = (theta - own[name]) * scale
            carried = e[name] * config.feedback_decay + pseudo_grad
            sent = top_k.encode(carried)  # Q(TOP-kappa(.))
            e[name] = carried - top_k.decode(sent)  # the rounding error stays in the feedback, too
            received.append(pack(sent))  # the exchange carries bytes
        # In the manifest's order, and scaled before it is subtracted: every replica reaches the same bits.
        sent_by_all = [unpack(data, theta.device) for data in received]
        for m, factor in enumerate(factors or ()):
            sent_by_all[m] = shrunk({name: sent_by_all[m]}, factor)[name]
        mean = aggregate(sent_by_all, config.aggregation, clip, weights)
        theta.sub_(mean * config.step_size)


class SparseLoCo:
    """Eq. 2 on named tensors, independent of replicas and stages.

    It holds one anchor. The caller keeps each contributor's feedback, because it moves with the contributor.
    """

    def __init__(self, anchor: Mapping[str, Tensor], config: OuterConfig) -> None:
        self.anchor, self.config = anchor, config
        device = next(iter(anchor.values())).device
        self.codec = codec_for(device, config.chunk_side, config.keep, config.values)

    def contribute(self, params: Mapping[str, Tensor], feedback: Mapping[str, Tensor]) -> Bundle:
        """One contributor's payload; updates its feedback from e^(t) to e^(t+1) in place."""
        return self.contribute_all([params], [feedback])[0]

    def contribute_all(
        self, params: Sequence[Mapping[str, Tensor]], feedback: Sequence[Mapping[str, Tensor]]
    ) -> list[Bundle]:
        """The payloads of several contributors that start from this anchor; updates each feedback."""
        beta, scale = self.config.feedback_decay, self._feedback_scale
        return self.codec.contribute_all(self.anchor, params, feedback, beta, scale)

    @property
    def _feedback_scale(self) -> float:
        return self.config.step_size if self.config.feedback_lr_scaled else 1.0

    def propose(self, params: Mapping[str, Tensor], feedback: Mapping[str, Tensor]) -> Bundle:
        """Like `contribute`, but leave the feedback at c = beta e + Delta. `feedback.settle` turns it into
        the next e once the round is settled."""
        beta, scale = self.config.feedback_decay, self._feedback_scale
        return self.codec.contribute_all(self.anchor, [params], [feedback], beta, scale, subtract=False)[0]

    def propose_again(self, params: Mapping[str, Tensor], feedback: Mapping[str, Tensor]) -> Bundle:
        """Return what `propose` returned, from the c that it left in the feedback."""
        return self.codec.encode_many(feedback)

    @torch.no_grad()
    def fold(self, params: Mapping[str, Tensor], feedback: Mapping[str, Tensor]) -> None:
        """c = beta e + Delta for a round that was settled before we had a payload.

        No payload is sent, so later rounds carry all of Delta, which may come from fewer than H inner steps.
        """
        for name, param in params.items():
            delta = (self.anchor[name] - param) * self._feedback_scale
            feedback[name].mul_(self.config.feedback_decay).add_(delta)

    def apply(
        self,
        payloads: Sequence[Payloads],
        weights: Sequence[int] | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        """theta^(t) = theta^(t-1) - eta mean; every holder of the anchor reaches the same bits. `factors` for
        a round that counts few updates: `clip.history_factor`."""
        how, size = self.config.aggregation, self.config.step_size
        clip = median_clips(self.config, len(payloads))
        self.codec.step(self.anchor, all_shrunk(payloads, factors), size, how, clip, weights)

    def state(self) -> dict[str, Tensor]:
        """The method's state from round to round, besides the anchor."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        pass
