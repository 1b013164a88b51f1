"""The members of a run in each round: run.json, and the documents with which the owner changes them.

    membership/<n>.json     what epoch n changes of epoch n - 1; only if absent, each names the one before

run.json is epoch 0. The owner signs every document. A document does not say when its epoch begins: the first
manifest that names it decides that, and the epoch holds from the round after (docs/protocol.md, Membership).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from isthmus.config import Recipe, ReplicaConfig, build_table
from isthmus.errors import ConfigError, RunError
from isthmus.layout.traffic import shards
from isthmus.protocol.documents import MOST_EPOCHS, Admitted, MembershipDocument, RunInfo, decode
from isthmus.protocol.trust import OWNER, Refused, Signer, open_raw, sha256
from isthmus.store import Store, StoreRefused
from isthmus.store.together import together

MOST_BYTES = 2**18  # of one document
AHEAD = 16  # documents that one batch requests
TRIES = 20  # two changes by the owner may collide


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What one document changes."""

    admitted: Sequence[Admitted] = ()
    revoked: Sequence[str] = ()
    closers: Sequence[str] = ()  # the complete list; empty: as before
    rounds: int = 0  # of the whole run; 0: as before


@dataclass(frozen=True, slots=True)
class Epoch:
    """The run after one document of the chain."""

    number: int
    digest: str  # of the document; of run.json for 0
    run: RunInfo
    used: frozenset[str]  # public keys of all replicas so far, which no newcomer may reuse
    ended: Mapping[str, int]  # replica -> the epoch that revoked it last

    @classmethod
    def first(cls, run: RunInfo) -> "Epoch":
        return cls(0, run.digest, run, frozenset(run.keys.values()), {})


class Membership:
    """The chain as far as it was read. It reads each document once and keeps all epochs."""

    def __init__(self, store: Store, run: RunInfo) -> None:
        """If `run` is a later epoch, the documents up to it are read on first use."""
        self.wanted, run = run.epoch, run.first or run
        self.store = store
        self.epochs = [Epoch.first(run)]
        self.names = frozenset(run.keys)  # of all epochs read so far
        self.odd = ""  # why the next document exists but does not count

    @property
    def newest(self) -> Epoch:
        if len(self.epochs) <= self.wanted:
            wanted, self.wanted = self.wanted, 0
            self.epoch(wanted)
        return self.epochs[-1]

    @property
    def run(self) -> RunInfo:
        """The run by the newest epoch that was read."""
        return self.newest.run

    def epoch(self, number: int) -> Epoch:
        """Return an epoch; Refused unless all documents up to it exist and are valid."""
        while len(self.epochs) <= number:
            last = min(number, len(self.epochs) + AHEAD - 1)
            wanted = range(len(self.epochs), last + 1)
            for n, data in zip(wanted, together([partial(self._get, n) for n in wanted]), strict=True):
                if data is None:
                    raise Refused(f"membership document {n} is gone")
                self._take(data)
        return self.epochs[number]

    def look(self) -> Epoch:
        """The newest epoch written, even if no round has begun with it. One request if nothing was written
        since the last look. A document that breaks the rules does not count: `odd` says why."""
        self.odd = ""
        while len(self.epochs) <= MOST_EPOCHS:
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
        """The epoch of a round whose previous manifest names epoch `named`: that one; or, if the run ended
        with it, the first later epoch that continues the run."""
        epoch = self.epoch(named)
        while round_number > epoch.run.recipe.outer.rounds and epoch.number < self.newest.number:
            epoch = self.epochs[epoch.number + 1]
        return epoch

    def order(self, owner: Signer, changes: Changes) -> Epoch:
        """Write a change signed by the owner; return the resulting epoch. It replaces an invalid document in
        that place, if the bucket allows it."""
        for _ in range(TRIES):
            before = self.look()
            try:
                sealed = document(before, owner, changes)
            except Refused as reason:
                raise ConfigError(str(reason)) from None
            key = membership_key(before.number + 1)
            if self.odd:
                self.store.put(key, sealed)
            else:
                self.store.create(key, sealed)
            self.look()
            made = self.epochs[before.number + 1 :][:1]
            if made and made[0].digest == sha256(sealed):  # the stored document counts
                return made[0]
        raise RunError(f"{TRIES} other changes of this run's membership came first; try again")

    def _get(self, number: int) -> bytes | None:
        try:
            return self.store.get(membership_key(number), max_bytes=MOST_BYTES)
        except StoreRefused as reason:
            raise Refused(str(reason)) from None

    def _take(self, data: bytes) -> None:
        epoch = advance(self.newest, data)
        self.epochs.append(epoch)
        self.names |= epoch.run.keys.keys()


def membership_key(number: int) -> str:
    return f"membership/{number:06d}.json"


def document(before: Epoch, owner: Signer, changes: Changes) -> bytes:
    """The sealed document after epoch `before`; Refused if readers would refuse it."""
    body = MembershipDocument(
        number=before.number + 1,
        previous=before.digest,
        admitted=tuple(changes.admitted),
        revoked=tuple(changes.revoked),
        closers=tuple(changes.closers),
        rounds=changes.rounds,
    )
    sealed = owner.seal("membership", before.run.run_id, body)
    advance(before, sealed)
    return sealed


