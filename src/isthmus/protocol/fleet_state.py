"""The state of a run's fleet as its bucket shows it: for `status`, the page, the report and metrics.

`look` queries the bucket; `member_states` interprets the answers without a request.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec.structs import replace

from isthmus.config import Member, Recipe
from isthmus.disk import in_words
from isthmus.protocol.heartbeat import GONE, WAITING, Heartbeat, silent_after, waiting_text
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.runlog.held_out import HeldOutLosses

SILENT, NOT_SEEN = "silent", "not seen"
DOWN = (SILENT, NOT_SEEN, WAITING, *GONE)  # its workers do not train now
Sign = tuple[Heartbeat, float]  # a replica's last heartbeat, and when it was written by the store's clock


@dataclass(frozen=True, slots=True)
class MemberState:
    """One replica, as its last heartbeat and the open round show it."""

    replica: str
    kind: str
    stages: int
    state: str  # the heartbeat's state; or silent, waiting (its supervisor has no worker), not seen
    heartbeat_age_seconds: float | None
    round: int | None
    inner_step: int | None
    loss: float | None
    tokens_per_second: float | None
    delivered: bool  # whether its update of the open round is there
    closes: bool = False  # whether it may close rounds
    waits_for: str = ""  # if its supervisor has no worker now, or it waits for the bucket
    host: str = ""
    incarnation: str = ""
    missing: tuple[int, ...] = ()  # absent stages; the others wait for them
    restarts: int = 0
    last_error: str = ""
    last_error_seconds: float | None = None  # age of the error when the heartbeat was written
    disk_free_bytes: float | None = None
    disk_short: bool = False  # less than its next save needs
    trouble: tuple[str, ...] = ()  # the same in words, if something is wrong

    @property
    def up(self) -> bool:
        """Whether it takes part now, or is starting to."""
        return self.state not in DOWN


@dataclass(frozen=True, slots=True)
class FleetState:
    """All members of a run, its last round and its open one."""

    run: str
    run_id: str
    round: int
    rounds: int
    last_round_seconds: float | None
    deadline_seconds: float | None
    refused: dict[str, str]
    awaited: list[str]
    members: list[MemberState]
    epoch: int = 0  # membership of the open round
    revoked: list[str] = field(default_factory=list)
    clock_behind_seconds: float = 0.0  # how far this machine's clock lags, by the newest heartbeat
    held_out: dict[str, Any] | None = None  # the newest held-out loss: its round, replica and losses
    outside_tokens: dict[str, int] = field(default_factory=dict)  # in the last round: see `_outside`


def look(ledger: Ledger, now: float | None = None) -> FleetState:
    """Read the fleet from its bucket. Ages are by this machine's clock: only a writer can ask the store for
    its own."""
    now = time.time() if now is None else now
    run, signs = ledger.run, read_signs(ledger, now)
    recipe, last = run.recipe, ledger.last_round()
    over = last >= recipe.outer.rounds
    manifest = ledger.manifest(last) if last else None
    delivered = set() if over else ledger.committed(last + 1)
    members = member_states(recipe, signs, now, delivered, run.closers)
    expected = manifest.members if manifest else [m.replica for m in members]
    awaited = [
        m.replica for m in members if m.replica in expected and not m.delivered and m.state not in GONE
    ]
    return FleetState(
        run=recipe.name,
        run_id=run.run_id,
        round=last,
        rounds=recipe.outer.rounds,
        last_round_seconds=manifest.seconds if manifest else None,
        deadline_seconds=(recipe.bucket.deadline_seconds or manifest.deadline_seconds) if manifest else None,
        refused=dict(manifest.refused) if manifest else {},
        awaited=[] if over else awaited,
        members=members,
        epoch=ledger.epoch_of(last + 1).number,
        revoked=sorted(set(ledger.epoch.ended) - set(run.keys)),
        clock_behind_seconds=max([now, *(written for _, written in signs.values())]) - now,
        held_out=_held_out(manifest, signs),
        outside_tokens=_outside(manifest),
    )


def read_signs(ledger: Ledger, now: float) -> dict[str, Sign]:
    """Each replica's last sign: its worker's heartbeat, with its supervisor's word while no worker runs."""
    beats, waits = ledger.heartbeats(now)
    signs = dict(beats)
    for name, (said, written) in waits.items():
        last = beats[name][0] if name in beats else Heartbeat()
        signs[name] = _said_by_supervisor(last, said), written
    return signs


def member_states(
    recipe: Recipe,
    signs: Mapping[str, Sign],
    now: float,
    delivered: Collection[str] = (),
    closers: Collection[str] = (),
) -> list[MemberState]:
    """Return the state of every replica of the recipe. `now` is by the clock of the signs."""
    return [
        _member_state(recipe, member, signs.get(member.name), now, member.name in delivered, closers)
        for member in recipe.fleet()
    ]


