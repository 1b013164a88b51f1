"""Payloads <-> bytes, without loss. Bytes from outside are checked to the last bit before they are used.

    magic "ISP", version, kind, side (u8 each), keep (u16), number of tensors (u32)
    per tensor: name length (u16), name in utf-8, number of dimensions (u8), dimensions (u32 each)
    2bit only: a base per tensor (fp32)
    per group of tensors whose chunks agree in shape and in entries kept, in order of first appearance:
        a bit string per chunk (`bits`): positions, then for 2bit signs and magnitudes
        2bit only: a scale per chunk (u16)
        else: values (fp32, bf16 or fp64)
    crc32 of all bytes before (u32)

Everything is little-endian.
"""

import struct
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from isthmus.layout.chunks import (
    BASE_BYTES,
    CRC_BYTES,
    HEADER_BYTES,
    SCALE_BYTES,
    VALUE_BYTES,
    Layout,
    bit_bytes,
    chunk_bytes,
)
from isthmus.sparse.bits import Levels, read_bits, to_bytes, write_bits
from isthmus.sparse.bundle import Bundle, Group, Shapes, SparseChunks, arrange, owners
from isthmus.sparse.header import read_header, write_header
from isthmus.sparse.quantize import MIN_BASE

BAD_CHUNKS = "the payload has positions out of order or out of range, or values that are not finite"
BAD_CHECKSUM = "the payload's checksum does not match its contents"
VALUE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

# The parts of packing and unpacking that kernels can replace.
WriteBits = Callable[[Tensor, Group, Levels | None, Layout], None]
ReadBits = Callable[
    [Tensor, Tensor | None, Levels | None, Sequence[Layout], int], tuple[Tensor, Tensor, Tensor]
]
Seal = Callable[[bytes, Tensor], list[bytes]]
CheckSums = Callable[[Sequence[memoryview], int, Tensor], Tensor]


def pack(payload: SparseChunks) -> bytes:
    """One parameter's payload as bytes."""
    return pack_many({"": payload})


def unpack(data: bytes, device: torch.device | str | None = None) -> SparseChunks:
    """The payload that `pack` turned into bytes; ValueError for anything else."""
    payloads = unpack_many(data, device)
    if list(payloads) != [""]:
        raise ValueError(f"expected the payload of one tensor without a name, found {len(payloads)} tensors")
    return payloads[""]


def pack_many(payloads: Mapping[str, SparseChunks]) -> bytes:
    """The payloads of many parameters with the same codec, as one string of bytes."""
    return pack_all([payloads])[0]


def unpack_many(data: bytes, device: torch.device | str | None = None) -> Bundle:
    """The payloads that `pack_many` turned into bytes; ValueError for anything else."""
    return unpack_all([data], device)[0]


def seal(header: bytes, body: Tensor) -> list[bytes]:
    """The header, each row of the body (R, n), and their checksum, with one copy from the device."""
    start, views = zlib.crc32(header), [row.numpy().data for row in body.cpu()]
    return [b"".join([header, view, struct.pack("<I", zlib.crc32(view, start))]) for view in views]


