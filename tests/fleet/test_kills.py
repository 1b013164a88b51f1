"""A fleet survives its processes: killed anywhere, stopped, gone and back, asked to leave."""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faults import kills
from returning import LATE, seat, small
from small_recipes import EDGE
from torch.testing import assert_close

from isthmus.cli.main import main
from isthmus.errors import ConfigError, RunError
from isthmus.model import checkpoint
from isthmus.outer.rounds import run_rounds
from isthmus.protocol import closer, history
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.patience import LeftWaiting
from isthmus.runtime.checks import check_not_taken
from isthmus.runtime.create import create
from isthmus.runtime.liveness import Watchdog
from isthmus.runtime.recovery import Recovery
from isthmus.runtime.trainer import Trainer
from isthmus.store.objects import open_store

ROUNDS = 4


# One process, so that a kill can be put exactly where it hurts


class Killed(BaseException):
    """Stands for SIGKILL: nothing below catches it."""


@pytest.fixture(autouse=True)
def _no_turns(monkeypatch):
    """Closers step in at once: in one process there is no other to wait for."""
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, set[str]]:
    alone = seat(small(full=1), tmp_path_factory.mktemp("undisturbed"))
    alone.run(ROUNDS)
    return alone.anchors()


POINTS = [
    ("checkpoint", "save_tensors"),  # in the middle of saving state
    ("checkpoint", "drop_round"),  # state written, not yet under its name
    ("ledger", "put_shard"),
    ("ledger", "commit"),  # between PUT and commit
    ("ledger", "create_manifest"),  # between commit and manifest
    ("outer", "apply"),
    ("ledger", "put_anchor_shard"),
    ("ledger", "complete_anchor"),
]


@pytest.mark.parametrize(("where", "what"), POINTS, ids=[what for _, what in POINTS])
def test_a_kill_at_any_point_changes_no_bit(where, what, undisturbed, tmp_path):
    """Killed just before that point in one start and just after it in the next; then left alone."""
    alone = seat(small(full=1), tmp_path)
    for after in (False, True):
        left = [2]  # the second time that it comes by

        def strike(fleet: Trainer, left=left, after=after) -> None:
            owner = {"checkpoint": checkpoint, "ledger": fleet.ledger, "outer": fleet.outer}[where]
            plain = getattr(owner, what)

            def deadly(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0 and not after:
                    raise Killed
                result = plain(*args, **kwargs)
                if left[0] == 0:
                    raise Killed
                return result

            strikes.setattr(owner, what, deadly)

        with pytest.MonkeyPatch.context() as strikes, contextlib.suppress(Killed):
            alone.run(ROUNDS, strike)
    alone.run(ROUNDS)
    assert alone.anchors() == undisturbed
    manifests = open_store(str(tmp_path / "bucket")).list("manifests")
    assert manifests == [f"manifests/{t:06d}.json" for t in range(1, ROUNDS + 1)]


def everything(fleet: Trainer) -> dict[str, torch.Tensor]:
    """All that a replica carries from round to round."""
    named = {f"anchor/{name}": t for name, t in fleet.anchor.items()}
    named |= {f"feedback/{name}": t for name, t in fleet.feedback.items()}
    return named | fleet.replica.state()


@pytest.mark.parametrize("saved", [[], [1]])
@pytest.mark.parametrize("full", [1, 2])
def test_rounds_since_the_last_whole_state_are_trained_again_to_the_same_bits(
    saved, full, tmp_path, monkeypatch
):
    """Killed with updates 1 to 3 on disk, and the state of round 1 or none at all."""
    recipe = small(full=full, **(LATE if full > 1 else {}), anchor_every=9)
    name = "rack" if full == 1 else "rack-0"
    usual, struck = seat(recipe, tmp_path / "usual", name), seat(recipe, tmp_path / "struck", name)
    whole = usual.run(4)
    save = checkpoint.save

    def some(folder, rounds, files, keep):
        if rounds in saved:
            save(folder, rounds, files, keep)

    monkeypatch.setattr(checkpoint, "save", some)
    struck.background = True
    killed = struck.come()
    rounds = range(Recovery(killed).resume() + 1, 4)
    run_rounds(killed, killed.exchange, rounds, lambda h: None, lambda t, seconds: None)
    killed.state.finish()  # no farewell, and nothing of it is used any more
    assert killed.state.rounds() == saved
    assert sorted(killed.state.updates()) == [number for number in (1, 2, 3) if number not in saved]
    sent = sorted(open_store(str(tmp_path / "struck" / "bucket")).list("payloads"))
    back = struck.come()
    assert Recovery(back).resume() == 3
    assert sorted(open_store(str(tmp_path / "struck" / "bucket")).list("payloads")) == sent  # nothing anew
    again = [line for line in struck.said if line.startswith("training round")]
    assert len(again) == 3 - len(saved)
    run_rounds(back, back.exchange, range(4, 5), lambda h: None, lambda t, seconds: None)
    back.finish()
    for key, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(back)[key]), key
    assert back.step_count == whole.step_count
    assert struck.anchors() == usual.anchors()


