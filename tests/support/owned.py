"""A little run with its owner, who invites and revokes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from little import RECIPE, Little, Replica, apply, closes, give
from msgspec.structs import replace

from isthmus.protocol.access import OWNER_KEY, check_owner
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.membership import Admitted, Changes, Epoch, table_of
from isthmus.protocol.trust import Signer, new_secret
from isthmus.store import open_store

MORE = RECIPE.replace("rounds = 6", "rounds = 30")


class Owned(Little):
    def __init__(
        self,
        url: str,
        folder: Path,
        recipe: str = MORE,
        closers: Sequence[str] | None = None,
        room: Sequence[int] = (),
    ) -> None:
        super().__init__(url, folder, recipe, closers, room)
        self.owner = check_owner(self.run, self.keys / OWNER_KEY)
        self.store = open_store(url)
        self.own: dict[str, Signer] = {}  # keys that were made after `init`

    def signer(self, name: str) -> Signer:
        return self.own.get(name) or super().signer(name)

    @property
    def epoch(self) -> Epoch:
        return self.ledger().membership.look()

    def admitted(self, name: str, like: str = "a", **changed: Any) -> Admitted:
        """A replica with a fresh key, which it has at once."""
        config = next(m.config for m in self.run.recipe.fleet() if m.name == like)
        self.own[name] = Signer(name, new_secret())
        return replace(Admitted(name, self.own[name].public_key, table_of(config)), **changed)

    def invite(self, name: str, comes: bool = True, **changed: Any) -> Epoch:
        """With `comes` it starts at once, and the run hears of it."""
        epoch = self.order(admitted=[self.admitted(name, **changed)])
        if comes:
            Ledger(self.store, self.run, self.own[name]).beat(Heartbeat(state="starting", incarnation="1"))
        return epoch

    def order(self, **changes: Any) -> Epoch:
        return self.ledger().membership.order(self.owner, Changes(**changes))

    def comes(self, name: str, last: int) -> Replica:
        """A newcomer, with the rounds up to `last` applied."""
        replica = self.replica(name)
        replica.ledger.membership.look()
        for t in range(1, last + 1):
            replica.apply(t, replica.exchange.closed(t))
        return replica

    def members(self, round_number: int) -> list[str]:
        return [member.name for member in self.ledger().at(round_number).recipe.fleet()]


def settled(round_number: int, closer: Replica, *givers: Replica) -> None:
    """A round as its closer settles it; all of them give to it and apply it."""
    for each in givers:
        each.beat()
    give(round_number, *givers)
    assert closes(closer, round_number)
    apply(round_number, *givers)
