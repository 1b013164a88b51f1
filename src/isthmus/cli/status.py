"""`isthmus status`: which replicas are in a run, how far it is, and which of them it waits for."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.disk import in_words
from isthmus.errors import ConfigError
from isthmus.printing import visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isthmus.protocol.heartbeat import Heartbeat
    from isthmus.protocol.ledger import Ledger, Manifest

WRONG_CLOCK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class MemberStatus:
    replica: str
    kind: str
    stages: int
    state: str
    heartbeat_age_seconds: float | None
    round: int | None
    inner_step: int | None
    loss: float | None
    tokens_per_second: float | None
    delivered: bool  # its update of the open round
    waits_for: str = ""  # of a replica whose launcher has no worker now, or that waits for the bucket
    host: str = ""
    also_on: str = ""  # where a second machine runs with the same key
    missing: tuple[int, ...] = ()  # stages that are not there; those beside them wait
    restarts: int = 0
    last_error: str = ""
    last_error_seconds: float | None = None
    disk_free_bytes: float | None = None
    trouble: tuple[str, ...] = ()  # the same in words, where something is wrong


@dataclass(frozen=True, slots=True)
class RunStatus:
    run: str
    run_id: str
    round: int
    rounds: int
    last_round_seconds: float | None
    deadline_seconds: float | None
    refused: dict[str, str]
    awaited: list[str]
    members: list[MemberStatus]
    scores: dict[str, float]  # of updates that the last closer scored: nats each adds to the held-out loss
    clock_behind_seconds: float = 0.0  # this machine's, as far as the newest heartbeat shows it
    held_out: dict[str, Any] | None = None  # the newest held-out loss: round, by whom, and the losses


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "status",
        help="members, round, who is awaited, rates and losses of a run",
        description="Read a run's bucket and print how it stands: its round, every replica's state, rate "
        "and loss, and the replicas that the open round waits for. It writes nothing, so ages are by this "
        "machine's clock. A bucket that is elsewhere than in the run directory is asked for first.",
        epilog="examples:\n  isthmus status s3://my-runs/first\n  isthmus status runs/demo --json\n"
        "  isthmus status s3://my-runs/first --follow\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="the run's bucket, or the run directory of `isthmus train`")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--follow", action="store_true", help="again and again, until the run ends or Ctrl-C")
    parser.set_defaults(run=status)


def status(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import open_ledger

    ledger = open_ledger(args.url)

    def look() -> RunStatus:
        found = gather(ledger)
        return found if found.held_out else replace(found, held_out=_recorded(args.url))

    if args.follow:
        from isthmus.cli.follow import follow

        if args.json:
            raise ConfigError("--follow draws a table or prints lines; drop it, or --json")
        return follow(look)
    found = look()
    print(json.dumps(asdict(found), indent=2) if args.json else table(found))
    return 0


def gather(ledger: "Ledger", wall: Callable[[], float] = time.time) -> RunStatus:
    from isthmus.protocol.heartbeat import GONE, WAITING, Heartbeat, silent_after, waiting_text
    from isthmus.protocol.log_lines import heard_stages
    from isthmus.protocol.standing import missing_in_words, said_by_launcher, trouble

    recipe = ledger.run.recipe
    members, now = [], wall()  # only who may write can ask the store for its clock
    beats, waits = ledger.heartbeats(now)
    last = ledger.last_round(beat.round for beat, _ in beats.values())
    over = last >= recipe.outer.rounds
    manifest = ledger.manifest(last) if last else None
    delivered = set() if over else ledger.committed(last + 1)
    newest = now
    for member in recipe.fleet():
        heartbeat, written_at = beats.get(member.name, (None, now))
        newest = max(newest, written_at)
        waits_for = ""
        state, age = heartbeat.state if heartbeat else "not seen", max(0.0, now - written_at)
        if heartbeat and not heartbeat.gone and age > silent_after(recipe, heartbeat):
            state = "silent"
        elif heartbeat and heartbeat.waits:
            waits_for = waiting_text(heartbeat, age)
        if waiting := waits.get(member.name):
            age = max(0.0, now - waiting[1])
            state, waits_for = WAITING, waiting_text(waiting[0], age)
            heartbeat = said_by_launcher(heartbeat or Heartbeat(), waiting[0])
        vitals = (heartbeat or Heartbeat()).vitals
        missing = heartbeat.missing if heartbeat and state == WAITING else ()
        if member.config.stages > 1 and state in ("silent", "not seen"):
            since = written_at if heartbeat else 0.0
            heard = heard_stages(ledger, member.name, member.config.stages, since, now)
            missing = tuple(s for s in range(member.config.stages) if s not in heard) if heard else ()
        wrong = [
            *missing_in_words(missing, member.config.stages),
            *(trouble(heartbeat, age) if heartbeat else ()),
        ]
        members.append(
            MemberStatus(
                replica=member.name,
                kind=member.config.kind,
                stages=member.config.stages,
                state=state,
                heartbeat_age_seconds=age if heartbeat or waits_for else None,
                round=heartbeat and heartbeat.round,
                inner_step=heartbeat and heartbeat.inner_step,
                loss=heartbeat and heartbeat.loss,
                tokens_per_second=heartbeat and heartbeat.tokens_per_second,
                delivered=member.name in delivered,
                waits_for=waits_for,
                host=heartbeat.host if heartbeat else "",
                also_on=heartbeat.also_on if heartbeat and state != "silent" else "",
                missing=missing,
                restarts=vitals.restarts,
                last_error=vitals.last_error,
                last_error_seconds=vitals.last_error_seconds,
                disk_free_bytes=vitals.disk_free_bytes,
                trouble=tuple(wrong),
            )
        )
    expected = manifest.members if manifest else [m.replica for m in members]
    awaited = [
        m.replica for m in members if m.replica in expected and not m.delivered and m.state not in GONE
    ]
    return RunStatus(
        run=recipe.name,
        run_id=ledger.run.run_id,
        round=last,
        rounds=recipe.outer.rounds,
        last_round_seconds=manifest.seconds if manifest else None,
        deadline_seconds=(recipe.bucket.deadline_seconds or manifest.deadline_seconds) if manifest else None,
        refused=dict(manifest.refused) if manifest else {},
        awaited=[] if over else awaited,
        members=members,
        scores=dict(manifest.scores) if manifest else {},
        clock_behind_seconds=newest - now,
        held_out=_held_out(manifest, {name: beat for name, (beat, _) in beats.items()}),
    )


def _held_out(manifest: "Manifest | None", beats: "Mapping[str, Heartbeat]") -> dict[str, Any] | None:
    """As the last round's members report it, and those who have ended since."""
    from isthmus.runlog.held_out import HeldOutLosses

    if manifest is None:
        return None
    losses = HeldOutLosses()
    losses.add(manifest)
    for name, beat in beats.items():
        if beat.gone:
            losses.add_facts(name, beat.farewell, manifest.round)
    return asdict(losses.last[0]) | {"by": losses.last[1]} if losses.last else None


