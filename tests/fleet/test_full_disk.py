"""A full disk is one line that names the folder, what is free and what is needed; what cannot go on ends."""

import errno
import subprocess
import sys
import time

import pytest
from returning import LATE, seat, small
from small_disk import fill, small_disk
from small_recipes import RACK, recipe_text

from isthmus import disk, simulate
from isthmus.cli.main import main
from isthmus.disk import DiskFull, free_bytes, shortage
from isthmus.errors import ConfigError
from isthmus.model import checkpoint
from isthmus.planner.room import check_disk, fleet_room, replica_room, simulator_room
from isthmus.protocol import closer
from isthmus.runlog import RunDir
from isthmus.runtime import checkpoint as runtime_checkpoint
from isthmus.runtime.disk_watch import LASTING_SECONDS, DiskWatch
from isthmus.runtime.failure import Failure

LIMIT_SECONDS = 180.0
LARGER = {"model": {"width": 128, "ffn": 256}, "outer": {"inner_steps": 2, "rounds": 1000}}


@pytest.fixture(autouse=True)
def _no_turns(monkeypatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


def test_the_line_names_the_folder_what_is_free_and_what_is_needed(tmp_path, monkeypatch):
    assert shortage(tmp_path / "not" / "there", 1, "a save") == ""
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 3_200_000)
    line = f"the disk of {tmp_path} has 3.2 MB free, and a save needs 41.0 MB; make room there"
    assert shortage(tmp_path, 40_000_000, "a save") == line
    with pytest.raises(ConfigError, match=r"3\.2 MB free"):
        disk.check_room(tmp_path, 40_000_000, "a save")


def test_a_write_that_nobody_has_counted_does_not_pass_and_has_no_traceback(tmp_path):
    failure = Failure.of(OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "note")))
    assert not failure.passes
    assert failure.text.startswith(f"the disk of {tmp_path} is full (")
    assert failure.trace == ""


# Private state


def test_a_state_without_room_is_left_out_in_one_line_and_training_goes_on(tmp_path, monkeypatch):
    alone, full = seat(small(rounds=9, full=1), tmp_path), [False, True, True, False]
    monkeypatch.setattr(runtime_checkpoint, "shortage", lambda *asked: "no room" if full.pop(0) else "")
    fleet = alone.run(4)
    assert fleet.checkpoint.numbers() == {4 * 3 + 3}  # of round 4, after three inner steps
    told = [line for line in alone.said if "room" in line]
    assert told == [
        "no room; training goes on, and a kill costs what is trained meanwhile",
        "there is room on the disk again: the state is saved as before",
    ]


def test_a_write_that_finds_the_disk_full_leaves_no_half_of_a_state(tmp_path, monkeypatch):
    whole, left = checkpoint.save_tensors, [3]

    def full(path, tensors):
        if path.parent.name.startswith("part-") and left_over() <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, tensors)

    def left_over() -> int:
        left[0] -= 1
        return left[0]

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    alone = seat(small(rounds=9, full=1), tmp_path)
    fleet = alone.run(2)
    assert fleet.checkpoint.numbers() == set()
    assert not list(fleet.checkpoint.folder.glob("*/part-*"))
    assert any("disk of" in line for line in alone.said)


def test_what_no_checkpoint_would_give_back_is_not_sent_before_it_is_saved(tmp_path, monkeypatch):
    """After a round that was trained and not committed the feedback holds more than any checkpoint."""
    recipe = small(**LATE)
    late, quick = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    fleet = late.come()
    assert fleet.resume() == 0
    deliver = fleet.session.deliver
    fleet.session.deliver = lambda *given: quick.run(1)
    fleet.train_round(1, lambda h: None)
    fleet.session.deliver = deliver
    fleet.settle(1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full_disk)
        with pytest.raises(DiskFull, match=r"the disk of .* was full"):
            fleet.train_round(2, lambda h: None)
    assert not Failure.of(DiskFull("")).passes
    fleet = late.run(2)
    assert min(fleet.checkpoint.numbers()) >= 4  # nothing before round 2 is restored any more


def full_disk(*args, **how):
    raise OSError(errno.ENOSPC, "No space left on device")


# Before the start


def test_what_a_plan_needs_is_what_the_files_take(tmp_path):
    recipe = small(rounds=3, full=2, precision="fp32")
    simulate(recipe, tmp_path / "simulated", device="cpu", quiet=True)
    state = sum(f.stat().st_size for f in (tmp_path / "simulated/state").glob("round-*/*"))
    assert state == pytest.approx(simulator_room(recipe, "fp32").state, rel=0.1)
    alone = seat(small(rounds=9, full=1, precision="fp32"), tmp_path / "real").run(3)
    (one,) = (
        sum(file.stat().st_size for file in folder.iterdir())
        for folder in alone.checkpoint.folder.glob("edge/round-*")
    )
    assert one == pytest.approx(replica_room(alone.recipe, alone.member).state, rel=0.2)


