"""Whom a round waits for, and for how long, by what the manifests before it say."""

import statistics
from collections.abc import Callable, Sequence

from isthmus.config import Recipe
from isthmus.layout.traffic import inner_step_bytes
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.scores import has_passed

FIRST_DEADLINE_SECONDS = 600.0  # of round 1: nobody knows yet how long a round takes
MOST_LENGTHS = 10  # of a usual round; an honest closer states about four
LATE_ROUNDS = 4  # so many rounds back, a late commit says that a replica delivers again


def opening_seconds(recipe: Recipe) -> float:
    """How much longer a round gets, at most, when boundaries open and whole streams cross the links.

    For links as the recipe states them, if compute hides none of it.
    """
    last, most = recipe.in_round(recipe.outer.rounds), 0.0
    for usual, opened in zip(recipe.fleet(), last.fleet(), strict=True):
        if links := usual.config.stages - 1:
            sent = [inner_step_bytes(recipe, member)["activations"] for member in (usual, opened)]
            # A step's bytes over one link, one way, and two micro-batches a link to fill and drain.
            more = (sent[1] - sent[0]) / links * (1 + 2 * links / recipe.micro_batches_of(usual.config))
            most = max(most, recipe.outer.inner_steps * more * 8 / (usual.config.link.mbps * 1e6))
    return most


def _delivered(manifest: Manifest, name: str) -> bool:
    """Did it count, or pass on probation?"""
    return manifest.entry(name) is not None or has_passed(dict(manifest.refused).get(name, ""))


class Members:
    """Reads the settled rounds that this process knows; none is fetched for it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.commits: dict[int, set[str]] = {}  # round -> who has committed to it, perhaps late
        self.begin(ledger.run.recipe)

    def begin(self, recipe: Recipe) -> None:
        """Another round is open, of the replicas that the recipe of its epoch has."""
        self.recipe, self.names = recipe, [member.name for member in recipe.fleet()]
        self.commits.clear()
        self.most: float | None = None  # seconds that a stated deadline may give this round, once asked for

    def awaited(self, round_number: int) -> list[str]:
        """The members of a round, as the manifest before it names them; of the first, all replicas."""
        previous = self.ledger.manifests.get(round_number - 1)
        return [name for name in (previous.members if previous else self.names) if name in self.names]

    def missed(self, name: str, last: int, counted: bool | None = None) -> list[int]:
        """The rounds up to `last` that waited for a replica in vain since it last counted, newest first.

        Only what counts, or passes on probation, is a delivery: an update that is refused could come just
        before every deadline.
        `counted` says it of round `last`, where that is still open.
        """
        rounds: list[int] = []
        for t in range(last, 0, -1):
            manifest = self.ledger.manifests.get(t)
            if manifest is None and (t < last or counted is None):
                break
            if counted if manifest is None else _delivered(manifest, name):
                break
            if t > 1 and t - 1 not in self.ledger.manifests:
                break  # nobody here knows whom it waited for
            if name in self.awaited(t):
                rounds.append(t)
        return rounds

    def given_up(self, name: str, last: int, counted: bool | None = None) -> bool:
        """Is a replica that lives no longer waited for after round `last`, having missed too many?

        It is waited for again when it delivers. That may be late: a slow replica is always late in a round
        that did not wait for it. But then each further miss doubles the rounds until the next try, so who
        beats and never counts costs a run the deadlines of some rounds, not of every round.
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
        """Whose commits to a settled round are there; asked once while a round is closed."""
        if round_number not in self.commits:
            self.commits[round_number] = self.ledger.committed(round_number)
        return self.commits[round_number]

    def left_behind(self, round_number: int) -> bool:
        """Did a settled round end without a member that was still there?"""
        manifest = self.ledger.manifests[round_number]
        judged = {entry.replica for entry in manifest.entries} | {name for name, _ in manifest.refused}
        return any(
            name in manifest.members
            or len(self.missed(name, round_number)) >= self.recipe.bucket.missed_rounds
            for name in self.awaited(round_number)
            if name not in judged
        )

    def deadline(self, previous: Manifest | None, lengths: Callable[[], Sequence[float]]) -> float:
        """Seconds that a round is given, unless the recipe states them. `lengths` are those of the rounds
        before it, by the store's clock.

        The manifest before it states them: one closer's word. It counts up to a few times what rounds took,
        so that nobody can state a deadline that never comes, and then beat and not deliver.
        """
        if self.recipe.bucket.deadline_seconds:
            return self.recipe.bucket.deadline_seconds
        stated = previous.deadline_seconds if previous else FIRST_DEADLINE_SECONDS
        if stated <= FIRST_DEADLINE_SECONDS:
            return stated
        if self.most is None:
            measured = MOST_LENGTHS * statistics.median(lengths() or [0.0])
            self.most = max(FIRST_DEADLINE_SECONDS, measured + 4 * opening_seconds(self.recipe))
        return min(stated, self.most)

    def next_deadline(self, round_number: int, seconds: float | None) -> float:
        """Of the next round: generous against the rounds measured, so that only the stuck are left behind.

        A round that ended at its deadline (`seconds` None) measures the deadline, not the fleet. If it
        counted, one stuck member would make every deadline longer than the one before.
        """
        known = self.ledger.manifests
        recent = [t for t in range(round_number - 5, round_number) if t in known and not self.left_behind(t)]
        taken = {t: known[t].seconds for t in recent} | ({} if seconds is None else {round_number: seconds})
        if not taken:
            previous = known.get(round_number - 1)
            return previous.deadline_seconds if previous else FIRST_DEADLINE_SECONDS
        # Where finishing begins, rounds get longer: whole streams cross from then on.
        begins = self.recipe.opening(round_number + 1) is not None
        more = opening_seconds(self.recipe) if begins else 0.0
        median = statistics.median(
            s + (more if self.recipe.opening(t) is None else 0) for t, s in taken.items()
        )
        return round(max(15.0, 4 * median) + 10, 3)
