"""`isthmus reproduce larger`: one mixed fleet of the 178M model on one GPU."""

import argparse
import json
from pathlib import Path

from experiments import larger
from experiments.lines import LOSSES, digest, identity
from experiments.tables import Scale
from isthmus.config import Recipe
from isthmus.errors import ConfigError


def reproduce_larger(args: argparse.Namespace) -> int:
    """Run it, or print its plan."""
    scale = larger.pick_larger(args.scale)
    recipe = larger.larger_recipe(scale, args.corpus or "corpus/", _seed(args.seeds), _rounds(args, scale))
    if args.tables != ["larger"]:
        others = " ".join(name for name in args.tables if name != "larger")
        raise ConfigError(f"larger has the device to itself; give {others} in a command of its own")
    if args.only or args.jobs != 1:
        raise ConfigError("--only and --jobs are for tables; larger is one run in one process")
    if args.dry_run:
        return _print_plan(args, scale, recipe)
    if not scale.record and args.results.resolve() == Path("results").resolve():
        raise ConfigError('--scale toy is a trial; give --results another folder than "results"')
    if not args.corpus:
        raise ConfigError("--corpus is missing; give a folder made by `isthmus data prepare`")
    return _run(args, scale, recipe)


def _seed(text: str | None) -> int:
    try:
        return int(text or 0)
    except ValueError:
        raise ConfigError(f'--seeds is "{text}"; larger takes one whole number') from None


def _rounds(args: argparse.Namespace, scale: Scale) -> int | None:
    if args.rounds is not None and args.minutes is not None:
        raise ConfigError("--rounds and --minutes both say how long larger is; give one of them")
    return args.rounds if args.minutes is None else larger.rounds_within(scale, args.minutes)


def _print_plan(args: argparse.Namespace, scale: Scale, recipe: Recipe) -> int:
    if args.json:
        facts = {
            "digest": digest(recipe),
            "rounds": recipe.outer.rounds,
            "tokens": recipe.outer.rounds * recipe.round_tokens,
            "seconds": round(larger.predicted_seconds(scale, recipe)),
            "predicted_bytes": larger.predicted_plan(recipe).predicted_bytes,
        }
        print(json.dumps(facts))
    else:
        print(larger.describe(scale, recipe))
    return 0


def _run(args: argparse.Namespace, scale: Scale, recipe: Recipe) -> int:
    from experiments.larger_run import run_larger
    from experiments.runner import find_commit
    from isthmus.simulator.run import checked_corpus, pick_device

    commit, device = find_commit(args.commit), pick_device(args.device)
    corpus, file = checked_corpus(recipe), args.results / larger.FILE
    there = {identity(line): line for line in larger.read_larger(args.results, scale)}
    line = there.get((recipe.seed, digest(recipe), corpus.sha256[:12]))
    word = "is there already in"
    if line is None:
        line, word = run_larger(scale.name, recipe, corpus, device, commit, args.results), "is now in"
    if args.json:
        long = ("curve", "train", "recipe")
        print(json.dumps({key: value for key, value in line.items() if key not in long}))
    else:
        losses = ", ".join(f"{name.removeprefix('loss_')} {line[name]:.4f}" for name in LOSSES)
        print(
            f"{recipe.name}, seed {recipe.seed}, {word} {file}: {losses}; "
            f"{line['tokens_per_second']:,} tokens/s, {line['peak_bytes'] / 2**30:.2f} GiB of "
            f"{line['predicted_bytes'] / 2**30:.2f} predicted"
        )
    return 0
