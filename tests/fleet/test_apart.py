"""One replica of two stages on two machines, over TLS: directly, with a stranger at its gate, and through a
relay where neither reaches the other. However it goes, it ends at the simulator's weights.

The machines are network namespaces. Every process is started as an operator starts it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import netns
import pytest
import stranger
from small_recipes import pipelined, recipe_text
from torch import Tensor

from isthmus import simulate
from isthmus.config import parse_recipe
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.replay import Replay
from isthmus.runtime.create import create
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.store.objects import open_store

EXACT = {"inner": {"precision": "fp64"}, "outer": {"inner_steps": 4, "rounds": 5, "values": "fp64"}}
RECIPE = recipe_text(pipelined("edge", stages=2, compression="1/4", wire="fp64"), **EXACT)
LIMIT_SECONDS = 240.0
ROUNDING = 1e-12


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """theta^(t) for t = 1 .. R."""
    found: list[dict[str, Tensor]] = []
    plain_apply = SimulatedFleet.apply

    def watched_apply(fleet: SimulatedFleet, *given: object) -> None:
        plain_apply(fleet, *given)  # type: ignore[arg-type]
        found.append({name: tensor.detach().clone() for name, tensor in fleet.anchor.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedFleet, "apply", watched_apply)
        simulate(parse_recipe(RECIPE), tmp_path_factory.mktemp("simulated"), device="cpu", quiet=True)
    return found


class Fleet:
    """The two stages of `edge`, on two machines of a network, with a bucket in a folder."""

    def __init__(self, network: netns.Network, folder: Path, machines: tuple[str, str]) -> None:
        self.network, self.folder, self.machines = network, folder, machines
        self.bucket = folder / "bucket"
        create(parse_recipe(RECIPE), str(self.bucket), folder / "keys")
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
        self.processes[name] = self.network.start(machine, command, self.folder / f"{name}.log")

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
        self.start(f"stage-{stage}", self.machines[stage], *netns.isthmus(*words, *where))

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

    def kill_worker(self, stage: int) -> None:
        """Of one stage, as the kernel would for lack of memory."""
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"isthmus.runtime.worker" in words and str(self.folder / f"work-{stage}").encode() in words:
                os.kill(int(entry.name), signal.SIGKILL)

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
        assert number == len(simulated) == 5
        digests = [set(re.findall(r"round 5: anchor (\w+)", self.log(f"stage-{stage}"))) for stage in (0, 1)]
        assert digests[0] == digests[1]
        assert len(digests[0]) == 1


@pytest.fixture
def network() -> Iterator[netns.Network]:
    if reason := netns.reason_to_skip():
        pytest.skip(reason)
    with netns.Network() as network:
        yield network


def test_a_stranger_at_the_gate_of_secured_stages_changes_nothing(network, tmp_path, simulated):
    """Junk, silence, a thousand connections at a time and another key, from before stage 1 comes."""
    cables = network.line(["s", "m0", "m1"])
    fleet = Fleet(network, tmp_path, ("m0", "m1"))
    host = cables[1].addresses[0]
    fleet.join(0, "--master", f"{host}:29500")
    run_id = read_run(open_store(str(fleet.bucket))).run_id
    fleet.start("stranger", "s", sys.executable, stranger.__file__, host, 29500, run_id)
    fleet.until(lambda: "turned away" in fleet.log("stage-0"))
    fleet.join(1, "--master", f"{host}:29500")
    fleet.check(simulated)
    times, inside = map(int, fleet.log("stranger").split()[-2:])
    assert (times > 0, inside) == (True, 0)
    assert "trying again" not in fleet.log()
    assert "starting it again" not in fleet.log()


def test_a_stage_that_is_killed_meets_its_neighbour_again(network, tmp_path, simulated):
    for name in ("m0", "m1"):
        network.machine(name)
    cable = network.cable("m0", "m1")
    fleet = Fleet(network, tmp_path, ("m0", "m1"))
    where = ("--master", f"{cable.addresses[0]}:29500")
    for stage in (0, 1):
        fleet.join(stage, *where)
    fleet.until(lambda: fleet.rounds() >= 1)
    fleet.kill_worker(1)  # its launcher starts the next one
    fleet.until(lambda: fleet.rounds() >= 2)
    fleet.kill("stage-1")  # the whole machine
    fleet.join(1, *where)
    fleet.until(lambda: fleet.rounds() >= 3)
    fleet.kill("stage-0")
    fleet.join(0, *where)
    fleet.check(simulated)


def test_stages_that_cannot_reach_each_other_train_through_a_relay(network, tmp_path, simulated):
    """The relay is killed and started again on the way, and a worker is killed. The new key is made on the
    machine of stage 0, and counts from round 2 on: stage 1 gets it from there."""
    for name in ("m0", "hub", "m1"):
        network.machine(name)
    cables = network.cable("m0", "hub"), network.cable("m1", "hub")  # and hub forwards nothing
    with pytest.raises(RuntimeError, match="nreachable"):
        network.run("m1", [sys.executable, "-c", CALL, cables[0].addresses[0]])
    fleet = Fleet(network, tmp_path, ("m0", "m1"))
    old = fleet.key(1).read_bytes()
    network.run("m0", netns.isthmus("rotate", fleet.bucket, "edge", "--key", fleet.key(0)))
    fleet.start("relay", "hub", *netns.isthmus("relay"))
    for stage, cable in enumerate(cables):
        fleet.join(stage, "--relay", f"{cable.addresses[1]}:29520")
    fleet.until(lambda: all(NEW_KEY in fleet.log(f"stage-{stage}") for stage in (0, 1)))
    fleet.kill("relay")
    fleet.start("relay", "hub", *netns.isthmus("relay"))
    fleet.until(lambda: fleet.rounds() >= 3)
    fleet.kill_worker(0)
    fleet.check(simulated)
    assert fleet.key(1).read_bytes() == fleet.key(0).read_bytes() != old


NEW_KEY = "round 2: from here on we sign with our new key"
CALL = """
import socket, sys
socket.create_connection((sys.argv[1], 1), 5)
"""
