"""A process's state and its measurements while it trains, from which heartbeats and commits are made."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from isthmus.replica.base import Replica
from isthmus.replica.meter import Meter
from isthmus.runlog import finite
from isthmus.runlog.facts import Facts, HeldOut

SAVED = ("loss", "grad_norm", "seconds")  # saved with the round's update
INNER_STEPS = "inner_steps"  # steps in an update, with those carried by the feedback from missed rounds
# The time between rounds, in which nothing trains: by activity, and in total.
EDGE_SECONDS = ("encode_seconds", "save_seconds", "apply_seconds", "edge_seconds")


@dataclass
class WorkerStatus:
    """The state of this process."""

    state: str = "starting"
    round: int = 0
    inner_step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    grad_norm: float | None = None
    farewell: Facts = field(default_factory=Facts)

    def to_save(self) -> dict[str, float]:
        return {name: float(getattr(self, name) or 0.0) for name in SAVED}

    def restore(self, saved: Mapping[str, float]) -> None:
        for name in SAVED:
            setattr(self, name, saved.get(name, 0.0))


class Measured:
    """A process's measurements between two updates."""

    def __init__(self, replica: Replica, device: torch.device) -> None:
        self.replica, self.meter = replica, Meter(replica, device)
        self.fresh_steps = 0  # inner steps that no update of ours has carried yet
        self.held_out: HeldOut | None = None  # the newest that this process measured; it stays
        self.seconds: dict[str, float] = defaultdict(float)  # time at the end of a round, by activity
        self.edge_began: float | None = None

    def edge_begins(self) -> None:
        """Record that a round's last inner step is done."""
        self.edge_began = time.monotonic()

    def edge_ends(self) -> None:
        if self.edge_began is not None:
            self.seconds["edge_seconds"] += time.monotonic() - self.edge_began

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - began

    def pop(self, status: WorkerStatus) -> Facts:
        """Return the measurements as the facts of an update or a farewell."""
        counts = self.replica.pop_counts()
        trip, figures = self.meter.pop(counts)
        figures |= {name: round(self.seconds.pop(name, 0.0), 4) for name in EDGE_SECONDS}
        figures[INNER_STEPS], self.fresh_steps = self.fresh_steps, 0
        return Facts(
            loss=finite(status.loss),
            grad_norm=finite(status.grad_norm),
            seconds=round(status.seconds or 0.0, 4),
            trip_seconds=trip,
            bytes=counts,
            measured={name: [figure] for name, figure in figures.items()},
            held_out=self.held_out,
        )

    def take_back(self, facts: Facts) -> None:
        """Take back the steps of an update that did not count: the next update carries them."""
        self.fresh_steps += int(facts.measured.get(INNER_STEPS, [0])[0])


class StartUp:
    """Times the phases from `join`, or from a restarted worker's start, to the first inner step."""

    def __init__(self, started: float, log: Callable[[str], None], began: float | None = None) -> None:
        """`started`: when the command started; `began`: when this worker did."""
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # the supervisor ran all the while
        began = time.time() if began is None else began
        self.started, self.log, self.told = began if again else started, log, False
        self.last, self.parts = began, {} if again else {"supervisor": began - started}

    def mark(self, name: str) -> None:
        """Record the end of a phase."""
        now = time.time()
        self.parts[name], self.last = now - self.last, now

    def tell(self) -> None:
        self.mark("first step")
        self.told = True
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        self.log(f"first inner step after {self.last - self.started:.1f} s ({parts})")
