"""Who belongs to a run, and from which round on: run.json, and the documents that change it one by one.

    membership/<n>.json     what epoch n changes of epoch n - 1; only if absent, each names the one before
    invitations/<key>.json  the owner's word that whoever holds a one-time key may name one replica's key
    requests/<key>.json     that word taken up; or a replica's wish for another key, signed with its old one

run.json is epoch 0. A document is signed by the run's owner, or by a closer of the epoch before. A closer's
carries only changes that prove themselves: an invitation with its request, or a rotation. When an epoch
begins is not in it: the first manifest that names it says so, for the round after (docs/protocol.md,
Membership).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from isthmus.config import Recipe, ReplicaConfig, build_table
from isthmus.errors import ConfigError
from isthmus.layout.traffic import shards
from isthmus.protocol.documents import MEMBERSHIP, MOST_EPOCHS, PAIR, RunInfo
from isthmus.protocol.invitations import check_invitation, check_request, check_rotation
from isthmus.protocol.schema import check
from isthmus.protocol.trust import OWNER, Refused, open_sealed, sha256
from isthmus.store import Store, StoreRefused
from isthmus.store.together import together

MOST_BYTES = 2**18  # of one document
AHEAD = 16  # documents that are read at a time


@dataclass(frozen=True, slots=True)
class Epoch:
    """The run as one document of the chain leaves it."""

    number: int
    digest: str  # of the document; of run.json for 0
    run: RunInfo
    used: frozenset[str]  # public keys that nobody can name again: of replicas, and of invitations
    ended: Mapping[str, int]  # replica -> the epoch that revoked it

    @classmethod
    def first(cls, run: RunInfo) -> "Epoch":
        return cls(0, run.digest, run, frozenset(run.keys.values()), {})


@dataclass(frozen=True, slots=True)
class Expected:
    """A newcomer before its admission, as it sees itself."""

    name: str
    pair: Mapping[str, Any]  # its invitation and its request
    run: RunInfo  # as it will be with it


class Membership:
    """The chain as far as it was read; epochs are kept, a document is read once."""

    def __init__(self, store: Store, run: RunInfo) -> None:
        """Where `run` is a later epoch, the documents up to it are read when they are first needed."""
        self.wanted, run = run.epoch, run.first or run
        self.store, self.owner = store, run.owner
        self.epochs = [Epoch.first(run)]
        self.names = frozenset(run.keys)  # of all epochs that were read
        self.odd = ""  # why the next document, which is there, does not count
        self.expected: Expected | None = None

    @property
    def newest(self) -> Epoch:
        if len(self.epochs) <= self.wanted:
            wanted, self.wanted = self.wanted, 0
            self.epoch(wanted)
        return self.epochs[-1]

    def expect(self, pair: Mapping[str, Any], now: float) -> None:
        """Before we are admitted: Refused unless this invitation and request would let us in now."""
        check(pair, PAIR)
        run = _admit(self.newest, pair, int(now)).run
        self.expected = Expected(run.recipe.replicas[-1].name, pair, run)

    @property
    def run(self) -> RunInfo:
        """The run by the newest epoch; for who is not admitted yet, as it will be with it."""
        run = self.newest.run
        return self.expected.run if self.expected and self.expected.name not in run.keys else run

    def epoch(self, number: int) -> Epoch:
        """Refused unless all documents up to it are there and good."""
        while len(self.epochs) <= number:
            last = min(number, len(self.epochs) + AHEAD - 1)
            wanted = range(len(self.epochs), last + 1)
            for n, data in zip(wanted, together([partial(self._get, n) for n in wanted]), strict=True):
                if data is None:
                    raise Refused(f"membership document {n} is gone")
                self._take(data)
        return self.epochs[number]

    def look(self) -> Epoch:
        """The newest epoch that is written, whether a round has begun with it or not. One request if there is
        none since the last look. A document that breaks the rules is none: `odd` says why."""
        self.odd = ""
        while self.owner and len(self.epochs) <= MOST_EPOCHS:
            try:
                data = self._get(len(self.epochs))
                if data is None:
                    break
                self._take(data)
            except Refused as reason:
                self.odd = f"membership document {len(self.epochs)}: {reason}"
                break
        return self.newest

    def at(self, named: int, round_number: int) -> Epoch:
        """The epoch of a round, where the manifest before it names epoch `named`: that one; or, where the run
        was over with it, the first after it by which the run goes on."""
        epoch = self.epoch(named)
        while round_number > epoch.run.recipe.outer.rounds and epoch.number < self.newest.number:
            epoch = self.epochs[epoch.number + 1]
        return epoch

    def _get(self, number: int) -> bytes | None:
        try:
            return self.store.get(membership_key(number), max_bytes=MOST_BYTES)
        except StoreRefused as reason:
            raise Refused(str(reason)) from None

    def _take(self, data: bytes) -> None:
        epoch = advance(self.newest, data)
        self.epochs.append(epoch)
        self.names |= epoch.run.keys.keys()


def advance(before: Epoch, data: bytes) -> Epoch:
    """The epoch after `before`, as a sealed document says; Refused with the reason where it may not."""
    run = before.run
    if not run.owner:
        raise Refused("run.json names no owner, so nothing in this run can change")
    if len(data) > MOST_BYTES:
        raise Refused(f"it has {len(data)} bytes; at most {MOST_BYTES} are accepted")
    writers = {OWNER: run.owner} | {name: run.keys[name] for name in run.closers}
    writer, body = open_sealed(data, "membership", run.run_id, writers)
    check(body, MEMBERSHIP)
    if body["number"] != before.number + 1 or body["previous"] != before.digest:
        raise Refused(f"it does not follow membership document {before.number} of this run")
    if writer != OWNER and (body["revoked"] or body["closers"] or body["rounds"]):
        raise Refused(f"{writer} changes what only the owner may")
    if not any(body[name] for name in ("admitted", "rotated", "revoked", "closers", "rounds")):
        raise Refused("it changes nothing")
    epoch = replace(before, number=before.number + 1, digest=sha256(data))
    for pair in body["admitted"]:
        epoch = _admit(epoch, pair, body["written"])
    for rotation in body["rotated"]:
        epoch = _rotate(epoch, rotation)
    for name in body["revoked"]:
        epoch = _revoke(epoch, name)
    return _set(epoch, body["closers"], body["rounds"])


def _admit(epoch: Epoch, pair: Mapping[str, Any], now: int) -> Epoch:
    run = epoch.run
    invitation = check_invitation(pair["invitation"], run)
    key = check_request(pair["request"], run, invitation)
    name = invitation["name"]
    if now > invitation["expires"]:
        raise Refused(f"the invitation of {name} had expired")
    if invitation["key"] in epoch.used:
        raise Refused(f"the invitation of {name} was used before")
    if name in run.keys:
        raise Refused(f"there is a replica {name} already")
    if epoch.ended.get(name, -1) > invitation["after"]:
        raise Refused(f"{name} was revoked after it was invited")
    if key in epoch.used:
        raise Refused(f"the key that {name} names was used before")
    config = replica_config(name, invitation["table"])
    recipe = _checked(run.recipe, (*run.recipe.replicas, config))  # first: the cut is for sound numbers
    check_fits(run, config)
    run = _changed(
        epoch,
        recipe=recipe,
        keys={**run.keys, name: key},
        closers=(*run.closers, name) if invitation["closes"] else run.closers,
    )
    return replace(epoch, run=run, used=epoch.used | {key, invitation["key"]})


def _rotate(epoch: Epoch, document: Any) -> Epoch:
    run = epoch.run
    name, key = check_rotation(document, run)
    if key in epoch.used:
        raise Refused(f"the key that {name} names was used before")
    run = _changed(epoch, keys={**run.keys, name: key})
    return replace(epoch, run=run, used=epoch.used | {key})


def _revoke(epoch: Epoch, name: str) -> Epoch:
    """Of somebody who is invited and has not come, it ends the invitation."""
    run, ended = epoch.run, {**epoch.ended, name: epoch.number}
    if name not in run.keys:
        return replace(epoch, ended=ended, run=_changed(epoch))
    left = tuple(
        one
        for config in run.recipe.replicas
        for one in _singles(config, [m.name for m in run.recipe.fleet() if m.config is config], name)
    )
    if not left:
        raise Refused(f"{name} is the last replica of this run")
    run = _changed(
        epoch,
        recipe=_checked(run.recipe, left),
        keys={other: key for other, key in run.keys.items() if other != name},
        closers=tuple(closer for closer in run.closers if closer != name),
    )
    return replace(epoch, run=run, ended=ended)


def _changed(epoch: Epoch, **changes: Any) -> RunInfo:
    return replace(epoch.run, first=epoch.run.first or epoch.run, epoch=epoch.number, **changes)


def _singles(config: ReplicaConfig, names: list[str], gone: str) -> list[ReplicaConfig]:
    """A table without one of its replicas: as it was, or one table for each that stays. Their order stays."""
    if gone not in names:
        return [config]
    return [replace(config, name=name, count=1) for name in names if name != gone]


def _set(epoch: Epoch, closers: list[str], rounds: int) -> Epoch:
    run, recipe = epoch.run, epoch.run.recipe
    if rounds and rounds <= recipe.outer.rounds:
        raise Refused(f"it ends at round {rounds}, and the run at {recipe.outer.rounds}: not later")
    run = _changed(
        epoch,
        closers=tuple(closers) or run.closers,
        recipe=extended(recipe, rounds) if rounds else recipe,
    )
    if not run.closers or len(set(run.closers)) < len(run.closers) or not set(run.closers) <= run.keys.keys():
        raise Refused("its closers are not replicas of the run, once each and at least one")
    return replace(epoch, run=run)


def extended(recipe: Recipe, rounds: int) -> Recipe:
    """A longer run. The learning rate follows the schedule of the shorter one: past its end it stays at
    inner.final_lr."""
    steps = recipe.inner.schedule_steps or recipe.num_inner_steps
    try:
        return replace(
            recipe,
            outer=replace(recipe.outer, rounds=rounds),
            inner=replace(recipe.inner, schedule_steps=steps),
        )
    except ConfigError as error:
        raise Refused(str(error)) from None


def _checked(recipe: Recipe, replicas: tuple[ReplicaConfig, ...]) -> Recipe:
    try:
        return replace(recipe, replicas=replicas)
    except ConfigError as error:
        raise Refused(str(error)) from None


def check_fits(run: RunInfo, config: ReplicaConfig) -> None:
    """Every update of a run is cut alike, as its first recipe says: Refused where a newcomer's stages would
    need a finer cut."""
    recipe = (run.first or run).recipe
    if shards(recipe, [*run.room, config.parts]) != shards(recipe, run.room):
        raise Refused(
            f"{config.name} has {config.parts} stages, and the updates of this run are not cut for that: it "
            "may have as many as a replica of the first recipe has or `init --room` said, or be a full one"
        )


def replica_config(name: str, table: Mapping[str, Any]) -> ReplicaConfig:
    """One replica from the table of an invitation; Refused where it is none."""
    try:
        return build_table(ReplicaConfig, {**table, "name": name, "count": 1}, "replica")
    except ConfigError as error:
        raise Refused(str(error)) from None


def table_of(config: ReplicaConfig) -> dict[str, Any]:
    """A kind of replica as an invitation carries it."""
    table = {key: value for key, value in asdict(config).items() if value is not None}
    return {key: value for key, value in table.items() if key not in ("name", "count")}


def membership_key(number: int) -> str:
    return f"membership/{number:06d}.json"
