"""Rounds to W&B and MLflow (`--log wandb`), each through its own package and as its own settings say."""

import contextlib
import importlib.util
import os
import queue
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from isthmus.config import Recipe
from isthmus.config.checks import choice
from isthmus.config.toml import as_tables
from isthmus.errors import ConfigError
from isthmus.page.compare import flatten
from isthmus.page.tensorboard import Follower, scalars
from isthmus.runlog import Row, RunDir
from isthmus.runlog.hooks import OnRound, RoundHooks

PROJECT = "isthmus"  # the name of W&B's project and MLflow's experiment, where the user's settings have none
MLFLOW_ENDINGS = {"finished": "FINISHED", "interrupted": "KILLED"}
MOST_CHARACTERS = 500  # of a parameter in MLflow
CLOSE_SECONDS = 60.0  # that the end of a run waits for a server
KNOWN = re.compile(
    "[A-Za-z0-9_-]{1,64}"
)  # what a service calls a run; the file that says so may be a stranger's


@dataclass(frozen=True, slots=True)
class Subject:
    """The run that is logged. `known`: what the service calls it already; `folder`: for the files of it."""

    name: str
    recipe: Recipe
    known: str = ""
    folder: str | None = None


class Logger(Protocol):
    """Where the values of a round go. `status` is as in about.json: finished, interrupted or failed."""

    run: str  # what the service calls this run: a resumed run goes on with it

    def add(self, round: int, values: Mapping[str, float]) -> None: ...

    def close(self, status: str) -> None: ...


class Wandb:
    """One run in W&B. WANDB_PROJECT, WANDB_MODE=offline and the rest of its settings are the user's."""

    def __init__(self, subject: Subject) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        self.run = subject.known or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        # Its capture of stdout would take the live view's place.
        quiet = wandb.Settings(console="off", silent=True)
        self.wandb = wandb.init(
            id=self.run,
            resume="allow",
            name=subject.name,
            dir=subject.folder,
            config=as_tables(subject.recipe),
            settings=quiet,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
        )
        # Its own step may not go back, as that of a resumed run does; ours is a value like the others.
        self.wandb.define_metric("round")
        self.wandb.define_metric("*", step_metric="round")

    def add(self, round: int, values: Mapping[str, float]) -> None:
        self.wandb.log({"round": round, **values})

    def close(self, status: str) -> None:
        self.wandb.finish(exit_code=1 if status == "failed" else 0)


class Mlflow:
    """One run in MLflow; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where."""

    def __init__(self, subject: Subject) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports] - an extra

        self.client, self.run = MlflowClient(), subject.known or os.environ.get("MLFLOW_RUN_ID", "")
        if self.run:
            self.client.update_run(self.run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        self.run = self.client.create_run(experiment, run_name=subject.name).info.run_id
        for key, value in flatten(subject.recipe).items():
            self.client.log_param(self.run, key, value[:MOST_CHARACTERS])

    def add(self, round: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self.client.log_metric(self.run, key, value, step=round)

    def close(self, status: str) -> None:
        self.client.set_terminated(self.run, MLFLOW_ENDINGS.get(status, "FAILED"))


LOGGERS: dict[str, Callable[[Subject], Logger]] = {"wandb": Wandb, "mlflow": Mlflow}


def check_loggers(names: Sequence[str]) -> None:
    """Before anything is started: are they known, and installed?"""
    for name in names:
        choice("--log", name, tuple(LOGGERS))
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is not the package
            raise ConfigError(f"--log {name} needs its package: pip install {name}, or isthmus[{name}]")


class Background(threading.Thread):
    """Feeds one logger from a thread of its own: a slow server holds up no round, and a fault of it ends the
    logging, not the run."""

    def __init__(self, name: str, subject: Subject) -> None:
        super().__init__(daemon=True, name=name)
        try:
            self.logger = LOGGERS[name](subject)
        except Exception as error:  # whatever its package raises: it is about its settings, or its server
            raise ConfigError(f"--log {name}: {_first_line(error)}") from None
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
                self.logger.add(*given)
            self.logger.close(self.status)
        except Exception as error:
            self._say(f"{_first_line(error)}; the run goes on without it")

    def close(self, status: str) -> None:
        self.status = status
        self.rounds.put(None)
        self.join(CLOSE_SECONDS)
        if self.is_alive():
            self._say(f"its server has not taken everything in {CLOSE_SECONDS:.0f} s; it is not waited for")

    def _say(self, text: str) -> None:
        print(f"isthmus: --log {self.name}: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def following(run: RunDir, on_round: OnRound | None, log: Sequence[str]) -> Iterator[RoundHooks]:
    """What gets the rounds of a run while it goes on; at the end the loggers are told how it ended."""
    loggers: list[Background] = []
    status = "failed"
    try:
        loggers += [_open(name, run) for name in dict.fromkeys(log)]
        yield RoundHooks([*([on_round] if on_round else []), *loggers])
        rows = run.rows() if loggers else []
        done = bool(rows) and rows[-1].round == run.recipe.outer.rounds
        status = "finished" if done else "interrupted"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        for logger in loggers:
            logger.close(status)


def _open(name: str, run: RunDir) -> Background:
    """A run that is resumed goes on in the run that it has there."""
    key = f"{name}_run"
    found = run.about.get(key)
    known = found if isinstance(found, str) and KNOWN.fullmatch(found) else ""
    logger = Background(name, Subject(run.path.resolve().name, run.recipe, known, str(run.path)))
    run.update_about(**{key: logger.logger.run})
    for row in [] if known else run.rows():  # of a run that was not logged until now
        if row.loss_full is not None or not run.recipe.is_scored(row.round):
            logger(row)
    return logger


class LoggedRows(Follower):
    """The rounds of a run that is watched: of a bucket that others train in, too."""

    def __init__(self, names: Sequence[str], where: str, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, name = recipe, where.rstrip("/").rpartition("/")[2] or recipe.name
        self.loggers = [Background(each, Subject(name, recipe)) for each in dict.fromkeys(names)]

    def write(self, at: float, round: int, values: Mapping[str, float]) -> None:
        for logger in self.loggers:
            logger.put(round, values)

    def close(self) -> None:
        for logger in self.loggers:
            logger.close("finished" if self.done >= self.recipe.outer.rounds else "interrupted")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
