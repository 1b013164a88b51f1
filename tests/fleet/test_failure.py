"""Which faults pass and which end a process, what is said of them, and how long the next start waits."""

import errno
import queue
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_recipes import RACK, recipe_text

from isthmus.config import parse_recipe
from isthmus.errors import ConfigError, Diverged, RunError, RunStopped, Unreachable, passes
from isthmus.protocol.heartbeat import WAITING, Heartbeat, fitting
from isthmus.runtime import versions, worker
from isthmus.runtime.checkpoint import put_aside
from isthmus.runtime.crashes import Crashes, count_end, count_restart, count_start, note_error
from isthmus.runtime.failure import (
    LONGEST_PAUSE_SECONDS,
    PASSING_STATUS,
    Failure,
    Failures,
    Final,
    Settled,
    failure_note,
)
from isthmus.runtime.process import LauncherConfig
from isthmus.runtime.recorder import ANSWER_SECONDS, Recorder
from isthmus.runtime.restarts import Restarts
from isthmus.runtime.supervisor import LocalSupervisor
from isthmus.runtime.waiting import NOTE, STARTING, WaitingNotes
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


def test_what_a_worker_noted_counts_for_more_than_its_exit_status(tmp_path):
    note = failure_note(tmp_path, 3)
    assert Failure.of_exit(1, note).kind == "status 1"
    told = Failure.of(TypeError("no"))
    told.write(note)
    assert Failure.of_exit(PASSING_STATUS, note) == told
    assert "TypeError: no" in told.trace
    for spoilt in (b"", b"{}", b"[1]", b'{"kind": 1}', b"\xff\xfe"):
        note.write_bytes(spoilt)
        assert Failure.of_exit(1, note).kind == "status 1"


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


def test_only_a_round_that_was_trained_is_progress(tmp_path):
    mark = Settled(tmp_path, 0)
    mark.round()  # replayed from the bucket
    assert not mark.path.exists()
    mark.step()
    assert not mark.path.exists()
    mark.round()
    assert mark.path.exists()


# Between two starts


def restarts(tmp_path: Path, num_workers: int = 2) -> tuple[Restarts, list[str]]:
    said: list[str] = []
    config = LauncherConfig(url="", replica="edge", work_dir=str(tmp_path))
    waiting = WaitingNotes(tmp_path, None, 1.0)
    made = Restarts(config, num_workers, said.append, waiting)
    made.starting()
    return made, said


def test_the_stage_that_failed_is_named_not_the_one_that_lost_it(tmp_path):
    made, said = restarts(tmp_path)
    lost, cause = (
        RunError("replica edge: stage 0 lost its link"),
        torch.OutOfMemoryError("CUDA out of memory"),
    )
    for rank, error in enumerate((lost, cause)):
        Failure.of(error).write(failure_note(tmp_path, rank))
    made.ended({0: PASSING_STATUS})  # stage 1 is still ending
    assert said == ["stage 1 ended (no memory); starting the replica's stages again"]
    made.starting()
    assert not failure_note(tmp_path, 1).exists()
    Failure.of(cause).write(failure_note(tmp_path, 1))
    with pytest.raises(Final, match="replica edge failed twice in the same way: out of memory"):
        made.ended({0: PASSING_STATUS, 1: 1})
    assert "OutOfMemoryError" in (tmp_path / "failed.txt").read_text()


def test_a_settled_round_in_between_gives_another_try(tmp_path):
    made, _ = restarts(tmp_path, 1)
    for _ in range(4):
        made.starting()
        mark = Settled(tmp_path, 0)
        mark.step()
        mark.round()
        made.ended({0: -signal.SIGSEGV})
    made.starting()
    with pytest.raises(Final, match="SIGSEGV"):
        made.ended({0: -signal.SIGSEGV})


def test_a_settled_round_counts_once_also_where_no_worker_starts_again(tmp_path):
    made, _ = restarts(tmp_path, 1)
    mark = Settled(tmp_path, 0)
    mark.step()
    mark.round()
    wrong = Failure.of(TypeError("unexpected keyword argument 'shutdown_timeout'"))
    assert made.judge([wrong]) == 0  # as when the agent itself fails
    with pytest.raises(Final, match="shutdown_timeout"):
        made.judge([wrong])


def test_a_request_to_leave_ends_the_pause(tmp_path):
    made, said = restarts(tmp_path, 1)
    made.failures.in_a_row = 20
    waits = threading.Event()
    made.waiting.wait_for = lambda *what: waits.set()
    pause = threading.Thread(target=made.ended, args=({0: -signal.SIGKILL},), daemon=True)
    pause.start()
    assert waits.wait(120)
    made.leaving.set()
    pause.join(LONGEST_PAUSE_SECONDS / 2)
    assert not pause.is_alive()
    assert said[-1] == "that was 21 times in a row; the next start is in 30 s"


