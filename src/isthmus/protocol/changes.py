"""Changing a run's membership: what its owner orders, and what closers take up before they settle a round."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from isthmus.errors import ConfigError, RunError
from isthmus.protocol.documents import MOST_CHANGES
from isthmus.protocol.invitations import MOST_BYTES, invitation_key, request_key
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.membership import Epoch, Membership, advance, membership_key
from isthmus.protocol.trust import INVITED, Refused, Signer, parse_document, sha256
from isthmus.store import Info, StoreError, StoreRefused

MOST_REQUESTS = 2000  # objects below requests/, whoever wrote them
TRIES = 20  # somebody else may write the next document at the same moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What one document changes; the last three are the owner's alone."""

    admitted: Sequence[Mapping[str, Any]] = ()  # invitation and request of each
    rotated: Sequence[Any] = ()
    revoked: Sequence[str] = ()
    closers: Sequence[str] = ()  # all of them from now on; empty: as before
    rounds: int = 0  # of the whole run from now on; 0: as before

    def plus(self, other: "Changes") -> "Changes":
        """With what another asks for too."""
        return Changes(
            admitted=[*self.admitted, *other.admitted],
            rotated=[*self.rotated, *other.rotated],
        )


def document(before: Epoch, writer: Signer, now: float, changes: Changes) -> bytes:
    """The document after epoch `before`, sealed; Refused where readers would not take it."""
    body = {
        "number": before.number + 1,
        "previous": before.digest,
        "written": int(now),
        "admitted": list(changes.admitted),
        "rotated": list(changes.rotated),
        "revoked": list(changes.revoked),
        "closers": list(changes.closers),
        "rounds": changes.rounds,
    }
    sealed = writer.seal("membership", before.run.run_id, body)
    advance(before, sealed)
    return sealed


def order(membership: Membership, owner: Signer, now: float, changes: Changes) -> Epoch:
    """Write a change in the owner's name; the epoch that it makes. What lies in its place and is no document
    of ours is replaced, where the bucket lets us."""
    for _ in range(TRIES):
        before = membership.look()
        try:
            sealed = document(before, owner, now, changes)
        except Refused as reason:
            raise ConfigError(str(reason)) from None
        key = membership_key(before.number + 1)
        if membership.odd:
            membership.store.put(key, sealed)
        else:
            membership.store.create(key, sealed)
        membership.look()
        made = membership.epochs[before.number + 1 :][:1]
        if made and made[0].digest == sha256(sealed):  # whatever the store answered, what lies there counts
            return made[0]
    raise RunError(f"{TRIES} other changes of this run's membership came first; try again")


class Requests:
    """A closer's part: it reads what was written, and admits who is invited and asks."""

    def __init__(self, ledger: Ledger, log: Callable[[str], None]) -> None:
        self.ledger, self.membership, self.log = ledger, ledger.membership, log
        self.refused: dict[str, Info] = {}  # requests that broke the rules, as they were listed
        self.said = ""

    def take(self, now: Callable[[], float]) -> Epoch:
        """The newest epoch, with all who ask in it. Two requests at a time, where nothing is new."""
        if not self.membership.owner:
            return self.membership.newest
        try:
            looks: list[Callable[[], Any]] = [self.membership.look, self._list]
            epoch, listed = self.ledger.store.together(looks)
            self._say(self.membership.odd)
            if wanted := self._new(epoch, listed):
                self._write(epoch, {signer: listed[request_key(signer)] for signer in wanted}, now())
        except StoreError as error:
            if error.kind != "denied":
                raise
            self._say(f"nobody is admitted here: {error}")  # rounds go on
        return self.membership.newest

    def _list(self) -> dict[str, Info]:
        try:
            return self.ledger.store.scan("requests", most=MOST_REQUESTS)
        except StoreRefused as error:
            self._say(f"requests to be admitted cannot be read: {error}")
            return {}

    def _new(self, epoch: Epoch, listed: Mapping[str, Info]) -> list[str]:
        """The keys that have signed something which was not taken yet. An invitation's is used once, a
        replica's is replaced when its rotation was taken."""
        found = {m[1]: key for key in listed if (m := re.fullmatch(r"requests/([0-9a-f]{64})\.json", key))}
        mine = set(epoch.run.keys.values())
        return [
            signer
            for signer, key in sorted(found.items())
            if (signer in mine or signer not in epoch.used) and self.refused.get(key) != listed[key]
        ][:MOST_CHANGES]

    def _write(self, epoch: Epoch, wanted: Mapping[str, Info], now: float) -> None:
        """One document with all that are good; of those that do not go together, the first."""
        signer, good = self.ledger.signer, Changes()
        calls = [partial(self._read, key, info, epoch, now) for key, info in wanted.items()]
        for change in self.ledger.store.together(calls):
            if change is not None:
                with suppress(Refused):
                    document(epoch, signer, now, good.plus(change))
                    good = good.plus(change)
        if good == Changes():
            return
        sealed = document(epoch, signer, now, good)
        self.ledger.store.create(membership_key(epoch.number + 1), sealed)
        before, after = epoch.run.keys, self.membership.look().run.keys
        for name in sorted(after.keys() - before.keys()):
            self.log(f"{name} is admitted, from the next round on")
        for name in sorted(name for name in before if after.get(name, before[name]) != before[name]):
            self.log(f"{name} has another key, from the next round on")

    def _read(self, signer: str, listed: Info, epoch: Epoch, now: float) -> Changes | None:
        """A request as a change of the membership, if it is good by itself."""
        try:
            request = self._get(request_key(signer))
            if request.get("replica") == INVITED:
                invitation = self._get(invitation_key(signer))
                change = Changes(admitted=[{"invitation": invitation, "request": request}])
            else:
                change = Changes(rotated=[request])
            document(epoch, self.ledger.signer, now, change)
            return change
        except Refused as reason:
            self.log(f"a request to change the membership does not count: {reason}")
            self.refused[request_key(signer)] = listed
            return None

    def _get(self, key: str) -> dict[str, Any]:
        try:
            found = parse_document(self.ledger.get_document(key, MOST_BYTES) or b"")
        except StoreRefused as error:
            raise Refused(f"{key}: {error}") from None
        if not isinstance(found, dict):
            raise Refused(f"{key} is not a document of ours")
        return found

    def _say(self, words: str) -> None:
        if words and words != self.said:
            self.said = words
            self.log(words)
