"""Rounds as a TensorBoard event file: TFRecords of a few protobuf fields, written without either package."""

import os
import socket
import struct
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError
from isthmus.runlog import Row

SCALARS = {
    "loss_full": "held-out/full",
    "loss_pipelined": "held-out/pipelined",
    "loss_mixed": "held-out/mixed",
    "loss_train": "train/all",
    "grad_norm": "inner/grad_norm",
    "lr": "inner/lr",
    "tokens_per_second": "speed/tokens_per_second",
    "seconds": "speed/round_seconds",
}


class EventWriter:
    """Appends one event a round to a file of its own in `folder`."""

    def __init__(self, folder: Path, started: str = "") -> None:
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.isthmus"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(folder / name, "xb")  # noqa: SIM115 - open as long as the page is served
        except OSError as error:
            raise ConfigError(f"cannot write TensorBoard files to {folder}: {error.strerror}") from None
        self.path = folder / name
        self.done = -1  # the newest round that was written
        try:
            self.began = datetime.fromisoformat(started).timestamp()
        except ValueError:
            self.began = time.time()
        self._write(_double(1, self.began) + _bytes(3, b"brain.Event:2"))

    def add(self, rows: list[Row]) -> None:
        """The rounds that are new; a round's time is the run's start and all rounds' seconds up to it."""
        at = self.began
        for row in rows:
            at += row["seconds"] or 0.0
            if row["round"] <= self.done:
                continue
            values = b"".join(
                _bytes(1, _bytes(1, tag.encode()) + struct.pack("<Bf", 0x15, value))
                for tag, value in scalars(row)
            )
            self._write(_double(1, at) + _varint(2 << 3) + _varint(row["round"]) + _bytes(5, values))
            self.done = row["round"]
        self.file.flush()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self.file.write(length + _masked(length) + event + _masked(event))


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """(tag, value) of everything that a row knows."""
    named: list[tuple[str, Any]] = [(tag, row[field]) for field, tag in SCALARS.items()]
    named += [(f"train/{kind}", value) for kind, value in row["train_by_kind"].items()]
    named += [(f"held-out by kind/{kind}", value) for kind, value in row["loss_by_kind"].items()]
    named += [(f"bytes/{purpose}", value) for purpose, value in row["bytes"].items()]
    for kind, told in row["bias"].items():
        named += [(f"bias/{kind}/boundary {b}", share) for b, share in enumerate(told["outside"])]
        named.append((f"bias/{kind}/drift", told["drift"]))
    return ((tag, float(value)) for tag, value in named if value is not None)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _table()


def crc32c(data: bytes) -> int:
    """CRC-32 by Castagnoli's polynomial, reflected."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    """As TFRecord stores it: rotated and shifted, so that a checksum of checksums is not one itself."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
