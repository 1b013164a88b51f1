"""The bucket: whole objects under keys, in a folder or in an object store, using `obstore`.

This module alone makes three promises: an object is whole or absent, `create` has one winner, and requests
wait out a bad network until the caller's deadline. The ledger defines what the objects mean.
"""

import asyncio
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from isthmus.errors import ConfigError, Unreachable
from isthmus.store.folder import FolderRequests, remove_empty, remove_stale, write_file
from isthmus.store.requests import BucketRequests, Info, delete
from isthmus.store.retry import (
    DEFAULT_SECONDS,
    Backoff,
    Fault,
    StoreError,
    StoreRefused,
    Unreadable,
    classify,
    wait,
)
from isthmus.store.timing import Absence, Rate, StoreClock
from isthmus.store.url import SEGMENT, connect, parse_url, where_s3_is

__all__ = ["Info", "Store", "open_store"]

T = TypeVar("T")
Try = Callable[..., Any]  # one of `requests`, with all arguments but its last two

# Requests up to this size travel apart from bulk, so that a heartbeat never queues behind it.
CONTROL_BYTES = 1 << 18
VERBS = ("get", "put", "create", "head", "list", "delete")
# The most manifests of a run; it leaves fewer objects of other kinds below one prefix. Any writer can make a
# listing endless.
MOST_LISTED = 1_000_000
ASK_SECONDS = 15.0  # after which a store that cannot return one object counts as down


