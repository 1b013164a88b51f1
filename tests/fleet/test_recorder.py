"""Rows when rounds are settled, losses when they are known: by a recorder of real rounds in a bucket."""

import io
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from made import small
from seats import rounds_in_a_bucket
from small_recipes import RACK, recipe_text

from isthmus import train
from isthmus.config import Recipe, parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.errors import ConfigError, RunError
from isthmus.layout.stages import EMBEDDING
from isthmus.model.digest import anchor_digest, shard_digest
from isthmus.protocol import replay as replay_module
from isthmus.protocol.access import open_ledger
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.manifests import Manifests
from isthmus.protocol.replay import Replay
from isthmus.replica.evaluate import Scorer
from isthmus.runlog import TIMING_FIELDS, Row, RunDir
from isthmus.runlog.live import View
from isthmus.runtime.recorder import Recorder, Scoring
from isthmus.runtime.scoring import ScoredAnchor, ScoringDevice, scoring_devices
from isthmus.runtime.train import resume
from isthmus.subspace.boundaries import BasisSet

ROUNDS = 4
CPU = torch.device("cpu")
SECONDS = 120.0  # nothing waits for it on a machine that works


@dataclass(frozen=True)
class History:
    folder: Path  # with bucket/
    recipe: Recipe
    rows: list[Row]  # as they have to be in the end


