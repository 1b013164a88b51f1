"""The bucket: whole objects under keys, in a folder or in an object store, by way of `obstore`.

Three promises are made here and nowhere else: an object is whole or absent, `create` has one winner, and a
bad network is waited out until the caller's deadline. What the objects mean is the ledger's business.
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
from isthmus.store.clock import StoreClock
from isthmus.store.folder import list_files, remove_empty, remove_stale, write_file
from isthmus.store.requests import BucketRequests, FolderRequests, Info, delete
from isthmus.store.retry import (
    DEFAULT_SECONDS,
    Absence,
    Backoff,
    Fault,
    Rate,
    StoreError,
    StoreRefused,
    Unreadable,
    classify,
    wait,
)
from isthmus.store.together import AT_ONCE, together
from isthmus.store.url import SEGMENT, connect, parse_url, where_s3_is

__all__ = ["Info", "Store", "open_store"]

T = TypeVar("T")
Try = Callable[..., Any]  # one of `requests`, with all arguments but its last two

# Up to here a request travels apart from bulk, so that a heartbeat never queues behind it.
CONTROL_BYTES = 1 << 18
VERBS = ("get", "put", "create", "copy", "head", "list", "delete")
ASK_SECONDS = 15.0  # until a store that cannot give one object is believed to be away


class Store:
    """Objects under keys. Any thread may call; `deadline` is a value of `time.monotonic()`."""

    def __init__(self, url: str, folder: Path | None) -> None:
        self.url, self._folder = url, folder
        self._clients: dict[str, Any] = {}
        self._up, self._down = Rate(), Rate()
        next_page = partial(self._count, "list")
        self._requests = (
            FolderRequests(folder) if folder else BucketRequests(url, self._up, self._down, next_page)
        )
        self._tally: Counter[str] = Counter()
        self._clock = StoreClock(self._stamp)
        self._absence = Absence()
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
        """Requests by verb, each try counted."""
        with self._lock:
            return {verb: self._tally[verb] for verb in VERBS}

    @property
    def seconds_since_return(self) -> float:
        """Since the store answered again after it had answered nobody here for a while; without end if it
        always did. Requests that nobody made are no absence: a process that trains asks for nothing."""
        return self._absence.seconds_since_return

    @property
    def answer_seconds(self) -> float:
        """What a small request takes, lately. Of a folder nothing: a busy disk has its moments."""
        return 0.0 if self._folder else self._absence.answer_seconds

    def get(self, key: str, *, max_bytes: int, deadline: float | None = None) -> bytes | None:
        """The object, or None. One larger than `max_bytes` is refused by its size, before any download."""
        found = self.get_dated(key, max_bytes=max_bytes, deadline=deadline)
        return found and found[0]

    def get_dated(
        self, key: str, *, max_bytes: int, deadline: float | None = None
    ) -> tuple[bytes, Info] | None:
        """The same, and when it was written: one request for what is looked at again and again."""
        request = partial(self._requests.get, self._key(key), max_bytes)
        found = self._persist("get", key, max_bytes, request, deadline)
        self._count("bytes received", len(found[0]) if found else 0)
        return found

    def put(self, key: str, data: bytes, *, deadline: float | None = None, durable: bool = True) -> None:
        """Write the object, replacing what was there; readers see the old or the new one, whole.

        In a folder it is on the disk before it has its name, unless it is not `durable`: a round that counts
        a payload must not be on the disk before it. A bucket promises that by itself.
        """
        request = partial(self._requests.put, self._key(key), data, False, durable)
        self._persist("put", key, len(data), request, deadline)
        self._count("bytes sent", len(data))

    def create(self, key: str, data: bytes, *, deadline: float | None = None, durable: bool = True) -> bool:
        """Write the object only if there is none; True if and only if these bytes are the object now.

        A failed create proves nothing: "already exists" may be about our own write whose reply was lost,
        and a 409 may come without any object. Everything but a clean success is settled by reading the key.
        A StoreError leaves open whether the object was written.
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

    def together(self, calls: Iterable[Callable[[], T]], at_once: int = AT_ONCE) -> list[T]:
        """What each call returns, in order; so many of them wait for the store at a time. The first fault, in
        that order, is raised when none is under way any more, and nothing is begun after it."""
        return together(calls, at_once)

    def list(self, prefix: str = "", *, deadline: float | None = None) -> list[str]:
        """Every key below `prefix`, which is a whole path segment ("payloads/rack-0"), in order.

        Always from the start: a listing from an offset misses keys on SeaweedFS.
        """
        if self._folder:
            self._count("list")
            return sorted(list_files(self._folder, self._below(prefix)))
        return list(self.scan(prefix, deadline=deadline))

    def scan(
        self, prefix: str = "", *, most: int | None = None, deadline: float | None = None
    ) -> dict[str, Info]:
        """The same with sizes and times. StoreRefused where there are more than `most` objects: whoever may
        write below a prefix can fill it, and a page of 1000 is a request."""
        request = partial(self._requests.scan, self._below(prefix), most)
        found = self._persist("list", prefix, 0, request, deadline) or {}
        if most is not None and len(found) > most:
            raise StoreRefused(f"{self.url}: more than {most} objects lie below {prefix}")
        return dict(sorted(found.items()))

    def copy(self, source: str, target: str, *, max_bytes: int, deadline: float | None = None) -> bool:
        """Copy an object inside the store, without moving its bytes here; False where there is none.

        It replaces what was there. Only a folder looks at `max_bytes`: whoever reads the copy does. A
        StoreError may mean that this store cannot copy, or that these credentials may not.
        """
        request = partial(self._requests.copy, self._key(source), self._key(target), max_bytes)
        return bool(self._persist("copy", target, 0, request, deadline))

    def foreign(self, read: Callable[[], T]) -> T:
        """What `read` finds in an object that somebody else wrote.

        If this object alone cannot be read (it is frozen, locked, not a file), that is its author's fault:
        Unreadable. Where the run itself cannot be read either, it is the store's: StoreError.
        """
        try:
            return read()
        except StoreError as error:
            with suppress(StoreRefused):  # it is there, and larger than nothing
                try:
                    self.get("run.json", max_bytes=0, deadline=time.monotonic() + ASK_SECONDS)
                except StoreError:
                    raise error from None
            raise Unreadable(str(error)) from None

    def delete(self, key: str, *, deadline: float | None = None) -> None:
        """Remove the object; an absent one is not an error."""
        self._persist("delete", key, 0, partial(delete, self._key(key)), deadline)

    def tidy(self, prefixes: Iterable[str]) -> None:
        """Remove what is left of prefixes without objects: in a folder they are folders."""
        for prefix in prefixes:
            if self._folder:
                remove_empty(self._folder, self._key(prefix))

    def now(self, key: str = "probe/clock") -> float:
        """The store's clock in Unix seconds, by an object that is written under `key` (`store.clock`)."""
        return self._clock.now(key)

    def doubt_clock(self) -> None:
        """The next `now` reads the store's clock again."""
        self._clock.doubt()

    def _stamp(self, key: str) -> tuple[float, float] | None:
        self.put(key, b"clock", durable=False)
        written = time.monotonic()
        info = self.head(key)
        # HTTP dates are cut to whole seconds, so half a second is added back; a folder's are not.
        return info and (info.modified_unix_seconds + (0.0 if self._folder else 0.5), written)

    def probe(self, prefix: str = "probe") -> None:
        """Refuse a store that ignores put-if-absent: there, two closers could both close a round."""
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
            with suppress(StoreError):  # a contributor may be allowed to write and not to delete
                self.delete(key, deadline=time.monotonic() + 5)

    def _below(self, prefix: str) -> str | None:
        return self._key(prefix.rstrip("/")) if prefix else None

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
        return Backoff(time.monotonic() + default if deadline is None else deadline)

    def _once(self, verb: str, num_bytes: int, request: Try, backoff: Backoff) -> Any:
        self._count(verb)
        rate, began = self._down if verb == "get" else self._up, time.monotonic()
        try:
            result = request(self._client(num_bytes), lambda size: backoff.allow(rate.limit(size)))
            answer = wait(result) if asyncio.iscoroutine(result) else result
        except Exception as error:
            if isinstance(error, TimeoutError):
                rate.too_slow()
            if not isinstance(error, StoreRefused | StoreError | ConfigError):
                self._absence.failed(began, classify(error))
            raise
        if num_bytes <= CONTROL_BYTES:  # bulk may take its time
            self._absence.answered(began)
        return answer

    def _fault(self, error: Exception) -> Fault:
        if isinstance(error, StoreRefused | StoreError | ConfigError):
            raise error
        fault = classify(error)
        if fault.kind in ("expired", "denied"):  # somebody may renew or replace them
            with self._lock:
                self._clients.clear()  # the next client reads the environment and the files again
        return fault

    def _persist(self, verb: str, key: str, size: int, request: Try, deadline: float | None) -> Any:
        """What the request returns, tried again until the deadline; None where the object is absent."""
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
            fault = backoff.fault  # an earlier try said more
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
    """The store at `url`, reached once: a wrong URL, right or clock is known before anything is started.

    `create` False is for readers: a folder that is not there is refused, and nothing is written into one.
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
        pass  # there is a run already
    except StoreError as error:
        raise error.at_start() from None
    return store
