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
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.sparse import fused
from isthmus.sparse.quantize import MIN_BASE, bits_of, dequantize, levels
from isthmus.sparse.size import (
    BASE_BYTES,
    CRC_BYTES,
    HEADER_BYTES,
    KINDS,
    MAX_DIMS,
    MAX_NAME_BYTES,
    MAX_TENSORS,
    SCALE_BYTES,
    VALUE_BYTES,
    IndexCode,
    Layout,
    bit_bytes,
    check_codec,
    check_shape,
    chunk_bytes,
    index_code,
    layout,
    packed_bytes,
    packed_many_bytes,
)
from isthmus.sparse.topk import SparseChunks, group_names, in_padding

__all__ = ["pack", "pack_many", "packed_bytes", "packed_many_bytes", "unpack", "unpack_many"]

MAGIC, VERSION = b"ISP", 1
HEADER = struct.Struct("<3sBBBHI")
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


@torch.no_grad()
def pack_many(payloads: Mapping[str, SparseChunks]) -> bytes:
    """The payloads of many parameters, encoded alike, as one string of bytes."""
    if not payloads:
        raise ValueError("there is nothing to pack")
    side, keep, kind = _codec_of(payloads)
    places = {name: _checked_layout(name, payload) for name, payload in payloads.items()}
    body = []
    if kind == "2bit":
        body.append(torch.stack([payload.base for payload in payloads.values()]).view(torch.uint8))
    for names in group_names(places):
        group = [payloads[name] for name in names]
        body += _pack_group(
            _join([p.values for p in group]), _join([p.index for p in group]), group, places[names[0]]
        )
    header = _header(payloads, side, keep, kind)
    body, crc = _to_host(torch.cat([part.flatten() for part in body]), header)
    return b"".join([header, body, struct.pack("<I", crc)])


def _to_host(body: Tensor, header: bytes) -> tuple[memoryview, int]:
    """The body, by one copy from the device, and the checksum of header and body."""
    if not fused.usable(body.device):
        data = body.cpu().numpy().data
        return data, zlib.crc32(data, zlib.crc32(header))
    data = torch.empty(len(body) + CRC_BYTES, dtype=torch.uint8, pin_memory=body.is_cuda)
    data.copy_(torch.cat([body, fused.crc_share(body).view(torch.uint8)]))
    view = data.numpy().data
    share = int.from_bytes(view[-CRC_BYTES:], "little")
    return view[:-CRC_BYTES], fused.finish_crc(header, share, len(body))


def _codec_of(payloads: Mapping[str, SparseChunks]) -> tuple[int, int, str]:
    codecs = {(payload.side, payload.keep, payload.kind) for payload in payloads.values()}
    if len(codecs) > 1:
        raise ValueError(f"payloads packed together must be encoded alike; found {sorted(codecs)}")
    (codec,) = codecs
    check_codec(*codec)
    return codec


def _checked_layout(name: str, payload: SparseChunks) -> Layout:
    check_shape(payload.shape)
    place = payload.layout
    fits = payload.values.shape == payload.index.shape == (place.chunks, place.kept)
    if payload.kind == "2bit":
        fits = fits and payload.scale is not None and payload.base is not None
    if not fits:
        raise ValueError(f"{name or 'the payload'} does not fit its own shape {tuple(payload.shape)}")
    return place


def _header(payloads: Mapping[str, SparseChunks], side: int, keep: int, kind: str) -> bytes:
    if len(payloads) > MAX_TENSORS:
        raise ValueError(f"{len(payloads)} tensors are too many to pack together; at most {MAX_TENSORS}")
    parts = [HEADER.pack(MAGIC, VERSION, KINDS.index(kind), side, keep, len(payloads))]
    for name, payload in payloads.items():
        label = name.encode()
        if len(label) > MAX_NAME_BYTES:
            raise ValueError(
                f"a tensor's name takes {len(label)} bytes; at most {MAX_NAME_BYTES} can be sent"
            )
        if max(payload.shape, default=0) >= 2**32:
            raise ValueError(f"{name} has a dimension beyond 32 bits: {tuple(payload.shape)}")
        parts.append(struct.pack("<H", len(label)) + label)
        parts.append(struct.pack(f"<B{len(payload.shape)}I", len(payload.shape), *payload.shape))
    return b"".join(parts)