# What is said while nothing runs


def test_waiting_is_said_until_the_next_worker_speaks_for_itself(tmp_path):
    now, said = [100.0], []
    (tmp_path / "incarnation").write_text("first")
    notes = WaitingNotes(tmp_path, said.append, 1.0, clock=lambda: now[0])
    notes.tell()
    assert said == []
    notes.wait_for("stage 1 at 10.0.0.3: no answer", 8.0)
    now[0] += 3
    notes.tell()
    assert (said[-1].state, said[-1].waited_seconds) == (WAITING, 3.0)
    assert said[-1].awaiting == "stage 1 at 10.0.0.3: no answer; next start in 5 s"
    assert (tmp_path / NOTE).read_text() == "stage 1 at 10.0.0.3: no answer"
    now[0] += 7
    notes.wait_for("stage 1 at 10.0.0.3: the connection was closed")  # still the same wait
    notes.tell()
    assert said[-1].waited_seconds == 10.0
    assert said[-1].awaiting == "stage 1 at 10.0.0.3: the connection was closed"
    (tmp_path / "incarnation").write_text("second")
    notes.tell()
    assert len(said) == 2
    assert not (tmp_path / NOTE).exists()


def test_the_bucket_hears_at_once_which_incarnation_has_ended(tmp_path):
    said: queue.Queue[Heartbeat] = queue.Queue()
    notes = WaitingNotes(tmp_path, said.put, every_seconds=1e6)  # nothing here waits for an interval
    notes.start()
    notes.ended("its first start")  # nobody has waited for a worker that never was
    (tmp_path / "incarnation").write_text(f"{STARTING}01234567")  # nor is who starts again after a stop dead
    notes.ended("its first start")
    for incarnation in ("first", "second"):  # the second ends before anybody has looked whether it came
        (tmp_path / "incarnation").write_text(incarnation)
        notes.ended("its next start")
        heard = said.get(timeout=60)
        assert (heard.state, heard.incarnation) == (WAITING, incarnation)
    assert not (tmp_path / NOTE).exists()  # a restart is no news for a terminal


def test_a_launcher_that_ends_first_says_that_its_worker_has(tmp_path):
    (tmp_path / "incarnation").write_text("first")
    said, release = [], threading.Event()
    notes = WaitingNotes(tmp_path, lambda heartbeat: (release.wait(60), said.append(heartbeat)), 1e6)
    notes.start()
    notes.ended("nothing more")
    threading.Timer(0.1, release.set).start()
    notes.flush(60)
    assert [heartbeat.incarnation for heartbeat in said] == ["first"]


def test_what_is_said_passes_the_readers_checks_whatever_it_is(tmp_path):
    said: list[Heartbeat] = []
    notes = WaitingNotes(tmp_path, said.append, 1.0)
    notes.wait_for("\x1b[2J" + "x" * 500, 30.0)
    notes.tell()
    read = fitting(said[0])
    assert read.awaiting.startswith(r"\x1b[2Jxxx")
    assert read.awaiting.endswith("; next start in 30 s")


def test_a_store_that_is_away_does_not_end_the_notes(tmp_path):
    def away(heartbeat: Heartbeat) -> None:
        raise StoreError("s3://b: put live.json: cannot reach the store", "network")

    notes = WaitingNotes(tmp_path, away, 1.0)
    notes.wait_for("the store")
    notes.tell()
    assert (tmp_path / NOTE).read_text() == "the store"


# The supervisor of `isthmus train`


class Ended:
    def __init__(self, status: int) -> None:
        self.status, self.pid = status, 0

    def poll(self) -> int:
        return self.status


@pytest.fixture
def supervisor(tmp_path) -> LocalSupervisor:
    made = LocalSupervisor(parse_recipe(recipe_text(RACK)), tmp_path, LauncherConfig(url="", replica=""))
    starts = made.starts = []
    launcher = made.launchers[0]
    launcher.work.mkdir(parents=True)
    launcher.start = lambda: (starts.append(1), setattr(launcher, "judged", False))
    return made


def ends(supervisor: LocalSupervisor, status: int, line: str = "") -> None:
    launcher = supervisor.launchers[0]
    launcher.log_from = launcher.log.stat().st_size if launcher.log.exists() else 0
    with open(launcher.log, "a") as log:
        log.write(line)
    launcher.process, launcher.judged = Ended(status), False
    supervisor.restart_dead()


