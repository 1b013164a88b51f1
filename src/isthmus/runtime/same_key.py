"""Two machines with one key: each finds the other by the heartbeat that both write, and says so."""

from collections.abc import Callable
from contextlib import suppress

from isthmus.errors import RunError
from isthmus.protocol.ledger import Ledger

MOST_STARTS = 64  # other starts of this replica that are remembered

Log = Callable[[str], None]


class SameKey:
    """Looks into our own live.json before we replace it: one GET a round, and more only when in doubt.

    An ordinary restart finds the last heartbeat of the start before it, once, and no newer one. So another
    start is alive only when its counter grows between two looks, both of them after a beat of ours.
    """

    def __init__(self, ledger: Ledger, incarnation: str, log: Log) -> None:
        self.ledger, self.incarnation, self.log = ledger, incarnation, log
        self.replica = ledger.signer.replica
        self.beats: dict[str, int] = {}  # of other starts, as last seen
        self.told: set[str] = set()
        self.round = -1  # in which we looked last
        self.doubt = False
        self.also_on = ""  # machine and process of the other, while it beats

    def look(self, round_number: int) -> None:
        """Call it before each beat of ours but the first."""
        if round_number == self.round and not self.doubt:
            return
        with suppress(RunError):  # the store is away; the beat itself tells
            self._look()
            self.round = round_number

    def _look(self) -> None:
        found = self.ledger.heartbeat(self.replica)
        other = found[0] if found and found[0].incarnation != self.incarnation else None
        if other is None or other.gone:
            self.doubt, self.also_on = False, ""
            return
        before = self.beats.get(other.incarnation)
        if len(self.beats) >= MOST_STARTS:
            self.beats.clear()
        self.beats[other.incarnation] = other.beat
        self.doubt = before is None
        if before is None or other.beat <= before:
            return
        self.also_on = f"{other.host or 'another machine'} (process {other.pid})"
        if other.incarnation not in self.told and len(self.told) < MOST_STARTS:
            self.told.add(other.incarnation)
            self.log(
                f"replica {self.replica} runs twice with one key: here, and on {self.also_on}; stop one of "
                "them. Of each round the first commit stands, and the other's update returns to its feedback"
            )
