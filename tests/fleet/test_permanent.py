"""Real processes: a fault that cannot pass ends `join` and `train` with one line; one that can is waited out.

Faults are put into workers alone, by a sitecustomize of theirs: the supervisor has checked everything before.
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

import pytest
import torch
from corpus_texts import make_texts, write_format
from faults import kills
from small_recipes import EDGE, RACK, recipe_text

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.page.source import open_source
from isthmus.page.state import StateBuilder
from isthmus.runlog import RunDir
from isthmus.runtime.create import create
from isthmus.runtime.versions import torch_range

pytestmark = pytest.mark.soak

LIMIT_SECONDS = 180.0  # for a machine that does much else; nothing waits for it
IN_WORKERS = """
import sys
if "forkserver" in " ".join(sys.orig_argv):
    {code}
"""
IN_ROUNDS = """import isthmus.runtime.trainer, os, signal, torch
    def fault(*args):
        {code}
    isthmus.runtime.trainer.Trainer.train_round = fault"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    texts = write_format(folder, ".jsonl", make_texts(200))
    assert main(["data", "prepare", str(texts), "--to", str(folder / "corpus"), "--vocab", "300"]) == 0
    return folder / "corpus"


@pytest.fixture
def here(tmp_path, corpus) -> Path:
    """A folder with a corpus that a test may take away."""
    shutil.copytree(corpus, tmp_path / "corpus")
    return tmp_path


def write_recipe(folder: Path, fleet: str = RACK) -> Path:
    text = recipe_text(
        fleet,
        model={"layers": 2},
        data={"corpus": str(folder / "corpus"), "eval_batches": 1},
        inner={"batch": 2, "precision": "fp32"},
        outer={"inner_steps": 3, "rounds": 100_000, "keep": 8, "values": "2bit"},
        bucket={"heartbeat_seconds": 1},
    )
    (folder / "r.toml").write_text(text)
    return folder / "r.toml"


def environment(folder: Path, code: str = "") -> dict[str, str]:
    """With a fault in every worker."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(IN_WORKERS.format(code=code) if code else "")
    before = os.environ.get("PYTHONPATH", "")
    return os.environ | {"PYTHONPATH": f"{folder / 'site'}:{before}".rstrip(":")}


def isthmus(*words: object) -> list[str]:
    return [sys.executable, "-m", "isthmus.cli.main", *map(str, words)]


def run(folder: Path, code: str, *words: object) -> tuple[int, list[str]]:
    """(exit status, lines of stderr) of a command whose workers have a fault."""
    done = subprocess.run(
        isthmus(*words),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        cwd=folder,
        env=environment(folder, code),
    )
    return done.returncode, done.stderr.splitlines()


def join(folder: Path, name: str = "rack", *more: object) -> list[object]:
    key, work = folder / "keys" / f"{name}.key", folder / "work" / name
    return ["join", folder / "bucket", "--replica", name, "--key", key, "--work", work, "--threads", 1, *more]


@pytest.fixture
def made(here) -> Path:
    """The same, with a run's bucket and keys."""
    create(parse_recipe(write_recipe(here).read_text()), str(here / "bucket"), here / "keys")
    return here


def faults(folder: Path) -> dict[str, tuple[str, int, str]]:
    """What -> (code in the worker, exit status, what the last line says)."""
    return {
        "no module": (
            'sys.modules["safetensors"] = None',
            1,
            r"ModuleNotFoundError: .*pip install safetensors",
        ),
        "wrong torch": (
            IN_ROUNDS.format(code="torch.no_such_name"),
            1,
            r"AttributeError: module 'torch' has no attribute 'no_such_name'; .*pip install .*torch>=",
        ),
        "no memory": (
            IN_ROUNDS.format(code="raise torch.OutOfMemoryError('CUDA out of memory. Tried 20 GiB')"),
            1,
            r"out of memory .*Tried 20 GiB.*inner\.batch.*inner\.recompute",
        ),
        "wrong input": (
            IN_ROUNDS.format(code="raise isthmus.errors.ConfigError('the corpus is gone')"),
            2,
            "the corpus is gone",
        ),
        "crash": (IN_ROUNDS.format(code="os.kill(os.getpid(), signal.SIGSEGV)"), 1, r"SIGSEGV"),
        "corpus": (f'__import__("shutil").rmtree("{folder}/corpus", True)', 2, rf"{folder}/corpus"),
        "key": (f'open("{folder}/keys/rack.key", "w").close()', 2, r"rack\.key is not a key of"),
    }


@pytest.mark.fleet_check
@pytest.mark.parametrize("what", ["no module", "wrong torch", "no memory", "crash", "corpus", "key"])
def test_join_ends_by_itself_and_says_why(made, what):
    code, status, says = faults(made)[what]
    ended, lines = run(made, code, *join(made, "rack", "--device", "cpu"))
    assert ended == status, lines
    assert re.match(f"isthmus: .*{says}", lines[-1]), lines
    assert sum(line.startswith("isthmus: ") for line in lines) == 1
    assert not any(line.startswith("Traceback") for line in lines), "\n".join(lines)
    assert sum("; starting it again" in line for line in lines) == (1 if status == 1 else 0)
    assert kills.check_left_over(made) == []


@pytest.mark.fleet_check
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_without_room_ends_join_with_the_cure(made):
    """The allocator of every worker may take less than its smallest block."""
    code = "import torch; torch.cuda.set_per_process_memory_fraction(1e-6)"
    ended, lines = run(made, code, *join(made, "rack", "--device", "cuda"))
    assert ended == 1, lines
    assert re.match(
        r"isthmus: replica rack failed twice in the same way: out of memory .*inner\.batch", lines[-1]
    ), lines
    assert not any(line.startswith("Traceback") for line in lines), "\n".join(lines)
    assert kills.check_left_over(made) == []


