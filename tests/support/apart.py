"""One replica of two stages, each started as an operator starts it on a machine of its own."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import netns
import pytest
from faults import kills
from torch import Tensor

from isthmus import simulate
from isthmus.config import parse_recipe
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.replay import Replay
from isthmus.runtime.create import create
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.store.objects import open_store

LIMIT_SECONDS = 240.0
ROUNDING = 1e-12


def simulated_rounds(recipe: str, folder: Path) -> list[dict[str, Tensor]]:
    """theta^(t) for t = 1 .. R, as the simulator has it."""
    found: list[dict[str, Tensor]] = []
    plain_apply = SimulatedFleet.apply

    def watched_apply(fleet: SimulatedFleet, *given: object) -> None:
        plain_apply(fleet, *given)  # type: ignore[arg-type]
        found.append({name: tensor.detach().clone() for name, tensor in fleet.anchor.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedFleet, "apply", watched_apply)
        simulate(parse_recipe(recipe), folder, device="cpu", quiet=True)
    return found


class Fleet:
    """The two stages of `edge`, started apart, with a bucket in a folder."""

    def __init__(
        self, recipe: str, folder: Path, network: netns.Network | None = None, machines: Sequence[str] = ()
    ) -> None:
        """Without a network both are this machine."""
        self.recipe, self.network, self.folder, self.machines = recipe, network, folder, machines
        self.bucket = folder / "bucket"
        create(parse_recipe(recipe), str(self.bucket), folder / "keys")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def key(self, stage: int) -> Path:
        """That machine's copy."""
        path = self.folder / f"keys-{stage}" / "edge.key"
        if not path.exists():
            path.parent.mkdir()
            shutil.copy(self.folder / "keys" / "edge.key", path)
        return path

    def start(self, name: str, machine: str, *words: object) -> None:
        command = [str(word) for word in words]
        log = self.folder / f"{name}.log"
        if self.network:
            self.processes[name] = self.network.start(machine, command, log)
            return
        with open(log, "ab") as file:
            self.processes[name] = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def join(self, stage: int, *where: object) -> None:
        words = ["join", self.bucket, "--replica", "edge", "--key", self.key(stage)]
        words += [
            "--work",
            self.folder / f"work-{stage}",
            "--stage",
            stage,
            "--device",
            "cpu",
            "--threads",
            1,
        ]
        self.start(
            f"stage-{stage}", self.machines[stage] if self.network else "", *netns.isthmus(*words, *where)
        )

    def log(self, name: str = "") -> str:
        paths = [self.folder / f"{name}.log"] if name else sorted(self.folder.glob("*.log"))
        return "".join(path.read_text() for path in paths if path.exists())

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not done():
            assert time.monotonic() < deadline, self.log()
            assert not any(process.poll() for process in self.processes.values()), self.log()
            time.sleep(0.02)

    def rounds(self) -> int:
        return len(list(self.bucket.glob("manifests/*.json")))

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def workers(self, stage: int) -> list[int]:
        """Process ids, whoever started them."""
        found = kills.processes(self.folder / f"work-{stage}")
        return [process.pid for process in found if process.role == "stage"]

    def kill_worker(self, stage: int) -> None:
        """Of one stage, as the kernel would for lack of memory."""
        for pid in self.workers(stage):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    def ended(self) -> bool:
        return all(self.processes[f"stage-{stage}"].poll() is not None for stage in (0, 1))

    def check(self, simulated: list[dict[str, Tensor]]) -> None:
        """It has ended well, and as the simulator has."""
        self.until(self.ended)
        assert [self.processes[f"stage-{stage}"].poll() for stage in (0, 1)] == [0, 0], self.log()
        store = open_store(str(self.bucket))
        replay, number = Replay(Ledger(store, read_run(store))), 0
        while replay.step() is not None:
            for name, tensor in simulated[number].items():
                gap = (replay.anchor[name].double() - tensor.double()).norm() / tensor.double().norm()
                assert gap < ROUNDING
            number += 1
        assert number == len(simulated)
        last = rf"round {number}: anchor (\w+)"
        digests = [set(re.findall(last, self.log(f"stage-{stage}"))) for stage in (0, 1)]
        assert digests[0] == digests[1]
        assert len(digests[0]) == 1