def test_an_update_that_missed_its_round_returns_to_the_feedback_also_when_it_is_trained_again(tmp_path):
    recipe = small(**LATE)
    late, quick = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    killed = late.come()
    assert Recovery(killed).resume() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", lambda *args, **how: None)  # the state is not yet whole
        killed.train_round(0, lambda h: None)
    trained = {name: p.detach().clone() for name, p in killed.replica.named_parameters().items()}
    start = {name: anchor.clone() for name, anchor in killed.anchor.items()}
    quick.run(1)
    back = late.come()
    assert Recovery(back).resume() == 1
    for name, feedback in back.feedback.items():
        assert_close(feedback, start[name] - trained[name])


def test_a_state_is_skipped_while_the_last_is_being_written_and_the_log_says_so(tmp_path, monkeypatch):
    release, save = threading.Event(), checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args, **how: (release.wait(), save(*args, **how)))
    alone = seat(small(rounds=9, full=1), tmp_path)
    alone.background = True
    fleet = alone.come()
    rounds = range(Recovery(fleet).resume() + 1, 3)
    run_rounds(fleet, fleet.exchange, rounds, lambda h: None, lambda t, seconds: None)  # writing stops none
    assert any("state of round 2 is not saved" in line for line in alone.said)
    assert fleet.state.rounds() == []
    release.set()
    fleet.finish()
    assert fleet.state.rounds() == [1]


def test_a_disk_that_cannot_be_written_stops_the_replica_by_name(tmp_path, monkeypatch):
    def fail(*args, **how):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checkpoint, "save", fail)
    alone = seat(small(rounds=9, full=1), tmp_path)
    alone.background = True
    with pytest.raises(RunError, match=r"private state in .* cannot be written: .*Read-only"):
        alone.run(2)


def test_a_stragglers_payload_returns_to_its_feedback_and_nothing_is_lost(tmp_path):
    recipe = small(**LATE)
    late, quick = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    straggler = late.come()
    assert Recovery(straggler).resume() == 0
    own = straggler.train_round(0, lambda h: None)
    trained = {name: p.detach().clone() for name, p in straggler.replica.named_parameters().items()}
    start = {name: anchor.clone() for name, anchor in straggler.anchor.items()}
    quick.run(1)  # settled by the deadline, without the straggler
    counted = straggler.exchange.close(1, own)
    assert [contribution.replica for contribution in counted] == ["rack-1"]
    straggler.apply(1, counted)
    for name, feedback in straggler.feedback.items():  # e was 0, so all of Delta is in it again
        assert_close(feedback, start[name] - trained[name])
    assert any("returned to the error feedback" in line for line in late.said)

    again = late.come()  # killed before it saved anything later: the same is settled again
    assert Recovery(again).resume() == 1
    for name, feedback in again.feedback.items():
        assert torch.equal(feedback, straggler.feedback[name])
        assert torch.equal(again.anchor[name], straggler.anchor[name])


def test_a_replica_away_for_several_rounds_replays_them_and_keeps_its_own_state(tmp_path):
    recipe = small(rounds=9, **LATE, anchor_every=9)
    away, there = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    before = away.run(1)
    there.run(4)
    back = away.come()
    assert Recovery(back).resume() == 1
    rounds = range(2, 5)
    assert run_rounds(back, back.exchange, rounds, lambda h: None, lambda t, seconds: None)
    assert away.anchors() == there.anchors()
    assert back.step_count == before.step_count == 3  # its optimiser took no step of the others'
    assert not any("fresh optimiser" in line for line in away.said)


def test_old_state_survives_a_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(
        history, "WITNESS_ROUNDS", 3
    )  # long enough after it left, the other speaks for anchors
    recipe = small(rounds=9, **LATE)
    away, there = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    away.run(1)
    there.run(6)
    store = open_store(str(tmp_path / "bucket"))
    for key in store.list("payloads"):
        if int(key.split("/")[2]) <= 4:  # of the anchors 2, 4 and 6 the second-newest
            store.delete(key)
    back = away.come()
    assert Recovery(back).resume() == 4  # nobody has started from the anchor of round 6 yet
    assert run_rounds(back, back.exchange, range(5, 7), lambda h: None, lambda t, seconds: None)
    assert back.step_count == 3
    assert any(bool(feedback.any()) for feedback in back.feedback.values())
    assert away.anchors()[6] == there.anchors()[6]


