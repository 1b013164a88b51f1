"""`isthmus extend`: add rounds to a run."""

import argparse
import shlex
from dataclasses import replace

from isthmus.cli.arguments import add_owner
from isthmus.config import Recipe
from isthmus.errors import ConfigError
from isthmus.runlog import REAL, RunDir

EPILOG = """examples:
  isthmus extend s3://my-runs/first --rounds 40
  isthmus extend runs/demo --rounds 40
"""


def register(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "extend",
        help="let a run go on for more rounds",
        description="Add rounds to a run, be it finished or not. The learning rate keeps its schedule: after "
        "its end the further rounds run at inner.final_lr. Needs the owner's key. Then start the replicas "
        "again: `isthmus join`, or `isthmus train --resume` for a run directory. A simulated run needs no "
        "key, and goes on by `isthmus simulate --resume`.",
        epilog=EPILOG,
    )
    parser.add_argument("url", help="the run's bucket, or a run directory")
    parser.add_argument("--rounds", type=int, required=True, help="how many more")
    add_owner(parser)
    parser.set_defaults(run=extend)


def extend(args: argparse.Namespace) -> int:
    from isthmus.protocol.access import is_run_dir, open_as_owner
    from isthmus.protocol.membership import Changes

    if args.rounds < 1:
        raise ConfigError(f"--rounds is {args.rounds}; it says how many more, 1 at least")
    folder = RunDir.open(args.url) if is_run_dir(args.url) else None
    if folder and folder.about.get("mode") != REAL:
        return extend_simulated(folder, args.rounds)
    ledger, owner = open_as_owner(args.url, args.key)
    recipe, epoch = ledger.run.recipe, ledger.epoch
    if folder and folder.recipe.outer.rounds < recipe.outer.rounds:
        recipe = folder.recipe  # after a killed `extend` the bucket is ahead of the folder
    else:
        epoch = ledger.order(owner, Changes(rounds=recipe.outer.rounds + args.rounds))
    longer = epoch.run.recipe
    if folder:
        folder.continue_with(replace(folder.recipe, outer=longer.outer, inner=longer.inner))
    print(f"{_goes_on(recipe, longer)} (epoch {epoch.number}). {_schedule(longer)}")
    how = f"isthmus train --resume {args.url}" if folder else f"isthmus join {args.url} --replica NAME"
    print(f"Start the replicas that have ended again: {how}")
    return 0


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
