"""A fleet survives its processes: killed anywhere, stopped, gone and back, asked to leave."""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from faults import kills
from joined import LIMIT_SECONDS, Joined
from returning import LATE, Seat, seat, small
from small_recipes import EDGE
from torch.testing import assert_close

from isthmus.cli.main import main
from isthmus.errors import ConfigError, RunError, RunStopped
from isthmus.model import checkpoint
from isthmus.outer.rounds import run_rounds
from isthmus.protocol import closer
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.patience import LeftWaiting
from isthmus.runtime.create import create
from isthmus.runtime.preflight import check_not_taken
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


def only_at(fleet: Trainer, *places: tuple[int, int]) -> None:
    """It saves checkpoints in these rounds, after so many inner steps, and no others."""
    fleet.checkpoint.is_due = lambda edge: (fleet.session.round, len(fleet.losses)) in places


def rounds_until(fleet: Trainer, last: int) -> Trainer:
    done = fleet.resume()
    run_rounds(fleet, range(done + 1, last + 1), lambda h: None, lambda t, seconds: None)
    return fleet


@pytest.mark.parametrize("place", [(1, 3), (2, 1), (3, 3)])
@pytest.mark.parametrize("full", [1, 2])
def test_rounds_since_an_old_checkpoint_are_trained_again_to_the_same_bits(place, full, tmp_path):
    recipe = small(full=full, **(LATE if full > 1 else {}), anchor_every=9)
    name = "rack" if full == 1 else "rack-0"
    usual, struck = seat(recipe, tmp_path / "usual", name), seat(recipe, tmp_path / "struck", name)
    whole = usual.run(4)
    killed = struck.come()
    only_at(killed, place)
    rounds_until(killed, 3)  # no farewell, and nothing of it is used any more
    sent = sorted(open_store(str(tmp_path / "struck" / "bucket")).list("payloads"))
    back = struck.come()
    assert back.resume() == place[0] - 1
    again = range(place[0], 4)
    run_rounds(back, again, lambda h: None, lambda t, seconds: None)
    assert sorted(open_store(str(tmp_path / "struck" / "bucket")).list("payloads")) == sent  # nothing anew
    run_rounds(back, range(4, 5), lambda h: None, lambda t, seconds: None)
    back.finish()
    for key, tensor in everything(whole).items():
        assert torch.equal(tensor, everything(back)[key]), key
    assert back.step_count == whole.step_count
    assert struck.anchors() == usual.anchors()


def test_no_checkpoint_is_due_while_the_last_is_being_written_and_none_is_waited_for(tmp_path, monkeypatch):
    release, save = threading.Event(), checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args, **how: (release.wait(), save(*args, **how)))
    alone = seat(small(rounds=9, full=1), tmp_path)
    alone.background = True
    fleet = rounds_until(alone.come(), 2)
    assert fleet.checkpoint.numbers() == set()
    release.set()
    fleet.finish()
    assert fleet.checkpoint.numbers() == {3}  # round 1, after three inner steps


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
    assert straggler.resume() == 0
    start = {name: anchor.clone() for name, anchor in straggler.anchor.items()}
    deliver = straggler.session.deliver
    straggler.session.deliver = lambda *given: (quick.run(1), deliver(*given))  # settled by the deadline
    straggler.train_round(1, lambda h: None)
    trained = {name: p.detach().clone() for name, p in straggler.replica.named_parameters().items()}
    assert straggler.settle(1) == 1
    assert [entry.replica for entry in straggler.ledger.manifest(1).entries] == ["rack-1"]
    for name, feedback in straggler.feedback.items():  # e was 0, so all of Delta is in it again
        assert_close(feedback, start[name] - trained[name])
    assert any("it stays in the error feedback" in line for line in late.said)

    again = late.come()  # killed before it saved anything later: the same is settled again
    rounds_until(again, 1)
    for name, feedback in again.feedback.items():
        assert torch.equal(feedback, straggler.feedback[name])
        assert torch.equal(again.anchor[name], straggler.anchor[name])


def test_a_replica_away_for_several_rounds_replays_them_and_keeps_its_own_state(tmp_path):
    recipe = small(rounds=9, **LATE, anchor_every=9)
    away, there = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    before = away.run(1)
    there.run(4)
    back = rounds_until(away.come(), 4)
    assert away.anchors() == there.anchors()
    assert back.step_count == before.step_count == 3  # its optimiser took no step of the others'
    assert not any("fresh optimiser" in line for line in away.said)


@pytest.fixture
def swept(tmp_path, monkeypatch) -> tuple[Seat, Seat]:
    """(a replica whose state is of round 1, one that went on to 6); payloads up to round 4 are gone."""
    # long enough after the first one left, the other speaks for anchors
    recipe = small(rounds=9, **LATE)
    away, there = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    away.run(1).save_now()
    there.run(6)
    store = open_store(str(tmp_path / "bucket"))
    for key in store.list("payloads"):
        if int(key.split("/")[2]) <= 4:  # of the anchors 2, 4 and 6 the second-newest
            store.delete(key)
    return away, there


