"""Whether a replica trains a round, asked at its edge: is it a member, by which key, with which data?"""

import time
from collections.abc import Callable
from pathlib import Path

from isthmus.errors import RunStopped
from isthmus.layout.deal import Deal
from isthmus.protocol.access import invited
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.trust import Refused
from isthmus.replica.control_group import ControlGroup, SingleProcess
from isthmus.runtime import newcomer
from isthmus.runtime.key_change import take_up_together


class Admission:
    """Of the replica whose key the ledger has. `key` is that key's file, `deal` is told of each round's
    share of the data."""

    def __init__(
        self,
        ledger: Ledger,
        log: Callable[[str], None] = lambda text: None,
        key: Path | None = None,
        deal: Callable[[Deal], None] = lambda deal: None,
        control: ControlGroup | None = None,
    ) -> None:
        self.ledger, self.log, self.key, self.deal = ledger, log, key, deal
        self.replica, self.control = ledger.signer.replica, control or SingleProcess()
        self.public_key = ""  # of the last round that we entered
        self.waits = self.asked = False
        self.admitted: Callable[[], None] = lambda: None  # is called when we come in by an invitation

    def enter(self, round_number: int) -> bool:
        """Do we train this round? False until the first round of the epoch that admits us. RunStopped where
        we are a member no longer, or our key is not ours any more."""
        epoch, name = self.ledger.epoch_of(round_number), self.replica
        public_key = epoch.run.keys.get(name)
        if public_key is None:
            return self._wait(round_number, epoch.ended.get(name, 0))
        if self.ledger.membership.expected:
            self._come_in(round_number)
        if public_key != self.public_key:  # in all our processes alike: it is that of the round's epoch
            self._take_up_key(round_number, public_key, epoch.number)
        if share := self.ledger.deal(round_number, name):
            self.deal(share)
        return True

    def _take_up_key(self, round_number: int, public_key: str, epoch: int) -> None:
        before, self.public_key = self.ledger.signer.public_key, public_key
        if not take_up_together(self.ledger, self.key, public_key, self.control):
            raise RunStopped(
                f"the key of replica {self.replica} was replaced, from round {round_number} on (epoch "
                f"{epoch}), and the new one is not here; give it with --key"
            )
        if self.ledger.signer.public_key != before:
            self.log(f"round {round_number}: from here on we sign with our new key")

    def ask(self) -> None:
        """We are ready. Where we are not admitted yet, ask for it; one process of the replica does."""
        if self._is_expected and not self.asked:
            newcomer.ask(self.ledger)
            self.asked = True
            self.log(
                f"ready; asked to be admitted as {self.replica}: a closer does so when it settles a round"
            )

    @property
    def _is_expected(self) -> bool:
        """Have we an invitation, and does the run not have us yet?"""
        membership = self.ledger.membership
        return membership.expected is not None and self.replica not in membership.newest.run.keys

    def _wait(self, round_number: int, ended: int) -> bool:
        membership, name = self.ledger.membership, self.replica
        if self._is_expected and membership.expected:
            try:  # the owner may have taken it back, and it may expire
                membership.expect(membership.expected.pair, time.time())
            except Refused as reason:
                raise RunStopped(
                    f"{name} is not admitted: {reason}; ask the run's owner for a token"
                ) from None
            return False
        if name not in self.ledger.run.keys:
            since = self.ledger.first_round_of(ended, 1, round_number)  # we may have slept over it
            raise RunStopped(
                f"replica {name} was revoked by the run's owner (epoch {ended}): it is no member from round "
                f"{since} on"
            )
        if not self.waits:
            self.waits = True
            self.log(f"round {round_number} began without us; we are admitted, and wait for its edge")
        return False

    def _come_in(self, round_number: int) -> None:
        self.ledger.membership.expected = None
        if self.key:
            invited(self.key).unlink(missing_ok=True)
        self.log(f"admitted: round {round_number} is our first")
        self.admitted()
