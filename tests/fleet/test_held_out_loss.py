"""A run in a bucket has a held-out loss: one member measures it, all others see it, and `join` says it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from faults import kills
from returning import seat, small
from small_recipes import EDGE, RACK, recipe_text

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.errors import ConfigError
from isthmus.page.source import open_source
from isthmus.page.state import StateBuilder
from isthmus.protocol import closer
from isthmus.protocol.access import open_ledger
from isthmus.protocol.recorded import bucket_rows
from isthmus.runlog.facts import Facts, HeldOut
from isthmus.runlog.held_out import HeldOutLosses
from isthmus.runtime.create import create
from isthmus.runtime.held_out import SHARE, HeldOutLoss
from isthmus.runtime.rounds import RoundLines
from isthmus.runtime.scoring import ScoredAnchor, ScoringDevice

LIMIT_SECONDS = 240.0
ROUNDS = 3
LINE = re.compile(
    r"round (\d)/3  loss (\d\.\d{3})(?:  held-out (\d\.\d{3})(?: \(round (\d)\))?)?  [\d.]+k? tok/s  "
    r"up [\d.]+ kB, down [\d.]+ k?B  [\d.]+ s \([\d.]+ compute, [\d.]+ exchange(?:, [\d.]+ scoring)?\)  "
    r"(?:ETA \d+s|the last one)$"
)


def member(folder: Path, name: str) -> subprocess.Popen[str]:
    words = ["join", "bucket", "--replica", name, "--key", f"keys/{name}.key", "--device", "cpu"]
    return subprocess.Popen(
        [sys.executable, "-m", "isthmus.cli.main", *words, "--threads", "1"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.soak
def test_a_fleet_that_was_joined_has_the_losses_that_a_recorder_measures(tmp_path, capsys, monkeypatch):
    recipe = parse_recipe(
        recipe_text(
            RACK + EDGE,
            model={"layers": 2},
            data={"eval_by": "rack"},  # in every round, however long it takes
            outer={"rounds": ROUNDS},
            bucket={"heartbeat_seconds": 1},
        )
    )
    create(recipe, str(tmp_path / "bucket"), tmp_path / "keys")
    fleet = {name: member(tmp_path, name) for name in ("rack", "edge")}
    try:
        said = {name: process.communicate(timeout=LIMIT_SECONDS)[1] for name, process in fleet.items()}
    finally:
        for process in fleet.values():
            process.kill()
    assert kills.check_left_over(tmp_path) == []
    ledger = open_ledger(str(tmp_path / "bucket"))
    recorder = ScoredAnchor(ledger, open_corpus(recipe.data.corpus), [ScoringDevice()], print)
    rows = bucket_rows(ledger)
    assert [row.round for row in rows] == [0, 1, 2, 3]
    for row in rows:
        recorder.reach(row.round)
        wanted = recorder.scores()
        assert row.loss_mixed == pytest.approx(wanted["loss_mixed"], rel=1e-5), row.round
        assert row.loss_pipelined == pytest.approx(wanted["loss_pipelined"], rel=1e-5)
    # Everybody's line has it: of who measures at once, of the others when they hear of it
    for name, lag in (("rack", 0), ("edge", 1)):
        lines = [found for line in said[name].splitlines() if (found := LINE.search(line))]
        assert [line[1] for line in lines] == ["1", "2", "3"], said[name]
        assert [line[4] for line in lines] == ([None] * 3 if lag == 0 else ["0", "1", "2"])
        for line, row in zip(lines, rows[1 - lag :], strict=False):
            assert float(line[3]) == pytest.approx(row.loss_mixed, abs=6e-4)
    # So have `status`, the ledger and the page
    monkeypatch.chdir(tmp_path)
    assert main(["status", "bucket"]) == 0
    assert f"held-out loss {rows[3].loss_mixed:.3f} after round 3, by rack" in capsys.readouterr().out
    assert main(["status", "bucket", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["held_out"]
    assert (found["round"], found["by"], found["mixed"]) == (3, "rack", pytest.approx(rows[3].loss_mixed))
    assert main(["ledger", "show", "bucket"]) == 0
    assert f"held-out loss of theta^(2) {rows[2].loss_mixed:.4f}, by rack" in capsys.readouterr().out
    state = StateBuilder().build(open_source("bucket").look())
    assert state["tiles"][0]["name"] == "Held-out loss"
    assert state["last"]["loss_mixed"] == pytest.approx(rows[3].loss_mixed)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)
    return seat(small(rounds=40, full=1), tmp_path)


def measuring(trainer, asked=None, clock=lambda: 0.0, **data) -> HeldOutLoss:
    recipe = replace(trainer.recipe, data=replace(trainer.recipe.data, **data))
    corpus = open_corpus(recipe.data.corpus)
    return HeldOutLoss(
        recipe, trainer.member, trainer.ledger, corpus, trainer.anchor, torch.float64, asked, clock
    )


def test_the_first_full_replica_that_gave_measures_unless_somebody_says_otherwise(alone):
    trainer = alone.run(2)
    assert measuring(trainer).is_ours(2)
    assert measuring(trainer, eval_by="rack").is_ours(2)
    assert not measuring(trainer, eval_by="edge").is_ours(2)
    assert not measuring(trainer, eval_by="none").is_ours(2)
    assert measuring(trainer, asked=True, eval_by="none").is_ours(2)
    assert not measuring(trainer, asked=False).is_ours(2)
    with pytest.raises(ConfigError, match=r"data\.eval_by"):
        parse_recipe(recipe_text(RACK, data={"eval_by": "../x"}))


def test_measuring_takes_a_small_share_of_the_time_and_never_skips_the_end(alone):
    trainer, now = alone.run(1), [0.0]

    def clock() -> float:
        now[0] += 1.0  # so it takes a second
        return now[0]

    loss = measuring(trainer, clock=clock)
    assert loss.after(1) is not None
    assert loss.after(1) is None
    now[0] += SHARE
    assert loss.after(1) is not None
    loss.recipe = replace(loss.recipe, outer=replace(loss.recipe.outer, rounds=1))
    assert loss.after(1) is not None, "the last round is always measured"
    asked = measuring(trainer, asked=True, clock=clock)
    assert [asked.after(1) is not None for _ in range(3)] == [True] * 3


def test_a_loss_from_a_stranger_is_checked_and_of_a_round_that_is_not_over_left_out():
    good = {"round": 4, "full": 3.5, "pipelined": 3.75, "mixed": 3.6}
    said = Facts.from_dict({"held_out": good})
    assert Facts.from_dict(json.loads(json.dumps(said.to_dict()))) == said
    odd = [{"round": -1}, {"round": True}, {"mixed": None}, {"full": -1}, {"mixed": 1e9}, {"pipelined": -2.0}]
    for change in odd:
        assert Facts.from_dict({"held_out": good | change}) == Facts()
    losses = HeldOutLosses()
    for t in (4, 5, 6):
        entries = [SimpleNamespace(replica=name, facts=said) for name in ("rack", "edge")]
        losses.add(SimpleNamespace(round=t, entries=entries))
        assert losses.last == (None if t == 4 else (HeldOut(**good), "rack"))
    assert Facts.from_dict({}).to_dict() == {}


def test_a_line_tells_loss_rate_bytes_seconds_and_how_long_the_rest_takes():
    said, now = [], [100.0]
    lines = RoundLines(said.append, 12, clock=lambda: now[0])
    facts = Facts(bytes={"payload_up": 1_200_000, "payload_down": 3_400_000})
    given = {"loss": 3.41234, "tokens_per_second": 12_300.0, "facts": facts}
    now[0] = 110.0
    lines.round(1, compute_seconds=7.0, held_out=None, **given)
    now[0] = 120.0
    measured = HeldOut(round=1, full=3.0, mixed=3.5)
    lines.round(2, compute_seconds=7.0, scoring_seconds=1.0, held_out=measured, **given)
    now[0] = 130.0
    lines.round(3, compute_seconds=7.0, held_out=measured, **given)
    assert said == [
        "round  1/12  loss 3.412  12.3k tok/s  up 1.2 MB, down 3.4 MB  "
        "10.0 s (7.0 compute, 3.0 exchange)  ETA 1m50s",
        "round  2/12  loss 3.412  held-out 3.500 (round 1)  12.3k tok/s  up 1.2 MB, down 3.4 MB  "
        "10.0 s (7.0 compute, 2.0 exchange, 1.0 scoring)  ETA 1m40s",
        "round  3/12  loss 3.412  12.3k tok/s  up 1.2 MB, down 3.4 MB  "
        "10.0 s (7.0 compute, 3.0 exchange)  ETA 1m30s",
    ]
    now[0] = 131.0  # we came late, and the others settled it: no update of ours, and no measure of a round
    lines.round(4, compute_seconds=0.5, held_out=None, **given | {"facts": None})
    now[0] = 231.0  # the bucket was away for a while
    lines.num_rounds = 14  # `isthmus extend`
    lines.round(5, compute_seconds=7.0, held_out=None, **given)
    assert [re.sub(" loss .*ETA", "ETA", line) for line in said[3:]] == [
        "round  4/12 ETA 1m20s",
        "round  5/14 ETA 1m30s",
    ]
    lines.num_rounds, said[3:] = 12, []
    for t in range(4, 12):  # read from the bucket in a moment
        lines.round(t, compute_seconds=None, held_out=None, **given)
    assert said[3:] == ["round  4/12  read from the bucket, not trained here"]
