"""Start or resume a run from Python. torch is loaded when a run starts, not before."""

import math
import os
from collections.abc import Sequence
from typing import Any

from isthmus.config import Recipe, dump_recipe, load_recipe, parse_recipe
from isthmus.config.checks import choice, short
from isthmus.config.toml import Overrides
from isthmus.errors import ConfigError
from isthmus.planner.devices import check_device
from isthmus.planner.plan import Forecast, predict
from isthmus.runlog import REAL, RunDir
from isthmus.runlog.hooks import OnRound
from isthmus.runlog.results import Results

AnyRecipe = Recipe | str | os.PathLike[str]  # a recipe, its file, or the name of one that ships
AnyPath = str | os.PathLike[str]


def as_recipe(recipe: AnyRecipe, overrides: Overrides = ()) -> Recipe:
    """Return the checked recipe, in whichever form it was given."""
    if not isinstance(recipe, Recipe):
        return load_recipe(os.fspath(recipe), overrides)
    return parse_recipe(dump_recipe(recipe), overrides) if overrides else recipe


def simulate(
    recipe: AnyRecipe,
    run_dir: AnyPath | None = None,
    *,
    overrides: Overrides = (),
    device: str = "auto",
    mode: str = "auto",
    compiled: bool | None = None,
    quiet: bool = False,
    on_round: OnRound | None = None,
    log: str | Sequence[str] = (),
) -> Results:
    """Train the whole fleet of a recipe on one device.

    `recipe`: a Recipe, the path of one, or the name of one that ships. `run_dir`: the folder of the run; by
    default the first free runs/NAME. `overrides`: as --set. `on_round(row)` is called after every round,
    first with row 0, the model before training; if it returns False or raises, the run stops at the end of
    that round and can be resumed. `log`: "wandb" sends every round to W&B.
    """
    choice("mode", mode, ("auto", "stacked", "turns"))
    _check_call(device, on_round)
    checked = _checked(recipe, overrides)
    from isthmus.simulator.run import simulate as start

    return start(
        checked,
        _path(run_dir),
        device=device,
        mode=mode,
        compiled=compiled,
        quiet=quiet,
        on_round=on_round,
        log=_names(log),
    )


def train(
    recipe: AnyRecipe,
    run_dir: AnyPath | None = None,
    *,
    overrides: Overrides = (),
    device: str = "auto",
    quiet: bool = False,
    on_round: OnRound | None = None,
    log: str | Sequence[str] = (),
    **options: Any,
) -> Results:
    """Run the whole fleet of a recipe as real processes on this machine.

    Like `simulate`, but `on_round` gets a row once its held-out loss is known, which may be rounds later. It
    is called in this thread while the replicas train on; if it stops the run, they leave at the end of their
    current round. `options`: further fields of every JoinConfig.
    """
    _check_call(device, on_round)
    checked = _checked(recipe, overrides)
    from isthmus.runtime.versions import check_torch

    check_torch()
    from isthmus.runtime.workers import prepare

    prepare()  # it imports torch while we do
    from isthmus.runtime.train import train as start

    return start(
        checked,
        _path(run_dir),
        device=device,
        quiet=quiet,
        on_round=on_round,
        log=_names(log),
        **options,
    )


def resume(
    run_dir: AnyPath,
    *,
    device: str = "auto",
    quiet: bool = False,
    on_round: OnRound | None = None,
    log: str | Sequence[str] = (),
) -> Results:
    """Resume a stopped or killed run, simulated or real, as if it had not stopped."""
    run = RunDir.open(os.fspath(run_dir))
    if run.about.get("mode") == REAL:
        from isthmus.runtime.train import resume as go_on
    else:
        from isthmus.simulator.run import resume as go_on
    return go_on(run.path, device=device, quiet=quiet, on_round=on_round, log=_names(log))


def plan(
    recipe: AnyRecipe, *, overrides: Overrides = (), tflops: float = 0.0, memory_gb: float = 0.0
) -> Forecast:
    """Forecast a run on its fleet and links: seconds, bytes, memory. Loads no torch.

    `tflops` and `memory_gb` apply to machines for which the recipe states none.
    """
    for name, value in (("tflops", tflops), ("memory_gb", memory_gb)):
        if not 0 <= value < math.inf:  # also refuses NaN
            raise ConfigError(f"{name} is {value}; it is 0 (not known) or more")
    return predict(as_recipe(recipe, overrides), tflops, memory_gb=memory_gb)


def _checked(recipe: AnyRecipe, overrides: Overrides) -> Recipe:
    """Return the checked recipe; a missing corpus raises before torch is loaded."""
    from isthmus.data.corpus import check_here

    checked = as_recipe(recipe, overrides)
    check_here(checked.data.corpus)
    return checked


def _check_call(device: object, on_round: object) -> None:
    """Check argument types before anything starts, for callers without a type checker."""
    check_device(device)
    if on_round is not None and not callable(on_round):
        raise ConfigError(f"on_round is {short(on_round)}; it is a function that takes a row")


def _names(log: str | Sequence[str]) -> list[str]:
    return [log] if isinstance(log, str) else list(log)


def _path(given: AnyPath | None) -> str | None:
    return None if given is None else os.fspath(given)
