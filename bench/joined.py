"""Real processes of one run for bench/fleet.py: made, joined, watched, ended by their ids, and read back."""

import hashlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kills import processes

from isthmus.config import Recipe
from isthmus.data.corpus import BUILTIN_FOLDER
from isthmus.data.manifest import TOKENIZER, Manifest
from isthmus.data.shards import ShardWriter, partial
from isthmus.model.checkpoint import saved_rounds
from isthmus.protocol.access import open_ledger
from isthmus.runtime.create import create

POLL_SECONDS = 0.02
FIRST_STEP = r"first inner step after [\d.]+ s.*"


class Failed(Exception):
    """A part came to no figure: what happened, in one line."""


def random_corpus(folder: Path, vocab: int, tokens: int, seed: int = 0) -> Path:
    """A prepared corpus of random tokens: speed does not depend on what they say."""
    folder.mkdir(parents=True)
    data = shutil.copy(BUILTIN_FOLDER / TOKENIZER, folder / TOKENIZER)
    draw, dtype = np.random.default_rng(seed), np.dtype(np.uint16 if vocab <= 2**16 else np.uint32)
    splits = {}
    for name, count in (("train", tokens), ("validation", max(tokens // 16, 2**16))):
        writer = ShardWriter(folder, name, dtype, count)
        writer.append(draw.integers(0, vocab, count).astype(dtype), 4 * count)
        splits[name] = writer.to_split()
        for shard in splits[name].shards:
            os.replace(partial(folder / shard.name), folder / shard.name)
    manifest = Manifest(
        vocab_size=vocab,
        dtype=dtype.name,
        end_token="<|endoftext|>",
        end_id=0,
        tokenizer_sha256=hashlib.sha256(Path(data).read_bytes()).hexdigest(),
        **splits,
        sources=[],
        arguments={},
        fingerprint="random",
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder


@dataclass
class Line:
    at: float  # when the bench read it, in Unix seconds
    text: str


class JoinedRun:
    """A new run in a folder, and `isthmus join` for its replicas, as an operator would type it."""

    def __init__(self, recipe: Recipe, folder: Path, env: Mapping[str, str], options: Sequence[str]) -> None:
        self.recipe, self.folder, self.options = recipe, folder, list(options)
        self.env = dict(os.environ) | {"PYTHONUNBUFFERED": "1"} | dict(env)
        self.bucket = folder / "bucket"
        folder.mkdir(parents=True)
        create(recipe, str(self.bucket), folder / "keys")
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.lines: dict[str, list[Line]] = {}
        self.began: dict[str, float] = {}
        self.read: dict[str, int] = {}

    def work(self, name: str) -> Path:
        return self.folder / "work" / name

    def join(self, name: str) -> None:
        where = ["--key", self.folder / "keys" / f"{name}.key", "--work", self.work(name)]
        words = ["-m", "isthmus.cli.main", "join", self.bucket, "--replica", name, *where, *self.options]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.began[name] = time.time()
            self.running[name] = subprocess.Popen(
                [sys.executable, *map(str, words)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.env,
            )

    def join_all(self) -> None:
        for member in self.recipe.fleet():
            self.join(member.name)

    def look(self) -> None:
        """Read the logs' new lines, each with the time at which it was there."""
        for name in self.running:
            with open(self.folder / f"{name}.log", "rb") as file:
                file.seek(self.read.get(name, 0))
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self.read[name] = self.read.get(name, 0) + len(new)
            found = [Line(time.time(), text) for text in new.decode(errors="replace").splitlines()]
            self.lines.setdefault(name, []).extend(found)

    def find(self, name: str, pattern: str, after: float = 0.0) -> tuple[Line, re.Match[str]] | None:
        for line in self.lines.get(name, ()):
            if line.at >= after and (match := re.search(pattern, line.text)):
                return line, match
        return None

    def wait(self, done: Callable[[], bool], deadline: float, what: str) -> None:
        while not done():
            self.look()
            for name, process in self.running.items():
                if process.poll():
                    raise Failed(f"{name} ended with status {process.returncode}: {self.tail(name)}")
            if time.time() > deadline:
                raise Failed(f"no {what} within the limit: {self.tail(*self.running)}")
            time.sleep(POLL_SECONDS)
        self.look()

    def wait_for_end(self, deadline: float) -> None:
        self.wait(lambda: all(p.poll() == 0 for p in self.running.values()), deadline, "end of the run")

    def tail(self, *names: str, count: int = 3) -> str:
        self.look()
        return " | ".join(line.text[:200] for name in names for line in self.lines.get(name, ())[-count:])

    def settled(self, round_number: int) -> float | None:
        """When the round's manifest was written, in Unix seconds; for 0, when the run was created."""
        name = f"manifests/{round_number:06d}.json" if round_number else "run.json"
        try:
            return (self.bucket / name).stat().st_mtime
        except OSError:
            return None

    def last_settled(self) -> int:
        return max((int(p.stem) for p in (self.bucket / "manifests").glob("[0-9]*.json")), default=0)

    def first_step(self, name: str, by_heartbeat: bool = False) -> dict[str, Any] | None:
        """Seconds from `join` to the first inner step: by the worker's line, else by the heartbeat of now."""
        began = self.began[name]
        if found := self.find(name, FIRST_STEP, began):
            return {"seconds": found[0].at - began, "told": found[1][0]}
        beat = open_ledger(str(self.bucket)).heartbeat(name) if by_heartbeat else None
        if beat and beat[0].inner_step and beat[1] > began:
            return {"seconds": beat[1] - began, "told": "by a heartbeat"}
        return None

    def saved(self, name: str) -> list[int]:
        """The checkpoints at edges of rounds that are whole on the disk of a full replica."""
        return saved_rounds(self.work(name) / "whole" / "state" / "edge")

    def stop(self) -> None:
        """Kill our `join` commands; their workers die with them."""
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        deadline = time.time() + 10
        while left := list(processes(self.folder)):
            if time.time() > deadline:
                print(f"processes left: {[process.pid for process in left]}", flush=True)
                break
            time.sleep(0.1)

    def __enter__(self) -> "JoinedRun":
        return self

    def __exit__(self, *fault: object) -> None:
        self.stop()


def rounds_of(run: JoinedRun) -> list[dict[str, Any]]:
    """Each settled round: its seconds, the inner steps' among them, and what every process measured."""
    ledger, rows = open_ledger(str(run.bucket)), []
    for t in range(1, run.last_settled() + 1):
        manifest, at, before = ledger.manifest(t), run.settled(t), run.settled(t - 1)
        assert manifest is not None
        assert at is not None
        assert before is not None
        row: dict[str, Any] = {"round": t, "seconds": at - before, "replicas": {}}
        for entry in manifest.entries:
            facts, inner = entry.facts, entry.facts.seconds or 0.0
            row["replicas"][entry.replica] = {
                "inner_seconds": inner,
                "standing_still": 1 - inner / row["seconds"],
                "loss": facts.loss,
                "trip_seconds": facts.trip_seconds,
                "measured": {key: list(values) for key, values in facts.measured.items()},
            }
        rows.append(row)
    return rows


def speed(run: JoinedRun, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens a second over whole rounds, from the first settled round to the last: start-up is not in it."""
    recipe, later = run.recipe, list(rows[1:])
    if not later:
        raise Failed("one round was settled; the rate needs two")
    tokens = recipe.outer.inner_steps * recipe.inner.batch * recipe.model.context
    seconds = sum(row["seconds"] for row in later)
    counted = sum(len(row["replicas"]) for row in later)
    still = [each["standing_still"] for row in later for each in row["replicas"].values()]
    inner = [each["inner_seconds"] for row in later for each in row["replicas"].values()]
    return {
        "tokens_per_second": tokens * counted / seconds,
        "round_seconds": seconds / len(later),
        "inner_seconds": statistics.mean(inner),
        "inner_tokens_per_second": tokens / statistics.mean(inner) if all(inner) else None,
        "standing_still": statistics.mean(still),
        "worst_standing_still": max(still),
        "contributions": counted,
        "rounds": list(rows),
    }


@contextmanager
def mps_server(wanted: bool, folder: Path) -> Iterator[dict[str, str]]:
    """NVIDIA's MPS for parts (c) and (d): kernels of several processes run at the same time."""
    control = shutil.which("nvidia-cuda-mps-control") if wanted else None
    if control is None:
        if wanted:
            print("there is no nvidia-cuda-mps-control here; going on without MPS", flush=True)
        yield {}
        return
    env = {f"CUDA_MPS_{name}_DIRECTORY": str(folder / f"mps-{name.lower()}") for name in ("PIPE", "LOG")}
    for path in env.values():
        Path(path).mkdir(parents=True)
    whole = dict(os.environ) | env
    subprocess.run([control, "-d"], env=whole, check=True, timeout=30)
    try:
        yield env
    finally:
        subprocess.run([control], input=b"quit\n", env=whole, timeout=30, check=False)
