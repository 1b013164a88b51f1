"""Error feedback of eq. 2 of arXiv 2601.02360: what was not sent is carried into the next round."""

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.sparse import fused
from isthmus.sparse.bundle import Bundle, Group, SparseChunks, arrange
from isthmus.sparse.size import Layout
from isthmus.sparse.topk import TopK, add_payload, as_sent, refuse_not_finite


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


@torch.no_grad()
def contribute_many(
    anchor: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    feedback: Mapping[str, Tensor],
    codec: TopK,
    decay: float,
    scale: float = 1.0,
) -> Bundle:
    """`feed_back_many` of scale (anchor - params), with the feedback overwritten. A GPU reads and writes each
    number once, in fused kernels; what they leave and every other device takes the plain way."""
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    layouts, group_names, _ = arrange(tuple(shapes.items()), codec.side, codec.keep)
    groups: list[Group | None] = []
    odd = []
    for names in group_names:
        three = [[tensors[name] for name in names] for tensors in (anchor, params, feedback)]
        places = [layouts[name] for name in names]
        if not _quick(three, places):
            groups.append(None)
            continue
        group, flag = fused.feed_back(*three, places, decay, scale, codec.values == "2bit")
        odd.append(flag)
        if codec.values != "2bit":
            group = Group(group.index, as_sent(group.values, codec.values))
        groups.append(group)
    plain = [
        name for names, group in zip(group_names, groups, strict=True) if group is None for name in names
    ]
    if plain:
        pseudo_grads = {name: (anchor[name] - params[name]) * scale for name in plain}
        rest = iter(feed_back_many(pseudo_grads, feedback, codec, decay, in_place=True)[0].groups)
        groups = [group or next(rest) for group in groups]
    if odd and torch.cat(odd).any():
        refuse_not_finite(feedback)
    sent = Bundle(shapes, codec.side, codec.keep, codec.values, groups)
    if codec.values != "2bit":
        for name in set(params) - set(plain):
            add_payload(feedback[name], sent[name], sign=-1)
    return sent


def _quick(three: list[list[Tensor]], places: list[Layout]) -> bool:
    """Whether a group's anchor, parameters and feedback can take the fused way."""
    tensors = [tensor for some in three for tensor in some]
    return (
        fused.usable(tensors[0].device)
        and all(map(fused.fits, places))
        and all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
    )
