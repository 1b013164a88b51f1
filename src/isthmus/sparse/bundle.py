"""Payloads as types: of one tensor, and of many together.

Tensors whose chunks have the same shape and number of kept entries form a group. A group is a few tensors
however many names it has, so a model of hundreds of weights needs few operations.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.layout.chunks import Layout, check_codec, check_shape
from isthmus.layout.chunks import layout as layout_of

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class SparseChunks:
    """One parameter's payload in one outer round."""

    values: Tensor  # (C, J) as the receiver will see them: fp32, fp64 for kind "fp64"
    index: Tensor  # (C, J) int16, position inside the chunk, ascending
    shape: torch.Size
    side: int = 64
    keep: int = 32
    kind: str = "fp32"
    scale: Tensor | None = None  # (C,) int32, only for 2bit: the codes of the chunk's two levels
    base: Tensor | None = None  # () fp32, only for 2bit: the levels are relative to it

    @property
    def layout(self) -> Layout:
        return layout_of(tuple(self.shape), self.side, self.keep)


class Group(NamedTuple):
    """The payloads of a group's tensors, one after the other."""

    index: Tensor  # (C, J) int16
    values: Tensor  # (C, J)
    scale: Tensor | None = None  # (C,) int32, only for 2bit
    base: Tensor | None = None  # (T,) fp32, only for 2bit

    @staticmethod
    def join(groups: Sequence["Group"]) -> "Group":
        """Concatenate groups of the same chunks; `row` extracts one again."""
        if len(groups) == 1:
            return groups[0]
        scales = [group.scale for group in groups if group.scale is not None]
        bases = [group.base for group in groups if group.base is not None]
        return Group(
            torch.cat([group.index for group in groups]),
            torch.cat([group.values for group in groups]),
            torch.cat(scales) if scales else None,
            torch.cat(bases) if bases else None,
        )

    def row(self, r: int, rows: int) -> "Group":
        """The part of replica r in the concatenated groups of `rows` replicas."""
        scale = None if self.scale is None else self.scale.chunk(rows)[r]
        base = None if self.base is None else self.base.chunk(rows)[r]
        return Group(self.index.chunk(rows)[r], self.values.chunk(rows)[r], scale, base)


class Location(NamedTuple):
    """A tensor's location: its group, its number there, and its chunks."""

    group: int
    number: int
    first: int
    stop: int


class Arrangement(NamedTuple):
    layouts: dict[str, Layout]
    groups: tuple[tuple[str, ...], ...]  # names, in order of first appearance
    locations: dict[str, Location]


@lru_cache(maxsize=512)
def arrange(shapes: Shapes, side: int, keep: int) -> Arrangement:
    """Arrange tensors of these names and shapes in groups."""
    layouts = {name: layout_of(tuple(shape), side, keep) for name, shape in shapes}
    groups: dict[tuple[int, int, int], list[str]] = {}
    for name, layout in layouts.items():
        groups.setdefault(layout.group, []).append(name)
    locations = {}
    for number, names in enumerate(groups.values()):
        first = 0
        for i, name in enumerate(names):
            locations[name] = Location(number, i, first, first + layouts[name].chunks)
            first += layouts[name].chunks
    return Arrangement(layouts, tuple(map(tuple, groups.values())), locations)


@lru_cache(maxsize=256)
def owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The tensor's number (C,) for each chunk of a group whose tensors have these chunk counts."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)


class Bundle(Mapping[str, SparseChunks]):
    """Payloads by name; a single tensor's payload is sliced out on access."""

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], side: int, keep: int, kind: str, groups: Sequence[Group]
    ) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.side, self.keep, self.kind, self.groups = side, keep, kind, tuple(groups)

    @property
    def key(self) -> tuple[Shapes, int, int]:
        """The arguments of `arrange`; equal for bundles that can be added up."""
        return tuple(self.shapes.items()), self.side, self.keep

    def __getitem__(self, name: str) -> SparseChunks:
        at = arrange(*self.key).locations[name]
        group, cut = self.groups[at.group], slice(at.first, at.stop)
        scale = None if group.scale is None else group.scale[cut]
        base = None if group.base is None else group.base[at.number]
        return SparseChunks(
            group.values[cut],
            group.index[cut],
            self.shapes[name],
            self.side,
            self.keep,
            self.kind,
            scale,
            base,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def part(self, names: Sequence[str]) -> "Bundle":
        """The payloads of some of the tensors."""
        shapes = {name: self.shapes[name] for name in names}
        whole = arrange(*self.key)
        groups = []
        for chosen in arrange(tuple(shapes.items()), self.side, self.keep).groups:
            at = [whole.locations[name] for name in chosen]
            group = self.groups[at[0].group]
            if all(a.stop == b.first for a, b in pairwise(at)):
                cut = slice(at[0].first, at[-1].stop)
                scale = None if group.scale is None else group.scale[cut]
                base = None if group.base is None else group.base[at[0].number : at[-1].number + 1]
                groups.append(Group(group.index[cut], group.values[cut], scale, base))
            else:
                groups.append(_group([self[name] for name in chosen]))
        return Bundle(shapes, self.side, self.keep, self.kind, groups)

    @staticmethod
    def of(payloads: Mapping[str, SparseChunks]) -> "Bundle":
        """A bundle of payloads with the same codec; ValueError if codecs differ or shapes do not fit."""
        if isinstance(payloads, Bundle):
            return payloads
        if not payloads:
            raise ValueError("there is nothing to pack")
        codecs = {(payload.side, payload.keep, payload.kind) for payload in payloads.values()}
        if len(codecs) > 1:
            raise ValueError(f"payloads packed together must be encoded alike; found {sorted(codecs)}")
        ((side, keep, kind),) = codecs
        check_codec(side, keep, kind)
        shapes = {name: payload.shape for name, payload in payloads.items()}
        arrangement = arrange(tuple(shapes.items()), side, keep)
        for name, layout in arrangement.layouts.items():
            _check(name, payloads[name], layout)
        groups = [_group([payloads[name] for name in names]) for names in arrangement.groups]
        return Bundle(shapes, side, keep, kind, groups)


def _check(name: str, payload: SparseChunks, layout: Layout) -> None:
    check_shape(payload.shape)
    fits = payload.values.shape == payload.index.shape == (layout.chunks, layout.kept)
    if payload.kind == "2bit":
        fits = fits and payload.scale is not None and payload.base is not None
    if not fits:
        raise ValueError(f"{name or 'the payload'} does not fit its own shape {tuple(payload.shape)}")


def _group(payloads: Sequence[SparseChunks]) -> Group:
    """The payloads of a group's tensors, one after the other."""
    return Group.join([
        Group(own.index, own.values, own.scale, None if own.base is None else own.base.view(1))
        for own in payloads
    ])  # fmt: skip