def test_old_state_survives_a_sweep(swept):
    away, there = swept
    back = away.come()
    assert back.resume() == 4  # nobody has started from the anchor of round 6 yet
    assert run_rounds(back, range(5, 7), lambda h: None, lambda t, seconds: None)
    assert back.step_count == 3
    assert any(bool(feedback.any()) for feedback in back.feedback.values())
    assert away.anchors()[6] == there.anchors()[6]


def test_restored_weights_are_never_held_as_those_of_round_0(swept, tmp_path):
    """No anchor can be read for now: the start fails, and accuses nobody. A later start goes on."""
    away, there = swept
    shutil.copytree(tmp_path / "bucket" / "anchors", tmp_path / "kept")
    for file in (tmp_path / "bucket" / "anchors").glob("*/*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(RunError) as failed:
        away.come().resume()
    assert not isinstance(failed.value, RunStopped)  # it may pass: the worker is started again
    shutil.copytree(tmp_path / "kept", tmp_path / "bucket" / "anchors", dirs_exist_ok=True)
    assert away.run(6).status.round == 6
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
def test_of_two_checkpoints_the_older_is_taken_where_the_newer_is_spoilt(tmp_path, harm, undisturbed):
    """One at the edge of a round, one inside the round before it was delivered."""
    alone = seat(small(full=1), tmp_path)
    fleet = alone.come()
    only_at(fleet, (3, 2), (3, 3))
    rounds_until(fleet, 3)
    (file,) = (tmp_path / "work" / "rack" / "state" / "edge").glob("*/optimiser.safetensors")
    os.truncate(file, 100) if harm == "cut short" else file.unlink()
    fleet = alone.run(4)
    assert fleet.step_count == 12
    assert any("a checkpoint is lost" in line for line in alone.said)
    assert "back in round 3, after 2 of its inner steps" in alone.said
    assert alone.anchors() == undisturbed


def test_another_number_of_processes_is_refused_with_the_cure(tmp_path):
    alone = seat(small(full=1), tmp_path)
    place = alone.run(1).place()
    fleet = alone.come()
    fleet.checkpoint.save_now(replace(place, processes=2), fleet.state_files())
    with pytest.raises(ConfigError, match="a replica of 2 processes, and this one has 1; put their"):
        alone.come().resume()


# Real processes


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
    fleet.stop()


@pytest.mark.soak
@pytest.mark.fleet_check
def test_join_is_refused_while_the_name_is_live(joined):
    words = joined.words("rack-1", "elsewhere")
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"isthmus: replica rack-1 is live in this run .*\n", done.stderr)


@pytest.mark.soak
@pytest.mark.fleet_check
def test_ctrl_c_leaves_at_the_end_of_the_round_with_all_stages(joined):
    joined.running["edge"].send_signal(signal.SIGINT)
    assert joined.running["edge"].wait(LIMIT_SECONDS) == 0
    assert joined.left_over("edge") == []
    assert "leaving at the end of this round" in joined.log("edge")
    assert len(re.findall(r"left after round \d+", joined.log("edge"))) == 2


@pytest.mark.soak
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


@pytest.mark.soak
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


@pytest.mark.soak
def test_a_fleet_under_fire_finishes_with_one_history(tmp_path):
    outcome = kills.ordeal(
        tmp_path / "run", rounds=15, every_seconds=2.5, seed=0, most=7, limit_seconds=600, inner_steps=2
    )
    print(outcome.faults)
    assert outcome.problems == []
    struck = {(fault.victim.role, fault.kind) for fault in outcome.faults}
    assert {role for role, _ in struck} == set(kills.ROLES)
    assert {kind for _, kind in struck} >= {"SIGKILL", "SIGSTOP"}
    assert len(outcome.faults) >= 4


def test_a_live_name_of_another_machine_is_not_ours_to_take(tmp_path):
    alone = seat(small(full=1), tmp_path)
    fleet = alone.run(1)
    fleet.ledger.beat(Heartbeat(incarnation="feed", state="training"))
    lock = tmp_path / "work" / "rack" / "replica.lock"
    lock.write_text("1 beef")
    clock = fleet.ledger.store.head("members/rack/clock")
    fresh = Ledger(open_store(str(tmp_path / "bucket")), fleet.ledger.run)  # has read no clock yet
    with pytest.raises(ConfigError, match="is live"):
        check_not_taken(fresh, "rack", lock)
    # Its closer goes by when it last read the clock itself.
    assert fleet.ledger.store.head("members/rack/clock") == clock
    lock.write_text("1 feed")  # our own, and nothing holds the folder: it is dead
    check_not_taken(fleet.ledger, "rack", lock)


def test_a_round_that_cannot_be_reached_is_waited_for_and_not_skipped(tmp_path):
    """A listed payload that is gone stops a replica that needs it; readers never skip on their own."""

    class Asked:
        def asked(self) -> int:
            return 1

        here = asked

    def leave(fleet: Trainer) -> None:
        fleet.patience.leave = Asked()

    recipe = small(rounds=9, **LATE)
    away, there = seat(recipe, tmp_path, "rack-0"), seat(recipe, tmp_path, "rack-1")
    there.run(1)
    store = open_store(str(tmp_path / "bucket"))
    for key in store.list("payloads/rack-1"):
        store.delete(key)
    with pytest.raises(LeftWaiting, match="payload that is missing"):
        away.run(1, leave)
