"""Runs what is missing: several worker processes, each of which keeps what it has compiled."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.tables import Scale
from experiments.work import Job, Run, jobs_of, next_job
from isthmus.config import dump_recipe
from isthmus.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[1]
WORKER = (sys.executable, "-m", "experiments.worker")


def find_commit(given: str | None) -> str:
    """Of this code: as given, from ISTHMUS_COMMIT, or from git, with "+changes" if files differ."""
    if given or os.environ.get("ISTHMUS_COMMIT"):
        return given or os.environ["ISTHMUS_COMMIT"]
    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(
            "every line names its commit, and git does not know it here; give --commit ID"
        ) from None


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@dataclass
class Outcome:
    """What came of a list of runs."""

    finished: int = 0
    faults: list[str] = field(default_factory=list)
    left: list[Run] = field(default_factory=list)  # not begun: no time, or no worker


class Runner:
    """Gives every worker one job at a time. Each worker process has a thread here that talks to it."""

    def __init__(
        self,
        runs: Sequence[Run],
        scale: Scale,
        folder: Path,
        *,
        device: str,
        jobs: int,
        commit: str,
        seconds: float | None = None,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        """`seconds`: no job is begun that may take longer than what is left of them."""
        self.pending, self.total, self.scale, self.folder = jobs_of(runs), len(runs), scale, folder
        self.device, self.jobs, self.commit, self.say = device, min(jobs, len(self.pending)), commit, say
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.pace = 0.0  # seconds for each of its load that the last job took, with all workers busy
        self.outcome, self.lock = Outcome(), threading.Lock()
        self.compiled: list[set[tuple]] = [set() for _ in range(self.jobs)]
        self.processes: list[subprocess.Popen] = []

    def run(self) -> Outcome:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.processes = [self._start() for _ in range(self.jobs)]
        threads = [threading.Thread(target=self._drive, args=(i,), daemon=True) for i in range(self.jobs)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)  # short, so that Ctrl-C gets through
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.terminate()
                process.wait()
        self.outcome.left += [run for job in self.pending for run in job.runs]  # their workers ended early
        if self.outcome.left:
            self.say(f"{len(self.outcome.left)} runs were not begun; the same command continues with them")
        return self.outcome

    def _start(self) -> subprocess.Popen:
        threads = str(max(1, (os.cpu_count() or 1) // self.jobs))
        paths = [str(CHECKOUT / "src"), str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = (
            {"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads}
            | os.environ
            | {"PYTHONPATH": os.pathsep.join(paths)}
        )
        pipe = subprocess.PIPE
        return subprocess.Popen(WORKER, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", env=env)

    def _drive(self, i: int) -> None:
        process = self.processes[i]
        assert process.stdin is not None
        assert process.stdout is not None
        while job := self._take(i):
            began = time.monotonic()
            try:
                process.stdin.write(json.dumps(self._task(job)) + "\n")
                process.stdin.flush()
            except OSError:
                pass  # it has ended, and readline() below returns nothing
            for run in job.runs:
                answer = process.stdout.readline()
                if not answer:
                    self._tell(run, {"fault": f"its worker ended with status {process.wait()}"})
                    return
                self._tell(run, json.loads(answer))
            self.pace = (time.monotonic() - began) / job.load
        process.stdin.close()
        process.wait()

    def _task(self, job: Job) -> dict[str, Any]:
        runs = [
            {
                "row": run.row.name,
                "text": run.row.text,
                "recipe": dump_recipe(run.recipe),
                "file": str(self.folder / f"{run.table}.jsonl"),
            }
            for run in job.runs
        ]
        return {"scale": self.scale.name, "device": self.device, "commit": self.commit, "runs": runs}

    def _take(self, i: int) -> Job | None:
        with self.lock:
            left = None if self.deadline is None else self.deadline - time.monotonic()
            while self.pending:
                elsewhere = set().union(*self.compiled[:i], *self.compiled[i + 1 :])
                job = next_job(self.pending, self.compiled[i], elsewhere)
                self.pending.remove(job)
                if left is None or self.pace * job.load <= left > 0:
                    self.compiled[i] |= job.signatures
                    return job
                self.outcome.left += job.runs
            return None

    def _tell(self, run: Run, answer: dict[str, Any]) -> None:
        with self.lock:
            if "fault" in answer:
                self.outcome.faults.append(f"{run}: {answer['fault']}")
                self.say(self.outcome.faults[-1])
                return
            self.outcome.finished += 1
            self.say(f"[{self.outcome.finished}/{self.total}] {describe(run, answer)}")


def describe(run: Run, line: dict[str, Any]) -> str:
    if line["failed"]:
        return f"{run}: {line['failed']}"
    return (
        f"{run}: full {line['loss_full']:.4f}, pipelined {line['loss_pipelined']:.4f}, mixed "
        f"{line['loss_mixed']:.4f}; {line['seconds']:.1f} s, {line['tokens_per_second'] / 1e6:.3g} Mtok/s"
    )
