"""Interpret a store's failures, and decide how long to keep trying.

A store's own error text can hold a key id, a token or a string to sign. So the messages here use only the
HTTP status and the error code.
"""

import asyncio
import atexit
import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from isthmus.errors import PASSING_ERRNO, ConfigError, RunError, Unreachable

DEFAULT_SECONDS = 60.0
LAST_TRY_SECONDS = 0.5  # how long before the deadline the last try starts
EXPIRED_TRIES = 4  # others renew the credentials, within a few seconds


class StoreError(RunError):
    """The store cannot be used, or not in time. `kind` is that of the last Fault: "network", "denied", ...

    Credentials, a clock and a URL do not fix themselves. `brief` is the message for a reader of the run,
    without the key and the number of tries.
    """

    def __init__(self, message: str, kind: str, passes: bool = True, brief: str = "") -> None:
        super().__init__(message)
        self.kind, self.brief = kind, brief or message
        self.passes = passes and kind not in ("denied", "config", "clock")

    @property
    def lasting(self) -> bool:
        """Whether waiting is useless even for a store that worked before: no such bucket, no such request.
        Rights, room and clocks may return."""
        return self.kind == "config"

    def at_start(self) -> ConfigError:
        """Convert it to a ConfigError for a person who has just named this store."""
        return (Unreachable if self.passes else ConfigError)(str(self))


class StoreRefused(ValueError):
    """An operation that we refuse: an odd key, an object over the limit, a link out of the folder."""


class Unreadable(StoreRefused):
    """One object of another writer cannot be read, but the rest of the store can."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed request: absent, exists, busy, slow, network, disk, expired, clock, denied or config."""

    kind: str
    words: str
    retry: bool


