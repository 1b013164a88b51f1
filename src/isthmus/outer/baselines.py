"""Dense averaging behind the same interface. Per-step AdamW needs none: its replicas share one set of
weights."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.config import OuterConfig
from isthmus.outer.aggregate import aggregate_many
from isthmus.outer.sparseloco import Payload, SparseLoCo
from isthmus.sparse import TopK
from isthmus.sparse.bundle import Bundle


class DiLoCo(SparseLoCo):
    """The dense baseline: every entry is sent, the mean goes through Nesterov momentum."""

    def __init__(self, anchor: dict[str, Tensor], config: OuterConfig) -> None:
        super().__init__(anchor, config)
        wide = next(iter(anchor.values())).dtype == torch.float64
        self.codec = TopK(config.chunk_side, config.chunk_side**2, "fp64" if wide else "fp32")
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
    def apply(self, payloads: Sequence[Payload]) -> None:
        mu = self.config.momentum
        for name, mean in aggregate_many(payloads, "all", None).items():
            velocity = self.velocity[name]
            velocity.mul_(mu).add_(mean)
            update = (mean + velocity * mu) * self.config.step_size
            self.anchor[name].sub_(update)

    def take_back(self, sent: Payload, feedback: Mapping[str, Tensor]) -> None:
        """DiLoCo keeps no feedback: a missed round is work lost."""

    def state(self) -> dict[str, Tensor]:
        return {f"velocity/{name}": tensor for name, tensor in self.velocity.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.velocity.items():
            tensor.copy_(state[f"velocity/{name}"])
