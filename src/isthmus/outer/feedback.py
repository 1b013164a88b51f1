"""Error feedback of eq. 2 of arXiv 2601.02360: what was not sent is carried into the next round."""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.sparse import fused
from isthmus.sparse.size import layout
from isthmus.sparse.topk import SparseChunks, TopK, add_payload, as_sent, group_names, refuse_not_finite


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
) -> tuple[dict[str, SparseChunks], dict[str, Tensor]]:
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


@torch.no_grad()
def contribute_many(
    anchor: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    feedback: Mapping[str, Tensor],
    codec: TopK,
    decay: float,
    scale: float = 1.0,
) -> dict[str, SparseChunks]:
    """`feed_back_many` of scale (anchor - params), with the feedback overwritten. A GPU reads and writes each
    number once, in fused kernels; what they leave and every other device takes the plain way."""
    places = {name: layout(tuple(p.shape), codec.side, codec.keep) for name, p in params.items()}
    quick = {
        name: places[name]
        for name, param in params.items()
        if fused.usable(param.device)
        and fused.fits(places[name])
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in (anchor[name], param, feedback[name]))
    }
    sent: dict[str, SparseChunks] = {}
    odd = []
    for names in group_names(quick):
        index, values, codes, base, flag = fused.feed_back(
            *([tensors[name] for name in names] for tensors in (anchor, params, feedback)),
            [places[name] for name in names],
            decay,
            scale,
            codec.values == "2bit",
        )
        odd.append(flag)
        if codes is None:
            values = as_sent(values, codec.values)
        group = codec.payloads({name: params[name].shape for name in names}, index, values, codes, base)
        if codes is None:
            for name, payload in group.items():
                add_payload(feedback[name], payload, sign=-1)
        sent |= group
    plain = {name: (anchor[name] - param) * scale for name, param in params.items() if name not in quick}
    if plain:
        sent |= feed_back_many(plain, feedback, codec, decay, in_place=True)[0]
    if odd and torch.cat(odd).any():
        refuse_not_finite({name: feedback[name] for name in quick})
    return {name: sent[name] for name in params}
