"""The members that a round waits for, and for how long, according to earlier manifests."""

import math
import statistics

from isthmus.config import Recipe
from isthmus.layout.traffic import inner_step_bytes
from isthmus.protocol.ledger import Ledger, Manifest

FIRST_DEADLINE_SECONDS = 600.0  # of round 1, whose length is unknown
MOST_OF_MEASURED, MOST_OF_USUAL = 4, 10  # times a measured round; times what most replicas took
LEAST_SECONDS, EXTRA_SECONDS = 15.0, 10.0
GROWTH = 1.1  # of a deadline, from one round to the next
LATE_ROUNDS = 4  # rounds to look back for a late commit, which shows that a replica delivers again


def opening_seconds(recipe: Recipe) -> float:
    """How many seconds longer a round gets, at most, when boundaries open and whole streams cross the links.

    For links as the recipe states them, if compute hides no transfer.
    """
    last, most = recipe.in_round(recipe.outer.rounds), 0.0
    for usual, opened in zip(recipe.fleet(), last.fleet(), strict=True):
        if links := usual.config.stages - 1:
            sent = [inner_step_bytes(recipe, member)["activations"] for member in (usual, opened)]
            # A step's bytes over one link, one way, and two micro-batches a link to fill and drain.
            more = (sent[1] - sent[0]) / links * (1 + 2 * links / recipe.micro_batches_of(usual.config))
            most = max(most, recipe.outer.inner_steps * more * 8 / (usual.config.link.mbps * 1e6))
    return most


class Members:
    """Reads the settled rounds that this process knows; fetches none."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.commits: dict[int, set[str]] = {}  # round -> replicas that committed to it, perhaps late
        self.begin(ledger.run.recipe)

    def begin(self, recipe: Recipe) -> None:
        """Start a round with the replicas in its epoch's recipe."""
        self.recipe, self.names = recipe, [member.name for member in recipe.fleet()]
        self.commits.clear()

    def awaited(self, round_number: int) -> list[str]:
        """The members of a round, as the previous manifest names them; all replicas for the first."""
        previous = self.ledger.known(round_number - 1)
        return [name for name in (previous.members if previous else self.names) if name in self.names]

    def missed(self, name: str, last: int, counted: bool | None = None) -> list[int]:
        """The rounds up to `last` that waited for a replica in vain since it last counted, newest first.

        A skip counts as an answer. A refused update does not: it could arrive just before every deadline.

        `counted` gives the answer for round `last` if that is still open.
        """
        rounds: list[int] = []
        for t in range(last, 0, -1):
            manifest = self.ledger.known(t)
            if manifest is None and (t < last or counted is None):
                break
            if counted if manifest is None else manifest.entry(name) or name in manifest.skips:
                break
            if t > 1 and self.ledger.known(t - 1) is None:
                break  # this process does not know whom it waited for
            if name in self.awaited(t):
                rounds.append(t)
        return rounds

    def absent(self, name: str, last: int) -> bool:
        """Whether a silent replica was absent from the last `missed_rounds` manifests before `last`. If so,
        its share of the data ends."""
        for t in range(last - 1, last - 1 - self.recipe.bucket.missed_rounds, -1):
            manifest = self.ledger.known(t)
            if manifest is None or name in manifest.answered or name in manifest.members:
                return False
        return True

    def given_up(self, name: str, last: int, counted: bool | None = None) -> bool:
        """Whether rounds after `last` no longer wait for a live replica because it missed too many.

        A round waits for it again once it delivers, even late: a slow replica is always late in a round that
        did not wait for it. Each further miss doubles the rounds until the next try, so a replica that sends
        heartbeats and never counts delays only some rounds.
        """
        missed = self.missed(name, last, counted)
        too_many = len(missed) - self.recipe.bucket.missed_rounds
        if too_many < 0:
            return False
        if last - missed[0] < 2 ** min(too_many, 30):
            return True
        recent = range(max(missed[0] + 1, last - LATE_ROUNDS), last + 1)
        return not any(name in self._committed(t) for t in recent)

    def _committed(self, round_number: int) -> set[str]:
        """The replicas with a commit to a settled round; requested once per round that we close."""
        if round_number not in self.commits:
            self.commits[round_number] = self.ledger.committed(round_number)
        return self.commits[round_number]

    def left_behind(self, round_number: int) -> bool:
        """Whether a settled round ended without a member that was still running."""
        manifest = self.ledger.settled(round_number)
        return any(
            name in manifest.members
            or len(self.missed(name, round_number)) >= self.recipe.bucket.missed_rounds
            for name in self.awaited(round_number)
            if name not in manifest.answered
        )

    def deadline(self, previous: Manifest | None) -> float:
        """Seconds that a round is given: as the recipe or else the previous manifest states."""
        if self.recipe.bucket.deadline_seconds:
            return self.recipe.bucket.deadline_seconds
        return previous.deadline_seconds if previous else FIRST_DEADLINE_SECONDS

    def next_deadline(self, round_number: int, seconds: float | None, usual: float | None = None) -> float:
        """The next round's deadline, generous so that only stuck members miss it.

        A round that ended at its deadline (`seconds` None) measures the deadline, not the fleet. `usual` is
        after how many seconds most had delivered. A member that always delivers at the last moment must not
        stretch the rounds: a deadline is at most ten times `usual` and grows by a tenth per round.
        """
        before = self.ledger.known(round_number - 1)
        given = before.deadline_seconds if before else FIRST_DEADLINE_SECONDS
        recent = filter(None, map(self.ledger.known, range(round_number - 5, round_number)))
        taken = {m.round: m.seconds for m in recent if not self.left_behind(m.round)}
        taken |= {} if seconds is None else {round_number: seconds}
        if not taken:
            return given
        # Rounds get longer once finishing begins: whole streams cross from then on.
        begins = self.recipe.opening(round_number + 1) is not None
        opened = self.recipe.opening(round_number) is not None
        more = opening_seconds(self.recipe) if begins else 0.0
        median = statistics.median(
            s + (more if self.recipe.opening(t) is None else 0) for t, s in taken.items()
        )
        planned = 0.0 if opened else MOST_OF_MEASURED * more
        most = math.inf if usual is None else MOST_OF_USUAL * (usual + more)
        wanted = max(LEAST_SECONDS, min(MOST_OF_MEASURED * median, most)) + EXTRA_SECONDS
        return round(min(wanted, GROWTH * given + planned), 3)
