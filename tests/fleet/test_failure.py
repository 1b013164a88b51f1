"""Which faults pass and which end a process, what is said of them, and how long the next start waits."""

import errno
import json
import queue
import re
import signal
import threading
import time
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_recipes import EDGE, RACK, recipe_text

from isthmus.config import parse_recipe
from isthmus.errors import ConfigError, Diverged, RunError, RunStopped, Unreachable, passes
from isthmus.protocol.heartbeat import WAITING, Heartbeat, fitting
from isthmus.runtime import versions, worker
from isthmus.runtime.checkpoint import put_aside
from isthmus.runtime.failure import MOST_KILLS, PASSING_STATUS, Failure, Failures
from isthmus.runtime.group import Group
from isthmus.runtime.heartbeat import WaitingNotes
from isthmus.runtime.leaving import AGAIN_STATUS, Orders, Settled
from isthmus.runtime.process import History, JoinConfig
from isthmus.runtime.recorder import ANSWER_SECONDS, Recorder
from isthmus.runtime.workers import Worker
from isthmus.store.retry import StoreError


@pytest.mark.parametrize(
    "error",
    [
        *(StoreError("s3://b: put x", kind) for kind in ("network", "busy", "slow", "expired")),
        RunError("replica edge: stage 0 lost its link to stage 1"),
        Diverged("another anchor"),
        Unreachable("no stage 0 there"),
        ConnectionResetError("reset"),
        TimeoutError(),
        torch.distributed.DistNetworkError("the client socket has timed out"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'kind', '')}",
)
def test_network_store_and_neighbour_pass(error):
    assert passes(error)
    assert Failure.of(error).passes


@pytest.mark.parametrize(
    "error",
    [
        *(StoreError("s3://b: put x", kind) for kind in ("denied", "config", "clock")),
        StoreError("folder: put x: Permission denied", "disk", passes=False),
        ConfigError("no such corpus"),
        RunStopped("a forged manifest"),
        AttributeError("module 'torch' has no attribute 'x'"),
        TypeError("__init__() got an unexpected keyword argument 'shutdown_timeout'"),
        ModuleNotFoundError("No module named 'obstore'", name="obstore"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("CUDA error: invalid device ordinal"),
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'kind', '')}",
)
def test_software_input_memory_and_rights_do_not_pass(error):
    assert not passes(error)
    assert not Failure.of(error).passes
    assert "\n" not in Failure.of(error).text


def test_a_failure_names_cause_and_cure():
    assert (
        "pip install obstore"
        in Failure.of(ModuleNotFoundError("No module named 'obstore'", name="obstore.store")).text
    )
    wrong = Failure.of(AttributeError("module 'torch' has no attribute 'x'"))
    assert "has no attribute 'x'" in wrong.text
    assert versions.torch_range() in wrong.text
    for cure in ("inner.batch", "inner.micro_batches", "inner.recompute", "pipelined"):
        assert cure in Failure.of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")).text
        assert cure in Failure.of(MemoryError()).text


def test_a_lack_of_memory_is_found_behind_what_it_became():
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError:
            raise RunError("replica rack: process 1 lost the other processes") from None
    except RunError as error:
        found = Failure.of(error)
    assert (found.kind, found.passes) == ("no memory", False)


def test_a_crash_does_not_pass_and_a_kill_does():
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS):
        crash = Failure.of_exit(-number)
        assert not crash.passes
        assert signal.Signals(number).name in crash.text
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP):
        assert Failure.of_exit(-number).passes


def test_the_second_time_ends_it_whatever_passed_in_between_and_a_round_forgives():
    failures, lasting, other = Failures(), Failure("a", "", False), Failure("b", "", False)
    passing = Failure("c", "", True)
    assert failures.final([lasting]) is None
    assert failures.final([passing, other]) is None
    assert failures.final([passing, passing]) is None
    assert failures.final([passing, lasting]) == lasting
    failures.progress()
    assert failures.final([lasting]) is None
    assert failures.final([other]) is None


def test_pauses_grow_from_nothing_to_half_a_minute():
    failures, pauses = Failures(), []
    for _ in range(9):
        failures.final([Failure("killed", "", True)])
        pauses.append(failures.pause_seconds())
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30]


def test_only_a_round_that_was_trained_is_progress():
    told: list[bool] = []
    mark = Settled(SimpleNamespace(tell=lambda settled: told.append(settled)))
    mark.round()  # replayed from the bucket
    mark.step()
    assert told == []
    mark.round()
    assert told == [True]


# Between two starts


