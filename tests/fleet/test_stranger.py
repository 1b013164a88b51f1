"""A replica whose stages are started apart, and a stranger at the port of stage 0: it trains as if alone."""

import contextlib
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from netns import isthmus
from small_recipes import EDGE, recipe_text
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - it is public

from isthmus.config import parse_recipe
from isthmus.runtime.addresses import free_port
from isthmus.runtime.create import create

pytestmark = pytest.mark.soak

RECIPE = recipe_text(EDGE, inner={"precision": "fp64"}, outer={"inner_steps": 3, "rounds": 6})
LIMIT_SECONDS = 240.0
ANCHOR = re.compile(r"round (\d+): anchor (\w+)")


class Machines:
    """`isthmus join --stage I`, twice, each with a work folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.bucket = folder / "bucket"
        create(parse_recipe(RECIPE), str(self.bucket), folder / "keys")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, stage: int) -> None:
        words = ["join", self.bucket, "--replica", "edge", "--key", self.folder / "keys" / "edge.key"]
        words += ["--work", self.folder / f"work-{stage}", "--stage", stage]
        words += ["--advertise", f"127.0.0.1:{self.port}" if stage == 0 else "none"]
        words += ["--device", "cpu", "--threads", 1]
        with open(self.folder / f"{stage}.log", "ab") as log:
            self.processes[stage] = subprocess.Popen(
                isthmus(*words), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def log(self, stage: int) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / f"{stage}.log").read_text()
        return ""

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not done():
            assert time.monotonic() < deadline, self.log(0) + self.log(1)
            assert not any(self.statuses()), self.log(0) + self.log(1)
            time.sleep(0.02)

    def statuses(self) -> list[int | None]:
        return [process.poll() for process in self.processes.values()]

    def rounds(self) -> int:
        return len(list(self.bucket.glob("manifests/*.json")))

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


class Intruder(threading.Thread):
    """Does to the port all that was done before, again and again, until told to stop."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.over, self.rounds, self.inside = port, threading.Event(), 0, 0

    def __enter__(self) -> "Intruder":
        self.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self.over.set()
        self.join()

    def run(self) -> None:
        while not self.over.is_set():
            with contextlib.ExitStack() as held:
                for number in range(200):
                    with contextlib.suppress(OSError):
                        link = held.enter_context(socket.create_connection(("127.0.0.1", self.port), 1.0))
                        link.sendall((b"", b"\x16\x03\x01", bytes(64), b"GET /")[number % 4])
                self.meddle()
            self.rounds += 1

    def meddle(self) -> None:
        """As a stage would, by torch's own client."""
        try:
            seconds = timedelta(seconds=0.5)
            store = TCPStore("127.0.0.1", self.port, None, False, seconds, wait_for_workers=False)
            store.set("session", "x")
            store.get("session")
            self.inside += 1
        except RuntimeError:
            pass


@pytest.fixture
def machines(tmp_path) -> Iterator[Callable[[str], Machines]]:
    made: list[Machines] = []

    def make(name: str) -> Machines:
        made.append(Machines(tmp_path / name))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def anchors(fleet: Machines) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for stage in fleet.processes:
        for number, digest in ANCHOR.findall(fleet.log(stage)):
            found.setdefault(int(number), set()).add(digest)
    return found


@pytest.mark.fleet_check
def test_a_stranger_at_the_stage_port_changes_no_bit_of_the_run(machines):
    alone, watched = machines("alone"), machines("watched")
    watched.start(0)
    alone.start(0)
    alone.start(1)
    watched.until(lambda: reached(watched.port))
    with Intruder(watched.port) as intruder:
        watched.until(lambda: intruder.rounds)  # it is there before stage 1 is
        assert watched.rounds() == 0
        watched.start(1)
        for fleet in (watched, alone):
            fleet.until(lambda fleet=fleet: None not in fleet.statuses())
    assert watched.statuses() == alone.statuses() == [0, 0], watched.log(0) + watched.log(1)
    assert intruder.inside == 0
    assert anchors(watched) == anchors(alone)
    assert sorted(anchors(watched)) == list(range(7))
    assert all(len(digests) == 1 for digests in anchors(watched).values())
    assert "turned away" in watched.log(0)
    assert "trying again" not in watched.log(0) + watched.log(1)


def reached(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