def _join(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _pack_group(values: Tensor, index: Tensor, group: list[SparseChunks], place: Layout) -> list[Tensor]:
    """The bytes of all chunks (C, J) of a group, as uint8 tensors."""
    count, kind = place.kept, group[0].kind
    code = index_code(place.entries, count)
    size = bit_bytes(place.entries, count, kind)
    bits = torch.zeros(len(index), 8 * size, dtype=torch.uint8, device=index.device)
    if kind == "2bit":
        scale = _join([payload.scale for payload in group])  # (C,)
        base = _join([payload.base.expand(len(payload.scale)) for payload in group])
        if fused.usable(index.device) and fused.fits(place):
            fused.write_bits(bits, index, values, levels(scale, base)[0][:, 0], code)
        else:
            _write_index(bits, index, code)
            at = code.bits(count)
            bits[:, at : at + count], bits[:, at + count : at + 2 * count] = bits_of(values, scale, base)
        return [_to_bytes(bits), torch.stack([scale & 255, scale >> 8], 1).to(torch.uint8)]
    _write_index(bits, index, code)
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


@torch.no_grad()
def unpack_many(data: bytes, device: torch.device | str | None = None) -> dict[str, SparseChunks]:
    """The payloads that `pack_many` made into bytes; ValueError on anything else.

    Lengths are compared with the header before anything is allocated, and what is allocated grows with
    len(data) alone.
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise ValueError("a payload is a string of bytes") from error
    if len(view) < HEADER_BYTES + CRC_BYTES:
        raise ValueError(f"a payload of {len(view)} bytes is shorter than its header")
    device = torch.device(device or "cpu")
    on_device = fused.usable(device)  # a GPU sums up the bytes where it needs them anyway
    crc = struct.unpack("<I", view[-CRC_BYTES:])[0]
    if not on_device and crc != zlib.crc32(view[:-CRC_BYTES]):
        raise ValueError(BAD_CHECKSUM)
    shapes, side, keep, kind, at = _read_header(view[:-CRC_BYTES])
    places = {name: layout(shape, side, keep) for name, shape in shapes.items()}
    expected = sum(place.chunks * chunk_bytes(place.entries, place.kept, kind) for place in places.values())
    expected += BASE_BYTES * len(shapes) if kind == "2bit" else 0
    if len(view) - CRC_BYTES - at != expected:
        raise ValueError(
            f"the payload's body has {len(view) - CRC_BYTES - at} bytes, its header says {expected}"
        )

    body = _Body(_to_device(view[at:-CRC_BYTES], device))
    if on_device and crc != fused.finish_crc(view[:at], fused.crc_share(body.data).item(), expected):
        raise ValueError(BAD_CHECKSUM)
    bases = dict.fromkeys(shapes)
    if kind == "2bit":
        base = body.take(len(shapes), BASE_BYTES).view(torch.float32)[:, 0]
        if not ((base >= MIN_BASE) & base.isfinite()).all():
            raise ValueError("the payload has a base out of range")
        bases = dict(zip(shapes, base, strict=True))
    sent: dict[str, SparseChunks] = {}
    for names in group_names(places):
        counts = [places[name].chunks for name in names]
        values, index, scale = _unpack_group(body, kind, names, places, bases)
        scales = [None] * len(names) if scale is None else scale.split(counts)
        for name, *tensors, scale in zip(
            names, values.split(counts), index.split(counts), scales, strict=True
        ):
            sent[name] = SparseChunks(
                *tensors, torch.Size(shapes[name]), side, keep, kind, scale, bases[name]
            )
    return {name: sent[name] for name in shapes}


def _to_device(view: memoryview, device: torch.device) -> Tensor:
    if not len(view):
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type != "cuda":
        return torch.frombuffer(bytearray(view), dtype=torch.uint8).to(device)
    pinned = torch.empty(len(view), dtype=torch.uint8, pin_memory=True)
    pinned.numpy().data[:] = view
    return pinned.to(device, non_blocking=True)


class _Body:
    """Reads the body from front to back."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.at = data, 0

    def take(self, rows: int, width: int) -> Tensor:
        """The next rows * width bytes, as a copy that may be viewed as another dtype."""
        start, self.at = self.at, self.at + rows * width
        return self.data[start : self.at].clone().view(rows, width)


def _read_header(view: memoryview) -> tuple[dict[str, tuple[int, ...]], int, int, str, int]:
    """Names and shapes, side, keep and kind, and where the body starts."""
    magic, version, number, side, keep, count = HEADER.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"not a payload of version {VERSION}")
    if number >= len(KINDS):
        raise ValueError(f"the payload's values are of the unknown kind {number}")
    check_codec(side, keep, KINDS[number])
    if not 1 <= count <= MAX_TENSORS:
        raise ValueError(f"the payload claims {count} tensors; 1 to {MAX_TENSORS} can be sent")
    shapes: dict[str, tuple[int, ...]] = {}
    at = HEADER_BYTES
    try:
        for _ in range(count):
            (length,) = struct.unpack_from("<H", view, at)
            at += 2 + length
            if length > MAX_NAME_BYTES or at > len(view):
                raise ValueError(f"the payload has a name of {length} bytes")
            name = bytes(view[at - length : at]).decode()
            (num_dims,) = struct.unpack_from("<B", view, at)
            if num_dims > MAX_DIMS:
                raise ValueError(f"{name} claims {num_dims} dimensions; at most {MAX_DIMS} can be sent")
            shape = struct.unpack_from(f"<{num_dims}I", view, at + 1)
            check_shape(shape)
            if name in shapes:
                raise ValueError(f"the payload has two tensors named {name!r}")
            shapes[name] = shape
            at += 1 + 4 * num_dims
    except struct.error as error:
        raise ValueError("the payload ends inside its header") from error
    return shapes, side, keep, KINDS[number], at


