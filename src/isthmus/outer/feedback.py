"""Error feedback of eq. 2 of arXiv 2601.02360: what was not sent is carried into the next round."""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.sparse.bundle import Bundle, SparseChunks
from isthmus.sparse.topk import TopK, add_payload


def feed_back(
    pseudo_grad: Tensor, feedback: Tensor, codec: TopK, decay: float
) -> tuple[SparseChunks, Tensor]:
    """One parameter's payload and its next feedback; see `feed_back_many`."""
    sent, rest = feed_back_many({"": pseudo_grad}, {"": feedback}, codec, decay)
    return sent[""], rest[""]


@torch.no_grad()
def feed_back_many(
    pseudo_grads: Mapping[str, Tensor],
    feedback: Mapping[str, Tensor],
    codec: TopK,
    decay: float,
    *,
    in_place: bool = False,
) -> tuple[Bundle, dict[str, Tensor]]:
    """e <- beta e + Delta; send Q(TOP-kappa(e)); e <- e - what was sent (eq. 2 of arXiv 2601.02360).

    What is subtracted is what the receivers decode, so that rounding stays in the feedback as well. With
    `in_place` the given feedback tensors are overwritten and returned, which saves a copy of the model; if
    the codec then refuses a value (ValueError), they hold beta e + Delta.
    """
    carried = {}
    for name, pseudo_grad in pseudo_grads.items():
        old = feedback[name]
        if in_place and not old.is_contiguous():
            raise ValueError(f"the feedback of {name} is not contiguous and cannot be overwritten in place")
        carried[name] = (old.mul_(decay) if in_place else (old * decay).contiguous()).add_(pseudo_grad)
    sent = codec.encode_many(carried)
    for name, payload in sent.items():
        add_payload(carried[name], payload, sign=-1)
    return sent, carried
