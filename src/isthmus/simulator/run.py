"""From a recipe to a finished run directory: `simulate`, and `resume` after a stop or a kill."""

import contextlib
import datetime
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypedDict, cast

import torch

from isthmus import __version__
from isthmus.config import Recipe
from isthmus.data.corpus import Corpus
from isthmus.data.fingerprint import check_text
from isthmus.errors import ConfigError
from isthmus.memory import machine_memory
from isthmus.model import checkpoint
from isthmus.model.initial import checked_first, first_params, start_digest
from isthmus.page.ending import Ending, ending
from isthmus.page.loggers import check_loggers, following
from isthmus.planner.auto import Pick, Untied, resolve
from isthmus.planner.fit import MemoryPick
from isthmus.planner.memory import SimulatorPlan, plan_simulator
from isthmus.planner.room import check_disk, simulator_room
from isthmus.replica.ahead import announce
from isthmus.replica.meter import peak_bytes
from isthmus.replica.picks import (
    checked_corpus,
    held_out_note,
    pick_device,
    pick_precision,
    pick_threads,
    precision_note,
    with_pin,
)
from isthmus.runlog import REAL, About, RunDir, next_run_dir
from isthmus.runlog.hooks import OnRound, RoundHooks
from isthmus.runlog.live import View
from isthmus.runlog.results import Results
from isthmus.simulator.exchange import LocalExchange
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.simulator.rounds import Saver, simulate_rounds

GUESSED_BYTES = 8 * 2**30  # of memory, if the system does not report it


class Setup(TypedDict):
    """The part of about.json with which a resumed simulation continues unchanged."""

    device: str
    device_type: str
    precision: str
    compiled: bool
    group: int  # replicas stacked together
    pieces: int  # grad_accum_steps
    parked: bool


def simulate(
    recipe: Recipe,
    run_dir: str | Path | None = None,
    *,
    device: str = "auto",
    mode: str = "auto",
    compiled: bool | None = None,
    quiet: bool = False,
    on_round: OnRound | None = None,
    log: Sequence[str] = (),
) -> Results:
    """Train the whole fleet of a recipe on one device; the default run_dir is the first free runs/NAME.
    `on_round` and the loggers of `log` get every row as its round ends."""
    check_loggers(log)
    recipe, picks = resolve(recipe)
    where, precision = pick_device(device), pick_precision(recipe, pick_device(device))
    corpus = checked_corpus(recipe)
    check_text(corpus, recipe.data.corpus)
    recipe = with_pin(recipe, corpus)
    first = checked_first(recipe, corpus)
    compiled = where.type == "cuda" if compiled is None else compiled
    plan = pick_plan(recipe, where, precision, compiled, mode)
    about = about_run(recipe, picks, corpus, first, where, precision) | About(
        device_type=where.type,
        compiled=compiled,
        mode="stacked" if plan.group == recipe.num_replicas else "in turns",
        group=plan.group,
        pieces=plan.grad_accum_steps,
        parked=plan.parked,
        predicted_bytes=plan.predicted_bytes,
    )
    path = Path(run_dir or next_run_dir("runs", recipe.name))
    if warning := check_disk(path, simulator_room(recipe, precision), "this run"):
        print(f"isthmus: {warning}", file=sys.stderr)
    run = RunDir.create(path, recipe, about)
    after = following(run, on_round, log)
    return _run(run, recipe, corpus, where, plan, quiet, after, done=0, state=None, first=first)


def about_run(
    recipe: Recipe,
    picks: Sequence[Untied | Pick | MemoryPick],
    corpus: Corpus,
    first: Mapping[str, torch.Tensor] | None,
    device: torch.device,
    precision: str,
) -> About:
    """The fields of about.json for every run, simulated or real, when it starts."""
    return About(
        isthmus=__version__,
        torch=torch.__version__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        precision=precision,
        parameters=recipe.model.num_parameters,
        auto=[*(pick.reason for pick in picks), *filter(None, [precision_note(recipe, device)])],
        corpus=recipe.data.corpus,
        corpus_sha256=corpus.sha256,
        tokenizer_sha256=corpus.tokenizer_sha256,
        start_sha256=start_digest(first) if first else "",
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        status="running",
    )