_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_EXPIRED |= {"CredentialsExpired"}
_CLOCK = {"RequestTimeTooSkewed", "RequestInTheFuture"}
_BAD_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity", "AuthFailure"}
_BUSY = {"SlowDown", "Throttling", "RequestTimeout", "InternalError", "OperationAborted"}
_FULL = {"InsufficientStorage", "XMinioStorageFull", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded"}
_GARBLED = {"IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"}  # damaged in transit: try again
_BUSY_STATUS = {408, 425, 429, 500, 502, 503, 504}
_NETWORK = (
    ("ConnectionRefused", "connection refused"),
    ("dns error", "its host name does not resolve"),
    ("ertificate", "its TLS certificate is not trusted"),
    ("NetworkUnreachable", "no route to it"),
    ("HostUnreachable", "no route to it"),
)


def classify(error: BaseException) -> Fault:
    """Convert an exception of obstore or of the operating system to a Fault."""
    text = str(error)
    name = type(error).__name__
    status = int(found[1]) if (found := re.search(r"status code: (\d{3})", text)) else None
    # The second form is a bulk delete's, which obstore always uses: refusals come inside a 200.
    found = re.search(r"<Code>([A-Za-z.]{3,60})</Code>|\(code: ([A-Za-z.]{3,60})\)", text)
    code = found[1] or found[2] if found else ""
    label = code or (f"HTTP {status}" if status else "no reason given")

    if isinstance(error, TimeoutError) and not error.errno:
        return Fault("slow", "no answer in time", True)
    if name == "AlreadyExistsError" or isinstance(error, FileExistsError):
        return Fault("exists", f"already there ({label})", True)
    if code == "NoSuchBucket":
        return Fault("config", "no such bucket; create it, or correct the URL", False)
    if code in _EXPIRED:
        cure = "renew them in the environment or the credentials file"
        return Fault("expired", f"the credentials have expired ({code}); {cure}", True)
    if code in _CLOCK:
        words = f"this machine's clock is wrong ({code}); set it, for instance by NTP"
        return Fault("clock", f"not a matter of permission: {words}", False)
    if code in _BAD_KEYS:
        words = f"the store does not know these credentials ({code}); check the key and its secret"
        return Fault("denied", words, False)
    if status in (401, 403) or code == "AccessDenied":
        # A refused HEAD has no body, so no reason.
        hint = "" if code else "; the reason may also be this machine's clock"
        return Fault("denied", f"permission denied ({label}): these credentials do not allow it{hint}", False)
    if isinstance(error, FileNotFoundError):
        return Fault("absent", f"not there ({label})", False)
    if status in _BUSY_STATUS or code in _BUSY | _GARBLED:
        return Fault("busy", f"the store is busy or failing ({label})", True)
    if status == 507 or code in _FULL:
        return Fault("busy", f"the store is full ({label})", True)
    if status == 501:
        return Fault("config", f"the store does not support this request ({label})", False)
    if "redirect" in text or status in (301, 307, 308):
        return Fault("config", "the bucket is in another region; set AWS_REGION or AWS_ENDPOINT_URL", False)
    if status and status > 501:
        return Fault("busy", f"the store is failing ({label})", True)
    if status:
        return Fault("config", f"the store rejects the request ({label})", False)
    found = re.search(r"\(os error (\d+)\)", text)
    if number := getattr(error, "errno", None) or (int(found[1]) if found else 0):
        if number == errno.ENOTDIR:  # a key below an object: a bucket would say 404
            return Fault("absent", os.strerror(number), False)
        words = str(getattr(error, "strerror", None) or os.strerror(number))
        return Fault("disk", words, number in PASSING_ERRNO)
    if "error sending request" in text or "HTTP error" in text or "error decoding" in text:
        reason = next((words for mark, words in _NETWORK if mark in text), "the connection broke")
        return Fault("network", f"cannot reach the store: {reason}", True)
    return Fault("network", f"the request failed ({name})", True)


class Backoff:
    """Decides when to try again and when to give up: exponential back-off with jitter, until a deadline.

    obstore does not pass on a store's Retry-After, so "busy" starts at one second instead.
    """

    def __init__(
        self,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.clock, self.sleep = clock, sleep
        self.began = clock()
        self.deadline = deadline
        self.tries = 0
        self.fault: Fault | None = None  # the latest one other than "slow"
        self._kinds: dict[str, int] = {}

    def remaining(self) -> float:
        return self.deadline - self.clock()

    def again(self, fault: Fault) -> bool:
        """Wait and return True, or return False at once if it is time to give up."""
        self.tries += 1
        seen = self._kinds[fault.kind] = self._kinds.get(fault.kind, 0) + 1
        if fault.kind != "slow" or self.fault is None:
            self.fault = fault
        if not fault.retry or self.remaining() <= LAST_TRY_SECONDS:
            return False
        if fault.kind == "expired" and seen >= EXPIRED_TRIES:
            return False
        first, most = {"busy": (1.0, 8.0), "expired": (0.5, 5.0)}.get(fault.kind, (0.1, 5.0))
        pause = min(most, first * 2 ** min(seen - 1, 10)) * random.uniform(0.5, 1.0)
        self.sleep(min(pause, max(0.0, self.remaining() - LAST_TRY_SECONDS)))
        return True

    def allow(self, seconds: float) -> float:
        """The time-out of the next request: doubled after each slow one, never past the deadline."""
        return max(1.0, min(seconds * 2 ** self._kinds.get("slow", 0), self.remaining()))

    def spent(self) -> str:
        return f"gave up after {self.clock() - self.began:.0f} s and {self.tries} tries"


_loops: dict[int, asyncio.AbstractEventLoop] = {}  # one per process: a fork does not inherit the thread
_loops_lock = threading.Lock()


def wait(request: Coroutine[Any, Any, Any]) -> Any:
    """Run a request on an event loop in a separate thread and wait for it here.

    A time-out then really cancels the request, and Ctrl-C works: obstore's own synchronous calls would block
    it until the store answers.
    """
    with _loops_lock:
        if (loop := _loops.get(os.getpid())) is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="isthmus-store", daemon=True)
            thread.start()
            atexit.register(_end, loop, thread, os.getpid())
    future = asyncio.run_coroutine_threadsafe(request, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, process: int) -> None:
    """Cancel all requests at exit: one that finishes after the interpreter aborts the process."""
    if process != os.getpid():
        return

    async def cancel() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(2)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(2)
    time.sleep(0.05)  # obstore's threads need the interpreter only to release it


async def drain(result: Any, stall_seconds: float) -> bytes:
    """Read the body of a GET. A silent connection is given up long before a slow one."""
    stream, parts = result.stream(min_chunk_size=1 << 16), []
    while part := await asyncio.wait_for(anext(stream, None), stall_seconds):
        parts.append(bytes(part))
    return b"".join(parts)
