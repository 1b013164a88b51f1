"""Error feedback of eq. 2 of arXiv 2601.02360: what was not sent is carried into the next round."""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.sparse.bundle import Bundle, SparseChunks
from isthmus.sparse.topk import TopK, add_payload, clear_payload


@torch.no_grad()
def feed_back(
    pseudo_grads: Mapping[str, Tensor],
    feedback: Mapping[str, Tensor],
    codec: TopK,
    decay: float,
    *,
    subtract: bool = True,
) -> Bundle:
    """e <- beta e + Delta; send Q(TOP-kappa(e)); subtract the sent part from e (eq. 2 of arXiv 2601.02360).

    It subtracts what the receivers decode, so that rounding stays in the feedback as well. Feedback changes
    in place, which saves a copy of the model; if the codec refuses a value (ValueError), it holds beta e +
    Delta. Without `subtract` it always holds that: c, from which `settle` makes e once it is known what
    counts.
    """
    carried = {}
    for name, pseudo_grad in pseudo_grads.items():
        if not feedback[name].is_contiguous():
            raise ValueError(f"the feedback of {name} is not contiguous and cannot be overwritten in place")
        carried[name] = feedback[name].mul_(decay).add_(pseudo_grad)
    sent = codec.encode_many(carried)
    if subtract:
        for name, payload in sent.items():
            add_payload(carried[name], payload, sign=-1)
    return sent


@torch.no_grad()
def settle(feedback: Mapping[str, Tensor], listed: Mapping[str, SparseChunks] | None, known: bool) -> None:
    """Turn c = beta e + Delta into the next e, in place, when a round is settled.

    `listed` is what the manifest counts for this replica. `known`: one of its own starts sent it, from the
    same c as this one. Then e = c - listed. An update from another sender, or from a lost c, cannot be
    subtracted: its entries are cleared, so that nothing is sent twice. If no update of ours counts, e = c.
    See docs/method.md, Error feedback.
    """
    for name, payload in (listed or {}).items():
        if name in feedback and known:
            add_payload(feedback[name], payload, sign=-1)
        elif name in feedback:
            clear_payload(feedback[name], payload)