@pytest.mark.parametrize(("status", "kind"), [(1, RunError), (2, ConfigError)])
def test_a_launcher_that_says_it_cannot_go_on_ends_train_with_its_line(supervisor, status, kind):
    with pytest.raises(kind, match=r"^the corpus is gone$"):
        ends(supervisor, status, "isthmus: the corpus is gone\n[W socket.cpp] a library's last word\n")
    assert supervisor.starts == []
    assert supervisor.all_left()


def test_a_launcher_that_was_killed_is_started_again_and_again(supervisor):
    for count in range(1, 5):
        supervisor.launchers[0].failures.progress()
        ends(supervisor, -signal.SIGKILL)
        assert len(supervisor.starts) == count


def test_a_launcher_whose_fault_can_pass_is_waited_out_and_shown(supervisor):
    launcher, pauses = supervisor.launchers[0], []
    launcher.started_at = float("inf")  # it has just begun
    for _ in range(8):
        ends(supervisor, PASSING_STATUS, "isthmus: cannot reach the store\n")
        pauses.append(launcher.failures.pause_seconds())
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]
    assert len(supervisor.starts) == 1  # the first at once; the others are still to come
    assert supervisor.news() == [("rack", "cannot reach the store")]
    assert supervisor.news() == []


def test_a_launcher_that_crashes_twice_ends_train(supervisor):
    ends(supervisor, 1, "Traceback\nImportError: cannot import name 'x'\n")
    with pytest.raises(RunError, match="failed twice in the same way: ImportError: cannot import name 'x'"):
        ends(supervisor, 1, "Traceback\nImportError: cannot import name 'x'\n")


def test_what_a_launcher_notes_is_news_once(supervisor):
    (supervisor.launchers[0].work / NOTE).write_text("stage 1: no answer")
    assert supervisor.news() == [("rack", "stage 1: no answer")]
    assert supervisor.news() == []
    (supervisor.launchers[0].work / NOTE).unlink()
    assert supervisor.news() == []


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


def test_a_worker_that_has_diverged_puts_its_state_aside_and_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    state = tmp_path / "whole" / "state"
    state.mkdir(parents=True)
    (state / "update-000003.safetensors").write_text("mine")

    def diverges(*args: object) -> int:
        raise Diverged("replica rack holds another anchor")

    monkeypatch.setattr(worker, "run_worker", diverges)
    config = LauncherConfig(url="bucket", replica="rack", work_dir=str(tmp_path))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert worker.work(config) == PASSING_STATUS
    finally:
        for number, handler in before.items():  # what is ignored here, processes of later tests would ignore
            signal.signal(number, handler)
    (aside,) = (tmp_path / "whole").iterdir()
    assert (aside / "update-000003.safetensors").read_text() == "mine"
    assert str(aside) in capsys.readouterr().err


# What is seen of it


def test_restarts_are_counted_with_the_stage_and_its_error_and_a_good_end_forgets_them(tmp_path):
    count_start(tmp_path)
    made, _ = restarts(tmp_path)
    told: list[tuple[str, tuple[int, ...]]] = []
    made.waiting.ended = lambda what, missing: told.append((what, missing))
    Failure.of(RunError("replica edge: stage 0 lost its link to stage 1")).write(failure_note(tmp_path, 0))
    made.ended({0: PASSING_STATUS, 1: -signal.SIGKILL})
    found = Crashes.read(tmp_path)
    assert (found.restarts, found.error) == (1, "stage 1: killed by signal 9")  # not who lost it
    assert told == [("the next start: its worker ended (killed by signal 9, status 75)", (1,))]
    count_restart(tmp_path)  # it follows another machine, which has its own note
    assert Crashes.read(tmp_path).restarts == 2
    count_start(tmp_path)  # the launcher was killed
    assert Crashes.read(tmp_path).restarts == 3
    count_end(tmp_path)
    count_start(tmp_path)
    assert Crashes.read(tmp_path) == Crashes(ended_well=False)


def test_what_a_launcher_waits_for_names_the_missing_stage_and_the_last_error(tmp_path):
    said: list[Heartbeat] = []
    (tmp_path / "incarnation").write_text("first")
    note_error(tmp_path, "stage 1: no room\nand more")
    notes = WaitingNotes(tmp_path, said.append, 1.0)
    notes.wait_for("stage 1: no answer", missing=[1])
    notes.tell()
    assert said[-1].missing == (1,)
    assert (said[-1].vitals.last_error, said[-1].vitals.restarts) == ("stage 1: no room", 0)
    assert said[-1].vitals.disk_free_bytes
    assert fitting(said[-1]) == said[-1]
