"""Who belongs to a run may change, at the edge of a round: invited, admitted, revoked, with another key."""

import time
from pathlib import Path
from typing import Any

import pytest
from little import RECIPE, Little, Replica, apply, closes, give
from little import hasty as hasty

from isthmus.protocol.access import OWNER_KEY, check_owner
from isthmus.protocol.changes import Changes, order
from isthmus.protocol.invitations import invitation_key, request_key
from isthmus.protocol.membership import current_keys, table_of
from isthmus.protocol.trust import INVITED, Signer, new_secret
from isthmus.store import open_store

pytestmark = pytest.mark.usefixtures("hasty")
MORE = RECIPE.replace("rounds = 6", "rounds = 30")


class Owned(Little):
    """A little run, its owner, and what newcomers do."""

    def __init__(self, url: str, folder: Path, recipe: str = MORE, closers: Any = None) -> None:
        super().__init__(url, folder, recipe, closers)
        self.owner = check_owner(self.run, self.keys / OWNER_KEY)
        self.store = open_store(url)
        self.newcomers: dict[str, Signer] = {}

    def invite(self, name: str, like: str = "a", **changed: Any) -> Signer:
        """The one-time key."""
        once = Signer(INVITED, new_secret())
        config = next(m.config for m in self.run.recipe.fleet() if m.name == like)
        body = {
            "name": name,
            "table": table_of(config),
            "key": once.public_key,
            "expires": int(time.time()) + 3600,
            "after": self.ledger().membership.look().number,
            "closes": 0,
        } | changed
        self.store.put(invitation_key(once.public_key), self.owner.seal("invitation", self.run.run_id, body))
        return once

    def ask(self, name: str, once: Signer, secret: bytes | None = None) -> Signer:
        """The newcomer's own key, which it names in its request."""
        own = Signer(name, secret or new_secret())
        sealed = once.seal("request", self.run.run_id, {"name": name, "key": own.public_key})
        self.store.create(request_key(once.public_key), sealed)
        self.newcomers[name] = own
        return own

    def newcomer(self, name: str) -> Replica:
        replica = Replica(self.url, name, self.newcomers[name])
        replica.ledger.membership.look()
        return replica

    def order(self, **changes: Any) -> int:
        return order(self.ledger().membership, self.owner, time.time(), Changes(**changes)).number

    def rotate(self, name: str) -> Signer:
        old, new = self.newcomers.get(name) or self.signer(name), Signer(name, new_secret())
        body = {"name": name, "key": new.public_key, "old": old.public_key}
        self.store.create(request_key(old.public_key), old.seal("rotation", self.run.run_id, body))
        self.newcomers[name] = new
        return new


def catch_up(newcomer: Replica, last: int) -> None:
    for t in range(1, last + 1):
        newcomer.apply(t, newcomer.exchange.closed(t))


def names(owned: Owned, round_number: int) -> list[str]:
    return [member.name for member in owned.ledger().at(round_number).recipe.fleet()]


def settled(round_number: int, closer: Replica, *givers: Replica) -> None:
    """A round as its closer settles it, and all of them apply it."""
    for each in givers:
        each.beat()
    give(round_number, *givers)
    assert closes(closer, round_number)
    apply(round_number, *givers)


# Admission


def test_who_is_invited_comes_in_at_the_edge_of_a_round_and_counts_in_the_next(any_store_url, tmp_path):
    owned = Owned(any_store_url, tmp_path, closers=["a"])
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    owned.ask("d", owned.invite("d"))
    assert owned.ledger().manifest(1).next_epoch == 0
    settled(2, a, a, b, c)
    manifest = owned.ledger().manifest(2)
    assert (manifest.epoch, manifest.next_epoch) == (0, 1)
    assert (names(owned, 2), names(owned, 3)) == (["a", "b", "c"], ["a", "b", "c", "d"])
    d = owned.newcomer("d")
    catch_up(d, 2)
    settled(3, a, a, b, c, d)
    manifest = owned.ledger().manifest(3)
    assert [entry.replica for entry in manifest.entries] == ["a", "b", "c", "d"]
    assert len({each.exchange.anchor for each in (a, b, c, d)}) == 1
    assert "d is admitted, from the next round on" in " ".join(a.said)
    assert current_keys(a.ledger)["d"] == d.ledger.signer.public_key