def resume(
    run_dir: str | Path,
    *,
    device: str = "auto",
    quiet: bool = False,
    on_round: OnRound | None = None,
    log: Sequence[str] = (),
) -> Results:
    """Continue from the last saved round, exactly as the run would have continued without a stop."""
    check_loggers(log)
    run = RunDir.open(run_dir)
    recipe, about = run.recipe, run.about
    if about.get("mode") == REAL:
        raise ConfigError(
            f"{run.path} is a fleet of real processes; go on with `isthmus train --resume {run.path}`"
        )
    if missing := sorted(Setup.__required_keys__ - about.keys()):
        raise ConfigError(
            f"{run.path}/about.json does not say how the run was simulated ({missing[0]}); start a new run"
        )
    setup = cast(Setup, about)
    where = pick_device(setup["device_type"] if device == "auto" else device)
    corpus = checked_corpus(recipe)
    if corpus.tokenizer_sha256 != about.get("tokenizer_sha256"):
        raise ConfigError(
            f"the corpus {recipe.data.corpus} has another tokenizer than when {run.path} began; "
            "put the old one back"
        )
    if stated := about.get("corpus_sha256"):  # older runs lack it
        check_text(corpus, recipe.data.corpus, stated)
    plan = SimulatorPlan(setup["group"], setup["pieces"], setup["parked"], about.get("predicted_bytes", 0))
    found = checkpoint.load(run.state_path)
    done, state = found or (0, None)
    run.truncate(done if found else -1)
    # The first weights are needed if no state was saved, and if T_perp stays at its first value.
    needed = recipe.model.start and (state is None or not recipe.subspace.adaptation)
    first = first_params(recipe, about.get("start_sha256")) if needed else None
    run.update_about(status="running", error=None)
    return _run(run, recipe, corpus, where, plan, quiet, following(run, on_round, log), done, state, first)


def _restore(fleet: SimulatedFleet, state: dict, done: int, run: RunDir) -> None:
    try:
        fleet.restore(state, done)
    except torch.OutOfMemoryError:
        raise
    except (KeyError, RuntimeError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(
            f"the saved state in {run.state_path} is not that of its recipe ({words:.120}); start a new run"
        ) from None


def _run(
    run: RunDir,
    recipe: Recipe,
    corpus: Corpus,
    device: torch.device,
    plan: SimulatorPlan,
    quiet: bool,
    after: AbstractContextManager[RoundHooks],
    done: int,
    state: dict | None,
    first: Mapping[str, torch.Tensor] | None,
) -> Results:
    about, setup = run.about, cast(Setup, run.about)
    threads = pick_threads()
    go_on = f"go on with: isthmus simulate --resume {shlex.quote(str(run.path))}"
    if not quiet:
        announce(recipe, device, done)
    with ending(run, go_on) as end, _measured(device, end):
        fleet = SimulatedFleet(recipe, corpus, device, setup["precision"], plan, setup["compiled"], first)
        if state:
            _restore(fleet, state, done, run)
        with (
            after as hooks,
            View(recipe, done, recipe.outer.rounds, rows=run.rows(), quiet=quiet) as view,
        ):
            view.hooks = hooks
            how = plan.describe(recipe.num_replicas)
            cpu = f" with {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else ""
            view.note(f"{run.path}: {how} on {setup['device']}{cpu}, {setup['precision']}")
            for reason in about.get("auto", ()):
                view.note(reason)
            if note := held_out_note(recipe, corpus):
                view.note(note)
            passes = fleet.batches.passes(recipe.num_inner_steps)
            if passes > 4:
                view.note(f"the run reads its text {passes:.1f} times over; more text would serve it better")
            whole = simulate_rounds(recipe, fleet, LocalExchange(recipe), run, view, done, Saver(run, fleet))
        if whole:
            checkpoint.save_tensors(run.model_path, fleet.anchor)
        end.status = "finished" if whole else "interrupted"
    hooks.raise_error()
    return Results(run.path, run.rows())


@contextlib.contextmanager
def _measured(device: torch.device, end: Ending) -> Iterator[None]:
    """Record the memory used, however the run ends."""
    try:
        yield
    finally:
        end.facts["peak_bytes"] = peak_bytes(device)
        if device.type == "cuda":  # including what its allocator keeps between tensors
            end.facts["reserved_bytes"] = torch.cuda.max_memory_reserved(device)


def pick_plan(
    recipe: Recipe, device: torch.device, precision: str, compiled: bool, mode: str = "auto"
) -> SimulatorPlan:
    """How the simulator fits this fleet into the device's free memory."""
    if device.type == "cuda":
        available = int(torch.cuda.mem_get_info(device)[0] * 0.92)
    else:
        found = machine_memory()
        available = found.available_bytes if found else GUESSED_BYTES
    plan = plan_simulator(
        recipe, precision, available, compiled=compiled, can_park=device.type == "cuda", mode=mode
    )
    if plan.predicted_bytes > available:
        print(
            f"isthmus: even {plan.describe(recipe.num_replicas)} are needed, "
            f"{available / 2**30:.1f} GiB are free; trying all the same",
            file=sys.stderr,
        )
    return plan
