"""`isthmus reproduce 178m`: three fleets of the 178M model, one after another on one GPU."""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments import fullsize
from experiments.fullsize import NAME
from experiments.lines import LOSSES, Line, digest
from experiments.tables import Scale
from isthmus.config import Recipe
from isthmus.errors import ConfigError

LONG = ("curve", "train", "recipe")


def reproduce_fullsize(args: argparse.Namespace) -> int:
    """Run the rows that have no line, or print their plans."""
    scale = fullsize.pick_fullsize(args.scale)
    recipes = {
        name: fullsize.recipe_at(scale, name, args.corpus or "corpus/", _seed(args.seeds), args.rounds)
        for name in _rows(args, scale)
    }
    if args.jobs != 1:
        raise ConfigError(f"--jobs is for tables; a row of {NAME} has the device to itself")
    if args.dry_run:
        return _print_plans(args, scale, recipes)
    if not scale.record and args.results.resolve() == Path("results").resolve():
        raise ConfigError('--scale toy is a trial; give --results another folder than "results"')
    if not args.corpus:
        raise ConfigError("--corpus is missing; give a folder made by `isthmus data prepare`")
    return _run(args, scale, recipes)


def _rows(args: argparse.Namespace, scale: Scale) -> list[str]:
    if args.tables != [NAME]:
        others = " ".join(name for name in args.tables if name != NAME)
        raise ConfigError(f"{NAME} has the device to itself; give {others} in a command of its own")
    names = list(fullsize.rows_at(scale))
    for name in args.only:
        if name not in names:
            raise ConfigError(f'--only is "{name}"; {NAME} has {", ".join(names)}')
    return [name for name in names if not args.only or name in args.only]


def _seed(text: str | None) -> int:
    try:
        return int(text or 0)
    except ValueError:
        raise ConfigError(f'--seeds is "{text}"; {NAME} takes one whole number') from None


def _print_plans(args: argparse.Namespace, scale: Scale, recipes: dict[str, Recipe]) -> int:
    lines = fullsize.read_fullsize(args.results, scale)
    there = {line["digest"] for line in lines if line["seed"] == _seed(args.seeds)}
    for name, recipe in recipes.items():
        tokens = recipe.outer.rounds * recipe.round_tokens
        facts = {
            "row": name,
            "digest": digest(recipe),
            "there": digest(recipe) in there,
            "rounds": recipe.outer.rounds,
            "tokens": tokens,
            "seconds": round(fullsize.predicted_seconds(scale, tokens, lines)),
            "predicted_bytes": fullsize.predicted_plan(recipe).predicted_bytes,
        }
        if args.json:
            print(json.dumps(facts))
        else:
            note = f" (there already: {digest(recipe)})" * facts["there"]
            print(fullsize.describe(scale, recipe, lines) + note)
    return 0


@dataclass
class Outcome:
    """What came of the rows."""

    lines: dict[str, tuple[str, Line]] = field(default_factory=dict)  # row -> (how it comes, its line)
    left: dict[str, str] = field(default_factory=dict)  # row -> why it is not there


def _run(args: argparse.Namespace, scale: Scale, recipes: dict[str, Recipe]) -> int:
    from experiments.fullsize_run import Task, run_row
    from experiments.runner import find_commit
    from isthmus.simulator.run import checked_corpus, pick_device

    began = time.monotonic()
    deadline = None if args.minutes is None else began + 60 * args.minutes
    commit, device = find_commit(args.commit), pick_device(args.device)
    corpus, outcome = checked_corpus(next(iter(recipes.values()))), Outcome()
    for name, recipe in recipes.items():
        lines = fullsize.read_fullsize(args.results, scale)
        if line := fullsize.line_of(lines, recipe, corpus.sha256[:12]):
            outcome.lines[name] = "is there already in", line
            continue
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and (words := _too_long(scale, recipe, lines, left, args.state)):
            outcome.left[name] = words
            continue
        task = Task(name, scale.name, recipe, corpus, device, commit)
        line = run_row(task, args.results, args.state, deadline)
        if line is None:
            outcome.left[name] = f"stopped in time; the same command goes on from {args.state}"
        else:
            outcome.lines[name] = "is now in", line
    return _print_outcome(args, outcome)


def _too_long(scale: Scale, recipe: Recipe, lines: list[Line], left: float, state: Path | None) -> str:
    """Why this row is not begun with so many seconds left, or nothing. One that can go on later needs time
    for a few rounds only."""
    rounds = min(3, recipe.outer.rounds) if state else recipe.outer.rounds
    needed = fullsize.predicted_seconds(scale, rounds * recipe.round_tokens, lines)
    if needed <= left:
        return ""
    what = "a few rounds of it take" if state else "it takes"
    return f"not begun: {what} about {needed:.0f} s, and {max(0.0, left):.0f} s are left"


def _print_outcome(args: argparse.Namespace, outcome: Outcome) -> int:
    if args.json:
        rows = {
            name: {key: value for key, value in line.items() if key not in LONG}
            for name, (_, line) in outcome.lines.items()
        }
        print(json.dumps({"rows": rows, "left": outcome.left}))
        return 0
    for name, (word, line) in outcome.lines.items():
        print(f"{name}, seed {line['seed']}, {word} {args.results / fullsize.FILE}: {_figures(line)}")
    for name, why in outcome.left.items():
        print(f"{name}: {why}", file=sys.stderr)
    return 0


def _figures(line: dict[str, Any]) -> str:
    losses = ", ".join(f"{name.removeprefix('loss_')} {line[name]:.4f}" for name in LOSSES)
    return (
        f"{losses}; {line['tokens_per_second']:,} tokens/s, {line['peak_bytes'] / 2**30:.2f} GiB of "
        f"{line['predicted_bytes'] / 2**30:.2f} predicted"
    )
