"""Eq. 2 of arXiv 2601.02360: from pseudo-gradients to payloads, from all payloads to the next anchor.

`plain_round` is the equation as it is written, one tensor after the other. `SparseLoCo` does the same for a
whole model in the two halves between which payloads travel; a codec chosen by the anchor's device does the
work. tests/outer/test_methods.py compares the two, bit by bit.
"""

from collections.abc import Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from isthmus.config import OuterConfig
from isthmus.outer.aggregate import aggregate
from isthmus.outer.codec import Payloads, codec_for
from isthmus.sparse import Bundle, TopK, pack, unpack
from isthmus.sparse.topk import add_payload


@torch.no_grad()
def plain_round(
    anchor: Mapping[str, Tensor],
    params: Sequence[Mapping[str, Tensor]],
    feedback: Sequence[MutableMapping[str, Tensor]],
    config: OuterConfig,
    weights: Sequence[int] | None = None,
) -> None:
    """Take the anchor from theta^(t-1) to theta^(t), and every replica's feedback from e^(t) to e^(t+1).

    `weights` are 1 in eq. 2; see `weights.round_weights`.
    """
    top_k = TopK(config.chunk_side, config.keep, config.values)
    scale = config.step_size if config.feedback_lr_scaled else 1.0  # 1 in eq. 2
    clip = None if config.clip == "none" else config.clip  # none in eq. 2
    for name, theta in anchor.items():
        received = []
        for own, e in zip(params, feedback, strict=True):  # on replica m
            pseudo_grad = (theta - own[name]) * scale
            carried = e[name] * config.feedback_decay + pseudo_grad
            sent = top_k.encode(carried)  # Q(TOP-kappa(.))
            e[name] = carried - top_k.decode(sent)  # what was rounded off stays in the feedback, too
            received.append(pack(sent))  # the exchange carries bytes
        # In the manifest's order, and scaled before it is subtracted: every replica reaches the same bits.
        sent_by_all = [unpack(data, theta.device) for data in received]
        mean = aggregate(sent_by_all, config.aggregation, clip, weights)
        theta.sub_(mean * config.step_size)


class SparseLoCo:
    """Eq. 2 on named tensors; it knows nothing of replicas or stages.

    It holds one anchor. Each contributor's feedback is kept by the caller, because it moves with the
    contributor.
    """

    def __init__(self, anchor: Mapping[str, Tensor], config: OuterConfig) -> None:
        self.anchor, self.config = anchor, config
        device = next(iter(anchor.values())).device
        self.codec = codec_for(device, config.chunk_side, config.keep, config.values)

    @property
    def _clip(self) -> str | None:
        return None if self.config.clip == "none" else self.config.clip

    def contribute(self, params: Mapping[str, Tensor], feedback: Mapping[str, Tensor]) -> Bundle:
        """What one contributor sends; its feedback is brought from e^(t) to e^(t+1) in place."""
        return self.contribute_all([params], [feedback])[0]

    def contribute_all(
        self, params: Sequence[Mapping[str, Tensor]], feedback: Sequence[Mapping[str, Tensor]]
    ) -> list[Bundle]:
        """The same for several contributors that start from this anchor."""
        scale = self.config.step_size if self.config.feedback_lr_scaled else 1.0
        return self.codec.contribute_all(self.anchor, params, feedback, self.config.feedback_decay, scale)

    @torch.no_grad()
    def account(self, params: Mapping[str, Tensor], feedback: Mapping[str, Tensor], sent: Payloads) -> None:
        """`contribute` for a round whose payload exists already: e <- beta e + Delta - what was sent.

        A replica that was killed trains the round again; what it had sent may be in the model by now.
        """
        scale = self.config.step_size if self.config.feedback_lr_scaled else 1.0
        for name, payload in sent.items():
            pseudo_grad = (self.anchor[name] - params[name]) * scale
            feedback[name].mul_(self.config.feedback_decay).add_(pseudo_grad)
            add_payload(feedback[name], payload, sign=-1)

    @torch.no_grad()
    def carry(self, params: Mapping[str, Tensor], feedback: Mapping[str, Tensor]) -> None:
        """`contribute` for a round that was over before there was a payload: e <- beta e + Delta.

        Nothing is sent, so all of Delta goes out with later rounds. It may be of fewer than H inner steps.
        """
        scale = self.config.step_size if self.config.feedback_lr_scaled else 1.0
        for name, param in params.items():
            feedback[name].mul_(self.config.feedback_decay).add_((self.anchor[name] - param) * scale)

    def apply(self, payloads: Sequence[Payloads], weights: Sequence[int] | None = None) -> None:
        """theta^(t) = theta^(t-1) - eta mean; every holder of the anchor reaches the same bits."""
        how, size = self.config.aggregation, self.config.step_size
        self.codec.step(self.anchor, payloads, size, how, self._clip, weights)

    @torch.no_grad()
    def take_back(self, sent: Payloads, feedback: Mapping[str, Tensor]) -> None:
        """A payload that missed its round returns to the feedback, so that nothing is lost."""
        for name, payload in sent.items():
            add_payload(feedback[name], payload)

    def state(self) -> dict[str, Tensor]:
        """What the method carries from round to round beside the anchor."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        pass
