"""Error feedback of eq. 2 of arXiv 2601.02360: what was not sent is carried into the next round."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.layout.chunks import Layout
from isthmus.sparse import fused
from isthmus.sparse.bundle import Bundle, Group, SparseChunks, arrange
from isthmus.sparse.topk import TopK, add_payload, refuse_not_finite


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


def contribute_many(
    anchor: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    feedback: Mapping[str, Tensor],
    codec: TopK,
    decay: float,
    scale: float = 1.0,
) -> Bundle:
    """`feed_back_many` of scale (anchor - params), with the feedback overwritten."""
    return contribute_all(anchor, [params], [feedback], codec, decay, scale)[0]


@torch.no_grad()
def contribute_all(
    anchor: Mapping[str, Tensor],
    params: Sequence[Mapping[str, Tensor]],
    feedback: Sequence[Mapping[str, Tensor]],
    codec: TopK,
    decay: float,
    scale: float = 1.0,
) -> list[Bundle]:
    """`contribute_many` of several replicas that stand on one anchor.

    A GPU takes all of them in one go and reads and writes each number once, in fused kernels; every other
    device, and what does not fit, the plain way.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in anchor.items() if name in params[0]}
    layouts, groups, _ = arrange(tuple(shapes.items()), codec.side, codec.keep)
    rows, odd = len(params), []
    sent: list[list[Group | None]] = [[] for _ in params]  # by replica, by group
    for names in groups:
        three = [
            [anchor[name] for _ in params for name in names],
            [one[name] for one in params for name in names],
            [one[name] for one in feedback for name in names],
        ]
        places = [layouts[name] for name in names] * rows
        if codec.values == "fp64" or not _quick(three, places):
            for groups_of in sent:
                groups_of.append(None)
            continue
        group, flag = fused.feed_back(*three, places, decay, scale, codec.values)
        odd.append(flag)
        for r, groups_of in enumerate(sent):
            groups_of.append(group.row(r, rows))
    plain = [name for names, one in zip(groups, sent[0], strict=True) if one is None for name in names]
    bundles = []
    for own, e, groups_of in zip(params, feedback, sent, strict=True):
        if plain:
            pseudo_grads = {name: (anchor[name] - own[name]) * scale for name in plain}
            rest = iter(feed_back_many(pseudo_grads, e, codec, decay, in_place=True)[0].groups)
            groups_of = [group or next(rest) for group in groups_of]
        bundles.append(Bundle(shapes, codec.side, codec.keep, codec.values, groups_of))
    if odd and torch.cat(odd).any():
        for e in feedback:
            refuse_not_finite(e)
    return bundles


def _quick(three: list[list[Tensor]], places: list[Layout]) -> bool:
    """Whether a group's anchor, parameters and feedback can take the fused way."""
    tensors = [tensor for some in three for tensor in some]
    return (
        fused.usable(tensors[0].device)
        and all(map(fused.fits, places))
        and all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
    )