@pytest.mark.fleet_check
@pytest.mark.parametrize("what", ["no module", "wrong input"])
def test_train_ends_by_itself_with_the_same_line(here, what):
    recipe = write_recipe(here, RACK + EDGE)
    code, status, says = faults(here)[what]
    ended, lines = run(here, code, "train", recipe, "--run", "run", "--device", "cpu")
    assert ended == status, lines
    assert re.match(f"isthmus: .*{says}", lines[-1]), lines
    assert sum(bool(re.match(f"isthmus: .*{says}", line)) for line in lines) == 1
    about = RunDir.open(here / "run").about
    assert about["status"] == "failed"
    assert re.search(says, about["error"])
    assert kills.check_left_over(here) == []


def test_input_that_is_wrong_from_the_start_is_one_line_and_status_2(made, capsys):
    (made / "corpus").rename(made / "elsewhere")
    for words in (
        ["train", made / "r.toml", "--run", made / "run"],
        join(made, "rack", "--device", "cpu"),
        join(made, "rack", "--device", "cuda:7"),
        ["train", made / "r.toml", "--run", made / "run", "--device", "cuda:7"],
    ):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        error = capsys.readouterr().err
        assert re.fullmatch(r"isthmus: .*(corpus|cuda:7).*\n", error), error
    assert not (made / "run").exists()


def test_another_torch_is_refused_before_it_is_imported(made):
    """One that is found first: its metadata says 2.3, and to import it would fail."""
    old = made / "site"
    (old / "torch-2.3.1.dist-info").mkdir(parents=True)
    (old / "torch-2.3.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.3.1\n"
    )
    (old / "torch.py").write_text("raise SystemExit('imported')\n")
    for words in (["train", "r.toml"], join(made)):
        status, (line,) = run(made, "", *words)
        assert status == 2
        assert line.startswith("isthmus: torch 2.3.1 is installed; Isthmus ")
        assert line.endswith(f": pip install '{torch_range()}'")
    assert run(made, "", "status", "bucket")[0] == 0  # what needs no torch still works
    assert run(made, "", "plan", "r.toml", "--tflops", 1)[0] == 0


# Faults that pass


class Started:
    """A command that runs, and its log."""

    def __init__(self, folder: Path, words: list[object]) -> None:
        self.folder, self.path = folder, folder / "log"
        with open(self.path, "ab") as log:
            self.process = subprocess.Popen(
                isthmus(*words),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment(folder),
            )

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not done():
            assert time.monotonic() < deadline, self.log()
            assert self.process.poll() is None, self.log()
            time.sleep(0.1)

    def log(self) -> str:
        return self.path.read_text()

    def rounds(self) -> int:
        return len(re.findall(r"round [1-9]\d*: anchor", self.log()))

    def worker(self) -> int:
        return next((p.pid for p in kills.processes(self.folder) if p.role in ("full", "stage")), 0)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def begin(folder: Path, words: list[object]) -> Started:
        started.append(Started(folder, words))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
    assert kills.check_left_over(tmp_path) == []


@pytest.mark.parametrize("bad_network", ["moto"], indirect=True)
def test_a_store_that_is_away_when_a_worker_starts_is_waited_for(here, start, bad_network):
    url, proxy = bad_network
    create(parse_recipe(write_recipe(here).read_text()), url, here / "keys")
    words = join(here, "rack", "--device", "cpu")
    words[1] = url
    fleet = start(here, words)
    fleet.until(lambda: fleet.rounds() > 0)
    proxy.close_port()
    os.kill(fleet.worker(), signal.SIGKILL)
    fleet.until(lambda: "cannot reach the store" in fleet.log())
    proxy.open_port()
    before = fleet.rounds()
    fleet.until(lambda: fleet.rounds() > before)


def test_a_worker_that_is_killed_again_and_again_comes_back(made, start):
    fleet = start(made, join(made, "rack", "--device", "cpu"))
    fleet.until(lambda: fleet.rounds() > 0)
    killed = [0]
    for count in (1, 2):  # the second one before it could train anything
        fleet.until(lambda: fleet.worker() not in killed)
        killed.append(fleet.worker())
        os.kill(killed[-1], signal.SIGKILL)
        fleet.until(lambda count=count: fleet.log().count("(killed by signal 9); starting it again") == count)
    before = fleet.rounds()
    fleet.until(lambda: fleet.rounds() > before)


def test_a_stage_that_waits_for_another_machine_says_so(here, start, capsys):
    recipe = parse_recipe(write_recipe(here, EDGE).read_text())
    create(recipe, str(here / "bucket"), here / "keys")
    words = join(here, "edge", "--device", "cpu", "--stage", 0)
    fleet = start(here, words)
    fleet.until(lambda: (here / "bucket" / "members" / "edge" / "waiting.json").exists())
    assert main(["status", str(here / "bucket")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^edge +2 stages .*waiting ", said, re.MULTILINE)
    assert re.search(
        r"^edge waits: stage 1: no answer; start `isthmus join` there \(for \d+ s\)$", said, re.MULTILINE
    )
    (edge,) = StateBuilder().build(open_source(str(here / "bucket")).look())["replicas"]
    assert (edge["state"], edge["up"], edge["tone"]) == ("waiting", False, "wait")
    assert edge["why"].startswith("stage 1: no answer")
