"""The outer methods by the name that a recipe gives them: SparseLoCo, and DiLoCo, the dense baseline."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.config import OuterConfig
from isthmus.outer.clip import all_shrunk, median_clips
from isthmus.outer.codec import Payloads, codec_for
from isthmus.outer.sparseloco import SparseLoCo
from isthmus.sparse import Bundle


class DiLoCo(SparseLoCo):
    """The dense baseline: every entry is sent, the mean goes through Nesterov momentum."""

    def __init__(self, anchor: Mapping[str, Tensor], config: OuterConfig) -> None:
        super().__init__(anchor, config)
        first = next(iter(anchor.values()))
        values = "fp64" if first.dtype == torch.float64 else "fp32"
        self.codec = codec_for(first.device, config.chunk_side, config.chunk_side**2, values)
        self.velocity = {name: torch.zeros_like(tensor) for name, tensor in anchor.items()}

    @torch.no_grad()
    def contribute_all(
        self, params: Sequence[Mapping[str, Tensor]], feedback: Sequence[Mapping[str, Tensor]]
    ) -> list[Bundle]:
        return [
            self.codec.encode_many({name: self.anchor[name] - param for name, param in own.items()})
            for own in params
        ]

    @torch.no_grad()
    def apply(
        self,
        payloads: Sequence[Payloads],
        weights: Sequence[int] | None = None,
        factors: Sequence[float] | None = None,
    ) -> None:
        mu, clip = self.config.momentum, median_clips(self.config, len(payloads))
        for name, mean in self.codec.mean(all_shrunk(payloads, factors), "all", clip, weights).items():
            velocity = self.velocity[name]
            velocity.mul_(mu).add_(mean)
            update = (mean + velocity * mu) * self.config.step_size
            self.anchor[name].sub_(update)

    def propose(self, params: Mapping[str, Tensor], feedback: Mapping[str, Tensor]) -> Bundle:
        """Contribute without feedback: the work of a round that does not count us is lost."""
        return self.contribute(params, feedback)

    def propose_again(self, params: Mapping[str, Tensor], feedback: Mapping[str, Tensor]) -> Bundle:
        return self.contribute(params, feedback)

    def fold(self, params: Mapping[str, Tensor], feedback: Mapping[str, Tensor]) -> None:
        """Drop the inner steps of a round that was settled meanwhile."""

    def state(self) -> dict[str, Tensor]:
        return {f"velocity/{name}": tensor for name, tensor in self.velocity.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.velocity.items():
            tensor.copy_(state[f"velocity/{name}"])


METHODS = {"sparseloco": SparseLoCo, "diloco": DiLoCo}


def outer_method(config: OuterConfig, anchor: Mapping[str, Tensor]) -> SparseLoCo:
    """The outer method of a recipe. "adamw" has none: its replicas share one set of weights."""
    return METHODS[config.method](anchor, config)