def test_a_replica_without_private_state_joins_from_the_bucket_and_says_so(tmp_path):
    recipe = small(rounds=9, full=1)
    alone = seat(recipe, tmp_path)
    alone.run(5)
    shutil.rmtree(tmp_path / "work" / "rack")
    fresh = alone.run(6)
    assert fresh.step_count == 3
    assert any("no private state here" in line and "fresh optimiser" in line for line in alone.said)
    assert all(len(digests) == 1 for digests in alone.anchors().values())


@pytest.mark.parametrize("harm", ["cut short", "file gone"])
def test_spoilt_state_falls_back_to_the_round_before(tmp_path, harm):
    recipe = small(rounds=9, full=1)
    alone = seat(recipe, tmp_path)
    alone.run(3)
    file = tmp_path / "work" / "rack" / "state" / "round-000003" / "optimiser.safetensors"
    os.truncate(file, 100) if harm == "cut short" else file.unlink()
    fleet = alone.run(4)
    assert fleet.step_count == 12  # the third was trained again: its update was there
    assert any("the state of round 3 is lost" in line for line in alone.said)
    assert any("training round 3 again" in line for line in alone.said)
    assert all(len(digests) == 1 for digests in alone.anchors().values())


class Echo:
    """A control group of two: the other process shares what we share, except for the first time."""

    rank, size = 0, 2

    def __init__(self, first: bytes) -> None:
        self.first: bytes | None = first

    def share(self, data: bytes) -> list[bytes]:
        theirs, self.first = self.first if self.first is not None else data, None
        return [data, theirs]

    def part(self) -> None:
        pass


def test_stages_whose_newest_rounds_differ_take_up_the_newest_that_both_have(tmp_path):
    alone = seat(small(rounds=9, full=1), tmp_path)
    alone.run(3)
    state = tmp_path / "work" / "rack" / "state"
    assert checkpoint.saved_rounds(state) == [2, 3]
    fleet = alone.come(Echo(b"[[1,2],[]]"))
    assert Recovery(fleet).resume() == 2
    assert checkpoint.saved_rounds(state) == [2]  # what one had beyond it would push it out of the two kept


def test_a_watchdog_tells_silence_from_a_new_start_and_from_its_own_sleep(tmp_path):
    now = [100.0]
    alive, watchdog = tmp_path / "alive", Watchdog(clock=lambda: now[0])
    alive.write_text("7")
    assert watchdog.look({alive: 7}) == {alive: 0.0}
    now[0] += 4
    assert watchdog.look({alive: 7}) == {alive: 4.0}
    assert watchdog.look({alive: 8}) == {alive: 0.0}  # another process instead of it
    now[0] += 3
    assert watchdog.look({alive: 8}) == {alive: 3.0}  # which has not written anything yet
    now[0] += 60  # we were stopped, and perhaps it was too
    assert watchdog.look({alive: 8}) == {alive: 3.0}
    alive.write_text("8")
    assert watchdog.look({alive: 8}) == {alive: 0.0}


# Real processes. Limits are for a machine that does much else; nothing waits for one.

LIMIT_SECONDS = 180.0


def isthmus(*words: object) -> list[str]:
    return [sys.executable, "-m", "isthmus.cli.main", *map(str, words)]


