"""Decide at the end of each round whether a replica trains the next: its membership and its data share."""

from collections.abc import Callable

from isthmus.errors import RunStopped
from isthmus.layout.deal import Deal
from isthmus.protocol.ledger import Ledger

NO_SHARE = "no_share"  # the code of our skip


class Admission:
    """Admits the replica whose key the ledger has; `deal` receives each round's share of the data."""

    def __init__(
        self,
        ledger: Ledger,
        log: Callable[[str], None] = lambda text: None,
        deal: Callable[[Deal], None] = lambda deal: None,
    ) -> None:
        self.ledger, self.log, self.deal = ledger, log, deal
        self.waits = False
        self.member = False  # of the last round that we entered, with or without a data share

    def enter(self, round_number: int) -> bool:
        """Whether we train this round. RunStopped if the owner has revoked us."""
        ledger, name, key = self.ledger, self.ledger.signer.replica, self.ledger.signer.public_key
        self.member = ledger.at(round_number).keys.get(name) == key
        if not self.member and ledger.run.keys.get(name) != key:
            raise RunStopped(ledger.revoked(name, round_number))
        share = ledger.deal(round_number, name) if self.member else None
        if share is None:
            if not self.waits:
                self.log(f"round {round_number} began without us; we wait for the next one")
            self.waits = True
            return False
        self.waits = False
        self.deal(share)
        return True
