"""Handle a payload that a round counts and a reader does not find.

An object is created once, before its commit, so it should be there. But NFS caches a missing name, and a disk
may die. The reader retries for two minutes. After that only a later anchor leads past the round: the reader
waits for one while another live member states that it holds such a model. Otherwise it stops.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from isthmus.errors import RunError, RunStopped
from isthmus.protocol.heartbeat import silent_after
from isthmus.protocol.patience import SLICE_SECONDS, LeftWaiting, Patience
from isthmus.protocol.trust import Refused
from isthmus.replica.control_group import ControlGroup, agree, all_true, any_true, share_json, whole_number

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Ledger, Manifest

T = TypeVar("T")

RETRY_SECONDS = 120.0  # an NFS client caches a missing name for a minute at most
PAUSE_SECONDS = (1.0, 30.0)  # between two tries, growing


class LedPast(RunError):
    """A later anchor leads past a round whose payloads are missing: continue from it."""

    def __init__(self, round_number: int, anchor: int) -> None:
        super().__init__(
            f"round {round_number} counts payloads that are gone; the anchor of round {anchor} leads past it"
        )
        self.round, self.anchor = round_number, anchor


class MissingPayload:
    """One process's wait. All processes of a replica call `wait` together and take the same decision."""

    def __init__(
        self, ledger: "Ledger", control: ControlGroup, log: Callable[[str], None], patience: Patience
    ) -> None:
        self.ledger, self.control, self.log, self.patience = ledger, control, log, patience
        self.clock, self.sleep = patience.clock, patience.sleep
        self.since: float | None = None  # when the wait began
        self.awaiting = ""  # what the heartbeat says it waits for
        self.tried: set[tuple[int, int]] = set()  # (round, anchor tried as a way past it)

    @property
    def waited_seconds(self) -> float | None:
        """Seconds of the wait for the heartbeat; None while nothing is missing."""
        since = self.since
        return None if since is None else time.monotonic() - since

    def wait(self, manifest: "Manifest", attempt: Callable[[], T], why: str) -> T:
        """What `attempt` reads of a settled round, after a first try failed in some process of the replica.
        Wait while Refused; LedPast or RunStopped ends that."""
        began, pause = self.clock(), PAUSE_SECONDS[0]
        self.since, self.awaiting = time.monotonic(), f"a payload of round {manifest.round}"
        why = why or "in another process of this replica"
        self.log(f"round {manifest.round} counts a payload that cannot be read ({why}); trying again")
        try:
            while True:
                self._pause(pause)
                pause = min(PAUSE_SECONDS[1], 2 * pause)
                found, again = tried(attempt)
                why = again or why
                if all_true(self.control, found is not None) and found is not None:
                    return found
                if agree(self.control, self.clock() - began > RETRY_SECONDS):
                    self._look_past(manifest.round, why)
        finally:
            self.since, self.awaiting = None, ""

    def _look_past(self, round_number: int, why: str) -> None:
        """Raise LedPast for an untried anchor, or RunStopped if none can come."""
        leads = self.control.rank == 0
        later = self.patience(lambda: self._later_anchor(round_number)) if leads else 0
        anchor = share_json(self.control, later, whole_number)[0]
        if anchor:
            self.tried.add((round_number, anchor))
            raise LedPast(round_number, anchor)
        hope = leads and self.patience(lambda: self._somebody_holds(round_number))
        if not agree(self.control, hope):
            raise RunStopped(
                f"round {round_number} counts a payload that cannot be read ({why}); no later anchor is there"
                " and no live member holds a later model. What can be had: `isthmus ledger rebuild URL "
                f"--round {round_number - 1} --to FOLDER`, and a new run whose model.start is that folder"
            )

    def _later_anchor(self, round_number: int) -> int:
        """The newest anchor of this round or later that the next manifest confirms; 0 if there is none."""
        for t in reversed(self.ledger.anchor_rounds()):
            if t >= round_number and (round_number, t) not in self.tried:
                with suppress(Refused):
                    self.ledger.check_confirmed(t, self.ledger.anchor_header(t)[1].digest)
                    return t
        return 0

    def _somebody_holds(self, round_number: int) -> bool:
        """Whether a live member holds theta of this round or later. It will write an anchor."""
        ledger = self.ledger
        now = ledger.store.now(f"members/{ledger.signer.replica}/clock")
        beats, _ = ledger.heartbeats(now)
        return any(
            beat.holds >= round_number and not beat.gone and now - at <= silent_after(ledger.run.recipe, beat)
            for name, (beat, at) in beats.items()
            if name != ledger.signer.replica
        )

    def _pause(self, seconds: float) -> None:
        """Sleep; LeftWaiting if somebody asks us to leave meanwhile."""
        leave = self.patience.leave
        while seconds > 0 and not (leave and leave.here()):
            self.sleep(min(seconds, SLICE_SECONDS))
            seconds -= SLICE_SECONDS
        if any_true(self.control, leave is not None and bool(leave.asked())):
            raise LeftWaiting("left while it waited for a payload that is missing")


def tried(attempt: Callable[[], T]) -> tuple[T | None, str]:
    """What `attempt` returns, or None and why it was Refused."""
    try:
        return attempt(), ""
    except Refused as reason:
        return None, str(reason)