def advance(before: Epoch, data: bytes) -> Epoch:
    """The epoch after `before`, by the owner's document; Refused with the reason if it breaks a rule."""
    run = before.run
    if len(data) > MOST_BYTES:
        raise Refused(f"it has {len(data)} bytes; at most {MOST_BYTES} are accepted")
    _, body = open_raw(data, "membership", run.run_id, {OWNER: run.owner})
    changes = decode(body, MembershipDocument, "membership document")
    if changes.number != before.number + 1 or changes.previous != before.digest:
        raise Refused(f"it does not follow membership document {before.number} of this run")
    if not (changes.admitted or changes.revoked or changes.closers or changes.rounds):
        raise Refused("it changes nothing")
    epoch = replace(before, number=before.number + 1, digest=sha256(data))
    for admitted in changes.admitted:
        epoch = _admit(epoch, admitted)
    for name in changes.revoked:
        epoch = _revoke(epoch, name)
    return _set(epoch, changes.closers, changes.rounds)


def _admit(epoch: Epoch, new: Admitted) -> Epoch:
    run = epoch.run
    if new.name in run.keys:
        raise Refused(f"there is a replica {new.name} already")
    if new.key in epoch.used:
        raise Refused(f"the key of {new.name} was used before")
    config = replica_config(new.name, new.table)
    recipe = _with_replicas(
        run.recipe, (*run.recipe.replicas, config)
    )  # first: `check_fits` needs sound numbers
    check_fits(run, config)
    run = _changed(
        epoch,
        recipe=recipe,
        keys={**run.keys, new.name: new.key},
        closers=(*run.closers, new.name) if new.closes else run.closers,
    )
    return replace(epoch, run=run, used=epoch.used | {new.key})


def _revoke(epoch: Epoch, name: str) -> Epoch:
    run = epoch.run
    if name not in run.keys:
        raise Refused(f"there is no replica {name}")
    left = tuple(
        one
        for config in run.recipe.replicas
        for one in _singles(config, [m.name for m in run.recipe.fleet() if m.config is config], name)
    )
    if not left:
        raise Refused(f"{name} is the last replica of this run")
    run = _changed(
        epoch,
        recipe=_with_replicas(run.recipe, left),
        keys={other: key for other, key in run.keys.items() if other != name},
        closers=tuple(closer for closer in run.closers if closer != name),
    )
    return replace(epoch, run=run, ended={**epoch.ended, name: epoch.number})


def _changed(epoch: Epoch, **changes: Any) -> RunInfo:
    return replace(epoch.run, first=epoch.run.first or epoch.run, epoch=epoch.number, **changes)


def _singles(config: ReplicaConfig, names: list[str], gone: str) -> list[ReplicaConfig]:
    """A table without one of its replicas: unchanged, or one table for each remaining replica, in order."""
    if gone not in names:
        return [config]
    return [replace(config, name=name, count=1) for name in names if name != gone]


def _set(epoch: Epoch, closers: Sequence[str], rounds: int) -> Epoch:
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
    """A longer run. The learning rate keeps the shorter run's schedule and then stays at inner.final_lr."""
    steps = recipe.inner.schedule_steps or recipe.num_inner_steps
    try:
        return replace(
            recipe,
            outer=replace(recipe.outer, rounds=rounds),
            inner=replace(recipe.inner, schedule_steps=steps),
        )
    except ConfigError as error:
        raise Refused(str(error)) from None


def _with_replicas(recipe: Recipe, replicas: tuple[ReplicaConfig, ...]) -> Recipe:
    try:
        return replace(recipe, replicas=replicas)
    except ConfigError as error:
        raise Refused(str(error)) from None


def check_fits(run: RunInfo, config: ReplicaConfig) -> None:
    """Raise Refused if a newcomer's stages need a finer cut: all updates of a run are cut as its first recipe
    says."""
    recipe = (run.first or run).recipe
    if recipe.model.tie_embeddings and config.stages > 1:
        raise Refused(
            f"{config.name} has {config.stages} stages, but embedding and head of this run are one table: "
            "only full replicas can join (`init --room` or model.tie_embeddings = false unties a new run)"
        )
    if shards(recipe, [*run.room, config.parts]) != shards(recipe, run.room):
        raise Refused(
            f"{config.name} has {config.parts} stages, and the updates of this run are not cut for that: it "
            "may have as many as a replica of the first recipe has or `init --room` said, or be a full one"
        )


def replica_config(name: str, table: Mapping[str, Any]) -> ReplicaConfig:
    """One replica from the table of a document; Refused if the table is invalid."""
    try:
        return build_table(ReplicaConfig, {**table, "name": name, "count": 1}, "replica")
    except ConfigError as error:
        raise Refused(str(error)) from None


def table_of(config: ReplicaConfig) -> dict[str, Any]:
    """A replica's settings in the form that a document carries."""
    table = {key: value for key, value in asdict(config).items() if value is not None}
    return {key: value for key, value in table.items() if key not in ("name", "count")}
