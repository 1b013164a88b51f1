"""`isthmus members`: who belongs to a run, since when; `isthmus extend`: more rounds."""

import argparse
import json
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.invite import add_owner, owners_folder
from isthmus.config import Recipe
from isthmus.errors import ConfigError
from isthmus.files import replace_file
from isthmus.reading import read_note
from isthmus.runlog import REAL, RunDir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus.protocol.invited import Invited
    from isthmus.protocol.ledger import Ledger, Manifest
    from isthmus.protocol.membership import Epoch
    from isthmus.protocol.trust import Signer

RECENT = 200  # rounds whose manifests are read


@dataclass(frozen=True, slots=True)
class MemberLine:
    """One replica that belongs or belonged to the run."""

    replica: str
    kind: str
    stages: int
    closes: bool
    state: str
    since_round: int  # the first that it may give to
    until_round: int | None  # the last, where it was revoked
    given: int  # rounds that counted it, of those that were read
    refused: int  # rounds that refused it
    scored: int  # rounds in which its update was scored
    score: float | None  # their mean, nats of held-out loss; below zero it helps
    probation: bool  # its updates do not count yet
    key: str


@dataclass(frozen=True, slots=True)
class MembersReport:
    run: str
    run_id: str
    epoch: int  # that the next round begins with
    written: int  # the newest document; a closer takes it up at the end of a round
    round: int
    rounds: int
    counted_from: int  # the first round that was read
    members: list[MemberLine]
    note: str = ""
    invited: "list[Invited]" = field(default_factory=list)  # who has not come yet


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "members",
        help="who belongs to a run, since when, and how often it gave",
        description="List every replica that belongs to a run or was revoked: kind, state, from which round "
        f"on, how many of the last {RECENT} rounds counted or refused it. Reads only, unless --closers is "
        "given: that names all replicas that may close rounds from the next round on, and needs the owner's "
        "key.",
        epilog="examples:\n  isthmus members s3://my-runs/first\n"
        "  isthmus members s3://my-runs/first --closers rack-0,rack-1\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="the run's bucket, or the run directory of `isthmus train`")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--closers", metavar="NAMES", help="who may close rounds from now on, by commas")
    add_owner(parser)
    parser.set_defaults(run=members)
    longer = commands.add_parser(
        "extend",
        help="let a run go on for more rounds",
        description="Add rounds to a run, be it finished or not. The learning rate keeps its schedule: after "
        "its end the further rounds run at inner.final_lr. Needs the owner's key. Then start the replicas "
        "again: `isthmus join`, or `isthmus train --resume` for a run directory. A simulated run needs no "
        "key, and goes on by `isthmus simulate --resume`.",
        epilog="examples:\n  isthmus extend s3://my-runs/first --rounds 40\n"
        "  isthmus extend runs/demo --rounds 40\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    longer.add_argument("url", help="the run's bucket, or a run directory")
    longer.add_argument("--rounds", type=int, required=True, help="how many more")
    add_owner(longer)
    longer.set_defaults(run=extend)


def members(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import find_member, open_as_owner, open_ledger
    from isthmus.protocol.changes import Changes, order

    if args.closers:
        closers = list(dict.fromkeys(name.strip() for name in args.closers.split(",")))
        ledger, owner = open_as_owner(args.url, args.key)
        for name in closers:
            find_member(ledger.run, name)
        epoch = order(ledger.membership, owner, time.time(), Changes(closers=closers))
        print(f"rounds are closed by {', '.join(closers)} (epoch {epoch.number}), after the open one.")
        return 0
    found = gather(open_ledger(args.url))
    print(json.dumps(asdict(found), indent=2) if args.json else table(found))
    return 0


def gather(ledger: "Ledger", now: float | None = None) -> MembersReport:
    from isthmus.protocol.heartbeat import silent_after
    from isthmus.protocol.invited import open_invitations

    now = time.time() if now is None else now
    beats, _ = ledger.heartbeats(now)
    last = ledger.last_round(beat.round for beat, _ in beats.values())
    first = max(1, last - RECENT + 1)
    read = list(ledger.between(first, last))
    force = ledger.epoch_of(last + 1)
    begins = _first_rounds(ledger, last)
    lines: dict[str, MemberLine] = {}
    before: dict[str, int] = {}
    for epoch in ledger.membership.epochs:
        since = begins.get(epoch.number, last + 2)
        for member in epoch.run.recipe.fleet():
            before.setdefault(member.name, since)
            beat = beats.get(member.name)
            silent = beat is not None and now - beat[1] > silent_after(ledger.run.recipe, beat[0])
            state = "not seen" if beat is None else "silent" if silent and not beat[0].gone else beat[0].state
            lines[member.name] = MemberLine(
                replica=member.name,
                kind=member.config.kind,
                stages=member.config.stages,
                closes=member.name in epoch.run.closers,
                state="admitted" if since > last + 1 and beat is None else state,
                since_round=before[member.name],
                until_round=None,
                given=sum(manifest.entry(member.name) is not None for manifest in read),
                refused=sum(member.name in dict(manifest.refused) for manifest in read),
                scored=len(scores := scores_of(read, member.name)),
                score=sum(scores) / len(scores) if scores else None,
                probation=bool(read) and member.name in read[-1].probation,
                key=epoch.run.keys[member.name],
            )
        for name in [name for name in lines if name not in epoch.run.keys]:
            if lines[name].until_round is None:
                ended = {**asdict(lines[name]), "until_round": since - 1, "state": "revoked", "closes": False}
                lines[name] = MemberLine(**ended)
                before.pop(name, None)
    return MembersReport(
        run=ledger.run.recipe.name,
        run_id=ledger.run.run_id,
        epoch=force.number,
        written=ledger.membership.newest.number,
        round=last,
        rounds=ledger.run.recipe.outer.rounds,
        counted_from=first,
        members=list(lines.values()),
        note=ledger.membership.odd,
        invited=open_invitations(ledger, now),
    )


def scores_of(manifests: "Sequence[Manifest]", replica: str) -> list[float]:
    """Of a replica's updates that closers have scored."""
    return [score for manifest in manifests for name, score in manifest.scores if name == replica]


def _first_rounds(ledger: "Ledger", last: int) -> dict[int, int]:
    """Epoch -> the first round that has it, or a later one."""
    found = {0: 1}
    for epoch in ledger.membership.epochs[1 : ledger.epoch_of(last + 1).number + 1]:
        found[epoch.number] = ledger.first_round_of(epoch.number, found[epoch.number - 1], last + 1)
    return found


def table(found: MembersReport) -> str:
    from isthmus.printing import visible

    span = f"rounds {found.counted_from} to {found.round}" if found.round else "no round yet"
    wide = max([18, *(2 + len(each.replica) for each in (*found.members, *found.invited))])
    lines = [
        f'run "{found.run}" ({found.run_id}): epoch {found.epoch}, {found.round} of {found.rounds} rounds',
        f"{'replica':<{wide}}{'kind':<11}{'closes':<8}{'state':<14}{'since':>7}{'until':>7}{'given':>7}{'refused':>9}"
        f"{'scored':>8}{'score':>9}",
    ]
    for m in found.members:
        kind = m.kind if m.stages == 1 else f"{m.stages} stages"
        until = "-" if m.until_round is None else str(m.until_round)
        lines.append(
            f"{m.replica:<{wide}}{kind:<11}{'yes' if m.closes else '-':<8}{m.state:<14}{m.since_round:>7}"
            f"{until:>7}{m.given:>7}{m.refused:>9}{m.scored:>8}"
            f"{'-' if m.score is None else f'{m.score:+.4f}':>9}{'  on probation' if m.probation else ''}"
        )
    for each in found.invited:
        kind = each.kind if each.stages == 1 else f"{each.stages} stages"
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.expires))
        says = (
            "ready, admitted when the open round is settled"
            if each.asked
            else f"has not asked; until {until}"
        )
        lines.append(f"{each.replica:<{wide}}{kind:<11}{'-':<8}invited: {says}")
    lines.append(f"given, refused and scores (mean nats of held-out loss; below 0 helps) are of {span}")
    if found.written > found.epoch:
        lines.append(f"epoch {found.written} is written; a closer takes it up when it settles the open round")
    if found.note:
        lines.append(visible(found.note))
    return "\n".join(lines)


