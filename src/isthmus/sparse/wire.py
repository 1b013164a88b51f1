"""Payloads <-> bytes, without loss. What comes from outside is checked to the last bit before it is believed.

    magic "ISP", version, kind, side (u8 each), keep (u16), number of tensors (u32)
    per tensor: name length (u16), name in utf-8, number of dimensions (u8), dimensions (u32 each)
    2bit only: a base per tensor (fp32)
    per group of tensors whose chunks agree in shape and in entries kept, in order of first appearance:
        a bit string per chunk: positions, then for 2bit signs and magnitudes
        2bit only: a scale per chunk (u16)
        else: values (fp32, bf16 or fp64)
    crc32 of all before (u32)

Everything is little-endian. Positions are in Elias-Fano code: with l = floor(log2(P / J)), the upper parts
i >> l of a chunk's ascending positions set bit (i >> l) + j of J + ceil(P / 2^l) - 1, and the l lower bits
follow bit by bit; where a bitmap of P bits is shorter it is used instead. A bit string of n bytes has its
bit b in byte b mod n, so that eight slices make the bytes.
"""

import struct
import warnings
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from isthmus.layout.chunks import (
    BASE_BYTES,
    CRC_BYTES,
    HEADER_BYTES,
    SCALE_BYTES,
    VALUE_BYTES,
    IndexCode,
    Layout,
    bit_bytes,
    chunk_bytes,
    index_code,
    packed_bytes,
    packed_many_bytes,
)
from isthmus.sparse import fused
from isthmus.sparse.bundle import Bundle, Group, Shapes, SparseChunks, arrange, owners
from isthmus.sparse.header import read_header, write_header
from isthmus.sparse.quantize import MIN_BASE, bits_of, dequantize, levels
from isthmus.sparse.topk import in_padding

__all__ = [
    "pack",
    "pack_all",
    "pack_many",
    "packed_bytes",
    "packed_many_bytes",
    "unpack",
    "unpack_all",
    "unpack_many",
]

BAD_CHUNKS = "the payload has positions out of order or out of range, or values that are not finite"
BAD_CHECKSUM = "the payload's checksum does not match its contents"
VALUE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def pack(payload: SparseChunks) -> bytes:
    """One parameter's payload as bytes."""
    return pack_many({"": payload})


def unpack(data: bytes, device: torch.device | str | None = None) -> SparseChunks:
    """The payload that `pack` made into bytes; ValueError on anything else."""
    payloads = unpack_many(data, device)
    if list(payloads) != [""]:
        raise ValueError(f"expected the payload of one tensor without a name, found {len(payloads)} tensors")
    return payloads[""]


def pack_many(payloads: Mapping[str, SparseChunks]) -> bytes:
    """The payloads of many parameters, encoded alike, as one string of bytes."""
    return pack_all([payloads])[0]


