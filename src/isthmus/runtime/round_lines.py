"""One log line for each round that this machine took part in: what it learnt, what it cost, how long the rest
takes."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from isthmus.runlog.facts import Facts, HeldOut
from isthmus.runlog.words import clock as short
from isthmus.runlog.words import rate, size
from isthmus.runtime.process import Log

REPLAYED_SECONDS = 5.0  # between two lines about rounds replayed from the bucket


class RoundLines:
    """Logs every round's end."""

    def __init__(self, log: Log, num_rounds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.log, self.num_rounds, self.clock = log, num_rounds, clock
        self.began = clock()  # start of the current round
        self.recent: deque[float] = deque(maxlen=8)  # durations of the last trained rounds
        self.next_replayed = 0.0
        self.said = -1  # the round of the last logged held-out loss

    def round(
        self,
        number: int,
        *,
        compute_seconds: float | None,
        scoring_seconds: float = 0.0,
        loss: float | None,
        tokens_per_second: float | None,
        facts: Facts | None,
        held_out: HeldOut | None,
    ) -> None:
        """`compute_seconds` is None for a round that was settled without us and only applied."""
        now = self.clock()
        seconds, self.began = now - self.began, now
        digits = len(str(self.num_rounds))
        parts = [f"round {number:>{digits}}/{self.num_rounds}"]
        if compute_seconds is None:
            if now >= self.next_replayed:
                self.next_replayed = now + REPLAYED_SECONDS
                self.log("  ".join([*parts, "read from the bucket, not trained here"]))
            return
        if facts or not self.recent:  # a cut-off round says little about the usual duration
            self.recent.append(seconds)
        parts.append(f"loss {loss:.3f}" if loss is not None else "loss -")
        if held_out and held_out.round > self.said:
            self.said = held_out.round
            when = f" (round {held_out.round})" if held_out.round != number else ""
            parts.append(f"held-out {held_out.mixed:.3f}{when}")
        if tokens_per_second:
            parts.append(rate(tokens_per_second))
        if facts:
            up, down = facts.bytes.get("payload_up", 0), facts.bytes.get("payload_down", 0)
            parts.append(f"up {size(up)}, down {size(down)}")
        exchange = max(0.0, seconds - compute_seconds - scoring_seconds)
        scoring = f", {scoring_seconds:.1f} scoring" if scoring_seconds >= 0.05 else ""
        parts.append(f"{seconds:.1f} s ({compute_seconds:.1f} compute, {exchange:.1f} exchange{scoring})")
        left = (self.num_rounds - number) * median(self.recent)  # the median, since one long wait is unusual
        parts.append(f"ETA {short(left)}" if number < self.num_rounds else "the last one")
        self.log("  ".join(parts))
