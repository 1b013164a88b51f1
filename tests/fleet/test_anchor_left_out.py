"""What the bucket refuses while a replica trains or starts: an anchor is left out, a start waits."""

import shutil

import pytest
from returning import seat, small

from isthmus.protocol import closer, patience
from isthmus.runtime.trainer import Trainer
from isthmus.store import StoreError


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)
    monkeypatch.setattr(patience, "PAUSE_SECONDS", (0.01, 0.02))


def refuse_once(owner: object, name: str) -> None:
    plain, left = getattr(owner, name), [1]

    def once(*args, **more):
        left[0] -= 1
        if left[0] >= 0:
            raise StoreError(f"s3://b: {name}: permission denied", "denied")
        return plain(*args, **more)

    setattr(owner, name, once)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("what", ["put_anchor_shard", "complete_anchor"])
def test_an_anchor_that_cannot_be_put_is_left_out_and_the_next_is_written(tmp_path, what, background):
    alone = seat(small(rounds=4, full=1), tmp_path)
    alone.background = background
    fleet = alone.run(4, lambda fleet: refuse_once(fleet.ledger, what))
    (line,) = [line for line in alone.said if "is left out" in line]
    assert line == f"s3://b: {what}: permission denied; the anchor of round 2 is left out"
    assert fleet.ledger.anchor_rounds() == [4]
    assert fleet.status.round == 4


@pytest.mark.parametrize("what", ["last_round", "read_anchor", "believed_anchors"])
def test_a_start_waits_in_place_for_a_bucket_that_cannot_be_read(tmp_path, what):
    """It has no private state, or an old one."""
    alone = seat(small(rounds=8, full=1), tmp_path)
    alone.run(5)
    if what != "believed_anchors":
        shutil.rmtree(tmp_path / "work")

    def refuse(fleet: Trainer) -> None:
        refuse_once(fleet.ledger, what)

    alone.said.clear()
    assert alone.run(6, refuse).status.round == 6
    assert [line for line in alone.said if f"{what}: permission denied; waiting for that to pass" in line]
    assert [line for line in alone.said if "the bucket can be used again" in line]
