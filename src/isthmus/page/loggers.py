"""Send rounds to W&B (`--log wandb`), through its own package and settings."""

import contextlib
import importlib.util
import os
import queue
import re
import secrets
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

from isthmus.config import Recipe
from isthmus.config.checks import choice
from isthmus.config.gone import gone_option
from isthmus.config.toml import as_tables
from isthmus.errors import ConfigError
from isthmus.page.tensorboard import Follower, scalars
from isthmus.runlog import Row, RunDir
from isthmus.runlog.hooks import OnRound, RoundHooks

PROJECT = "isthmus"  # in W&B, unless WANDB_PROJECT names another
CLOSE_SECONDS = 60.0  # how long a run's end waits for the server
RUN_NAME = re.compile("[A-Za-z0-9_-]{1,64}")  # W&B's id of a run


def check_loggers(names: Sequence[str]) -> None:
    """Check that the loggers are known and installed, before anything starts."""
    for name in names:
        if line := gone_option(f"--log {name}"):
            raise ConfigError(line)
        choice("--log", name, ("wandb",))
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is not the package
            raise ConfigError(f"--log {name} needs its package: pip install {name}, or isthmus[{name}]")


class Wandb(threading.Thread):
    """One W&B run, fed from its own thread: a slow server delays no round, and its faults end only the
    logging. The user controls W&B's settings, such as WANDB_PROJECT and WANDB_MODE=offline."""

    def __init__(self, title: str, recipe: Recipe, known: str = "", folder: str | None = None) -> None:
        """Start a W&B run, or resume the one with the id `known`; `folder`: for its files."""
        super().__init__(daemon=True, name="wandb")
        self.run_id = known or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        try:
            import wandb  # pyright: ignore[reportMissingImports] - an extra

            # Capturing stdout would replace the live view.
            quiet = wandb.Settings(console="off", silent=True)
            self.wandb = wandb.init(
                id=self.run_id,
                resume="allow",
                name=title,
                dir=folder,
                config=as_tables(recipe),
                settings=quiet,
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
            )
            # W&B's own step cannot go back, as a resumed run's does, so log ours as an ordinary value.
            self.wandb.define_metric("round")
            self.wandb.define_metric("*", step_metric="round")
        except Exception as error:  # the package may raise anything, over its settings or its server
            raise ConfigError(f"--log wandb: {_first_line(error)}") from None
        self.status = ""
        self.rounds: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue()
        self.start()

    def __call__(self, row: Row) -> None:
        self.put(row.round, dict(scalars(row)))

    def put(self, round: int, values: Mapping[str, float]) -> None:
        self.rounds.put((round, values))

    def run(self) -> None:
        try:
            while (given := self.rounds.get()) is not None:
                self.wandb.log({"round": given[0], **given[1]})
            self.wandb.finish(exit_code=1 if self.status == "failed" else 0)
        except Exception as error:
            self._say(f"{_first_line(error)}; the run goes on without it")

    def close(self, status: str) -> None:
        self.status = status
        self.rounds.put(None)
        self.join(CLOSE_SECONDS)
        if self.is_alive():
            self._say(f"its server has not taken everything in {CLOSE_SECONDS:.0f} s; it is not waited for")

    def _say(self, text: str) -> None:
        print(f"isthmus: --log wandb: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def following(run: RunDir, on_round: OnRound | None, log: Sequence[str]) -> Iterator[RoundHooks]:
    """Yield the hooks that get a run's rounds, and report the run's outcome to W&B at the end."""
    logger: Wandb | None = None
    status = "failed"
    try:
        logger = _open(run) if log else None
        yield RoundHooks([hook for hook in (on_round, logger) if hook])
        rows = run.rows() if logger else []
        done = bool(rows) and rows[-1].round == run.recipe.outer.rounds
        status = "finished" if done else "interrupted"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        if logger:
            logger.close(status)


def _open(run: RunDir) -> Wandb:
    """Open a W&B run; a resumed run continues its own."""
    found = run.about.get("wandb_run")
    known = found if isinstance(found, str) and RUN_NAME.fullmatch(found) else ""
    logger = Wandb(run.path.resolve().name, run.recipe, known, str(run.path))
    run.update_about(wandb_run=logger.run_id)
    for row in [] if known else run.rows():  # the run was not logged before
        if row.loss_full is not None or not run.recipe.is_scored(row.round):
            logger(row)
    return logger


class LoggedRows(Follower):
    """Log a watched run's rounds, also from a bucket that others train in."""

    def __init__(self, where: str, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.logger = Wandb(where.rstrip("/").rpartition("/")[2] or recipe.name, recipe)

    def write(self, at: float, round: int, values: Mapping[str, float]) -> None:
        self.logger.put(round, values)

    def close(self) -> None:
        self.logger.close("finished" if self.done >= self.recipe.outer.rounds else "interrupted")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
