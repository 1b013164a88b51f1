"""What the manifests say of a replica's own updates: refused for their norm, or counted and unknown here."""

from collections.abc import Callable, Collection

from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.norms import is_too_large

REFUSALS = 3  # updates refused in a row for their norm, after which the error feedback is dropped
LOOK_BACK = 12  # rounds in which they may lie: a slow replica does not deliver in each
LOOK_AHEAD = 8  # rounds after an old state that are looked at where they are not replayed

Log = Callable[[str], None]


class OwnRecord:
    """Reads it from the manifests alone, so that it survives a restart. All processes of a replica read the
    same."""

    def __init__(self, ledger: Ledger, replica: str, log: Log) -> None:
        self.ledger, self.replica, self.log = ledger, replica, log
        self.dropped_in = 0  # the round after which the feedback was dropped last
        self.restored = 0  # the newest round that the private state knows; 0: it came without
        self.unknown: list[int] = []  # rounds that count an update of ours which is not in it

    def refused_too_often(self, round_number: int) -> bool:
        """Was this round's update of ours the third in a row whose norm was too large?

        A replica does not judge its own norm before it sends: only a closer sees the others', and a fleet
        whose norms all grow must not fall silent. But feedback that is wrong returns with every refusal.
        """
        refusals = 0
        for t in range(round_number, max(self.dropped_in, round_number - LOOK_BACK, 0), -1):
            manifest = self.ledger.manifest(t)
            if manifest is None or manifest.entry(self.replica) is not None:
                return False
            reason = dict(manifest.refused).get(self.replica)
            if reason is None:
                continue  # it was late, or away
            if not is_too_large(reason):
                return False
            refusals += 1
            if refusals == REFUSALS:
                self.dropped_in = round_number
                return True
        return False

    # What an old copy of a private state does not know

    def came_back(self, round_number: int, updates: Collection[int]) -> None:
        """With the state of a round, and the updates of some rounds after it."""
        self.restored, self.unknown = max({round_number, *updates}), []

    def came_without(self) -> None:
        self.restored, self.unknown = 0, []

    def applied(self, manifest: Manifest) -> None:
        """A round to which this start had no update of its own."""
        if manifest.round > self.restored > 0 and manifest.entry(self.replica) is not None:
            self.unknown.append(manifest.round)

    def skipped(self, updates: Collection[int]) -> None:
        """The rounds after the state are not replayed. The first of them tell as much as all."""
        for t in range(self.restored + 1, self.restored + 1 + LOOK_AHEAD):
            manifest = self.ledger.manifest(t)
            if manifest is None:
                return
            if t not in updates:
                self.applied(manifest)

    def tell(self) -> None:
        """Once, when the replica trains again."""
        if self.unknown:
            first, last = self.unknown[0], self.unknown[-1]
            rounds = (
                f"rounds {first} to {last} count updates"
                if last > first
                else f"round {last} counts an update"
            )
            self.log(
                f"the private state here is an old copy: it knows rounds up to {self.restored}, and {rounds} "
                f"of this replica. Lost are the optimiser's moments and the error feedback of round {last}; "
                f"it goes on with those of round {self.restored}"
            )
        self.came_without()  # from here on it knows what it sends
