"""A little run with its owner, and what newcomers do to get into it."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from little import RECIPE, Little, Replica, apply, closes, give

from isthmus.protocol.access import OWNER_KEY, check_owner
from isthmus.protocol.changes import Changes, order
from isthmus.protocol.invitations import invitation_key, request_key
from isthmus.protocol.membership import Epoch, table_of
from isthmus.protocol.trust import INVITED, Signer, new_secret
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

    def invitation(self, name: str, once: Signer, like: str = "a", **changed: Any) -> dict[str, Any]:
        config = next(m.config for m in self.run.recipe.fleet() if m.name == like)
        body = {
            "name": name,
            "table": table_of(config),
            "key": once.public_key,
            "expires": int(time.time()) + 3600,
            "after": self.epoch.number,
            "closes": 0,
        }
        return body | changed

    def invite(self, name: str, **changed: Any) -> Signer:
        """The one-time key."""
        once = Signer(INVITED, new_secret())
        body = self.invitation(name, once, **changed)
        self.store.put(invitation_key(once.public_key), self.owner.seal("invitation", self.run.run_id, body))
        return once

    def ask(self, name: str, once: Signer) -> Signer:
        """The newcomer's own key, which it names in its request."""
        self.own[name] = Signer(name, new_secret())
        sealed = once.seal("request", self.run.run_id, {"name": name, "key": self.own[name].public_key})
        self.store.create(request_key(once.public_key), sealed)
        return self.own[name]

    def rotate(self, name: str) -> tuple[Signer, Signer]:
        """(the old key, the new one that is asked for)"""
        old, new = self.signer(name), Signer(name, new_secret())
        body = {"name": name, "key": new.public_key, "old": old.public_key}
        self.store.create(request_key(old.public_key), old.seal("rotation", self.run.run_id, body))
        self.own[name] = new
        return old, new

    def order(self, **changes: Any) -> Epoch:
        return order(self.ledger().membership, self.owner, time.time(), Changes(**changes))

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