@torch.no_grad()
def pack_all(
    replicas: Sequence[Mapping[str, SparseChunks]], write_bits: WriteBits = write_bits, seal: Seal = seal
) -> list[bytes]:
    """`pack_many` for several replicas, all at once if they send the same tensors."""
    bundles = [Bundle.of(payloads) for payloads in replicas]
    key, kind = bundles[0].key, bundles[0].kind
    if any(bundle.key != key or bundle.kind != kind for bundle in bundles):
        return [pack_all([bundle], write_bits, seal)[0] for bundle in bundles]
    header, (layouts, groups, _) = write_header(*key, kind), arrange(*key)
    rows, body, bases = len(bundles), [], []
    for i, names in enumerate(groups):
        group = Group.join([bundle.groups[i] for bundle in bundles])  # (R C, J)
        own = [layouts[name] for name in names]
        levels = None
        if kind == "2bit":
            assert group.scale is not None, "a 2bit payload has scales"
            assert group.base is not None, "a 2bit payload has bases"
            bases.append(group.base.view(rows, len(names)))
            levels = group.scale, bases[-1][:, _owners(own, group.index.device)].flatten()
        size = bit_bytes(own[0].entries, own[0].kept, kind)
        bits = torch.zeros(len(group.index), 8 * size, dtype=torch.uint8, device=group.index.device)
        write_bits(bits, group, levels, own[0])
        body.append(to_bytes(bits))
        if levels is not None:
            body.append(torch.stack([levels[0] & 255, levels[0] >> 8], 1).to(torch.uint8))
        else:
            body.append(group.values.to(VALUE_TYPES[kind]).contiguous().view(torch.uint8))
    if bases:
        base = torch.cat(bases, 1)
        body.insert(0, base[:, _wire_order(*key, base.device)].view(torch.uint8))
    parts = [part.reshape(rows, part.numel() // rows) for part in body]
    return seal(header, torch.cat(parts, 1))


@lru_cache(maxsize=256)
def _wire_order(shapes: Shapes, side: int, keep: int, device: torch.device) -> Tensor:
    """The index of each tensor, in the order of names, in the order of groups: (T,)."""
    grouped = [name for names in arrange(shapes, side, keep).groups for name in names]
    number = {name: i for i, name in enumerate(grouped)}
    return torch.tensor([number[name] for name, _ in shapes], device=device)


def _owners(layouts: Sequence[Layout], device: torch.device) -> Tensor:
    return owners(tuple(layout.chunks for layout in layouts), device)


def unpack_all(strings: Sequence[bytes], device: torch.device | str | None = None) -> list[Bundle]:
    """`unpack_many` for several replicas, all at once if they sent the same tensors.

    Lengths are compared with the header before any allocation, and allocations grow only with the length of
    the strings.
    """
    views = [viewed(data) for data in strings]
    for view in views:
        if stated_crc(view) != zlib.crc32(view[:-CRC_BYTES]):
            raise ValueError(BAD_CHECKSUM)
    return unpack_views(views, torch.device(device or "cpu"))


def viewed(data: bytes) -> memoryview:
    """The bytes of a payload; ValueError if there are too few."""
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise ValueError("a payload is a string of bytes") from error
    if len(view) < HEADER_BYTES + CRC_BYTES:
        raise ValueError(f"a payload of {len(view)} bytes is shorter than its header")
    return view


def stated_crc(view: memoryview) -> int:
    return struct.unpack("<I", view[-CRC_BYTES:])[0]


@torch.no_grad()
def unpack_views(
    views: Sequence[memoryview],
    device: torch.device,
    read_bits: ReadBits = read_bits,
    check_sums: CheckSums | None = None,
) -> list[Bundle]:
    """Payloads from bytes whose checksums were compared, or that `check_sums` compares on the device."""
    found = [read_header(view[:-CRC_BYTES]) for view in views]
    if any(header != found[0] for header in found):
        return [unpack_views([view], device, read_bits, check_sums)[0] for view in views]
    shapes, side, keep, kind, at = found[0]
    expected = _body_bytes(shapes, side, keep, kind)
    for view in views:
        if len(view) - CRC_BYTES - at != expected:
            raise ValueError(
                f"the payload's body has {len(view) - CRC_BYTES - at} bytes, its header says {expected}"
            )

    body = _Body(_to_device([view[at:-CRC_BYTES] for view in views], device))
    checks: list[tuple[Tensor, str]] = []  # (R,) each, zero if one fails; read from the device at the end
    if check_sums is not None:
        checks.append((check_sums(views, at, body.data), BAD_CHECKSUM))
    layouts, groups, _ = arrange(shapes, side, keep)
    bases: Sequence[Tensor | None] = [None] * len(groups)
    if kind == "2bit":
        base = body.read(len(shapes), BASE_BYTES).view(torch.float32).view(len(views), len(shapes))
        checks.append((((base >= MIN_BASE) & base.isfinite()).all(1), "the payload has a base out of range"))
        grouped = torch.empty_like(base)
        grouped[:, _wire_order(shapes, side, keep, device)] = base
        bases = grouped.split([len(names) for names in groups], 1)
    parts = []
    for names, base in zip(groups, bases, strict=True):
        group, valid = _unpack_group(body, kind, [layouts[name] for name in names], base, read_bits)
        parts.append(group)
        checks.append((valid, BAD_CHUNKS))
    answers = torch.stack([answer for answer, _ in checks]).tolist()
    for row, (_, complaint) in zip(answers, checks, strict=True):
        if not all(row):
            raise ValueError(complaint)
    return [
        Bundle(dict(shapes), side, keep, kind, [group.row(r, len(views)) for group in parts])
        for r in range(len(views))
    ]


@lru_cache(maxsize=256)
def _body_bytes(shapes: Shapes, side: int, keep: int, kind: str) -> int:
    layouts = arrange(shapes, side, keep).layouts.values()
    total = sum(layout.chunks * chunk_bytes(layout.entries, layout.kept, kind) for layout in layouts)
    return total + (BASE_BYTES * len(shapes) if kind == "2bit" else 0)


def _unpack_group(
    body: "_Body", kind: str, layouts: Sequence[Layout], base: Tensor | None, read_bits: ReadBits
) -> tuple[Group, Tensor]:
    """A group's payloads of R replicas, (R C, J), and (R,) whether they are well formed, on the device."""
    count, chunks = layouts[0].kept, sum(layout.chunks for layout in layouts)
    data = body.read(chunks, bit_bytes(layouts[0].entries, count, kind))
    values = levels = scale = None
    if base is not None:
        code = body.read(chunks, SCALE_BYTES).int()
        scale = code[:, 0] | (code[:, 1] << 8)
        levels = scale, base[:, _owners(layouts, data.device)].flatten()  # (R C,) each
    else:
        values = body.read(chunks, VALUE_BYTES[kind] * count).view(VALUE_TYPES[kind])
        values = values.float() if kind == "bf16" else values
    index, values, valid = read_bits(data, values, levels, layouts, len(body.data))
    return Group(index.short(), values, scale, None if base is None else base.flatten()), valid


def _to_device(views: list[memoryview], device: torch.device) -> Tensor:
    """Strings of equal length as rows (R, n)."""
    rows = torch.empty(len(views), len(views[0]), dtype=torch.uint8, device=device)
    if not rows.numel():
        return rows
    pinned = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True) if device.type == "cuda" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bytes are read-only, and are only read
        for r, view in enumerate(views):
            data = torch.frombuffer(view, dtype=torch.uint8)
            if pinned is not None:
                data = pinned[r].copy_(data)  # copied by several threads while the previous one transfers
            rows[r].copy_(data, non_blocking=True)
    return rows


class _Body:
    """Reads the bodies (R, n) of R payloads from front to back."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.at = data, 0

    def read(self, rows: int, width: int) -> Tensor:
        """The next rows * width bytes of each, (R * rows, width), as a copy that may be viewed as another
        dtype."""
        start, self.at = self.at, self.at + rows * width
        part = self.data[:, start : self.at]
        copy = torch.empty(part.shape, dtype=part.dtype, device=part.device).copy_(part)
        return copy.view(len(part) * rows, width)
