"""A fleet of real processes on a real S3 server, one of which gets SIGKILL at an exact write.

The traffic of every closer, of a newcomer and of the commands goes through a proxy of its own, which sees
method and key. So that a change falls into a known round R, closers are held before their first write to R
until the change is in the bucket. From there on the writes of whichever closer is first in line are steps:
(rounds after R, kind of object, how many of that kind so far).
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from faultproxy import FaultProxy

LIMIT_SECONDS = 300.0  # for an event, on a busy machine
KINDS = {
    "update": r"payloads/[\w-]+/(\d{6})/\d+-",
    "copy": r"payloads/[\w-]+/(\d{6})/kept-",
    "commit": r"commits/(\d{6})/",
    "manifest": r"manifests/(\d{6})\.json",
    "anchor": r"anchors/(\d{6})/\d+\.safetensors",
    "end of anchor": r"anchors/(\d{6})/complete\.json",
    "membership": r"membership/()",
    "request": r"requests/()",
    "invitation": r"invitations/()",
}
CHANGES = ("membership", "request")  # one of these, by who is no closer, begins a change


@dataclass(frozen=True, slots=True, order=True)
class Step:
    later: int  # rounds after the one in which the change came
    kind: str
    number: int = 1  # of its kind, in that round
    by: str = "closer"  # or the command, or the newcomer

    def __str__(self) -> str:
        where = f"round R+{self.later}" if self.later else "round R"
        nth = f" {self.number}" if self.number > 1 else ""
        return f"{where if self.by == 'closer' else self.by}: {self.kind}{nth}"


@dataclass(slots=True)
class Strike:
    step: Step
    after: bool  # the store has answered, and the writer does not know it
    fired: str = ""  # the key
    victim: str = ""
    at: float = 0.0  # by the monotonic clock
    round: int = 0  # the newest that a closer had given to


@dataclass
class Watch:
    """Sees all writes: holds closers, counts steps and kills. `kill` returns when the process has ended."""

    closers: Sequence[str]
    prefix: str  # of the run, in paths
    kill: Callable[[str], None]
    first: int | None = None  # the round R of the change that is being made
    steps: list[Step] = field(default_factory=list)  # of that change, as they came
    strike: Strike | None = None
    fault: str = ""

    def __post_init__(self) -> None:
        self.turn = threading.Condition()
        self.newest = 0  # round that a closer has written an update to
        self.held: set[str] = set()
        self.open = True
        self.counted: Counter[tuple[int, str]] = Counter()
        self.numbered: dict[str, Step] = {}  # by key

    def begin(self, strike: Strike | None = None, in_line: str = "") -> Strike | None:
        """A change is about to be made. Where a closer is to be struck, or nobody, it will fall into round R;
        `in_line` is then first in line in the round of the strike."""
        with self.turn:
            self.strike, self.steps, self.first = strike, [], None
            self.counted.clear()
            self.numbered.clear()
            self.held.clear()
            if strike is None or strike.step.by == "closer":
                later = strike.step.later if strike else 0
                self.first = self.newest + 1
                while in_line and self.in_line(self.first + later) != in_line:
                    self.first += 1
                self.open = False
        return strike

    def in_line(self, round_number: int) -> str:
        return self.closers[round_number % len(self.closers)]

    def saw(self, who: str, method: str, path: str, status: int) -> bool:
        """One request, before and after the store has it; True where its process was killed at it."""
        key = path.partition("?")[0].partition(f"{self.prefix}/")[2]
        found = next(((k, m) for k, p in KINDS.items() if (m := re.match(p, key))), None)
        if method != "PUT" or found is None:
            return False
        kind, round_number = found[0], int(found[1][1] or 0)
        if status == 0:
            return self._before(who, kind, round_number, key)
        return self._after(who, kind, round_number, key, status)

    def _before(self, who: str, kind: str, t: int, key: str) -> bool:
        with self.turn:
            if who in self.closers and kind == "update":
                if self.first is not None and t >= self.first:
                    self.held.add(who)
                    self.turn.notify_all()
                    self._wait(lambda: self.open, f"{who} is held at {key}")
                self.newest = max(self.newest, t)
            elif kind in CHANGES and who not in self.closers and not self.open:
                self._wait(lambda: self.held >= set(self.closers), f"{key} waits for {self.closers}")
            return self._struck(who, kind, t, key, after=False)

    def _after(self, who: str, kind: str, t: int, key: str, status: int) -> bool:
        with self.turn:
            struck = status < 300 and self._struck(who, kind, t, key, after=True)
            if kind in CHANGES and who not in self.closers and status < 300:
                self.open = True
                self.turn.notify_all()
            return struck

    def _struck(self, who: str, kind: str, t: int, key: str, after: bool) -> bool:
        if key not in self.numbered and (new := self._step(who, kind, t)):
            self.numbered[key] = new
            self.steps.append(new)
        strike = self.strike
        if strike is None or strike.fired or strike.after != after or strike.step != self.numbered.get(key):
            return False
        strike.fired, strike.victim, strike.at, strike.round = key, who, time.monotonic(), self.newest
        self.kill(who)
        return True

    def _step(self, who: str, kind: str, t: int) -> Step | None:
        if who not in self.closers:
            return Step(0, kind, 1, who) if kind in (*CHANGES, "invitation") else None
        if self.first is None or not self.open:
            return None
        t = t or self.first  # a membership document has no round
        # Where the first in line is slow another steps in: what is created once is theirs who come first.
        if t < self.first or (kind not in ("membership", "manifest") and self.in_line(t) != who):
            return None
        self.counted[t, kind] += 1
        return Step(t - self.first, kind, self.counted[t, kind])

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        if not self.turn.wait_for(done, LIMIT_SECONDS):
            self.fault = f"{what} for {LIMIT_SECONDS:g} s"


class Wires:
    """A proxy for each who is watched."""

    def __init__(self, port: int, watch: Watch) -> None:
        self.port, self.watch = port, watch
        self.proxies: dict[str, FaultProxy] = {}

    def endpoint(self, who: str) -> str:
        if who not in self.proxies:
            proxy = self.proxies[who] = FaultProxy(self.port)
            proxy.watch = lambda *request: self.watch.saw(who, *request)
        return self.proxies[who].url

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.close_port()