def _unpack_group(
    body: _Body, kind: str, names: list[str], places: Mapping[str, Layout], bases: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values (C, J), positions (C, J) and scales (C,) of a group, checked."""
    place = places[names[0]]
    count = place.kept
    counts = [places[name].chunks for name in names]
    chunks = sum(counts)
    data = body.take(chunks, bit_bytes(place.entries, count, kind))
    code = index_code(place.entries, count)
    if kind == "2bit":
        scale = body.take(chunks, SCALE_BYTES).int()
        scale = scale[:, 0] | (scale[:, 1] << 8)
        base = _join([bases[name].expand(places[name].chunks) for name in names])
    if kind == "2bit" and fused.usable(data.device) and fused.fits(place):
        low, high = levels(scale, base)
        index, values, odd = fused.read(data, low[:, 0], high[:, 0], place, code)
        valid = odd[0] == 0
    else:
        bits = _from_bytes(data)
        index = _read_index(bits, code, place)
        at = code.bits(count)
        if kind == "2bit":
            negative, large = bits[:, at : at + 2 * count].bool().unflatten(1, (2, count)).unbind(1)
            values = dequantize(negative, large, scale, base)
            at += 2 * count
        else:
            values, scale = body.take(chunks, VALUE_BYTES[kind] * count).view(VALUE_TYPES[kind]), None
            values = values.float() if kind == "bf16" else values
        valid = (bits[:, at:] == 0).all()
    valid &= values.isfinite().all()
    valid &= (index[:, 1:] > index[:, :-1]).all() & (index < place.entries).all()
    for name, part in zip(names, index.split(counts), strict=True):
        if places[name].padded:
            valid &= ~in_padding(part, places[name]).any()
    if not valid:
        raise ValueError(
            "the payload has positions out of order or out of range, or values that are not finite"
        )
    return values, index.short(), scale


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
