"""A clock that passes only while everybody waits, and a bucket whose objects carry its dates.

Every actor is a thread, and one of them runs at a time, so a test sees the same history each time it is run.
When all of them wait, the clock jumps to the first that wakes: an hour costs as much as a second.
"""

import heapq
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

from isthmus.store import Info, Store, together
from isthmus.store.folder import FolderRequests
from isthmus.store.url import parse_url

BEGIN = 1_700_000_000.0  # Unix seconds
MOST_SECONDS = 4_000.0  # of virtual time: a test that needs more never ends


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class Actor(threading.Thread):
    """One thread of a fleet. `owner` names the process that it belongs to: a kill ends all of its actors."""

    def __init__(self, time: "VirtualTime", owner: str, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True, name=owner)
        self.time, self.owner, self.work = time, owner, work
        self.killed = self.over = False
        self.result: Any = None
        self.fault: BaseException | None = None

    def run(self) -> None:
        try:
            self.time.begin(self)
            self.result = self.work()
        except BaseException as fault:
            self.fault = fault
        finally:
            self.time.end(self)


class VirtualTime:
    def __init__(self, now: float = BEGIN) -> None:
        self.now = now
        self.actors: list[Actor] = []
        self.waiting: list[tuple[float, int, Actor]] = []
        self.order = itertools.count()
        self.turn: Actor | None = None
        self.changed = threading.Condition()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        actor = threading.current_thread()
        with self.changed:
            if not isinstance(actor, Actor):  # nobody else runs: the test itself calls
                self.now += max(0.0, seconds)
                return
            self._wait(actor, self.now + max(0.0, seconds))

    def start(self, owner: str, work: Callable[[], Any]) -> Actor:
        """Begin an actor; it runs when its turn comes."""
        actor = Actor(self, owner, work)
        with self.changed:
            self.actors.append(actor)
            heapq.heappush(self.waiting, (self.now, next(self.order), actor))
        actor.start()
        return actor

    def kill(self, owner: str) -> None:
        """SIGKILL to a process: its actors run no further than where they wait now."""
        with self.changed:
            doomed = [actor for actor in self.actors if actor.owner == owner and not actor.over]
            for actor in doomed:
                actor.killed = True
            self.waiting = [
                (self.now if actor in doomed else until, number, actor)
                for until, number, actor in self.waiting
            ]
            heapq.heapify(self.waiting)
        if threading.current_thread() in doomed:
            raise Killed

    def run(self) -> None:
        """Until all actors have ended. The first fault of one of them that was not killed is raised."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(together, "ThreadPoolExecutor", InTurn)
            patch.setattr(os, "fsync", lambda handle: None)  # a power cut is another test's business
            with self.changed:
                self._next()
                while not all(actor.over for actor in self.actors):
                    assert self.changed.wait(30), "an actor waits for something else than the clock"
        ended, self.actors = self.actors, []
        for actor in ended:
            if actor.fault and not isinstance(actor.fault, Killed):
                raise actor.fault

    def at_once(self, *calls: Callable[[], Any]) -> list[Any]:
        """What each returned: every call is an actor of its own."""
        actors = [self.start(f"call {number}", call) for number, call in enumerate(calls)]
        self.run()
        return [actor.result for actor in actors]

    # What actors call

    def begin(self, actor: Actor) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn is actor)
            if actor.killed:
                raise Killed

    def end(self, actor: Actor) -> None:
        with self.changed:
            actor.over = True
            self._next()

    def _wait(self, actor: Actor, until: float) -> None:
        heapq.heappush(self.waiting, (until, next(self.order), actor))
        self._next()
        self.changed.wait_for(lambda: self.turn is actor)
        if actor.killed:
            raise Killed

    def _next(self) -> None:
        self.turn = None
        if self.waiting:
            until, _, self.turn = heapq.heappop(self.waiting)
            self.now = max(self.now, until)
            if self.now > BEGIN + MOST_SECONDS:
                self.turn.killed, self.turn.fault = True, TimeoutError("the fleet does not come to an end")
        self.changed.notify_all()


class InTurn:
    """Takes the place of a thread pool: each call runs when it is submitted, in its caller's turn."""

    def __init__(self, *sizes: Any) -> None: ...

    def __enter__(self) -> "InTurn":
        return self

    def __exit__(self, *fault: Any) -> None: ...

    def submit(self, call: Callable[..., Any], *given: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(call(*given))
        except BaseException as fault:
            done.set_exception(fault)
        return done


Strike = Callable[[str, str], None]  # (verb, key); it may raise


class Requests(FolderRequests):
    """Requests to a folder in virtual time, each with a place to strike before and after it."""

    def __init__(self, url: str, time: VirtualTime) -> None:
        _, folder = parse_url(url)
        assert folder, "virtual time needs a folder: a bucket has dates of its own"
        super().__init__(folder)
        self.time = time
        self.before: Strike = lambda verb, key: None
        self.after: Strike = lambda verb, key: None

    def get(self, key: str, *more: Any) -> tuple[bytes, Info]:
        self.before("get", key)
        return super().get(key, *more)

    def put(self, key: str, data: bytes, create: bool, durable: bool, *more: Any) -> None:
        self.before("create" if create else "put", key)
        super().put(key, data, create, False, *more)
        self._date(key)
        self.after("create" if create else "put", key)

    def head(self, key: str, *more: Any) -> Info | None:
        self.before("head", key)
        return super().head(key, *more)

    def scan(self, prefix: str | None, *more: Any) -> dict[str, Info]:
        self.before("list", prefix or "")
        return super().scan(prefix, *more)

    def _date(self, key: str) -> None:
        with suppress(FileNotFoundError):
            os.utime(self.folder / key, (self.time.now, self.time.now))


class VirtualStore(Store):
    """A folder as one process of the fleet sees it."""

    def __init__(self, url: str, time: VirtualTime, clock: Callable[[], float] | None = None) -> None:
        """`clock` is that of the process's own machine, if it is another."""
        root, folder = parse_url(url)
        super().__init__(root, folder, clock or time.clock, time.sleep)
        self._requests: Requests = Requests(url, time)

    @property
    def strikes(self) -> Requests:
        return self._requests


def date_all(url: str, time: VirtualTime) -> None:
    """What was written before the clock began is as old as the clock."""
    _, folder = parse_url(url)
    assert folder
    for path in _files(folder):
        os.utime(path, (time.now, time.now))


def _files(folder: os.PathLike[str]) -> Iterable[str]:
    for base, _, names in os.walk(folder):
        yield from (os.path.join(base, name) for name in names)
