"""The state of a row that may be cut off: rows and weights in a folder, and when they are saved."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

from experiments.lines import digest
from isthmus.config import Recipe
from isthmus.errors import ConfigError
from isthmus.files import remove_folder
from isthmus.model import checkpoint
from isthmus.planner.memory import SimulatorPlan
from isthmus.runlog import About, Row, RunDir
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.simulator.rounds import Saver

SAVE_SECONDS = 180.0  # between two saved states: eight replicas of 178M are 20 GB, so not every round
ASSUMED_BYTES_PER_SECOND = 3e8  # of a disk, until a save was measured


class Kept:
    """One row's folder: a run directory of the simulator, continued by whoever opens it next."""

    def __init__(self, run: RunDir, plan: SimulatorPlan) -> None:
        self.run, self.plan = run, plan
        found = checkpoint.load(run.state_path)
        self.done, self.state = found or (0, None)
        run.truncate(self.done if found else -1)  # later rows are trained again
        self.rows: list[Row] = run.rows()

    @classmethod
    def open(cls, folder: Path, row: str, recipe: Recipe, corpus: str, plan: SimulatorPlan) -> Self:
        """The folder of this row at this seed on this text; a new one is begun where there is none. A stack
        is saved as it is held, so a row that goes on keeps the plan that it began with."""
        path = folder / f"{row}-seed{recipe.seed}-{digest(recipe)}-{corpus}"
        if not path.exists():
            about = About(group=plan.group, pieces=plan.grad_accum_steps, parked=plan.parked,
                          predicted_bytes=plan.predicted_bytes)  # fmt: skip
            return cls(RunDir.create(path, recipe, about), plan)
        run = RunDir.open(path)
        about = cast(dict[str, Any], run.about)
        try:
            plan = SimulatorPlan(about["group"], about["pieces"], about["parked"], about["predicted_bytes"])
        except KeyError as lacking:
            raise ConfigError(f"{path}/about.json has no {lacking}; remove {path} to begin anew") from None
        return cls(run, plan)

    def append(self, row: Row) -> None:
        self.run.append(row)

    def restore(self, fleet: SimulatedFleet) -> None:
        if self.state is None:
            return
        try:
            fleet.restore(self.state, self.done)
        except (KeyError, RuntimeError) as error:
            words = " ".join(str(error).split())
            raise ConfigError(
                f"the state in {self.run.state_path} is not that of this row ({words:.120}); remove "
                f"{self.run.path} to begin anew"
            ) from None
        self.state = None  # it is on the device now

    def remove(self) -> None:
        remove_folder(self.run.path)


class KeptSaver(Saver):
    """Saves every few minutes, and knows when a row must stop so that its state can still be saved."""

    def __init__(
        self,
        kept: Kept,
        fleet: SimulatedFleet,
        deadline: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline` is a time of this clock."""
        super().__init__(kept.run, fleet, clock)
        tensors = (tensor for file in fleet.state().values() for tensor in file.values())
        self.cost = sum(tensor.nbytes for tensor in tensors) / ASSUMED_BYTES_PER_SECOND
        self.deadline, self.last, self.edge, self.round_seconds = deadline, clock(), clock(), 0.0

    def save(self, rounds: int, force: bool) -> None:
        """After each round; the last one's line follows at once, so `force` asks for nothing here."""
        now = self.clock()
        self.round_seconds, self.edge = now - self.edge, now
        if not force and now - self.last >= SAVE_SECONDS:
            self.write(rounds)
            self.edge = self.clock()

    def write(self, rounds: int) -> None:
        began = self.clock()
        checkpoint.save(self.run.state_path, rounds, self.fleet.state())
        self.last = self.clock()
        self.cost = self.last - began

    def leave(self) -> bool:
        """Is the time too short for one more round and a save, with some to spare? At least one round is
        trained."""
        if self.deadline is None or not self.round_seconds:
            return False
        return self.clock() + 2 * self.round_seconds + 1.5 * self.cost > self.deadline
