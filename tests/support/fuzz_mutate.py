"""How a document or a payload is spoilt: small operations, drawn from a seed, that can be kept.

An operation is a list of JSON values, so that a case which failed is one line of a file and stays the same
however the drawing changes. One that does not fit where it is applied does nothing.
"""

import json
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

Op = list[Any]
MOST_BYTES = 8 << 20
NEST = "\x00nest"  # in place of what no JSON writer would write


def _nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "zero": 0,
    "minus": -1,
    "one": 1,
    "half": 0.5,
    "minus zero": -0.0,
    "2**63-1": 2**63 - 1,
    "10**6": 10**6,
    "nested": _nested(300),  # what one reader can read and another, further down, cannot
    "replica": "rack-1",
    "edge": "edge",
    "key": "ab" * 32,
    "2**31": 2**31,
    "2**63": 2**63,
    "10**9": 10**9,
    "10**400": 10**400,
    "-10**400": -(10**400),
    "1e308": 1e308,
    "1e-320": 1e-320,
    "nan": float("nan"),
    "inf": float("inf"),
    "empty": "",
    "long": "x" * 100_000,
    "escape": "\x1b]0;title\x07\x1b[31m\u202e\u2066\x9b2J\r\n",
    "surrogate": "\ud800",
    "up": "../../canary/secret",
    "absolute": "/etc/hostname",
    "device": "/dev/zero",
    "nul": "a\x00b",
    "number": "12",
    "hash": "0" * 64,
    "url": "s3://nowhere/at-all",
    "O": "O",
    "list": [],
    "dict": {},
    "many": [0] * 20_000,
    "keys": {str(i): i for i in range(5_000)},
    "deep": NEST,
}
BYTES = {
    "nul": b"\x00",
    "high": b"\xff\xfe",
    "escape": b"\x1b[31m",
    "quote": b'"',
    "brace": b"}",
    "open": b"[" * 5_000,
    "digits": b"9" * 6_000,
    "lines": b"\n" * 5_000,
    "bom": b"\xef\xbb\xbf",
    "bidi": "\u202e".encode(),
}
# Documents


def draw_json(draw: random.Random, document: Any) -> Op:
    paths = list(_paths(document))
    path = draw.choice(paths)
    kind = draw.choice(("set", "set", "set", "set", "del", "dup", "rename", "wrap", "swap"))
    if kind == "set":
        return [kind, path, draw.choice(list(VALUES))]
    if kind == "rename":
        return [kind, path, draw.choice(("", "up", "escape", "long", "nul"))]
    return [kind, path, draw.choice(paths)] if kind == "swap" else [kind, path]


def draw_bytes(draw: random.Random) -> Op:
    kind = draw.choice(("flip", "flip", "flip", "cut", "drop", "insert", "insert", "repeat", "fill"))
    at = round(draw.random(), 4)
    if kind == "flip":
        return [kind, at, 1 << draw.randrange(8)]
    if kind in ("cut", "drop"):
        return [kind, at, draw.choice((1, 2, 7, 100, 5000))]
    if kind == "insert":
        return [kind, at, draw.choice(list(BYTES))]
    return (
        [kind, at, draw.choice((0, 1, 9, 1000))]
        if kind == "repeat"
        else [kind, draw.choice((0, 1, 64, 5 << 20))]
    )


def spoil_json(document: Any, ops: list[Op]) -> Any:
    for kind, path, *rest in ops:
        try:
            document = _apply(document, kind, path, rest)
        except (KeyError, IndexError, TypeError):
            continue
    return document


def dumped(document: Any) -> bytes:
    text = json.dumps(document).replace(json.dumps(NEST), "[" * 50_000 + "]" * 50_000)
    return text.encode(errors="surrogatepass")


def spoil_bytes(data: bytes, ops: list[Op]) -> bytes:
    for op in ops:
        data = _BYTE_OPS[op[0]](data, *op[1:])[:MOST_BYTES]
    return data


def _paths(document: Any, path: tuple = ()) -> Any:
    yield list(path)
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _paths(value, (*path, key))
    elif isinstance(document, list):
        for i, value in enumerate(document[:4]):
            yield from _paths(value, (*path, i))


def _at(document: Any, path: list[Any]) -> Any:
    for key in path:
        document = document[key]
    return document


def _apply(document: Any, kind: str, path: list[Any], rest: list[Any]) -> Any:
    if not path:
        return VALUES[rest[0]] if kind == "set" else [document] if kind == "wrap" else document
    parent, key = _at(document, path[:-1]), path[-1]
    value = parent[key]
    if kind == "set":
        parent[key] = VALUES[rest[0]]
    elif kind == "del":
        del parent[key]
    elif kind == "wrap":
        parent[key] = [value]
    elif kind == "dup":
        parent[key] = value * 60 if isinstance(value, list | str) else [value] * 60
    elif kind == "rename" and isinstance(parent, dict):
        parent[VALUES.get(rest[0], rest[0])] = parent.pop(key)
    elif kind == "swap" and rest[0]:
        other = _at(document, rest[0][:-1])
        parent[key], other[rest[0][-1]] = json.loads(json.dumps([other[rest[0][-1]], value]))
    return document


def _position(data: bytes, at: float) -> int:
    return min(int(at * len(data)), max(0, len(data) - 1))


def _flip(data: bytes, at: float, bit: int) -> bytes:
    found = bytearray(data)
    if found:
        found[_position(data, at)] ^= bit
    return bytes(found)


def _drop(data: bytes, at: float, count: int) -> bytes:
    place = _position(data, at)
    return data[:place] + data[place + count :]


def _insert(data: bytes, at: float, name: str) -> bytes:
    place = _position(data, at)
    return data[:place] + BYTES[name] + data[place:]


def _repeat(data: bytes, at: float, times: int) -> bytes:
    place = _position(data, at)
    return data[:place] + data[place:] * min(times, 1 + MOST_BYTES // max(1, len(data) - place))


def _poke(data: bytes, at: int, form: str, value: int) -> bytes:
    new = struct.pack(form, value)
    return data[:at] + new + data[at + len(new) :] if at + len(new) <= len(data) else data


def _head(data: bytes, ops: list[Op], lie: int) -> bytes:
    """Of a safetensors file: its header as JSON, and how long it says that it is."""
    size = int.from_bytes(data[:8], "little")
    head = dumped(spoil_json(json.loads(data[8 : 8 + size]), ops))
    return (len(head) + lie).to_bytes(8, "little", signed=False) + head + data[8 + size :]


_BYTE_OPS: dict[str, Callable[..., bytes]] = {
    "flip": _flip,
    "cut": lambda data, at, _=0: data[: _position(data, at)],
    "drop": _drop,
    "insert": _insert,
    "repeat": _repeat,
    "fill": lambda data, size: bytes(size),
    "poke": _poke,
    "head": _head,
    "crc": lambda data: data[:-4] + struct.pack("<I", zlib.crc32(data[:-4])),
}


# Payloads: the front of the wire format, see sparse.header


def draw_payload(draw: random.Random) -> list[Op]:
    ops: list[Op] = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        if draw.random() < 0.5:
            form = draw.choice(("<B", "<H", "<I"))
            most = {"<B": 0xFF, "<H": 0xFFFF, "<I": 0xFFFFFFFF}[form]
            value = draw.choice((0, 1, 2, most, most // 2 + 1, draw.randint(0, most)))
            ops.append(
                ["poke", draw.randrange(160) if draw.random() < 0.7 else draw.randrange(20_000), form, value]
            )
        else:
            ops.append(draw_bytes(draw))
    return [*ops, ["crc"]] if draw.random() < 0.85 else ops
