"""How the processes of one replica agree between inner steps: small messages through stage 0's TCPStore."""

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from isthmus.errors import RunError

PARTING_SECONDS = 20.0


class ControlGroup(Protocol):
    """The processes of one replica; number 0 leads: it alone speaks for the replica in the bucket."""

    rank: int
    size: int

    def share(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, in the order of the ranks. All call it, the same number of times."""

    def part(self) -> None:
        """Nothing more will be shared; who keeps the place where the others meet waits for them."""


class SingleProcess:
    """A replica of one process."""

    rank, size = 0, 1

    def share(self, data: bytes) -> list[bytes]:
        return [data]

    def part(self) -> None:
        pass


class StageControlGroup:
    """The stages of one replica. What they share are hashes, flags and counters: bytes of ours, never
    objects."""

    def __init__(
        self, replica: str, rank: int, size: int, store: Any, timeout_seconds: float = 1800.0
    ) -> None:
        self.replica, self.rank, self.size, self.store = replica, rank, size, store
        self.patience = timedelta(seconds=timeout_seconds)
        self.turn = 0

    def share(self, data: bytes) -> list[bytes]:
        self.turn += 1
        try:
            self.store.set(f"share/{self.turn}/{self.rank}", data.hex())
            keys = [f"share/{self.turn}/{rank}" for rank in range(self.size)]
            self.store.wait(keys, self.patience)
            shared = [bytes.fromhex(self.store.get(key).decode("ascii")) for key in keys]
            if self.turn > 2:  # everybody has read what is two turns old
                self.store.delete_key(f"share/{self.turn - 2}/{self.rank}")
        except (RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0][:200]
            raise RunError(
                f"replica {self.replica}: stage {self.rank} lost the other stages between inner steps: {why}"
            ) from None
        return shared

    def part(self) -> None:
        """Number 0 keeps the store: going first, it would take what the others have still to read."""
        with suppress(RuntimeError):
            self.store.set(f"parted/{self.rank}", "1")
            if self.rank == 0:
                everybody = [f"parted/{rank}" for rank in range(self.size)]
                self.store.wait(everybody, min(self.patience, timedelta(seconds=PARTING_SECONDS)))


def agree(control: ControlGroup, flag: bool) -> bool:
    """The lead's answer, for everybody."""
    return control.share(bytes([flag]))[0] == b"\x01"


def any_true(control: ControlGroup, flag: bool) -> bool:
    return any(answer == b"\x01" for answer in control.share(bytes([flag])))


def all_true(control: ControlGroup, flag: bool) -> bool:
    return all(answer == b"\x01" for answer in control.share(bytes([flag])))


def collect(control: ControlGroup, own: dict[int, str], total: int) -> Sequence[str]:
    """One text for each of `total` places, every process giving those it holds; the first giver counts."""
    found: dict[int, str] = {}
    for data in control.share(json.dumps({str(k): v for k, v in own.items()}).encode()):
        for key, value in json.loads(data).items():
            found.setdefault(int(key), value)
    missing = [place for place in range(total) if place not in found]
    if missing:
        raise RunError(f"no process of this replica holds part {missing[0]}")
    return [found[place] for place in range(total)]