def _recorded(url: str) -> dict[str, Any] | None:
    """The newest held-out loss of a run directory: `train` measures it itself, and writes it there."""
    from isthmus.runlog import RunDir

    if "://" in url or not (Path(url) / "metrics.jsonl").is_file():
        return None
    rows = [row for row in RunDir.open(url).rows() if row.loss_mixed is not None]
    if not rows:
        return None
    last = rows[-1]
    losses = {"full": last.loss_full, "pipelined": last.loss_pipelined, "mixed": last.loss_mixed}
    return {"round": last.round, **losses, "by": "train"}


def table(found: RunStatus) -> str:
    from isthmus.protocol.scores import not_counted

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    settled = f"round {found.round}" if found.round else "none"
    wide = max([16, *(2 + len(m.replica) for m in found.members)])
    lines = [f'run "{found.run}" ({found.run_id}): {settled} of {found.rounds} is settled']
    if found.last_round_seconds is not None:
        lines[0] += f", the last took {found.last_round_seconds:.1f} s"
    lines.append(
        f"{'replica':<{wide}}{'kind':<11}{'state':<14}{'seen':>7}{'step':>8}{'loss':>8}{'tok/s':>10}{'disk':>10}"
        "  this round"
    )
    for m in found.members:
        kind = m.kind if m.stages == 1 else f"{m.stages} stages"
        seen = "-" if m.heartbeat_age_seconds is None else f"{m.heartbeat_age_seconds:.0f} s"
        lines.append(
            f"{m.replica:<{wide}}{kind:<11}{m.state:<14}{seen:>7}{number(m.inner_step, 'd'):>8}"
            f"{number(m.loss, '.3f'):>8}{number(m.tokens_per_second, ',.0f'):>10}"
            f"{'-' if m.disk_free_bytes is None else in_words(m.disk_free_bytes):>10}"
            f"  {'delivered' if m.delivered else '-'}"
        )
    lines += [f"{m.replica} waits: {visible(m.waits_for)}" for m in found.members if m.waits_for]
    lines += [f"{m.replica} {visible(words)}" for m in found.members for words in m.trouble]
    lines += [
        f"{m.replica} runs twice with one key: on {m.host or 'one machine'}, and on {visible(m.also_on)}; "
        "stop one of them"
        for m in found.members
        if m.also_on
    ]
    if found.clock_behind_seconds > WRONG_CLOCK_SECONDS:
        lines.append(
            f"this machine's clock is {found.clock_behind_seconds:.0f} s behind the bucket's: what was seen "
            "is older than it says"
        )
    if found.awaited:
        lines.append(f"round {found.round + 1} waits for {', '.join(found.awaited)}")
    if said := found.held_out:
        lines.append(f"held-out loss {said['mixed']:.3f} after round {said['round']}, by {said['by']}")
    if found.scores:
        said = ", ".join(f"{name} {score:+.4f}" for name, score in found.scores.items())
        lines.append(f"round {found.round} scored {said} (nats of held-out loss; below 0 helps)")
    for name, reason in found.refused.items():
        lines.append(f"round {found.round}: {not_counted(name, visible(reason))}")
    return "\n".join(lines)
