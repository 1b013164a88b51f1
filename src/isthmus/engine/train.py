"""`isthmus train`: every replica of a recipe as real processes on this machine, followed from the bucket."""

import contextlib
import datetime
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from isthmus import __version__
from isthmus.comm.ledger import Ledger
from isthmus.comm.store import open_store
from isthmus.config import Recipe
from isthmus.dashboard.live import open_view
from isthmus.dashboard.report import write_report
from isthmus.engine import checkpoint
from isthmus.engine.first import checked_first, start_digest
from isthmus.engine.fleet import Machines, check_trainable, create
from isthmus.engine.follower import Follower
from isthmus.engine.launcher import STALL_SECONDS
from isthmus.engine.start import Results, checked_corpus, pick_device, pick_precision
from isthmus.errors import ConfigError
from isthmus.planner.auto import resolve
from isthmus.runlog import RunDir, next_run_dir


def train(
    recipe: Recipe,
    run_dir: str | Path | None = None,
    *,
    device: str = "auto",
    quiet: bool = False,
    join_options: Sequence[str] = (),
    apart: Collection[str] = (),
    stall_seconds: float = STALL_SECONDS,
) -> Results:
    """Start the fleet, tend it, write down its rounds; the run directory holds bucket, keys and logs.

    `join_options` go to every `isthmus join`; `apart` and `stall_seconds` as in `Machines`.
    """
    recipe, picks = resolve(recipe)
    check_trainable(recipe)
    where = pick_device(device)
    corpus = checked_corpus(recipe)
    first = checked_first(recipe, corpus)
    about = {
        "isthmus": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "precision": pick_precision(recipe, where),
        "mode": "real processes",
        "parameters": recipe.model.num_parameters,
        "auto": [pick.reason for pick in picks],
        "corpus": recipe.data.corpus,
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "start_sha256": start_digest(first) if first else "",
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "status": "running",
    }
    run = RunDir.create(run_dir or next_run_dir("runs", recipe.name), recipe, about)
    url = recipe.bucket.url or str((run.path / "bucket").resolve())
    status, error = "failed", None
    machines = Machines(
        recipe,
        url,
        run.path.resolve(),
        ["--device", device, *join_options],
        apart=apart,
        stall_seconds=stall_seconds,
    )
    try:
        store_run = create(recipe, url, run.path / "keys", first=first)
        torch.set_num_threads(1)  # the replicas need the cores more
        machines.start_all()
        with open_view(recipe, 0, recipe.outer.rounds, quiet=quiet) as view:
            workers = sum(max(m.config.stages, m.config.processes) for m in recipe.fleet())
            view.note(f"{run.path}: {recipe.num_replicas} replicas, {workers} processes, bucket {url}")
            for pick in picks:
                view.note(pick.reason)
            follower = Follower(Ledger(open_store(url), store_run), corpus, run, view)
            asked = _follow(follower, machines, view)
            follower.farewell(machines.all_ended)
        if not asked:
            machines.finish()
        # Asked to leave from elsewhere, all of them may be gone before the last round.
        status = "finished" if follower.replay.round == recipe.outer.rounds else "interrupted"
        checkpoint.save_tensors(run.model_path, follower.replay.anchor)
    except BaseException as fault:
        error = f"{type(fault).__name__}: {fault}".splitlines()[0]
        raise
    finally:
        machines.stop(5.0)
        run.update_about(status=status, error=error, restarts=machines.restarts)
        with contextlib.suppress(OSError, ConfigError):
            write_report(run.path)
    return Results(run.path, run.rows())


def _follow(follower: Follower, machines: Machines, view) -> bool:
    """Until the last round; True when Ctrl-C asked the fleet to leave before it."""
    asked = False
    tended = time.monotonic()

    def stop() -> bool:
        nonlocal tended
        if time.monotonic() - tended > 1:
            machines.tend()
            tended = time.monotonic()
        return machines.all_left()

    while True:
        try:
            follower.follow(stop)
            return asked
        except KeyboardInterrupt:
            if asked:
                raise
            asked = True
            view.note("leaving at the end of this round; Ctrl-C again stops now")
            machines.leave()
