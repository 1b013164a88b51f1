"""What a process knows of itself, and measures while it trains: heartbeats and commits are made of it."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from isthmus.replica.base import Replica
from isthmus.replica.meter import Meter
from isthmus.runlog import finite
from isthmus.runlog.facts import Facts, HeldOut

SAVED = ("loss", "grad_norm", "seconds")  # saved with the round's update
INNER_STEPS = "inner_steps"  # those behind an update, with what the feedback carried of rounds that it missed
# Of the edge of a round, in which nothing trains: what it was spent on, and all of it.
EDGE_SECONDS = ("encode_seconds", "save_seconds", "apply_seconds", "edge_seconds")


@dataclass
class WorkerStatus:
    """How this process stands."""

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
    """What a process measures from one update to the next."""

    def __init__(self, replica: Replica, device: torch.device) -> None:
        self.replica, self.meter = replica, Meter(replica, device)
        self.fresh_steps = 0  # inner steps that no update of ours has carried yet
        self.held_out: HeldOut | None = None  # the newest one that this process measured; it stays
        self.seconds: dict[str, float] = defaultdict(float)  # at the edge of a round, by what it was spent on
        self.edge_began: float | None = None

    def edge_begins(self) -> None:
        """The last inner step of a round is done."""
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
        """As the facts of an update, or of a farewell."""
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

    def forget(self) -> None:
        """Of a step that counts for nothing."""
        self.meter.pop(self.replica.pop_counts())

    def take_back(self, facts: Facts) -> None:
        """An update with these facts did not count: its steps go out with the next."""
        self.fresh_steps += int(facts.measured.get(INNER_STEPS, [0])[0])
