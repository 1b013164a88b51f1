"""`isthmus reproduce`: the paper's tables at a size that one GPU trains in seconds, with seeds."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments import lines as results
from experiments import work
from experiments.catalog import tables_of
from experiments.fullsize import NAME as FULLSIZE
from experiments.fullsize import SCALES as FULLSIZES
from experiments.real_fleet import NAME as FLEET
from experiments.same_code import NAME as COMMITS
from experiments.tables import DEFAULT_SCALE, SCALES, Scale, pick_scale
from isthmus.errors import ConfigError, RunError

if TYPE_CHECKING:
    from experiments.runner import Outcome

EPILOG = """tables:
{tables}
  tune-base, tune-regime, regime   of --scale 24m-4, where the base works, and 24m: H and keep, every method
                 tuned alike on a text of its own, then five seeds of each
  nearer         of --scale 24m: what brings SparseLoCo near to averaging at every step
  all            all of them; a row that several tables show is run once
  178m           not in all: three fleets of the 178M model, one after another: dense, het-8, recommended
  commits        not in all, on a CPU: do the commits of two compared rows compute the same?
  fleet          not in all, on a CPU: do real processes compute the regime's rows as the simulator does?

scales:
{scales}
  178m, toy      of 178m (default 178m): {fullsize}

examples:
  isthmus reproduce all --dry-run                          every run, its tokens, and the time they may take
  isthmus reproduce tune --corpus corpus/ --device cuda --jobs 4     the learning rates come first
  isthmus reproduce 1 2 4 --corpus corpus/ --device cuda --jobs 4 --minutes 9
  isthmus reproduce 2 --corpus corpus/ --only het-96 --seeds 3,4     two more seeds of one row
  isthmus reproduce 178m --corpus corpus178m/ --device cuda --minutes 10 --state state/     rows that fit
  isthmus reproduce commits --corpus corpus/ --jobs 2      rows that were run by two commits, by both
  isthmus reproduce --render                                   docs/results.md and its plots, from results/

