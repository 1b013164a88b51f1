"""A replica's place in the run, asked at the edge of every round: is it a member, by which key, with which
data?"""

from collections.abc import Callable
from pathlib import Path

from isthmus.errors import RunStopped
from isthmus.layout.deal import Deal
from isthmus.protocol.access import take_up_key
from isthmus.protocol.ledger import Ledger


class Place:
    """Of the replica whose key the ledger has. `key` is that key's file, `deal` is told of each round's
    share of the data."""

    def __init__(
        self,
        ledger: Ledger,
        log: Callable[[str], None] = lambda text: None,
        key: Path | None = None,
        deal: Callable[[Deal], None] = lambda deal: None,
    ) -> None:
        self.ledger, self.log, self.key, self.deal = ledger, log, key, deal
        self.replica = ledger.signer.replica
        self.waits = False

    def enter(self, round_number: int) -> bool:
        """Do we train this round? False until the first round of the epoch that admits us. RunStopped where
        we are a member no longer, or our key is not ours any more."""
        epoch, name = self.ledger.epoch_of(round_number), self.replica
        public_key = epoch.run.keys.get(name)
        if public_key is None:
            return self._wait(round_number, epoch.ended.get(name, 0))
        if public_key != self.ledger.signer.public_key:
            if not self.key or not take_up_key(self.ledger, self.key, name):
                raise RunStopped(
                    f"the key of replica {name} was replaced, from round {round_number} on (epoch "
                    f"{epoch.number}), and the new one is not here; give it with --key"
                )
            self.log(f"round {round_number}: from here on we sign with our new key")
        if share := self.ledger.deal(round_number, name):
            self.deal(share)
        return True

    def _wait(self, round_number: int, ended: int) -> bool:
        if self.replica not in self.ledger.run.keys:
            raise RunStopped(
                f"replica {self.replica} was revoked by the run's owner (epoch {ended}): it is no member "
                f"from round {round_number} on"
            )
        if not self.waits:
            self.waits = True
            self.log(f"round {round_number} began without us; we are admitted, and wait for its edge")
        return False
