"""`isthmus members`: who belongs to a run and since when; `isthmus extend`: add rounds."""

import argparse
import json
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.invite import add_owner, owners_folder
from isthmus.config import Recipe
from isthmus.errors import ConfigError
from isthmus.files import replace_file
from isthmus.reading import read_note
from isthmus.runlog import REAL, RunDir

if TYPE_CHECKING:
    from isthmus.protocol.ledger import Ledger
    from isthmus.protocol.membership import Epoch
    from isthmus.protocol.trust import Signer

RECENT = 200  # the number of rounds whose manifests are read


@dataclass(frozen=True, slots=True)
class MemberLine:
    """One replica that belongs or belonged to the run."""

    replica: str
    kind: str
    stages: int
    closes: bool
    share: bool  # of the open round's data
    state: str
    since_round: int  # the first round that it may contribute to
    until_round: int | None  # the last one, if it was revoked
    given: int  # rounds read that counted it
    refused: int  # rounds read that refused it
    key: str


@dataclass(frozen=True, slots=True)
class MembersReport:
    run: str
    run_id: str
    epoch: int  # the epoch of the next round
    written: int  # the newest document; a closer adopts it at the end of a round
    round: int
    rounds: int
    counted_from: int  # the first round that was read
    members: list[MemberLine]
    note: str = ""


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
    from isthmus.protocol.membership import Changes

    if args.closers:
        closers = list(dict.fromkeys(name.strip() for name in args.closers.split(",")))
        ledger, owner = open_as_owner(args.url, args.key)
        for name in closers:
            find_member(ledger.run, name)
        epoch = ledger.order(owner, Changes(closers=closers))
        print(f"rounds are closed by {', '.join(closers)} (epoch {epoch.number}), after the open one.")
        return 0
    found = gather(open_ledger(args.url))
    print(json.dumps(asdict(found), indent=2) if args.json else table(found))
    return 0


def gather(ledger: "Ledger", now: float | None = None) -> MembersReport:
    from isthmus.protocol.access import find_member
    from isthmus.protocol.fleet_state import read_signs, state_word

    now = time.time() if now is None else now
    run, signs, last = ledger.run, read_signs(ledger, now), ledger.last_round()
    first = max(1, last - RECENT + 1)
    read = list(ledger.between(first, last))
    founders = ledger.epochs[0].run.keys
    shares = read[-1].dealt_in if read else founders
    lines = []
    for name, (since, until, epoch) in _spans(ledger, last).items():
        config, sign = find_member(epoch.run, name).config, signs.get(name)
        state = "invited" if sign is None and name not in founders else state_word(run.recipe, sign, now)
        line = MemberLine(
            replica=name,
            kind=config.kind,
            stages=config.stages,
            closes=until is None and name in epoch.run.closers,
            share=until is None and name in shares,
            state=state if until is None else "revoked",
            since_round=since,
            until_round=until,
            given=sum(manifest.entry(name) is not None for manifest in read),
            refused=sum(manifest.refusal(name) is not None for manifest in read),
            key=epoch.run.keys[name],
        )
        lines.append(line)
    return MembersReport(
        run=run.recipe.name,
        run_id=run.run_id,
        epoch=ledger.epoch_of(last + 1).number,
        written=ledger.epoch.number,
        round=last,
        rounds=run.recipe.outer.rounds,
        counted_from=first,
        members=lines,
        note=ledger.odd,
    )


def _spans(ledger: "Ledger", last: int) -> "dict[str, tuple[int, int | None, Epoch]]":
    """Map each replica to its first round, its last round if revoked, and the newest epoch that lists it."""
    begins = _first_rounds(ledger, last)
    spans: dict[str, tuple[int, int | None, Epoch]] = {}
    for epoch in ledger.epochs:
        begin = begins.get(epoch.number, last + 2)
        for name, (since, until, before) in spans.items():
            if until is None and name not in epoch.run.keys:
                spans[name] = since, begin - 1, before
        for name in epoch.run.keys:
            since, until, _ = spans.get(name, (begin, None, epoch))
            spans[name] = since if until is None else begin, None, epoch
    return spans


def _first_rounds(ledger: "Ledger", last: int) -> dict[int, int]:
    """Map each epoch to its first round, or a later one."""
    found = {0: 1}
    for epoch in ledger.epochs[1 : ledger.epoch_of(last + 1).number + 1]:
        found[epoch.number] = ledger.first_round_of(epoch.number, found[epoch.number - 1], last + 1)
    return found


def table(found: MembersReport) -> str:
    from isthmus.printing import visible

    span = f"rounds {found.counted_from} to {found.round}" if found.round else "no round yet"
    wide = max([18, *(2 + len(each.replica) for each in found.members)])
    lines = [
        f'run "{found.run}" ({found.run_id}): epoch {found.epoch}, {found.round} of {found.rounds} rounds',
        f"{'replica':<{wide}}{'kind':<11}{'closes':<8}{'share':<7}{'state':<14}{'since':>7}{'until':>7}{'given':>7}{'refused':>9}",
    ]
    for m in found.members:
        kind = m.kind if m.stages == 1 else f"{m.stages} stages"
        until = "-" if m.until_round is None else str(m.until_round)
        lines.append(
            f"{m.replica:<{wide}}{kind:<11}{'yes' if m.closes else '-':<8}{'yes' if m.share else '-':<7}"
            f"{m.state:<14}{m.since_round:>7}{until:>7}{m.given:>7}{m.refused:>9}"
        )
    lines.append(f"given and refused are of {span}")
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
    recipe, epoch = ledger.run.recipe, ledger.epoch
    folder = RunDir.open(args.url) if is_run_dir(args.url) else None
    note = owners_folder(args, recipe.name) / "run.extend"
    if folder and folder.recipe.outer.rounds < recipe.outer.rounds:
        recipe = folder.recipe  # after a killed `extend` the bucket is ahead of the folder
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
    """Order more rounds; return the previous recipe and the epoch of the extension. After a kill, the same
    command completes the same extension: `note` names it until it is done."""
    from isthmus.protocol.membership import Changes

    run, rounds = ledger.run, ledger.run.recipe.outer.rounds
    if read_note(note) == f"{run.run_id} {rounds - more} {rounds}":  # the order reached the bucket
        epochs = ledger.epochs
        made = next(epoch.number for epoch in epochs if epoch.run.recipe.outer.rounds == rounds)
        return epochs[made - 1].run.recipe, epochs[made]
    with suppress(OSError):  # the owner's key may be in a read-only folder
        replace_file(note, f"{run.run_id} {rounds} {rounds + more}")
    return run.recipe, ledger.order(owner, Changes(rounds=rounds + more))


def extend_simulated(run: RunDir, rounds: int) -> int:
    """Extend a simulated run. It has no bucket and no owner, so only its recipe changes."""
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
