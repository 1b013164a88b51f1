"""`isthmus join` for some replicas of one run, as an operator would type it."""

import re
import subprocess
import sys
import time
from pathlib import Path

from faults import kills

LIMIT_SECONDS = 180.0  # for a machine that does much else; nothing waits for it


class Joined:
    """A work folder and a log for each replica; keys lie in `keys`."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self.folder, self.url = folder, url or str(folder / "bucket")
        self.running: dict[str, subprocess.Popen] = {}

    def words(self, name: str, work: str = "work") -> list[str]:
        options = ["--key", self.folder / "keys" / f"{name}.key", "--work", self.folder / work / name]
        words = ["join", self.url, "--replica", name, *options, "--threads", 1, "--device", "cpu"]
        return [sys.executable, "-m", "isthmus.cli.main", *map(str, words)]

    def join(self, name: str) -> subprocess.Popen:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                self.words(name), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.running[name] = process
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name: str, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not re.search(pattern, self.log(name)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.log(name)}"
            time.sleep(0.1)

    def left_over(self, name: str) -> list[str]:
        return kills.check_left_over(self.folder / "work" / name)

    def stop(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        assert kills.check_left_over(self.folder) == []