class Joined:
    """`isthmus join` for some replicas of one run, as an operator would type it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, str(folder / "bucket")
        self.running: dict[str, subprocess.Popen] = {}

    def words(self, name: str, work: str = "work") -> list[str]:
        options = ["--key", self.folder / "keys" / f"{name}.key", "--work", self.folder / work / name]
        return isthmus("join", self.url, "--replica", name, *options, "--threads", 1, "--device", "cpu")

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


@pytest.fixture(scope="module")
def joined(tmp_path_factory) -> Iterator[Joined]:
    """Two full replicas and one of two stages, in a run that does not end by itself."""
    recipe = small(rounds=100_000, more=EDGE, precision="fp32")
    folder = tmp_path_factory.mktemp("joined")
    create(recipe, str(folder / "bucket"), folder / "keys")
    fleet = Joined(folder)
    names = [member.name for member in recipe.fleet()]
    for name in names:
        fleet.join(name)
    for name in names:
        fleet.wait_for(name, r"round [1-9]\d*: anchor")
    yield fleet
    for process in fleet.running.values():
        if process.poll() is None:
            process.kill()
            process.wait()
    assert kills.check_left_over(folder) == []


@pytest.mark.fleet_check
def test_join_is_refused_while_the_name_is_live(joined):
    words = joined.words("rack-1", "elsewhere")
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"isthmus: replica rack-1 is live in this run .*\n", done.stderr)


@pytest.mark.fleet_check
def test_ctrl_c_leaves_at_the_end_of_the_round_with_all_stages(joined):
    joined.running["edge"].send_signal(signal.SIGINT)
    assert joined.running["edge"].wait(LIMIT_SECONDS) == 0
    assert joined.left_over("edge") == []
    assert "leaving at the end of this round" in joined.log("edge")
    assert len(re.findall(r"left after round \d+", joined.log("edge"))) == 2


@pytest.mark.fleet_check
def test_leave_by_command_from_anywhere(joined, capsys):
    words = ["leave", joined.url, "--replica", "rack-0", "--key", str(joined.folder / "keys" / "rack-0.key")]
    assert main(words) == 0
    assert joined.running["rack-0"].wait(LIMIT_SECONDS) == 0
    assert joined.left_over("rack-0") == []
    assert re.search(r"left after round \d+", joined.log("rack-0"))
    capsys.readouterr()
    assert main(words) == 2
    assert capsys.readouterr().err == "isthmus: replica rack-0 is not in the run now\n"


@pytest.mark.fleet_check
def test_after_a_crash_the_same_command_goes_on_and_two_ctrl_c_leave_now(joined):
    joined.running["rack-1"].kill()
    joined.running["rack-1"].wait()
    assert joined.left_over("rack-1") == []  # its worker went with it
    shutil.rmtree(joined.folder / "work" / "rack-1" / "whole")
    process = joined.join("rack-1")
    joined.wait_for("rack-1", "no private state here: joining at round .* fresh optimiser")
    joined.wait_for("rack-1", r"fresh optimiser(.|\n)*round \d+: anchor")
    worker = next(p for p in kills.processes(joined.folder / "work" / "rack-1") if p.role == "full")
    os.kill(worker.pid, signal.SIGSTOP)  # it does not reach the end of the round
    process.send_signal(signal.SIGINT)
    joined.wait_for("rack-1", "leaving at the end of this round")
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_SECONDS) == 130
    assert joined.left_over("rack-1") == []


def test_a_fleet_under_fire_finishes_with_one_history(tmp_path):
    outcome = kills.ordeal(
        tmp_path / "run", rounds=15, every_seconds=2.5, seed=0, most=7, limit_seconds=600, inner_steps=2
    )
    print(outcome.table())
    assert outcome.problems == []
    struck = {(fault.victim.role, fault.kind) for fault in outcome.faults}
    assert {role for role, _ in struck} == set(kills.ROLES)
    assert {kind for _, kind in struck} >= {"SIGKILL", "SIGSTOP"}
    assert len(outcome.faults) >= 4


def test_a_live_name_of_another_machine_is_not_ours_to_take(tmp_path):
    alone = seat(small(full=1), tmp_path)
    fleet = alone.run(1)
    fleet.ledger.beat(Heartbeat(incarnation="feed", state="training"))
    work = tmp_path / "work" / "rack"
    (work / "incarnation").write_text("beef")
    clock = fleet.ledger.store.head("members/rack/clock")
    fresh = Ledger(open_store(str(tmp_path / "bucket")), fleet.ledger.run)  # has read no clock yet
    with pytest.raises(ConfigError, match="is live"):
        check_not_taken(fresh, "rack", work)
    # Its closer goes by when it last read the clock itself.
    assert fleet.ledger.store.head("members/rack/clock") == clock
    (work / "incarnation").write_text("feed")  # our own, and nothing holds the folder: it is dead
    check_not_taken(fleet.ledger, "rack", work)


def test_a_round_that_cannot_be_reached_is_waited_for_and_not_skipped(tmp_path):
    """A listed payload that is gone stops a replica that needs it; readers never skip on their own."""

    class Asked:
        def pending(self) -> bool:
            return True

        here = pending

    def leave(fleet: Trainer) -> None:
        fleet.exchange.rescue.leave = Asked()

    recipe = small(rounds=9, **LATE)
    away, there = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    there.run(1)
    store = open_store(str(tmp_path / "bucket"))
    for key in store.list("payloads/rack-1"):
        store.delete(key)
    with pytest.raises(LeftWaiting, match="payloads that are lost"):
        away.run(1, leave)