def extend(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import is_run_dir, open_as_owner

    if args.rounds < 1:
        raise ConfigError(f"--rounds is {args.rounds}; it says how many more, 1 at least")
    if is_run_dir(args.url) and RunDir.open(args.url).about.get("mode") != REAL:
        return extend_simulated(RunDir.open(args.url), args.rounds)
    ledger, owner = open_as_owner(args.url, args.key)
    recipe, epoch = ledger.run.recipe, ledger.membership.newest
    folder = RunDir.open(args.url) if is_run_dir(args.url) else None
    note = owners_folder(args, recipe.name) / "run.extend"
    if folder and folder.recipe.outer.rounds < recipe.outer.rounds:
        recipe = folder.recipe  # an `extend` that was killed: the bucket knows, the folder does not
    else:
        recipe, epoch = _order_longer(ledger, owner, args.rounds, note)
    longer = epoch.run.recipe
    if folder:
        folder.continue_with(replace(folder.recipe, outer=longer.outer, inner=longer.inner))
    print(f"{_goes_on(recipe, longer)} (epoch {epoch.number}). {_schedule(longer)}")
    how = f"isthmus train --resume {args.url}" if folder else f"isthmus join {args.url} --replica NAME"
    print(f"Where a replica has ended, start it again: {how}", flush=True)
    with suppress(OSError):
        note.unlink()
    return 0


def _order_longer(ledger: "Ledger", owner: "Signer", more: int, note: Path) -> "tuple[Recipe, Epoch]":
    """The recipe before, and the epoch by which the run is longer. The same line, typed again after a kill,
    is the same extension: until it is done, `note` says which one is under way."""
    from isthmus.protocol.changes import Changes, order

    run, rounds = ledger.run, ledger.run.recipe.outer.rounds
    if read_note(note) == f"{run.run_id} {rounds - more} {rounds}":  # it reached the bucket
        epochs = ledger.membership.epochs
        made = next(epoch.number for epoch in epochs if epoch.run.recipe.outer.rounds == rounds)
        return epochs[made - 1].run.recipe, epochs[made]
    with suppress(OSError):  # the owner's key may lie where nothing is written
        replace_file(note, f"{run.run_id} {rounds} {rounds + more}")
    return run.recipe, order(ledger.membership, owner, time.time(), Changes(rounds=rounds + more))


def extend_simulated(run: RunDir, rounds: int) -> int:
    """A simulated run has no bucket and no owner: its recipe is all that changes."""
    from isthmus.protocol.membership import extended
    from isthmus.protocol.trust import Refused

    recipe = run.recipe
    try:
        longer = extended(recipe, recipe.outer.rounds + rounds)
    except Refused as error:  # too many
        raise ConfigError(str(error)) from None
    run.continue_with(longer)
    print(f"{_goes_on(recipe, longer)}. {_schedule(longer)}")
    print(f"Go on with: isthmus simulate --resume {shlex.quote(str(run.path))}")
    return 0


def _goes_on(recipe: Recipe, longer: Recipe) -> str:
    return f'"{recipe.name}" goes on from {recipe.outer.rounds} to {longer.outer.rounds} rounds'


def _schedule(longer: Recipe) -> str:
    inner = longer.inner
    last = f"after inner step {inner.schedule_steps} it is {inner.lr * inner.final_lr:g}"
    return f"The learning rate keeps its schedule: {last}."
