"""The header of a payload's bytes: its tensors and their encoding. `wire` documents the layout."""

import struct
from functools import lru_cache

from isthmus.layout.chunks import (
    HEADER_BYTES,
    KINDS,
    MAX_DIMS,
    MAX_NAME_BYTES,
    MAX_TENSORS,
    check_codec,
    check_shape,
)
from isthmus.sparse.bundle import Shapes

MAGIC, VERSION = b"ISP", 1
HEADER = struct.Struct("<3sBBBHI")
Found = tuple[Shapes, int, int, str, int]  # names and shapes, side, keep, kind, start of the body
MAX_REMEMBERED_BYTES = 2**16
_recent: dict[bytes, Found] = {}


@lru_cache(maxsize=256)
def write_header(shapes: Shapes, side: int, keep: int, kind: str) -> bytes:
    if len(shapes) > MAX_TENSORS:
        raise ValueError(f"{len(shapes)} tensors are too many to pack together; at most {MAX_TENSORS}")
    parts = [HEADER.pack(MAGIC, VERSION, KINDS.index(kind), side, keep, len(shapes))]
    for name, shape in shapes:
        label = name.encode()
        if len(label) > MAX_NAME_BYTES:
            raise ValueError(
                f"a tensor's name takes {len(label)} bytes; at most {MAX_NAME_BYTES} can be sent"
            )
        if max(shape, default=0) >= 2**32:
            raise ValueError(f"{name} has a dimension beyond 32 bits: {tuple(shape)}")
        parts.append(struct.pack("<H", len(label)) + label)
        parts.append(struct.pack(f"<B{len(shape)}I", len(shape), *shape))
    return b"".join(parts)


def read_header(view: memoryview) -> Found:
    """Parse a header; ValueError if the bytes begin with none. A run's payloads share a few headers, which
    are cached unless they are unusually large."""
    for header, found in list(_recent.items()):
        if view[: len(header)] == header:
            return found
    shapes, side, keep, kind, at = _parse(view)
    found = tuple(shapes.items()), side, keep, kind, at
    if at <= MAX_REMEMBERED_BYTES:
        for old in list(_recent)[:-15]:
            _recent.pop(old, None)
        _recent[bytes(view[:at])] = found
    return found


def _parse(view: memoryview) -> tuple[dict[str, tuple[int, ...]], int, int, str, int]:
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