A finished run is one line in results/TABLE.jsonl. The same command again runs what is missing; a run that
was stopped is repeated; one of 178m goes on from its --state. A method
takes the best learning rate of `tune`, once that table is complete.
The corpus: isthmus data prepare TEXT --to corpus/ --vocab 8192 (of 178m: --vocab 32000)
"""


def register(commands: argparse._SubParsersAction) -> None:
    scale = SCALES[DEFAULT_SCALE]
    tables = "\n".join(f"  {table.name:14} {table.title}" for table in tables_of(scale).values())
    scales = "\n".join(
        f"  {s.name:14} {s.about}{' (default)' * (s is scale)}: {s.rounds} rounds of H = {s.inner_steps}"
        for s in SCALES.values()
    )
    run = FULLSIZES[FULLSIZE]
    fullsize = f"{run.rounds} rounds of H = {run.inner_steps}, or four rounds of nano"
    parser = commands.add_parser(
        "reproduce",
        help="the paper's tables, at a size that one GPU trains in seconds",
        description="Run the rows of the paper's tables that have no result yet, several at once, and draw "
        "the page.",
        epilog=EPILOG.format(tables=tables, scales=scales, fullsize=fullsize),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "tables",
        nargs="*",
        metavar="TABLE",
        help="one of the tables below, or all; or 178m, commits, fleet",
    )
    parser.add_argument("--corpus", metavar="DIR", help="a folder made by `isthmus data prepare`")
    parser.add_argument("--scale", metavar="NAME", help=f"default {DEFAULT_SCALE}")
    parser.add_argument("--seeds", metavar="N,N", help="instead of 0,1,2 (tune: 0 only; 178m: one)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="ROW", help="this row; may be repeated"
    )
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="worker processes (default 1)")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="T",
        help="begin no run that may not end within T; with --state, stop at the edge of a round before T",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help=f"of 178m (default {run.rounds}): a trial")
    parser.add_argument(
        "--state",
        metavar="DIR",
        type=Path,
        help="of 178m: save a row every few minutes, and go on from there; 25 GB, until its line is there",
    )
    parser.add_argument("--results", default="results", metavar="DIR", type=Path, help="default results/")
    parser.add_argument(
        "--commit",
        metavar="ID",
        help="of this code, if neither git nor ISTHMUS_COMMIT knows it; commits: every "
        "compared row by this one too",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the missing runs and the time they may take"
    )
    parser.add_argument("--render", action="store_true", help="write docs/results.md and its plots")
    parser.add_argument(
        "--docs", default="docs", metavar="DIR", type=Path, help="where --render writes (docs/)"
    )
    parser.add_argument("--json", action="store_true", help="print the list or the outcome as JSON")
    parser.set_defaults(run=reproduce)


def reproduce(args: argparse.Namespace) -> int:
    """Run, list or render."""
    if FULLSIZE in args.tables:
        from experiments.fullsize_command import reproduce_fullsize

        return reproduce_fullsize(args) or render(args, pick_scale(DEFAULT_SCALE))
    if COMMITS in args.tables:
        return replay_commits(args) or render(args, pick_scale(DEFAULT_SCALE))
    if FLEET in args.tables:
        return run_fleet(args) or render(args, pick_scale(DEFAULT_SCALE))
    if args.rounds is not None or args.state is not None:
        option = "--rounds" if args.state is None else "--state"
        raise ConfigError(
            f"{option} is for {FULLSIZE}; a run of a table is short, and its scale has its rounds"
        )
    scale = pick_scale(args.scale or DEFAULT_SCALE)
    if not args.tables and not args.render:
        raise ConfigError(f"give a table: {', '.join(tables_of(scale))} or all; or --render")
    if args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}; it must be at least 1")
    if not scale.record and args.results.resolve() == Path("results").resolve():
        raise ConfigError(f'--scale {scale.name} is a trial; give --results another folder than "results"')
    status = 0
    if args.tables:
        tables = work.pick_tables(args.tables, scale)
        status = list_runs(args, scale, tables) if args.dry_run else run_tables(args, scale, tables)
    return render(args, scale) or status


def replay_commits(args: argparse.Namespace) -> int:
    """Run the rows that two commits have to be shown alike for, by both; every row by --commit as well."""
    from experiments.checks import compared_lines, of_two_commits
    from experiments.render import judge_together, read_book, read_template
    from experiments.same_code import run_replays, wanted

    if args.tables != [COMMITS] or args.scale or args.only or args.seeds:
        raise ConfigError(
            f"{COMMITS} runs what the page compares; give it --corpus, --jobs, --commit and --dry-run alone"
        )
    if args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}; it must be at least 1")
    book = read_book(args.results, pick_scale(DEFAULT_SCALE))
    judge_together(read_template(args.docs), book)
    books = [found for found in (book, book.regime) if found]
    pairs = [pair for each in books for lines in of_two_commits(each).values() for pair in lines]
    if args.commit:
        pairs += [(line, line | {"commit": args.commit}) for each in books for line in compared_lines(each)]
    replays = wanted(pairs, book.curves)
    if args.dry_run:
        for one in replays:
            print(f"{one.row:28} by {one.commit}")
        print(f"{len(replays)} runs are missing, about ten seconds each on one core")
        return 0
    if not replays:
        print("nothing is missing: every pair of commits that git has was run")
        return 0
    if not args.corpus:
        raise ConfigError(
            "--corpus is missing; give a folder made by `isthmus data prepare`, --vocab 512 is enough"
        )
    faults = run_replays(
        replays, args.corpus, args.results, args.jobs, lambda text: print(text, file=sys.stderr, flush=True)
    )
    return _told(args, COMMITS, len(replays), faults)


def run_fleet(args: argparse.Namespace) -> int:
    """Run the rows of the regime by real processes and by the simulator."""
    from experiments.checks import of_regime
    from experiments.real_fleet import can_be_real, run_twins
    from experiments.render import read_book
    from experiments.runner import find_commit

    if args.tables != [FLEET] or args.scale or args.seeds or args.jobs != 1:
        raise ConfigError(
            f"{FLEET} runs the regime's rows, one by one; give it --corpus, --only and --dry-run alone"
        )
    regime = read_book(args.results, pick_scale(DEFAULT_SCALE)).regime
    assert regime is not None
    rows = {line["row"]: line for line in of_regime(regime) if can_be_real(line)}
    for name in args.only:
        if name not in rows:
            raise ConfigError(f'--only is "{name}"; {FLEET} has {", ".join(rows)}')
    wanted = [
        line
        for name, line in rows.items()
        if line["digest"] not in regime.twins and (not args.only or name in args.only)
    ]
    if args.dry_run or not wanted:
        for line in wanted:
            print(line["row"])
        print(f"{len(wanted)} of {len(rows)} rows are missing, about two minutes each on two cores")
        return 0
    if not args.corpus:
        raise ConfigError(
            "--corpus is missing; give a folder made by `isthmus data prepare`, --vocab 512 is enough"
        )
    faults = run_twins(
        wanted,
        args.corpus,
        args.results,
        find_commit(args.commit),
        lambda text: print(text, file=sys.stderr, flush=True),
    )
    return _told(args, FLEET, len(wanted), faults)


def _told(args: argparse.Namespace, table: str, begun: int, faults: Sequence[str]) -> int:
    print(f"{begun - len(faults)} runs finished, lines in {args.results}/{table}.jsonl")
    if faults:
        raise RunError(f"{len(faults)} runs failed, the first: {faults[0]}")
    return 0


def render(args: argparse.Namespace, scale: Scale) -> int:
    if args.render:
        from experiments.render import write_page

        for path in write_page(args.results, args.docs, scale):
            print(path)
        if scale.name == DEFAULT_SCALE and args.results.resolve() == Path("results").resolve():
            from experiments.prices import write_prices

            print(write_prices(results.read(args.results, scale)))
    return 0


def seeds_of(text: str | None) -> list[int] | None:
    try:
        return sorted({int(part) for part in text.split(",")}) if text else None
    except ValueError:
        raise ConfigError(f'--seeds is "{text}"; write whole numbers as 0,1,2') from None


def list_runs(args: argparse.Namespace, scale: Scale, tables: Sequence) -> int:
    """What would be run. Without --corpus, lines of any corpus count."""
    lines = results.read(args.results, scale)
    runs = work.all_runs(tables, scale, args.corpus or "corpus/", lines, seeds_of(args.seeds), args.only)
    known = {line["corpus"].partition("/")[0] for line in lines}  # without the half that was scored
    corpora = [fingerprint(args.corpus)] if args.corpus else known
    todo = runs
    for corpus in corpora:
        todo = work.missing(todo, lines, corpus)
    together, measured = work.rate(scale, lines, args.jobs)
    seconds = work.predicted_seconds(todo, scale, lines, args.jobs)
    if args.json:
        entries = [
            {"row": r.row.name, "seed": r.seed, "table": r.table, "digest": r.digest, "tokens": r.tokens}
            for r in todo
        ]
        print(json.dumps({"runs": entries, "there": len(runs) - len(todo), "seconds": round(seconds)}))
        return 0
    for run in todo:
        print(f"{run.table:12} {run.row.name:28} seed {run.seed}  {run.tokens / 1e6:6.1f} Mtok  {run.digest}")
    assumed = f"and {scale.round_seconds:g} s an exchange, both assumed"
    graphs = len({run.signature for run in todo})
    rate = f"{together / 1e6:.2f} Mtok/s, {'as measured' if measured else assumed}"
    print(
        f"{len(todo)} of {len(runs)} runs are missing: {sum(run.tokens for run in todo) / 1e6:,.0f} Mtok, "
        f"{graphs} forwards to compile; about {seconds / 60:.1f} min at {rate}, "
        f"{args.jobs} worker{'s' * (args.jobs > 1)}"
    )
    parts = work.sittings(todo, scale, lines, args.jobs) if seconds > work.SITTING and scale.record else []
    for number, part in enumerate(parts, start=1):
        took = work.predicted_seconds(part, scale, lines, args.jobs)
        print(f"  sitting {number}: {len(part)} runs, {took:,.0f} s: {part[0]} to {part[-1]}")
    return 0


def fingerprint(corpus: str) -> str:
    from isthmus.data.corpus import open_corpus

    return open_corpus(corpus).sha256[:12]


def run_tables(args: argparse.Namespace, scale: Scale, tables: Sequence) -> int:
    """The tune tables first, where they are among them: the others take their learning rates from them."""
    import time

    from experiments.runner import Outcome, Runner, find_commit
    from isthmus.simulator.run import checked_corpus, pick_device

    if not args.corpus:
        raise ConfigError("--corpus is missing; give a folder made by `isthmus data prepare`")
    work.check_rows(args.only, tables)
    commit, seeds, began = find_commit(args.commit), seeds_of(args.seeds), time.monotonic()
    device = str(pick_device(args.device))
    total = Outcome()
    tune = [table for table in tables if table.name.startswith("tune")]
    phases = [tune, [table for table in tables if table not in tune]]
    for phase in filter(None, phases):
        lines = results.read(args.results, scale)
        names = {shown.row for table in phase for shown in table.shown}
        only = [name for name in args.only if name in names]
        if args.only and not only:
            continue
        runs = work.all_runs(phase, scale, args.corpus, lines, seeds, only)
        corpus = checked_corpus(runs[0].recipe)
        runs = work.settled(work.missing(runs, lines, corpus.sha256[:12]), scale, lines)
        left = None if args.minutes is None else args.minutes * 60 - (time.monotonic() - began)
        if runs:
            seconds = work.predicted_seconds(runs, scale, lines, args.jobs)
            print(f"{len(runs)} runs, about {seconds / 60:.1f} min on {device}", file=sys.stderr, flush=True)
            settings = {"device": device, "jobs": args.jobs, "commit": commit, "seconds": left}
            outcome = Runner(runs, scale, args.results, **settings).run()
            total.finished += outcome.finished
            total.faults += outcome.faults
            total.left += outcome.left
        if total.left and phase is phases[0]:
            break  # the learning rates of the others are not known yet
    return print_outcome(args, total)


def print_outcome(args: argparse.Namespace, total: "Outcome") -> int:
    left = [str(run) for run in total.left]
    if args.json:
        print(json.dumps({"finished": total.finished, "left": left, "faults": total.faults}))
    else:
        print(f"{total.finished} runs finished, {len(left)} left, lines in {args.results}/")
    if total.faults:
        raise RunError(f"{len(total.faults)} runs failed, the first: {total.faults[0]}")
    return 0
