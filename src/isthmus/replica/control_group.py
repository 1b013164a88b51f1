"""A replica's control group: its processes agree between inner steps, through stage 0's TCPStore."""

import json
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from isthmus.errors import RunError

if TYPE_CHECKING:  # reading the protocol needs no torch
    from isthmus.replica.process_groups import Store

LEAVE_SECONDS = 20.0
MAX_SHARED_BYTES = 4 * 2**20
LENGTH = struct.Struct(">I")  # before each part of a message between stages

T = TypeVar("T")


class ControlGroup(Protocol):
    """The processes of one replica; rank 0 is the leader: it alone writes to the bucket for the replica."""

    rank: int
    size: int

    def share(self, data: bytes) -> list[bytes]:
        """The bytes of all processes, by rank. All processes call it equally often."""
        ...

    def leave(self) -> None:
        """End the sharing. The process that serves the store waits for the others."""


class SingleProcess:
    """A replica of one process."""

    rank, size = 0, 1

    def share(self, data: bytes) -> list[bytes]:
        return [data]

    def leave(self) -> None:
        pass


class StageControlGroup:
    """The stages of one replica. They share hashes, flags and counters: bytes, never objects."""

    def __init__(
        self, replica: str, rank: int, size: int, store: "Store", timeout_seconds: float = 1800.0
    ) -> None:
        self.replica, self.rank, self.size, self.store = replica, rank, size, store
        self.timeout = timedelta(seconds=timeout_seconds)
        self.turn = 0

    def share(self, data: bytes) -> list[bytes]:
        self.turn += 1
        try:
            self.store.set(f"share/{self.turn}/{self.rank}", data.hex())
            keys = [f"share/{self.turn}/{rank}" for rank in range(self.size)]
            self.store.wait(keys, self.timeout)
            shared = [_bytes(self.store.get(key), key) for key in keys]
            if self.turn > 2:  # all have read the values of two turns ago
                self.store.delete_key(f"share/{self.turn - 2}/{self.rank}")
        except (RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0][:200]
            raise RunError(
                f"replica {self.replica}: stage {self.rank} lost the other stages between inner steps: {why}"
            ) from None
        return shared

    def leave(self) -> None:
        """Rank 0 serves the store, so it leaves last: the others may still read."""
        with suppress(RuntimeError):
            self.store.set(f"parted/{self.rank}", "1")
            if self.rank == 0:
                others = [f"parted/{rank}" for rank in range(self.size)]
                self.store.wait(others, min(self.timeout, timedelta(seconds=LEAVE_SECONDS)))


class MessageLink(Protocol):
    """The methods of a link that a control group uses."""

    def send_message(self, data: bytes) -> None: ...

    def receive_message(self, timeout_seconds: float | None = None) -> bytes: ...


class LinkControlGroup:
    """The stages of one replica, which share bytes over their links: each stage's bytes travel down to stage
    0, and all of them travel back up."""

    def __init__(
        self,
        replica: str,
        rank: int,
        size: int,
        before: MessageLink | None,
        after: MessageLink | None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        self.replica, self.rank, self.size = replica, rank, size
        self.before, self.after, self.timeout_seconds = before, after, timeout_seconds

    def share(self, data: bytes) -> list[bytes]:
        if len(data) > MAX_SHARED_BYTES:
            raise ValueError(f"{len(data)} bytes to share; {MAX_SHARED_BYTES} at most are taken")
        shared = [data]
        if self.after:
            shared += self._receive(self.after, self.size - self.rank - 1)
        if self.before:
            self.before.send_message(_join(shared))
            shared = self._receive(self.before, self.size)
        if self.after:
            self.after.send_message(_join(shared))
        return shared

    def _receive(self, link: MessageLink, count: int) -> list[bytes]:
        try:
            return _split(link.receive_message(self.timeout_seconds), count)
        except ValueError as error:
            raise RunError(
                f"replica {self.replica}: stage {self.rank} cannot read what its neighbour shared: {error}"
            ) from None

    def leave(self) -> None:
        """Do nothing: no stage serves the others, and a link ends when both of its ends close it."""


def _join(parts: Sequence[bytes]) -> bytes:
    return b"".join(LENGTH.pack(len(part)) + part for part in parts)


def _split(data: bytes, count: int) -> list[bytes]:
    """Split data into exactly `count` parts, or raise ValueError."""
    parts, at = [], 0
    for _ in range(count):
        if at + LENGTH.size > len(data):
            raise ValueError(f"{len(parts)} parts where {count} were due")
        (size,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size + size
        if size > MAX_SHARED_BYTES or at > len(data):
            raise ValueError(f"a part of {size} bytes, {len(data)} bytes in all")
        parts.append(data[at - size : at])
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes too many")
    return parts


def _bytes(value: bytes, key: str) -> bytes:
    if len(value) > 2 * MAX_SHARED_BYTES:
        raise ValueError(f"{key} holds {len(value)} bytes, and {2 * MAX_SHARED_BYTES} at most are shared")
    return bytes.fromhex(value.decode("ascii"))


def agree(control: ControlGroup, flag: bool) -> bool:
    """The leader's answer, in every process."""
    return control.share(bytes([flag]))[0] == b"\x01"


def any_true(control: ControlGroup, flag: bool) -> bool:
    return any(answer == b"\x01" for answer in control.share(bytes([flag])))


def all_true(control: ControlGroup, flag: bool) -> bool:
    return all(answer == b"\x01" for answer in control.share(bytes([flag])))


def share_json(control: ControlGroup, mine: Any, read: Callable[[Any], T]) -> list[T]:
    """The values of all processes, by rank, each through `read`, which raises on an invalid value."""
    found = []
    for rank, data in enumerate(control.share(json.dumps(mine).encode())):
        try:
            found.append(read(json.loads(data)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise RunError(
                f"process {rank} of this replica shared what nobody asked for: {data[:60]!r}"
            ) from None
    return found


def whole_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError("not a count, a size or a round")
    return value


def whole_numbers(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return [whole_number(each) for each in value]
