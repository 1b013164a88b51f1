"""Error feedback and one outer round: from pseudo-gradients to payloads, from all payloads to the next
anchor."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.config import OuterConfig
from isthmus.outer.aggregate import step_many
from isthmus.outer.feedback import contribute_all
from isthmus.sparse import SparseChunks, TopK
from isthmus.sparse.bundle import Bundle
from isthmus.sparse.topk import add_payload

Payload = Mapping[str, SparseChunks]


class SparseLoCo:
    """Eq. 2 of arXiv 2601.02360 on named tensors; it has not heard of replicas or stages.

    One anchor, and a feedback for every contributor: the caller keeps it, because it moves with the
    contributor.
    """

    def __init__(self, anchor: dict[str, Tensor], config: OuterConfig) -> None:
        self.anchor, self.config = anchor, config
        self.codec = TopK(config.chunk_side, config.keep, config.values)

    def contribute(self, params: Mapping[str, Tensor], feedback: Mapping[str, Tensor]) -> Bundle:
        """Delta and e of eq. 2; `feedback` is brought to e^(t+1) in place."""
        return self.contribute_all([params], [feedback])[0]

    @torch.no_grad()
    def contribute_all(
        self, params: Sequence[Mapping[str, Tensor]], feedback: Sequence[Mapping[str, Tensor]]
    ) -> list[Bundle]:
        """The same of several contributors that stand on this anchor."""
        scale = self.config.step_size if self.config.feedback_lr_scaled else 1.0
        return contribute_all(self.anchor, params, feedback, self.codec, self.config.feedback_decay, scale)

    @torch.no_grad()
    def apply(self, payloads: Sequence[Payload]) -> None:
        """theta^(t) = theta^(t-1) - eta mean; every holder of the anchor reaches the same bits."""
        clip = None if self.config.clip == "none" else self.config.clip
        step_many(self.anchor, payloads, self.config.step_size, self.config.aggregation, clip)

    @torch.no_grad()
    def take_back(self, sent: Payload, feedback: Mapping[str, Tensor]) -> None:
        """A payload that missed its round returns to the feedback (docs/method.md, Error feedback)."""
        for name, payload in sent.items():
            add_payload(feedback[name], payload)

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        pass
