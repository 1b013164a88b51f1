"""A fleet that was ended, however, and taken up again by one command ends as one that was left alone."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faults import kills
from small_recipes import EDGE, RACK, recipe_text

from isthmus import train
from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.protocol.access import open_ledger
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.runlog import TIMING_FIELDS, RunDir
from isthmus.runtime.process import lock_file
from isthmus.runtime.recorder import Recorder
from isthmus.runtime.resume import TIMEOUT_SECONDS, StartingHeartbeats, keys_of
from isthmus.runtime.train import fleet_of

ROUNDS = 5
INNER_STEPS = 100
ALONE = recipe_text(
    RACK,
    name="again",
    model={"layers": 2},
    inner={"batch": 2, "lr": 1e-2, "precision": "fp32"},
    outer={"inner_steps": INNER_STEPS, "rounds": ROUNDS, "keep": 8, "values": "2bit"},
    bucket={"heartbeat_seconds": 1, "anchor_every": 3, "quorum": 1, "deadline_seconds": 3600},
)
RECIPE = ALONE + EDGE
REPLICAS = ("rack", "edge")
LIMIT_SECONDS = 300.0  # for a machine that does much else; nothing waits for it
ANCHOR = re.compile(r"\] round (\d+): anchor (\w+)")


class Fleet:
    """`isthmus train` in a process group of its own, as a shell starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.said, self.anchors_before = folder, folder / "run", "", 0
        self.started: list[subprocess.Popen] = []
        (folder / "again.toml").write_text(RECIPE)

    def start(self, *words: str) -> subprocess.Popen:
        words = words or ("train", "again.toml", "--run", "run", "--device", "cpu")
        self.anchors_before = self.anchors_of_last_stage()
        self.started.append(
            subprocess.Popen(
                [sys.executable, "-m", "isthmus.cli.main", *words],
                cwd=self.folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return self.started[-1]

    def end(self, process: subprocess.Popen) -> int:
        try:
            self.said, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            logs = "".join(path.read_text() for path in (self.run / "logs").glob("*.log"))
            pytest.fail(f"it did not end within {LIMIT_SECONDS:g} s: {process.communicate()[0]}{logs}")
        return process.returncode

    def until(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not there():
            assert time.monotonic() < deadline, "it did not come so far"
            time.sleep(0.01)

    def last_stage(self) -> int:
        """The process of edge's stage 1."""
        return next(process.pid for process in kills.processes(self.run) if process.name == "edge stage 1")

    def anchors_of_last_stage(self) -> int:
        log = self.run / "logs" / "edge.log"
        return len(re.findall(r"\[edge/1\] round \d+: anchor", log.read_text())) if log.exists() else 0

    def new_heartbeat(self, replica: str) -> Heartbeat:
        """One that was made after this call; the next may have been under way before it."""
        ledger = open_ledger(str(self.run / "bucket"))
        for _ in range(2):
            before = ledger.heartbeat(replica)
            self.until(lambda before=before: ledger.heartbeat(replica) not in (None, before))
        return ledger.heartbeat(replica)[0]

    def stop_in_a_round(self, after: int) -> int:
        """Stop edge's last stage in the middle of a round that rack has delivered; the number of the round.

        In the middle: between two rounds a replica looks whether to leave, and Ctrl-C there could part them.
        """
        self.until(lambda: self.settled(after) and self.anchors_of_last_stage() > self.anchors_before)
        stage = self.last_stage()
        while True:
            time.sleep(0.05)
            os.kill(stage, signal.SIGSTOP)
            t = 1 + len(list((self.run / "bucket" / "manifests").glob("*.json")))
            assert t <= ROUNDS, "every round was over before it was seen"
            heartbeat = self.new_heartbeat("edge")
            if heartbeat.state == "training" and heartbeat.inner_step > (t - 1) * INNER_STEPS:
                self.until(lambda t=t: self.delivered(t) == 1)
                return t
            os.kill(stage, signal.SIGCONT)

    def settled(self, round_number: int) -> bool:
        return (self.run / "bucket" / "manifests" / f"{round_number:06d}.json").exists()

    def delivered(self, round_number: int) -> int:
        return len(list((self.run / "bucket" / "commits" / f"{round_number:06d}").glob("*.json")))

    def digests(self) -> list[str]:
        """The anchor before every round, as the ledger has it, and the one after the last."""
        ledger = open_ledger(str(self.run / "bucket"))
        return [ledger.manifest(t).anchor for t in range(1, ROUNDS + 1)] + [
            RunDir.open(self.run).rows()[-1]["anchor"]
        ]

    def logged(self) -> dict[int, set[str]]:
        """Round -> every digest that any process ever said of it."""
        said: dict[int, set[str]] = {}
        for path in (self.run / "logs").glob("*.log"):
            for number, digest in ANCHOR.findall(path.read_text()):
                said.setdefault(int(number), set()).add(digest)
        return said

    def history(self) -> list[dict]:
        """What the rows tell, less the clock and the bytes that a second start costs."""
        aside = (*TIMING_FIELDS, "bytes")
        return [
            {k: v for k, v in row.items() if k not in aside} | {"up": row["bytes"].get("payload_up")}
            for row in RunDir.open(self.run).rows()
        ]

    def slow_start(self, replica: str, heartbeats: int) -> None:
        """Let a replica come up so many heartbeats later than the other."""

        def workers() -> list[int]:
            return [p.pid for p in kills.processes(self.run) if p.replica == replica]

        log, live = self.run / "logs" / "rack.log", self.run / "bucket" / "members" / "rack" / "live.json"
        before = log.read_text().count("back in round")
        seen: set[int] = set()

        def heard() -> int:
            seen.add(live.stat().st_mtime_ns)
            return len(seen)

        self.until(lambda: bool(workers()))
        stopped = workers()
        for worker in stopped:
            os.kill(worker, signal.SIGSTOP)
        try:
            self.until(lambda: log.read_text().count("back in round") > before)
            self.until(lambda: heard() > heartbeats)
        finally:
            for worker in stopped:
                os.kill(worker, signal.SIGCONT)

    def asked_to_leave(self) -> int:
        """The replicas that their supervisor has asked since this start."""
        texts = [path.read_text() for path in (self.run / "logs").glob("*.log")]
        return sum("leaving at the end of this round" in text.rpartition("] joining ")[2] for text in texts)

    def a_night_later(self) -> None:
        """Everything in the bucket is ten hours old, as the store's clock has it."""
        then = time.time() - 36_000
        for path in (self.run / "bucket").rglob("*"):
            os.utime(path, (then, then))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """One to kill; nothing of it outlives a test that failed."""
    fleet = Fleet(tmp_path)
    yield fleet
    for process in fleet.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    fleet = Fleet(tmp_path_factory.mktemp("straight"))
    assert fleet.end(fleet.start()) == 0, fleet.said
    assert "--resume" not in fleet.said
    return fleet


def same_end(fleet: Fleet, straight: Fleet) -> None:
    assert fleet.digests() == straight.digests()
    assert fleet.logged() == straight.logged()  # one digest a round in every log of every start
    for ours, theirs in zip(fleet.history(), straight.history(), strict=True):
        assert ours == theirs
    weights = [(f.run / "model.safetensors").read_bytes() for f in (fleet, straight)]
    assert weights[0] == weights[1]
    assert main(["ledger", "verify", str(fleet.run / "bucket")]) == 0
    assert kills.check_left_over(fleet.run) == []


@pytest.mark.soak
def test_ended_in_every_way_and_resumed_it_ends_in_the_same_bits(straight, fleet):
    """By Ctrl-C, by a second one, by a kill in the middle of a round; the last line is the command that goes
    on."""
    process = fleet.start()
    first = fleet.stop_in_a_round(1)
    process.send_signal(signal.SIGINT)
    fleet.until(lambda: fleet.asked_to_leave() == 2)
    os.kill(fleet.last_stage(), signal.SIGCONT)
    assert fleet.end(process) == 0, fleet.said
    last = fleet.said.splitlines()[-1]
    assert last == "isthmus: go on with: isthmus train --resume run"
    assert RunDir.open(fleet.run).about["status"] == "interrupted"
    assert fleet.settled(first)
    assert not fleet.settled(first + 1)

    process = fleet.start(*shlex.split(last.partition(": isthmus ")[2]))
    second = fleet.stop_in_a_round(first)
    process.send_signal(signal.SIGINT)
    fleet.until(lambda: fleet.asked_to_leave() == 2)
    process.send_signal(signal.SIGINT)  # now, not at the end of the round
    assert fleet.end(process) == 130
    assert fleet.said.splitlines()[-1] == "isthmus: interrupted; go on with: isthmus train --resume run"
    assert not fleet.settled(second)

    process = fleet.start("train", "--resume", "run")
    third = fleet.stop_in_a_round(second - 1)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    fleet.until(lambda: kills.check_left_over(fleet.run) == [])  # the replicas went with it
    assert not fleet.settled(third)
    assert RunDir.open(fleet.run).about["status"] == "running"
    fleet.a_night_later()

    process = fleet.start("train", "--resume", "run")
    fleet.slow_start("edge", 7)  # the other neither takes it for gone nor counts the night
    assert fleet.end(process) == 0, fleet.said
    same_end(fleet, straight)
    about, rows = RunDir.open(fleet.run).about, RunDir.open(fleet.run).rows()
    assert (about["status"], about["error"]) == ("finished", None)
    assert all(row["seconds"] < 3600 for row in rows)  # the night is nobody's training time
    assert "back in round" in (fleet.run / "logs" / "rack.log").read_text()


@pytest.mark.soak
def test_ctrl_c_while_a_round_is_scored_loses_no_row(tmp_path, monkeypatch):
    scores, rounds = Recorder._scores, []

    def struck(recorder: Recorder) -> dict:
        rounds.append(recorder.replay.round)
        if len(rounds) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return scores(recorder)

    monkeypatch.setattr(Recorder, "_scores", struck)
    endless = parse_recipe(ALONE, ["outer.rounds=1000"])  # however far the replica is ahead, it leaves
    results = train(endless, tmp_path / "run", device="cpu", quiet=True)
    assert [row["round"] for row in results.rows] == rounds == list(range(len(rounds)))
    assert 1 < len(rounds) <= 1000
    assert RunDir.open(tmp_path / "run").about["status"] == "interrupted"


@pytest.fixture
def here(straight, tmp_path, monkeypatch) -> Path:
    """A copy of the finished run that says it was cut short, to spoil; nothing may be started from it."""
    shutil.copytree(straight.run, tmp_path / "run", ignore=shutil.ignore_patterns("links"))  # sockets
    (tmp_path / "again.toml").write_text(RECIPE)
    RunDir.open(tmp_path / "run").update_about(status="running")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "isthmus.runtime.supervisor.Supervisor.start", lambda supervisor: pytest.fail("started")
    )
    return tmp_path


def everything_in(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def finished(folder: Path) -> None:
    RunDir.open(folder / "run").update_about(status="finished")


def simulated(folder: Path) -> None:
    RunDir.open(folder / "run").update_about(mode="stacked")
    (folder / "run" / "state").mkdir()


def without_a_bucket(folder: Path) -> None:
    shutil.rmtree(folder / "run" / "bucket")


def without_a_run_in_it(folder: Path) -> None:
    (folder / "run" / "bucket" / "run.json").unlink()


def without_a_key(folder: Path) -> None:
    (folder / "run" / "keys" / "edge.key").unlink()


def of_another_recipe(folder: Path) -> None:
    recipe = folder / "run" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(f"rounds = {ROUNDS}", "rounds = 60"))


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder / "run")


def as_it_is(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "options", "says"),
    [
        (
            finished,
            [],
            f"run is finished: all of its {ROUNDS} rounds are done; `isthmus extend run --rounds N` adds",
        ),
        (
            simulated,
            [],
            "run is not a run of `isthmus train`; go on with `isthmus simulate --resume run`",
        ),
        (without_a_bucket, [], "run cannot be resumed: "),
        (without_a_run_in_it, [], "run/bucket is not a run"),
        (without_a_key, [], "no key for replica edge at run/keys/edge.key"),
        (of_another_recipe, [], "run/recipe.toml is not the recipe that "),
        (no_folder, [], "run does not exist; give the folder of a run"),
        (as_it_is, ["again.toml"], "give a recipe to start a run, or --resume RUN"),
        (as_it_is, ["--set", "outer.rounds=9"], "`isthmus extend run` adds rounds"),
        (as_it_is, ["--set", "outer.keep=9"], "--set and --run are for a new one"),
        (as_it_is, ["--device", "tpu"], "auto, cpu, cuda"),
    ],
)
def test_what_cannot_be_resumed_is_refused_in_one_line_and_left_alone(here, capsys, spoil, options, says):
    spoil(here)
    lock = here / "run" / "work" / "train.lock"
    before = everything_in(here)
    assert main(["train", "--resume", "run", *options]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    after = everything_in(here)
    assert {**after, lock: before.get(lock)} == {**before, lock: before.get(lock)}


def test_a_run_that_still_runs_is_not_started_twice(here, capsys):
    with lock_file(here / "run" / "work" / "train.lock"):
        assert main(["train", "--resume", "run"]) == 2
    said = f"isthmus: run still runs (process {os.getpid()}); Ctrl-C there ends it, "
    assert capsys.readouterr().err.startswith(said)
    with lock_file(here / "run" / "work" / "edge" / "replica.lock"):  # one that was joined by hand
        assert main(["train", "--resume", "run"]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(
        r"isthmus: replica edge of run still runs, in .*/run/work/edge; stop it first\n", error
    )


def test_a_starting_replica_gets_heartbeats_until_it_is_up_has_left_or_takes_too_long(here):
    run, ledger = RunDir.open("run"), open_ledger("run")
    supervisor = fleet_of(run, "cpu")
    rack, edge = supervisor.groups
    now = [0.0]

    def heartbeats() -> StartingHeartbeats:
        return StartingHeartbeats(ledger, supervisor, keys_of(run), clock=lambda: now[0])

    def sent(sender: StartingHeartbeats) -> set[str]:
        """The replicas in whose name the next heartbeats go out."""
        before = {name: ledger.heartbeat(name) for name in REPLICAS}
        sender.send()
        return {name for name in REPLICAS if ledger.heartbeat(name) != before[name]}

    with heartbeats() as sender:
        assert {ledger.heartbeat(name)[0].state for name in REPLICAS} == {"starting"}
        sender.ended.set()  # from here on they are sent by hand
        sender.join()
        assert sent(sender) == {"rack", "edge"}
        rack.incarnation = "of its own"
        assert sent(sender) == {"edge"}
        edge.result = 0  # it has left
        assert sent(sender) == set()
    rack.incarnation, edge.result = "", None
    with heartbeats() as sender:
        assert sender.is_alive()
        now[0] += TIMEOUT_SECONDS
        sender.join(LIMIT_SECONDS)
        assert not sender.is_alive()
        assert list(sender.starting) == [rack, edge]


def test_simulate_names_the_command_for_it(here, capsys):
    assert main(["simulate", "--resume", "run"]) == 2
    words = "isthmus: run is a fleet of real processes; go on with `isthmus train --resume run`\n"
    assert capsys.readouterr().err == words


def test_a_run_directory_stands_for_its_bucket(here, capsys):
    said = []
    for url in ("run", "run/bucket"):
        assert main(["ledger", "show", url]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].count("\n") > ROUNDS
    shutil.rmtree("run/bucket")
    assert main(["status", "run"]) == 2
    assert capsys.readouterr().err.startswith("isthmus: run has no bucket yet")


def test_help_tells_it(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "isthmus train --resume runs/long" in capsys.readouterr().out