class Store:
    """Objects under keys. Any thread may call; `deadline` is a value of `clock`."""

    def __init__(
        self,
        url: str,
        folder: Path | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url, self._folder = url, folder
        self.clock, self.sleep = clock, sleep
        self._clients: dict[str, Any] = {}
        self._up, self._down = Rate(), Rate()
        next_page = partial(self._count, "list")
        self._requests = (
            FolderRequests(folder) if folder else BucketRequests(url, self._up, self._down, next_page)
        )
        self._tally: Counter[str] = Counter()
        self._clock = StoreClock(self._stamp, clock)
        self._absence = Absence(clock)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def bytes_sent(self) -> int:
        """Bytes of objects in writes that the store answered, without headers."""
        return self._tally["bytes sent"]

    @property
    def bytes_received(self) -> int:
        return self._tally["bytes received"]

    @property
    def requests(self) -> dict[str, int]:
        """Requests by verb; each try counts."""
        with self._lock:
            return {verb: self._tally[verb] for verb in VERBS}

    @property
    def seconds_since_return(self) -> float:
        """Seconds since the store answered again after an outage; infinite if there was none. A pause without
        requests is not an outage: a process that trains asks for nothing."""
        return self._absence.seconds_since_return

    @property
    def answer_seconds(self) -> float:
        """The recent duration of a small request. 0 for a folder, since a busy disk says little."""
        return 0.0 if self._folder else self._absence.answer_seconds

    def get(self, key: str, *, max_bytes: int, deadline: float | None = None) -> bytes | None:
        """The object, or None. One larger than `max_bytes` is refused by its size, without a download."""
        found = self.get_dated(key, max_bytes=max_bytes, deadline=deadline)
        return found and found[0]

    def get_dated(
        self, key: str, *, max_bytes: int, deadline: float | None = None
    ) -> tuple[bytes, Info] | None:
        """The object and its write time, in one request."""
        request = partial(self._requests.get, self._key(key), max_bytes)
        found = self._persist("get", key, max_bytes, request, deadline)
        self._count("bytes received", len(found[0]) if found else 0)
        return found

    def put(self, key: str, data: bytes, *, deadline: float | None = None, durable: bool = True) -> None:
        """Write the object, replacing what was there; readers see the old or the new one, whole.

        In a folder it reaches the disk before it gets its name, unless not `durable`: a round that counts a
        payload must not be on the disk before it. A bucket guarantees that itself.
        """
        request = partial(self._requests.put, self._key(key), data, False, durable)
        self._persist("put", key, len(data), request, deadline)
        self._count("bytes sent", len(data))

    def create(self, key: str, data: bytes, *, deadline: float | None = None, durable: bool = True) -> bool:
        """Write the object only if there is none; True if and only if these bytes are the object now.

        A failed create proves nothing: "already exists" may refer to our own write whose reply was lost, and
        a 409 may come without any object. Unless it succeeds cleanly, it reads the key to find out. After a
        StoreError the object may or may not exist.
        """
        request = partial(self._requests.put, self._key(key), data, True, durable)
        backoff = self._backoff(len(data), deadline)
        while True:
            try:
                self._once("create", len(data), request, backoff)
                self._count("bytes sent", len(data))
                return True
            except Exception as error:
                if not (fault := self._fault(error)).retry:
                    raise self._error("create", key, fault, backoff) from None
                self._count("bytes sent", len(data) if fault.kind == "exists" else 0)
            try:
                there = self.get(key, max_bytes=len(data), deadline=backoff.deadline)
            except StoreRefused:
                return False  # larger than ours
            if there is not None:
                return there == data
            if not backoff.again(fault):
                raise self._error("create", key, fault, backoff) from None

    def head(self, key: str, *, deadline: float | None = None) -> Info | None:
        return self._persist("head", key, 0, partial(self._requests.head, self._key(key)), deadline)

    def list(self, prefix: str = "", *, deadline: float | None = None) -> list[str]:
        """Every key below `prefix`, a whole path segment ("payloads/rack-0"), in order."""
        return list(self.scan(prefix, deadline=deadline))

    def scan(self, prefix: str = "", *, deadline: float | None = None) -> dict[str, Info]:
        """Like `list`, with sizes and times. It always lists from the start: on SeaweedFS a listing from an
        offset misses keys. Any writer can make a listing endless, so it has a limit."""
        below = self._key(prefix.rstrip("/")) if prefix else None
        found = self._persist("list", prefix, 0, partial(self._requests.scan, below, MOST_LISTED), deadline)
        if len(found := found or {}) > MOST_LISTED:
            words = f"more than {MOST_LISTED:,} objects lie below {prefix}, and no run leaves so many there"
            raise StoreError(f"{self.url}: {words}; remove what is not this run's", "config")
        return dict(sorted(found.items()))

    def foreign(self, read: Callable[[], T]) -> T:
        """Return what `read` finds in an object that somebody else wrote.

        If only this object cannot be read (it is frozen, locked, not a file), its author is at fault:
        Unreadable. If run.json cannot be read either, the store is: StoreError.
        """
        try:
            return read()
        except StoreError as error:
            with suppress(StoreRefused):  # it exists and is not empty
                try:
                    self.get("run.json", max_bytes=0, deadline=self.clock() + ASK_SECONDS)
                except StoreError:
                    raise error from None
            raise Unreadable(str(error)) from None

    def delete(self, key: str, *, deadline: float | None = None) -> None:
        """Remove the object; an absent one is not an error."""
        self._persist("delete", key, 0, partial(delete, self._key(key)), deadline)

    def tidy(self, prefixes: Iterable[str]) -> None:
        """Remove prefixes without objects: in a folder they are folders."""
        for prefix in prefixes:
            if self._folder:
                remove_empty(self._folder, self._key(prefix))

    def now(self, key: str = "probe/clock") -> float:
        """The store's clock in Unix seconds, from an object written under `key` (`store.timing`)."""
        return self._clock.now(key)

    def doubt_clock(self) -> None:
        """Make the next `now` read the store's clock again."""
        self._clock.doubt()

    def _stamp(self, key: str) -> tuple[float, float] | None:
        self.put(key, b"clock", durable=False)
        written = self.clock()
        info = self.head(key)
        # HTTP dates lack the fraction, so half a second is added; a folder's dates have it.
        return info and (info.modified_unix_seconds + (0.0 if self._folder else 0.5), written)

    def probe(self, prefix: str = "probe") -> None:
        """Raise ConfigError if the store ignores put-if-absent: two closers could then close one round."""
        key = f"{prefix}/{secrets.token_hex(16)}"
        try:
            if not self.create(key, b"first") or self.create(key, b"second"):
                raise ConfigError(
                    f"{self.url} ignores put-if-absent (If-None-Match), so rounds could be closed twice; "
                    "use a store that honours it"
                )
        except StoreError as error:
            raise error.at_start() from None
        finally:
            with suppress(StoreError):  # a contributor may have the right to write but not to delete
                self.delete(key, deadline=self.clock() + 5)

    def _key(self, key: str) -> str:
        segments = key.split("/")
        if len(key) > 700 or not all(SEGMENT.fullmatch(segment) for segment in segments):
            raise StoreRefused(f"{key[:80]!r} is not a key: write letters, digits and ._=+- between slashes")
        return key

    def _count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self._tally[what] += amount

    def _client(self, num_bytes: int) -> Any:
        lane = "control" if num_bytes <= CONTROL_BYTES else "bulk"
        with self._lock:
            if lane not in self._clients:
                self._clients[lane] = connect(self.url, self._folder)
            return self._clients[lane]

    def _backoff(self, num_bytes: int, deadline: float | None) -> Backoff:
        default = max(DEFAULT_SECONDS, 2 * self._up.limit(num_bytes))
        until = self.clock() + default if deadline is None else deadline
        return Backoff(until, self.clock, self.sleep)

    def _once(self, verb: str, num_bytes: int, request: Try, backoff: Backoff) -> Any:
        self._count(verb)
        rate, began = self._down if verb == "get" else self._up, self.clock()
        try:
            result = request(self._client(num_bytes), lambda size: backoff.allow(rate.limit(size)))
            answer = wait(result) if asyncio.iscoroutine(result) else result
        except Exception as error:
            if isinstance(error, TimeoutError):
                rate.too_slow()
            if not isinstance(error, StoreRefused | StoreError | ConfigError):
                self._absence.failed(began, classify(error))
            raise
        if num_bytes <= CONTROL_BYTES:  # bulk says nothing about latency
            self._absence.answered(began)
        return answer

    def _fault(self, error: Exception) -> Fault:
        if isinstance(error, StoreRefused | StoreError | ConfigError):
            raise error
        fault = classify(error)
        if fault.kind in ("expired", "denied"):  # somebody may renew or replace the credentials
            with self._lock:
                self._clients.clear()  # the next client reads environment and files again
        return fault

    def _persist(self, verb: str, key: str, size: int, request: Try, deadline: float | None) -> Any:
        """The request's result, retried until the deadline; None if the object is absent."""
        backoff = self._backoff(size, deadline)
        while True:
            try:
                return self._once(verb, size, request, backoff)
            except Exception as error:
                fault = self._fault(error)
                if fault.kind == "absent" and verb != "put":
                    return None
                if not backoff.again(fault):
                    raise self._error(verb, key, fault, backoff) from None

    def _error(self, verb: str, key: str, fault: Fault, backoff: Backoff) -> StoreError:
        if fault.kind == "slow" and backoff.fault:
            fault = backoff.fault  # an earlier try gave a better reason
        if fault.kind == "network" and self.url.startswith("s3://"):
            fault = replace(fault, words=f"{fault.words} ({where_s3_is()})")
        if fault.kind == "absent":
            fault = Fault("config", "a write is answered by 404: is there such a bucket, is it S3?", False)
        tail = f" ({backoff.spent()})" if fault.retry else ""
        passes = fault.retry or fault.kind != "disk"
        does = "read" if verb in ("get", "head", "list") else "write to"
        brief = f"cannot {does} the bucket: {fault.words}"
        return StoreError(f"{self.url}: {verb} {key}: {fault.words}{tail}", fault.kind, passes, brief)


def open_store(url: str, *, timeout_seconds: float = 15.0, create: bool = True) -> Store:
    """Open the store at `url` and reach it once, so that a wrong URL, right or clock shows early.

    `create` False is for readers: a missing folder is refused, and nothing is written to one.
    """
    root, folder = parse_url(url)
    store = Store(root, folder)
    if folder and not create:
        if not folder.is_dir():
            raise Unreachable(f"there is no folder {root}; give the URL that `isthmus init` was given")
        return store
    if folder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder, f"probe/{secrets.token_hex(8)}", b"", create=False, sync=False, keep=False)
        except FileExistsError:
            raise ConfigError(f"{root} is a file; the store needs a folder") from None
        except OSError as error:
            raise ConfigError(f"cannot write to the folder {root}: {error.strerror or error}") from None
        remove_stale(folder)
        return store
    try:
        store.get("run.json", max_bytes=0, deadline=time.monotonic() + timeout_seconds)
    except StoreRefused:
        pass  # a run exists already
    except StoreError as error:
        raise error.at_start() from None
    return store