@torch.no_grad()
def pack_all(replicas: Sequence[Mapping[str, SparseChunks]]) -> list[bytes]:
    """`pack_many` of what several replicas send, all in one go where they send the same tensors."""
    bundles = [Bundle.of(payloads) for payloads in replicas]
    key, kind = bundles[0].key, bundles[0].kind
    if any(bundle.key != key or bundle.kind != kind for bundle in bundles):
        return [pack_all([bundle])[0] for bundle in bundles]
    header, (layouts, groups, _) = write_header(*key, kind), arrange(*key)
    body = []
    joined = [_join([bundle.groups[i] for bundle in bundles]) for i in range(len(groups))]
    if kind == "2bit":
        bases = torch.cat([group.base.view(len(bundles), -1) for group in joined], 1)
        body.append(bases[:, _wire_order(*key, bases.device)].view(torch.uint8))
    for names, group in zip(groups, joined, strict=True):
        body += _pack_group(group, [layouts[name] for name in names], kind, len(bundles))
    rows = torch.cat([part.reshape(len(bundles), part.numel() // len(bundles)) for part in body], 1)
    return [b"".join([header, data, struct.pack("<I", crc)]) for data, crc in _to_host(rows, header)]


def _join(groups: list[Group]) -> Group:
    if len(groups) == 1:
        return groups[0]
    return Group(
        *(None if tensors[0] is None else torch.cat(tensors) for tensors in zip(*groups, strict=True))
    )


@lru_cache(maxsize=256)
def _wire_order(shapes: Shapes, side: int, keep: int, device: torch.device) -> Tensor:
    """Where each tensor, in the order of names, is found in the order of groups: (T,)."""
    grouped = [name for names in arrange(shapes, side, keep).groups for name in names]
    number = {name: i for i, name in enumerate(grouped)}
    return torch.tensor([number[name] for name, _ in shapes], device=device)


def _to_host(body: Tensor, header: bytes) -> list[tuple[memoryview, int]]:
    """The bodies (R, n), by one copy from the device, and the checksum of the header and each."""
    if not fused.usable(body.device):
        views = [row.numpy().data for row in body.cpu()]
        return [(view, zlib.crc32(view, zlib.crc32(header))) for view in views]
    rows, size = body.shape
    data = torch.empty(rows, size + CRC_BYTES, dtype=torch.uint8, pin_memory=body.is_cuda)
    data.copy_(torch.cat([body, fused.crc_share(body)[:, None].view(torch.uint8)], 1))
    found = []
    for row in data:
        view = row.numpy().data
        share = int.from_bytes(view[-CRC_BYTES:], "little")
        found.append((view[:-CRC_BYTES], fused.finish_crc(header, share, size)))
    return found


def _pack_group(group: Group, places: list[Layout], kind: str, rows: int) -> list[Tensor]:
    """The bytes of all chunks (R C, J) of R replicas' groups, as uint8 tensors."""
    index, values, scale, base = group
    place = places[0]
    count = place.kept
    code = index_code(place.entries, count)
    size = bit_bytes(place.entries, count, kind)
    bits = torch.zeros(len(index), 8 * size, dtype=torch.uint8, device=index.device)
    low = None
    if kind == "2bit":
        owner = owners(tuple(place.chunks for place in places), index.device)
        base = base.view(rows, len(places))[:, owner].flatten()  # (R C,)
        low = levels(scale, base)[0][:, 0]
    if fused.usable(index.device) and fused.fits(place):
        fused.write_bits(bits, index, values, low, code)
    else:
        _write_index(bits, index, code)
        if kind == "2bit":
            at = code.bits(count)
            bits[:, at : at + count], bits[:, at + count : at + 2 * count] = bits_of(values, scale, base)
    if kind == "2bit":
        return [_to_bytes(bits), torch.stack([scale & 255, scale >> 8], 1).to(torch.uint8)]
    return [_to_bytes(bits), values.to(VALUE_TYPES[kind]).contiguous().view(torch.uint8)]


def _write_index(bits: Tensor, index: Tensor, code: IndexCode) -> None:
    count = index.shape[1]
    if not code.marks:
        return
    upper = (index >> code.low).long()  # (C, J)
    if not code.bitmap:
        upper += torch.arange(count, device=index.device)
    bits[:, : code.marks].scatter_(1, upper, 1)
    if code.low:
        shift = torch.arange(code.low, dtype=torch.int16, device=index.device)[:, None]
        bits[:, code.marks : code.bits(count)].unflatten(1, (code.low, count)).copy_(
            (index[:, None] >> shift) & 1
        )


def _to_bytes(bits: Tensor) -> Tensor:
    """(C, 8 n) bits as uint8 -> (C, n) bytes."""
    weight = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)[:, None]
    return (bits.unflatten(1, (8, bits.shape[1] // 8)) * weight).sum(1, dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Tensor:
    """(C, n) bytes -> (C, 8 n) bits as uint8."""
    shift = torch.arange(8, dtype=torch.uint8, device=data.device)[:, None]
    return ((data[:, None] >> shift) & 1).flatten(1)


def unpack_many(data: bytes, device: torch.device | str | None = None) -> Bundle:
    """The payloads that `pack_many` made into bytes; ValueError on anything else."""
    return unpack_all([data], device)[0]


@torch.no_grad()
def unpack_all(strings: Sequence[bytes], device: torch.device | str | None = None) -> list[Bundle]:
    """`unpack_many` of what several replicas sent. Where they sent the same tensors, all in one go.

    Lengths are compared with the header before anything is allocated, and what is allocated grows with the
    length of the strings alone.
    """
    device = torch.device(device or "cpu")
    views = [_viewed(data) for data in strings]
    if not fused.usable(device):  # a GPU sums up the bytes where it needs them anyway
        for view in views:
            if _crc_of(view) != zlib.crc32(view[:-CRC_BYTES]):
                raise ValueError(BAD_CHECKSUM)
    found = [read_header(view[:-CRC_BYTES]) for view in views]
    if any(header != found[0] for header in found):
        return [unpack_all([data], device)[0] for data in strings]
    shapes, side, keep, kind, at = found[0]
    expected = _body_bytes(shapes, side, keep, kind)
    for view in views:
        if len(view) - CRC_BYTES - at != expected:
            raise ValueError(
                f"the payload's body has {len(view) - CRC_BYTES - at} bytes, its header says {expected}"
            )

    body = _Body(_to_device([view[at:-CRC_BYTES] for view in views], device))
    checks: list[tuple[Tensor, str]] = []  # (R,) each, zero where one fails; asked of the device in the end
    if fused.usable(device):
        checks.append((fused.crc_share(body.data), BAD_CHECKSUM))
    layouts, groups, _ = arrange(shapes, side, keep)
    bases = [None] * len(groups)
    if kind == "2bit":
        base = body.take(len(shapes), BASE_BYTES).view(torch.float32).view(len(views), len(shapes))
        checks.append((((base >= MIN_BASE) & base.isfinite()).all(1), "the payload has a base out of range"))
        grouped = torch.empty_like(base)
        grouped[:, _wire_order(shapes, side, keep, device)] = base
        bases = grouped.split([len(names) for names in groups], 1)
    parts = []
    for names, base in zip(groups, bases, strict=True):
        group, valid = _unpack_group(body, kind, [layouts[name] for name in names], base)
        parts.append(group)
        checks.append((valid, BAD_CHUNKS))
    answers = torch.stack([answer.long() for answer, _ in checks]).tolist()
    if fused.usable(device):
        answers[0] = [
            fused.finish_crc(view[:at], share, expected) == _crc_of(view)
            for view, share in zip(views, answers[0], strict=True)
        ]
    for row, (_, complaint) in zip(answers, checks, strict=True):
        if not all(row):
            raise ValueError(complaint)
    return [
        Bundle(dict(shapes), side, keep, kind, [group.row(r, len(views)) for group in parts])
        for r in range(len(views))
    ]


def _viewed(data: bytes) -> memoryview:
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise ValueError("a payload is a string of bytes") from error
    if len(view) < HEADER_BYTES + CRC_BYTES:
        raise ValueError(f"a payload of {len(view)} bytes is shorter than its header")
    return view


def _crc_of(view: memoryview) -> int:
    return struct.unpack("<I", view[-CRC_BYTES:])[0]


@lru_cache(maxsize=256)
def _body_bytes(shapes: Shapes, side: int, keep: int, kind: str) -> int:
    places = arrange(shapes, side, keep).layouts.values()
    total = sum(place.chunks * chunk_bytes(place.entries, place.kept, kind) for place in places)
    return total + (BASE_BYTES * len(shapes) if kind == "2bit" else 0)


def _to_device(views: list[memoryview], device: torch.device) -> Tensor:
    """Strings of the same length as rows (R, n)."""
    rows = torch.empty(len(views), len(views[0]), dtype=torch.uint8, device=device)
    if not rows.numel():
        return rows
    pinned = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True) if device.type == "cuda" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bytes are read-only, and only read from
        for r, view in enumerate(views):
            data = torch.frombuffer(view, dtype=torch.uint8)
            if pinned is not None:
                data = pinned[r].copy_(data)  # by several threads, while the one before it travels
            rows[r].copy_(data, non_blocking=True)
    return rows


class _Body:
    """Reads the bodies (R, n) of R payloads from front to back."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.at = data, 0

    def take(self, rows: int, width: int) -> Tensor:
        """The next rows * width bytes of each, (R * rows, width), as a copy that may be viewed as another
        dtype."""
        start, self.at = self.at, self.at + rows * width
        part = self.data[:, start : self.at]
        copy = torch.empty(part.shape, dtype=part.dtype, device=part.device).copy_(part)
        return copy.view(len(part) * rows, width)


def _unpack_group(body: _Body, kind: str, places: list[Layout], base: Tensor | None) -> tuple[Group, Tensor]:
    """A group's payloads of R replicas, (R C, J), and (R,) whether they are well formed, on the device."""
    place, rows = places[0], len(body.data)
    count, counts = place.kept, tuple(place.chunks for place in places)
    chunks = sum(counts)
    data = body.take(chunks, bit_bytes(place.entries, count, kind))
    code = index_code(place.entries, count)
    scale = values = base_of = None
    if kind == "2bit":
        scale = body.take(chunks, SCALE_BYTES).int()
        scale = scale[:, 0] | (scale[:, 1] << 8)
        base_of = base[:, owners(counts, data.device)].flatten()  # (R C,)
    else:
        values = body.take(chunks, VALUE_BYTES[kind] * count).view(VALUE_TYPES[kind])
        values = values.float() if kind == "bf16" else values
    if fused.usable(data.device) and fused.fits(place) and kind != "fp64":
        pair = None if values is not None else tuple(level[:, 0] for level in levels(scale, base_of))
        index, decoded, odd = fused.read(data, pair, place, code)
        values = decoded if values is None else values
        fused.check(index, values, place.entries, odd)
        valid = (odd == 0).expand(rows)
    else:
        bits, at = _from_bytes(data), code.bits(count)
        index = _read_index(bits, code, place)
        if values is None:
            negative, large = bits[:, at : at + 2 * count].bool().unflatten(1, (2, count)).unbind(1)
            values = dequantize(negative, large, scale, base_of)
            at += 2 * count
        valid = _each(bits[:, at:] == 0, rows) & _well_formed(index, values, places, rows)
    return Group(index.short(), values, scale, None if base is None else base.flatten()), valid


def _well_formed(index: Tensor, values: Tensor, places: list[Layout], rows: int) -> Tensor:
    """(R,): positions ascend, inside their chunk and outside padding, and values are finite."""
    valid = _each(values.isfinite(), rows) & _each(index < places[0].entries, rows)
    valid = valid & _each(index[:, 1:] > index[:, :-1], rows)
    if any(place.padded for place in places):
        counts = [place.chunks for place in places]
        for own, part in zip(
            places, index.view(rows, sum(counts), places[0].kept).split(counts, 1), strict=True
        ):
            if own.padded:
                valid = valid & ~torch.stack([in_padding(row, own).any() for row in part])
    return valid


def _each(test: Tensor, rows: int) -> Tensor:
    """Whether all of each replica's part is true: (R,)."""
    return test.reshape(rows, test.numel() // rows).all(1)


def _read_index(bits: Tensor, code: IndexCode, place: Layout) -> Tensor:
    """The positions (C, J) int32 that `_write_index` wrote."""
    chunks, count = len(bits), place.kept
    if not code.marks:
        return torch.arange(count, dtype=torch.int32, device=bits.device).expand(chunks, count)
    marks = bits[:, : code.marks]
    if not (marks.sum(1, dtype=torch.int32) == count).all():
        raise ValueError("the payload has a chunk that does not hold as many positions as its header says")
    index = (
        marks.reshape(-1).nonzero().view(chunks, count)
    )  # ascending, so the rows of the marks stay in order
    row = torch.arange(chunks, device=bits.device)[:, None] * code.marks
    if code.bitmap:
        return (index - row).int()
    index = (index - row - torch.arange(count, device=bits.device)).int() << code.low
    lower = bits[:, code.marks : code.bits(count)].unflatten(1, (code.low, count)) if code.low else ()
    for bit in range(code.low):
        index |= lower[:, bit].int() << bit
    return index