def plain_rows(ledger: Ledger) -> list[Row]:
    """Slow and plain: one round after another, each scored before the next is looked at."""
    recipe, replay = ledger.run.recipe, Replay(ledger)
    embedding = replay.anchor[EMBEDDING]
    scorer = Scorer(
        recipe, open_corpus(recipe.data.corpus), BasisSet(recipe, CPU, embedding.dtype), CPU, embedding.dtype
    )
    rows = [Row.untrained(recipe, scorer.score(replay.anchor, embedding), 0.0)]
    while True:
        manifest = replay.step()
        if manifest is None:
            return rows
        digest = anchor_digest([shard_digest(replay.anchor, names) for names in ledger.shards])
        scores = scorer.score(replay.anchor, embedding) if recipe.is_scored(manifest.round) else None
        rows.append(Row.from_manifest(recipe, manifest, rows[-1].tokens, scores, digest))


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Rounds 1 to 4, of which all but the first are to be scored. Not to be written to."""
    folder = tmp_path_factory.mktemp("history")
    settings = ("bucket.deadline_seconds=1", "bucket.anchor_every=2", "inner.precision=fp32")
    recipe = small(f"outer.rounds={ROUNDS}", "data.eval_every=2", *settings)
    torch.set_num_threads(1)
    rounds_in_a_bucket(recipe, folder, settle=ROUNDS)
    return History(folder, recipe, plain_rows(open_ledger(str(folder / "bucket"))))


class Recorded:
    """A run directory beside the history, and recorders of it, one after another."""

    def __init__(self, history: History, path: Path) -> None:
        self.history, self.bucket = history, str(history.folder / "bucket")
        self.said = io.StringIO()
        self.run = RunDir.create(path, history.recipe, {})

    def recorder(self, where: list[ScoringDevice] | None = None, view: View | None = None) -> Recorder:
        recipe, corpus = self.history.recipe, open_corpus(self.history.recipe.data.corpus)
        view = view or View(recipe, 0, ROUNDS, self.said)
        return Recorder(open_ledger(self.bucket), corpus, self.run, view, where=where or [ScoringDevice()])

    def lines(self) -> list[str]:
        return self.said.getvalue().splitlines()

    def check(self) -> None:
        """Its file holds what a plain recorder would have written."""
        wanted = [json.dumps(row.to_dict()) for row in self.history.rows]
        assert self.run.metrics_path.read_text().splitlines() == wanted


@pytest.fixture
def recorded(history: History, tmp_path: Path) -> Recorded:
    torch.set_num_threads(1)
    return Recorded(history, tmp_path / "run")


def always() -> bool:
    return True


def fill_all(recorder: Recorder) -> None:
    while recorder.fill_in():
        pass


ORDERS: dict[str, Callable[[Recorder], None]] = {
    "losses first": lambda r: [(r.fill_in(), r.advance()) for _ in range(ROUNDS)] and fill_all(r),
    "rows first": lambda r: (r.record(always), fill_all(r)),
    "two by two": lambda r: (
        [(r.advance(), r.advance(), r.fill_in(), r.fill_in()) for _ in range(ROUNDS)] and fill_all(r)
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_in_whatever_order_rows_and_losses_come_the_file_ends_as_a_plain_recorder_writes_it(recorded, order):
    recorder = recorded.recorder()
    ORDERS[order](recorder)
    assert recorder.has_last_anchor()
    recorded.run.tidy()
    recorded.check()


def test_rows_come_at_once_while_a_slow_scorer_is_still_at_the_first(recorded, monkeypatch):
    begun, go = threading.Event(), threading.Event()
    scores = Recorder._scores

    def slow(recorder: Recorder) -> dict:
        begun.set()
        assert go.wait(SECONDS)
        return scores(recorder)

    monkeypatch.setattr(Recorder, "_scores", slow)
    recorder = recorded.recorder()
    with Scoring(recorder) as scoring:
        assert begun.wait(SECONDS)
        recorder.record(lambda: False)
        rows = recorded.run.rows()
        assert [row.round for row in rows] == list(range(ROUNDS + 1))
        assert all(row.loss_full is None and row.anchor is None for row in rows)
        assert rows[-1].loss_train == recorded.history.rows[-1].loss_train
        go.set()
        scoring.finish()
    recorded.run.tidy()
    recorded.check()


def test_a_line_has_its_losses_or_they_follow_in_a_line_of_their_own(recorded):
    recorder = recorded.recorder()
    assert recorded.lines() == []  # it waits for its losses
    recorder.fill_in()
    assert recorded.lines()[0].endswith("before training")
    recorder.advance()
    assert "round 1/4  loss mixed     - full     -" in recorded.lines()[1]  # eval_every is 2
    recorder.advance()
    recorder.advance()
    assert "round 2/4  loss mixed     - full     -" in recorded.lines()[2]  # it has waited long enough
    fill_all(recorder)
    two = recorded.history.rows[2]
    losses = f"mixed {two.loss_mixed:.2f}, full {two.loss_full:.2f}, pipelined {two.loss_pipelined:.2f}"
    assert recorded.lines()[4:] == [f"round 2: held-out loss {losses}"]
    recorder.advance()
    fill_all(recorder)
    four = recorded.history.rows[4]
    assert len(recorded.lines()) == 6
    assert recorded.lines()[-1].startswith(f"round 4/4  loss mixed {four.loss_mixed:5.2f} full")


@pytest.mark.parametrize("filled", range(ROUNDS + 1))
def test_a_run_that_goes_on_fills_in_what_was_missing(recorded, filled):
    before = recorded.recorder()
    before.advance(), before.advance(), before.advance()
    for _ in range(filled):
        before.fill_in()
    recorded.run.truncate(3)  # as a resume does
    after = recorded.recorder()
    assert sorted(after.waiting) == list(range(filled, 4))
    with Scoring(after) as scoring:
        after.record(always)
        scoring.finish()
    recorded.run.tidy()
    recorded.check()


def test_what_farewells_add_to_the_last_row_stays_when_its_losses_come_later(recorded):
    recorder = recorded.recorder()
    recorder.record(always)
    recorder.add_farewells(always)
    before = recorded.run.rows()[-1]
    fill_all(recorder)
    after, wanted = recorded.run.rows()[-1], recorded.history.rows[-1]
    assert (after.bytes, after.measured) == (before.bytes, before.measured)
    assert (after.loss_full, after.anchor) == (wanted.loss_full, wanted.anchor)


def test_losses_that_cannot_be_measured_end_the_losses_and_nothing_else(recorded, monkeypatch):
    def gone(*args: object) -> None:
        raise ConfigError("the text is gone")

    recorder = recorded.recorder()
    recorder.advance()
    fill_all(recorder)
    monkeypatch.setattr(Scorer, "score", gone)
    with Scoring(recorder) as scoring:
        recorder.record(always)
        scoring.finish()
    assert [line for line in recorded.lines() if "gone" in line] == [
        "no more held-out losses: the text is gone; the fleet goes on"
    ]
    assert recorder.problem() == "rounds 2 to 4 could not be scored: the text is gone"
    assert recorder.has_last_anchor()
    for row, wanted in zip(recorded.run.rows(), recorded.history.rows, strict=True):
        assert row.anchor == wanted.anchor  # they are known without the text
        assert row.loss_full == (wanted.loss_full if row.round < 2 else None)
    assert any(line.startswith("round 4/4") for line in recorded.lines())  # it may say that it scores, too


def test_a_history_that_does_not_add_up_is_named_and_rows_still_come(recorded, monkeypatch):
    def other(replay: Replay) -> str:
        return "0" * 64

    monkeypatch.setattr(Replay, "digest", other)
    recorder = recorded.recorder()
    with Scoring(recorder) as scoring:
        recorder.record(always)
        scoring.finish()
    assert "manifest 1 of this run, by closer" in recorder.problem()
    assert not recorder.has_last_anchor()
    assert [row.round for row in recorded.run.rows()] == list(range(ROUNDS + 1))


def test_where_payloads_were_swept_it_goes_on_from_the_next_anchor_and_says_so(
    recorded, tmp_path, monkeypatch
):
    monkeypatch.setattr(Manifests, "check_confirmed", lambda *args: None)
    shutil.copytree(recorded.bucket, tmp_path / "bucket")
    recorded.bucket = str(tmp_path / "bucket")
    recorder = recorded.recorder()
    recorder.fill_in()
    recorder.record(always)
    for folder in (tmp_path / "bucket" / "payloads").glob("*/00000[12]"):
        shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "bucket" / "anchors" / "000002")
    fill_all(recorder)
    assert recorded.lines()[-1] == (
        "no held-out losses of round 2: payloads were swept before they were scored"
    )
    rows, wanted = recorded.run.rows(), recorded.history.rows
    known = (wanted[0].loss_full, None, None, None, wanted[4].loss_full)
    assert tuple(row.loss_full for row in rows) == known
    assert rows[4].anchor == wanted[4].anchor
    assert recorder.has_last_anchor()
    assert recorder.problem() == ""


def test_a_place_without_room_is_left_once_and_the_losses_are_the_same(recorded, monkeypatch):
    score, tries = Scorer.score, []

    def full(scorer: Scorer, *args: object) -> dict:
        tries.append((scorer.device, scorer.rows))
        if scorer.device.index is not None and len(tries) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return score(scorer, *args)

    monkeypatch.setattr(Scorer, "score", full)
    crowded = torch.device("cpu", 0)
    recorder = recorded.recorder(
        [ScoringDevice(crowded), ScoringDevice(crowded, compiled=True), ScoringDevice()]
    )
    ORDERS["rows first"](recorder)
    assert tries == [(crowded, None), (crowded, None), (CPU, None), (CPU, None)]
    assert [line for line in recorded.lines() if "CPU" in line] == [
        "scoring goes on on the CPU, and takes longer: cpu:0 has no room for it"
    ]
    recorded.run.tidy()
    recorded.check()


def test_what_does_not_compile_is_scored_without_compiling(recorded, monkeypatch):
    made = ScoredAnchor._make_scorer

    def no_compiler(anchor: ScoredAnchor) -> Scorer:
        if anchor.where[0].compiled:
            raise OSError("there is no compiler")
        return made(anchor)

    monkeypatch.setattr(ScoredAnchor, "_make_scorer", no_compiler)
    recorder = recorded.recorder([ScoringDevice(compiled=True), ScoringDevice()])
    ORDERS["rows first"](recorder)
    assert "scoring goes on without compiling: there is no compiler" in recorded.lines()
    recorded.run.tidy()
    recorded.check()


def test_a_fleet_on_cpus_is_scored_in_whole_batches_and_one_on_a_gpu_in_parts():
    assert scoring_devices(CPU, "bf16") == [ScoringDevice()]
    *on_gpu, last = scoring_devices(torch.device("cuda", 1), "bf16")
    assert all(on.shared and on.dtype == torch.bfloat16 for on in on_gpu)
    assert on_gpu[-1] == ScoringDevice(torch.device("cuda", 1), torch.bfloat16, shared=True)
    assert last == ScoringDevice(shared=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_on_a_gpu_anchors_have_the_same_bits_and_losses_are_near(recorded, precision, tolerance):
    on_gpu = [on for on in scoring_devices(torch.device("cuda", 0), precision) if on.device.type == "cuda"]
    recorder = recorded.recorder(on_gpu)
    with Scoring(recorder) as scoring:
        recorder.record(always)
        scoring.finish()
    assert recorder.problem() == ""
    assert recorder.replay.anchor[EMBEDDING].is_cuda
    for row, wanted in zip(recorded.run.rows(), recorded.history.rows, strict=True):
        assert row.anchor == wanted.anchor
        assert row.loss_by_kind == pytest.approx(wanted.loss_by_kind, rel=tolerance)


def test_scoring_a_few_sequences_at_a_time_gives_the_same_losses(history):
    ledger = open_ledger(str(history.folder / "bucket"))
    replay, corpus = Replay(ledger), open_corpus(history.recipe.data.corpus)
    replay.step()
    wide = {name: tensor.double() for name, tensor in replay.anchor.items()}
    bases = BasisSet(history.recipe, CPU, torch.float64)
    whole, parts = (
        Scorer(history.recipe, corpus, bases, CPU, torch.float64, rows=rows).score(wide, wide[EMBEDDING])
        for rows in (None, 1)
    )
    assert parts["loss_by_kind"] == pytest.approx(whole["loss_by_kind"], rel=1e-12)
    assert parts["loss_full"] == pytest.approx(whole["loss_full"], rel=1e-12)


def test_whoever_stops_does_not_wait_for_a_round_to_be_scored(recorded, monkeypatch):
    begun = threading.Event()
    check = ScoredAnchor.check

    def last_layer(anchor: ScoredAnchor) -> None:
        begun.set()
        assert anchor.stopped.wait(SECONDS)
        check(anchor)

    recorder = recorded.recorder()
    monkeypatch.setattr(ScoredAnchor, "check", last_layer)
    with Scoring(recorder) as scoring:
        assert begun.wait(SECONDS)
        recorder.advance()
    assert not scoring.is_alive()
    assert [row.loss_full for row in recorded.run.rows()] == [None, None]


def test_an_anchor_is_hashed_once(recorded, monkeypatch):
    hashed = []
    plain = replay_module.shard_digests
    monkeypatch.setattr(replay_module, "shard_digests", lambda *args: hashed.append(args) or plain(*args))
    ORDERS["rows first"](recorded.recorder())
    assert len(hashed) == ROUNDS + 1


@pytest.mark.soak
def test_a_run_whose_scoring_failed_ends_so_and_is_scored_when_it_goes_on(tmp_path, monkeypatch):
    def broken(recorder: Recorder) -> dict:
        raise OSError("the disk with the text is away")

    recipe = parse_recipe(recipe_text(RACK, model={"layers": 2}, inner={"precision": "fp32"}))
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "_scores", broken)
        with pytest.raises(RunError) as reason:
            train(recipe, tmp_path / "run", device="cpu", quiet=True)
    assert str(reason.value) == (
        "rounds 0 to 2 could not be scored: the disk with the text is away; go on with: isthmus train "
        f"--resume {tmp_path / 'run'}"
    )
    about = RunDir.open(tmp_path / "run").about
    assert about["status"] == "failed"
    assert "the disk with the text is away" in (about["error"] or "")
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    rows = resume(tmp_path / "run", quiet=True).rows
    assert RunDir.open(tmp_path / "run").about["status"] == "finished"
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model
    same_but_for_the_clock(tmp_path / "run", rows)


@pytest.mark.soak
def test_ctrl_c_while_the_last_round_is_scored_leaves_that_to_the_next_start(tmp_path, monkeypatch):
    scores, finish, waits = Recorder._scores, Scoring.finish, threading.Event()

    def struck(recorder: Recorder) -> dict:
        if recorder.replay.round == recorder.recipe.outer.rounds:
            assert waits.wait(SECONDS)
            os.kill(os.getpid(), signal.SIGINT)
            assert recorder.stopped.wait(SECONDS)
        return scores(recorder)

    recipe = parse_recipe(recipe_text(RACK, model={"layers": 2}, inner={"precision": "fp32"}))
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "_scores", struck)
        patch.setattr(Scoring, "finish", lambda scoring: (waits.set(), finish(scoring)))
        with pytest.raises(KeyboardInterrupt, match="interrupted; go on with: isthmus train --resume"):
            train(recipe, tmp_path / "run", device="cpu", quiet=True)
    run = RunDir.open(tmp_path / "run")
    assert run.about["status"] == "interrupted"
    assert [row.loss_full is None for row in run.rows()] == [False, False, True]
    sent = run.rows()[-1].bytes["payload_up"]
    rows = resume(tmp_path / "run", quiet=True).rows
    assert RunDir.open(tmp_path / "run").about["status"] == "finished"
    assert rows[-1].bytes["payload_up"] == sent  # nothing was trained or counted twice
    same_but_for_the_clock(tmp_path / "run", rows)


def same_but_for_the_clock(run: Path, rows: list[Row]) -> None:
    """Rows as a plain recorder writes them, less the clock and the bytes of a second start."""
    aside = (*TIMING_FIELDS, "bytes")
    for row, wanted in zip(rows, plain_rows(open_ledger(str(run / "bucket"))), strict=True):
        left, right = ({k: v for k, v in each.items() if k not in aside} for each in (row, wanted))
        assert left == right