def state_word(recipe: Recipe, sign: Sign | None, now: float) -> str:
    """A replica's state, in the word that every command and the page use."""
    if sign is None:
        return NOT_SEEN
    beat, written = sign
    if not beat.gone and beat.state != WAITING and now - written > silent_after(recipe, beat):
        return SILENT
    return beat.state or "starting"


def _member_state(
    recipe: Recipe,
    member: Member,
    sign: Sign | None,
    now: float,
    delivered: bool,
    closers: Collection[str],
) -> MemberState:
    beat, written = sign or (Heartbeat(), now)
    state, age, seen = state_word(recipe, sign, now), max(0.0, now - written), sign is not None
    missing = beat.missing if state == WAITING else ()
    wrong = [*_missing_in_words(missing, member.config.stages), *(_trouble(beat, age) if seen else ())]
    return MemberState(
        replica=member.name,
        kind=member.config.kind,
        stages=member.config.stages,
        state=state,
        heartbeat_age_seconds=age if seen else None,
        round=beat.round if seen else None,
        inner_step=beat.inner_step if seen else None,
        loss=beat.loss,
        tokens_per_second=beat.tokens_per_second,
        delivered=delivered,
        closes=member.name in closers,
        waits_for=waiting_text(beat, age) if state != SILENT and (beat.waits or state == WAITING) else "",
        host=beat.host,
        incarnation=beat.incarnation,
        missing=tuple(stage for stage in missing if stage < member.config.stages),
        restarts=beat.vitals.restarts,
        last_error=beat.vitals.last_error,
        last_error_seconds=beat.vitals.last_error_seconds,
        disk_free_bytes=beat.vitals.disk_free_bytes,
        disk_short=beat.vitals.disk_is_short,
        trouble=tuple(wrong),
    )


def _held_out(manifest: Manifest | None, signs: Mapping[str, Sign]) -> dict[str, Any] | None:
    """The newest held-out loss that the last round's members report, or members that have ended since."""
    if manifest is None:
        return None
    losses = HeldOutLosses()
    losses.add(manifest)
    for name, (beat, _) in signs.items():
        if beat.gone:
            losses.add_facts(name, beat.farewell, manifest.round)
    return asdict(losses.last[0]) | {"by": losses.last[1]} if losses.last else None


def _outside(manifest: Manifest | None) -> dict[str, int]:
    """Replica -> tokens that its stages sent with values outside the range of a few-bit wire."""
    entries = manifest.entries if manifest else ()
    counts = {entry.replica: int(sum(entry.facts.measured.get("outside_tokens", ()))) for entry in entries}
    return {name: count for name, count in counts.items() if count}


def _said_by_supervisor(last: Heartbeat, waiting: Heartbeat) -> Heartbeat:
    """A worker's last heartbeat, with what its supervisor says now that none runs."""
    return replace(
        last,
        state=WAITING,
        awaiting=waiting.awaiting,
        waited_seconds=waiting.waited_seconds,
        missing=waiting.missing,
        vitals=waiting.vitals,
    )


def _missing_in_words(missing: Sequence[int], num_stages: int) -> list[str]:
    """The absent stages, by name; empty if unknown."""
    known = [stage for stage in missing if stage < num_stages]
    if not known or num_stages == 1:
        return []
    named = " and ".join(", ".join(map(str, known)).rsplit(", ", 1))
    others = "the other waits" if num_stages - len(known) == 1 else "the others wait"
    rest = f"; {others}" if len(known) < num_stages else ""
    return [f"lacks stage{'s' * (len(known) > 1)} {named}{rest}"]


def _trouble(heartbeat: Heartbeat, age_seconds: float) -> list[str]:
    """What went wrong on the replica's machine, one line each; `age_seconds` is the heartbeat's."""
    vitals, said = heartbeat.vitals, []
    seconds = None if vitals.last_error_seconds is None else vitals.last_error_seconds + age_seconds
    ago = f", {seconds:.0f} s ago" if seconds is not None else ""
    why = f": {vitals.last_error}" if vitals.last_error else ""
    if vitals.restarts:
        times = f"{vitals.restarts:,} time{'s' * (vitals.restarts != 1)}"
        said.append(f"was started again {times}, the last{ago}{why}".replace(", the last,", ", the last"))
    elif why:
        said.append(f"failed{ago.removeprefix(',')}{why}")
    if vitals.disk_is_short:
        free, needed = in_words(vitals.disk_free_bytes), in_words(vitals.disk_needed_bytes)
        said.append(f"has {free} free on the disk of its state, and its next save needs {needed}")
    return said