def test_a_start_without_room_for_two_states_is_refused_and_one_for_some_is_warned(tmp_path, monkeypatch):
    recipe = small(rounds=100, full=2)
    room = fleet_room(recipe, recipe.fleet(), bucket=True)
    assert 2 * room.state < room.most
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 2 * room.state - 1)
    with pytest.raises(ConfigError, match="make room there"):
        check_disk(tmp_path, room, "this run")
    assert check_disk(tmp_path, room, "to go on", begun=True) == ""  # the other state is there already
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 2 * room.state + disk.SPARE_BYTES)
    assert "it may become full on the way" in check_disk(tmp_path, room, "this run")
    monkeypatch.setattr(disk, "free_bytes", lambda folder: room.most + disk.SPARE_BYTES)
    assert check_disk(tmp_path, room, "this run") == ""


def test_a_lack_of_room_that_lasts_ends_and_one_that_passes_does_not(tmp_path, monkeypatch):
    now, free = [0.0], [10**9]
    monkeypatch.setattr(disk, "free_bytes", lambda folder: free[0])
    watch = DiskWatch(tmp_path, 10**6, clock=lambda: now[0])
    assert watch.look() == ""
    for _ in range(2):
        free[0] = 5
        assert "the next round needs 2.0 MB" in watch.look()
        now[0] += LASTING_SECONDS - 1
        assert watch.look() == ""
        free[0] = 10**9
        assert watch.look() == ""
    free[0] = 5
    watch.look()
    now[0] += LASTING_SECONDS
    with pytest.raises(DiskFull):
        watch.look()


# A real small file system


@pytest.mark.parametrize("command", ["simulate", "train"])
def test_on_a_small_disk_nothing_is_begun_and_one_line_says_why(command, tmp_path, capsys):
    (tmp_path / "r.toml").write_text(recipe_text(RACK, **LARGER))
    with small_disk(tmp_path / "disk", 4) as folder:
        words = [command, str(tmp_path / "r.toml"), "--run", str(folder / "run"), "--device", "cpu"]
        assert main(words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith(f"isthmus: the disk of {folder}/run has ")
        assert not (folder / "run").exists()


def test_a_simulation_whose_disk_becomes_full_ends_with_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "r.toml").write_text(recipe_text(RACK, **LARGER))
    append, free = RunDir.append, []

    def then_fill(run: RunDir, row) -> None:
        append(run, row)
        if row.round == 2:
            free.append(fill(run.path, 100_000))

    monkeypatch.setattr(RunDir, "append", then_fill)
    with small_disk(tmp_path / "disk", 64) as folder:
        words = ["simulate", str(tmp_path / "r.toml"), "--run", str(folder / "run"), "--device", "cpu"]
        assert main(words) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith(f"isthmus: the disk of {folder}/run")
        assert "Traceback" not in "".join(lines)
        assert RunDir.open(folder / "run").about["status"] in ("failed", "running")


@pytest.mark.soak
def test_a_fleet_whose_disk_becomes_full_ends_with_one_line_and_can_go_on(tmp_path):
    (tmp_path / "r.toml").write_text(recipe_text(RACK, **LARGER, bucket={"heartbeat_seconds": 1}))
    with small_disk(tmp_path / "disk", 64) as folder:
        words = ["train", str(tmp_path / "r.toml"), "--run", str(folder / "run"), "--device", "cpu"]
        command = [sys.executable, "-m", "isthmus.cli.main", *words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as train:
            assert train.stderr is not None
            for line in train.stderr:
                if line.startswith("round") and not line.startswith("round    0/"):
                    break
            ballast = fill(folder)
            lines = train.stderr.read().splitlines()
            assert train.wait(LIMIT_SECONDS) == 1
        assert free_bytes(folder) is not None
        assert lines[-1].startswith("isthmus: ")
        assert f"the disk of {folder}/run" in lines[-1]
        assert "Traceback" not in "\n".join(lines)
        ballast.unlink()
        run = RunDir.open(folder / "run")
        before = len(run.rows())
        words = ["train", "--resume", str(folder / "run"), "--device", "cpu"]
        with subprocess.Popen(
            [sys.executable, "-m", "isthmus.cli.main", *words], stderr=subprocess.PIPE, text=True
        ) as again:
            deadline = time.monotonic() + LIMIT_SECONDS
            while len(run.rows()) <= before + 1 and again.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
            again.terminate()
            again.communicate(timeout=LIMIT_SECONDS)
        assert len(run.rows()) > before