class Process:
    """A worker's process and its end of the pipe, by hand."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.ours, self.pipe = Pipe()
        self.orders: list[dict] = []

    @property
    def exitcode(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self.status = -signal.SIGKILL if self.status is None else self.status

    def join(self) -> None:
        assert self.status is not None

    def say(self, **message: object) -> None:
        self.pipe.send_bytes(json.dumps(message).encode())

    def heard(self) -> list[dict]:
        while self.pipe.poll():
            self.orders.append(json.loads(self.pipe.recv_bytes()))
        return self.orders


class Fleet:
    """A group whose workers are no processes, at a time that a test sets."""

    def __init__(self, folder: Path, fleet: str = EDGE, **config: object) -> None:
        self.lines: list[str] = []
        self.notes: list[Heartbeat] = []
        (member,) = parse_recipe(recipe_text(fleet)).fleet()
        notes = WaitingNotes(folder, self.notes.append, 1.0)
        notes.wait_for = lambda *what, wait=notes.wait_for: (wait(*what), notes.tell())
        given = JoinConfig(url="", replica=member.name, work_dir=str(folder), **config)
        self.group = Group(given, member, self.lines.append, notes)
        self.group.start = self.start
        self.workers: list[Process] = []
        self.starts, self.now = 0, time.monotonic()
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.workers = [Process() for _ in self.group.ranks]
        self.group.started_at = time.monotonic()
        self.group.workers = {
            rank: Worker(worker, worker.ours, self.now)
            for rank, worker in zip(self.group.ranks, self.workers, strict=True)
        }

    def ends(self, statuses: dict[int, int], error: BaseException | None = None, rank: int = 0) -> None:
        """Workers end, the one of `rank` with an error, and the next start is due."""
        if error is not None:
            self.workers[rank].say(failure=asdict(Failure.of(error)))
        for each, status in statuses.items():
            self.workers[each].status = status
        self.group.look(self.now)
        if not self.group.workers and self.group.result is None:
            self.group.not_before = 0.0
            self.group.look(self.now)


def test_the_stage_that_failed_is_named_not_the_one_that_lost_it(tmp_path):
    fleet = Fleet(tmp_path)
    lost, cause = (
        RunError("replica edge: stage 0 lost its link"),
        torch.OutOfMemoryError("CUDA out of memory"),
    )
    fleet.workers[0].say(failure=asdict(Failure.of(lost)))
    fleet.ends({0: PASSING_STATUS}, cause, rank=1)  # stage 1 is still ending
    assert fleet.lines == ["stage 1 ended (no memory); starting the replica's stages again"]
    fleet.ends({0: PASSING_STATUS, 1: 1}, cause, rank=1)
    assert re.match("replica edge failed twice in the same way: out of memory", str(fleet.group.error))
    assert (fleet.group.result, fleet.starts) == (1, 2)
    assert "OutOfMemoryError" in (tmp_path / "failed.txt").read_text()


@pytest.mark.parametrize(("error", "status"), [(ConfigError("no corpus"), 2), (RunStopped("forged"), 1)])
def test_a_fault_that_no_restart_mends_ends_the_group_at_once(error, status, tmp_path):
    fleet = Fleet(tmp_path, RACK)
    fleet.ends({0: status}, error)
    assert (fleet.group.result, str(fleet.group.error), fleet.starts) == (status, str(error), 1)
    assert isinstance(fleet.group.error, ConfigError) == (status == 2)


def test_a_settled_round_in_between_gives_another_try(tmp_path):
    fleet = Fleet(tmp_path, RACK)
    for _ in range(4):
        fleet.workers[0].say(settled=True)
        fleet.ends({0: -signal.SIGSEGV})
    assert fleet.starts == 5
    fleet.ends({0: -signal.SIGSEGV})
    assert "SIGSEGV" in str(fleet.group.error)


def test_a_worker_that_is_killed_ten_times_without_a_round_is_given_up_with_one_line(tmp_path):
    fleet = Fleet(tmp_path, RACK)
    for _ in range(MOST_KILLS - 1):
        fleet.ends({0: -signal.SIGKILL})
    fleet.workers[0].say(settled=True)
    for _ in range(MOST_KILLS):
        assert fleet.group.error is None
        fleet.ends({0: -signal.SIGKILL})
    line = "replica rack was ended 10 times without a round: killed by signal 9; "
    assert str(fleet.group.error).startswith(line)


def test_pauses_are_told_and_a_request_to_leave_shortens_them(tmp_path):
    fleet = Fleet(tmp_path, RACK)
    fleet.group.failures.in_a_row = 20
    fleet.workers[0].status = -signal.SIGKILL
    fleet.group.look(fleet.now)
    assert fleet.lines[-1] == "that was 21 times in a row; the next start is in 30 s"
    assert fleet.notes[-1].awaiting == "killed by signal 9; next start in 30 s"
    fleet.group.leave()
    assert fleet.group.not_before <= time.monotonic() + 2.0


def test_a_silent_worker_is_killed_unless_we_slept_ourselves(tmp_path):
    fleet = Fleet(tmp_path, RACK, stall_seconds=5.0)
    fleet.group.look(fleet.now + 60, asleep=60.0)
    fleet.workers[0].say()
    fleet.group.look(fleet.now + 63)
    fleet.group.look(fleet.now + 67)
    assert fleet.starts == 1
    fleet.group.look(fleet.now + 69)
    assert fleet.starts == 2
    assert fleet.lines[0] == "the worker has made no progress for 6 s; killing it"


def test_orders_reach_each_worker_and_a_part_is_left_for_later(tmp_path):
    fleet = Fleet(tmp_path)
    fleet.group.leave()
    fleet.group.part(100.0)
    assert [worker.heard() for worker in fleet.workers] == [[{"leave": True}, {"part": 100.0}]] * 2
    fleet.ends({0: 0, 1: AGAIN_STATUS})
    assert (fleet.group.result, fleet.starts) == (AGAIN_STATUS, 1)
    assert fleet.lines[-1].startswith("left for now: ")


def test_what_ends_before_its_time_or_after_the_run_is_told_apart(tmp_path):
    finished, late = Fleet(tmp_path, RACK), Fleet(tmp_path, RACK)
    for fleet, seconds in ((finished, 100.0), (late, 0.0)):
        fleet.workers[0].say(incarnation="first")
        fleet.group.look(fleet.now)
        fleet.group.part(seconds)
    finished.ends({0: 0})
    assert finished.group.result == 0
    late.group.look(late.now)
    assert late.group.result == AGAIN_STATUS
    assert late.notes[-1].awaiting == "its next start: its machine was taken back"


def test_a_stage_without_links_leaves_at_once_and_says_for_whom_it_waits(tmp_path):
    fleet = Fleet(tmp_path, stage=0)
    fleet.workers[0].say(waits="stage 1: no answer", missing=[1])
    fleet.group.look(fleet.now)
    assert (fleet.notes[-1].awaiting, fleet.notes[-1].missing) == ("stage 1: no answer", (1,))
    assert fleet.group.waits == "stage 1: no answer"
    fleet.group.leave()
    fleet.group.look(fleet.now)
    assert fleet.group.result == 0


def test_restarts_are_counted_with_the_stage_and_its_error_for_the_next_start(tmp_path):
    fleet = Fleet(tmp_path)
    fleet.workers[0].say(incarnation="first")
    lost = RunError("replica edge: stage 0 lost its link to stage 1")
    fleet.ends({0: PASSING_STATUS, 1: -signal.SIGKILL}, lost)
    history = fleet.group.history
    assert (history.restarts, history.error) == (1, "stage 1: killed by signal 9")  # not who lost it
    assert history.incarnation == "first"
    assert fleet.notes[-1].awaiting == "the next start: its worker ended (killed by signal 9)"
    assert (fleet.notes[-1].missing, fleet.notes[-1].incarnation) == ((1,), "first")


# What is said while nothing runs


def test_waiting_is_said_until_the_next_worker_speaks_for_itself(tmp_path):
    now, said = [100.0], []
    notes, first = (
        WaitingNotes(tmp_path, said.append, 1.0, clock=lambda: now[0]),
        History("first", 2, "no room"),
    )
    notes.tell()
    assert said == []
    notes.wait_for("stage 1 at 10.0.0.3: no answer", first, [1], 8.0)
    now[0] += 3
    notes.tell()
    assert (said[-1].state, said[-1].waited_seconds, said[-1].missing) == (WAITING, 3.0, (1,))
    assert said[-1].awaiting == "stage 1 at 10.0.0.3: no answer; next start in 5 s"
    assert (said[-1].vitals.last_error, said[-1].vitals.restarts) == ("no room", 2)
    assert said[-1].vitals.disk_free_bytes
    assert fitting(said[-1]) == said[-1]
    now[0] += 7
    notes.wait_for("stage 1 at 10.0.0.3: the connection was closed", first)  # still the same wait
    notes.tell()
    assert said[-1].waited_seconds == 10.0
    notes.over()
    notes.tell()
    assert len(said) == 2


def test_the_bucket_hears_at_once_which_incarnation_has_ended(tmp_path):
    said: queue.Queue[Heartbeat] = queue.Queue()
    notes = WaitingNotes(tmp_path, said.put, every_seconds=1e6)  # nothing here waits for an interval
    notes.start()
    for incarnation in ("first", "second"):
        notes.wait_for("its next start", History(incarnation))
        heard = said.get(timeout=60)
        assert (heard.state, heard.incarnation) == (WAITING, incarnation)


def test_a_supervisor_that_ends_first_says_that_its_worker_has(tmp_path):
    said, release = [], threading.Event()
    notes = WaitingNotes(tmp_path, lambda heartbeat: (release.wait(60), said.append(heartbeat)), 1e6)
    notes.start()
    notes.wait_for("nothing more", History("first"))
    threading.Timer(0.1, release.set).start()
    notes.flush(60)
    assert [heartbeat.incarnation for heartbeat in said] == ["first"]


def test_what_is_said_passes_the_readers_checks_and_survives_a_store_that_is_away(tmp_path):
    said: list[Heartbeat] = []

    def away(heartbeat: Heartbeat) -> None:
        said.append(heartbeat)
        raise StoreError("s3://b: put live.json: cannot reach the store", "network")

    notes = WaitingNotes(tmp_path, away, 1.0)
    notes.wait_for("\x1b[2J" + "x" * 500, History(), (), 30.0)
    notes.tell()
    read = fitting(said[0])
    assert read.awaiting.startswith(r"\x1b[2Jxxx")
    assert read.awaiting.endswith("; next start in 30 s")


def test_a_recorder_whose_store_is_away_says_so_once_and_goes_on_looking_after_the_fleet():
    """`stop` restarts what has died: it is asked again and again while the store does not answer."""
    asked, said, answers = [], [], [StoreError("s3://b: cannot reach the store", "network")] * 3 + [None, 7.0]
    answers[1] = StoreError("s3://b: permission denied", "denied")

    def settled_at(round_number: int, deadline: float) -> float | None:
        assert deadline - time.monotonic() <= ANSWER_SECONDS
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    one = SimpleNamespace(
        last=SimpleNamespace(round=0),
        recipe=SimpleNamespace(outer=SimpleNamespace(rounds=1)),
        ledger=SimpleNamespace(settled_at=settled_at),
        view=SimpleNamespace(note=said.append),
    )
    one.advance = lambda: setattr(one.last, "round", 1) or "settled"
    Recorder.record(one, lambda: bool(asked.append(1)), poll_seconds=0.0)
    assert (len(asked), said) == (5, ["s3://b: cannot reach the store; still trying"])
    one.last.round, answers = 0, [StoreError("s3://b: no such bucket", "config")]
    with pytest.raises(StoreError, match="no such bucket"):
        Recorder.record(one, lambda: False, poll_seconds=0.0)


def test_state_that_is_put_aside_is_renamed_whole_and_the_log_names_its_folder(tmp_path: Path):
    said: list[str] = []
    for number in range(6):
        for part in ("stage-0", "stage-1"):
            folder = tmp_path / part / "state" / "round-000001"
            folder.mkdir(parents=True)
            (folder / "feedback.safetensors").write_text(f"{part} {number}")
        put_aside(tmp_path, said.append)
        assert not list(tmp_path.glob("*/state"))
    for part in ("stage-0", "stage-1"):
        kept = sorted((tmp_path / part).iterdir())
        texts = [(each / "round-000001" / "feedback.safetensors").read_text() for each in kept]
        assert texts == [f"{part} {number}" for number in (0, 4, 5)]  # the first, and the newest two
        assert f"its private state is put aside: {kept[-1]}" in said
    put_aside(tmp_path, said.append)
    assert len(said) == 12


def test_a_worker_that_has_diverged_puts_its_state_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    state = tmp_path / "whole" / "state"
    state.mkdir(parents=True)
    (state / "update-000003.safetensors").write_text("mine")

    def diverges(*args: object) -> int:
        raise Diverged("replica rack holds another anchor")

    monkeypatch.setattr(worker, "run_worker", diverges)
    monkeypatch.setattr(worker, "name_process", lambda name: None)
    with pytest.raises(Diverged):
        worker.work(JoinConfig(url="bucket", replica="rack", work_dir=str(tmp_path)), Orders(), History())
    (aside,) = (tmp_path / "whole").iterdir()
    assert (aside / "update-000003.safetensors").read_text() == "mine"
    assert str(aside) in capsys.readouterr().err
