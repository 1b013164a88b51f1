"""The rows of the paper's size: a toy of them for real, cut off and continued, and what the page says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from result_lines import line as table_line

from experiments import fullsize_run, fullsize_state
from experiments.budget import replica_bytes, stage_bytes
from experiments.fullsize import SCALES, predicted_plan, read_fullsize, recipe_at, rows_at, shown_lines
from experiments.fullsize_page import fullsize_claim, fullsize_facts, fullsize_setup, fullsize_table
from experiments.fullsize_run import Task, run_row
from experiments.lines import append, digest, read
from experiments.render import write_page
from experiments.tables import pick_scale
from isthmus.cli.main import main
from isthmus.config import dump_recipe, parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.errors import ConfigError, RunError
from isthmus.layout.traffic import inner_step_bytes, outer_bytes
from isthmus.runlog import Row
from isthmus.simulator.run import simulate

ROOT = Path(__file__).parents[2]
REAL, TOY = SCALES["178m"], SCALES["toy"]
COMMAND = ["reproduce", "178m", "--scale", "toy", "--corpus", "builtin:sample", "--device", "cpu"]
LOSSES = ("loss_full", "loss_pipelined", "loss_mixed")
TIMED = ("seconds", "tokens_per_second", "sustained_tokens_per_second", "peak_bytes")


def fabricated(row="het-8", loss=5.0, rounds=None, **facts):
    """A line as a GPU would write it."""
    recipe = recipe_at(REAL, row, "corpus/", rounds=rounds)
    last = {"loss_full": loss, "loss_pipelined": loss + 0.2, "loss_mixed": loss + 0.1}
    rounds = recipe.outer.rounds
    falling = [
        [n, *(value + 2 - 2 * n / rounds for value in last.values())] for n in (0, rounds // 2, rounds)
    ]
    bytes_of = {"activations": 10**9, "gradients": 10**9, "tokens": 10**6, "payload_up": 2 * 10**6}
    return {
        "row": row, "scale": REAL.name, "seed": 0, "digest": digest(recipe),
        "recipe": dump_recipe(recipe), "commit": "c0ffee", "device": "a device", "torch": "2.11.0",
        "precision": "bf16", "corpus": "0123456789ab", "corpus_tokens": 75_000_000,
        "parameters": recipe.model.num_parameters, "tokens": rounds * recipe.round_tokens, "seconds": 245.6,
        "tokens_per_second": 431_000, "sustained_tokens_per_second": 399_000,
        "predicted_bytes": 80 * 2**30, "peak_bytes": 64 * 2**30, "failed": None, "curve": falling,
        "round_bytes": {"edge": bytes_of | {"payload_down": 23 * 10**6}},
        **last,
    } | facts  # fmt: skip


def three(dense=4.9, het=5.0, recommended=4.8):
    lines = [fabricated("dense", dense), fabricated("het-8", het), fabricated("recommended", recommended)]
    return shown_lines(lines)


def toy(row, *settings):
    recipe = parse_recipe(dump_recipe(recipe_at(TOY, row, "builtin:sample")), settings)
    return Task(row, TOY.name, recipe, open_corpus("builtin:sample"), torch.device("cpu"), "c0ffee")


def computed(line):
    """What a line says but for its times."""
    return {key: value for key, value in line.items() if key not in TIMED}


def test_a_toy_of_a_row_runs_without_what_only_fleets_need_and_scores_as_the_simulator_does(tmp_path, capsys):
    for name in ("obstore", "cryptography", "pyarrow", "rich", "matplotlib", "tensorboardX"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on this machine')\n")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}", "ISTHMUS_COMMIT": "c0ffee"}
    only = ["--only", "recommended", "--rounds", "2"]
    command = [sys.executable, "-m", "isthmus", *COMMAND, *only, "--results", "found", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "round 2/2" in done.stderr
    folder = tmp_path / "found"
    assert [path.name for path in folder.iterdir()] == ["178m.jsonl"]  # no part is left
    [line] = read_fullsize(folder, TOY)
    long = ("curve", "train", "recipe")
    told = {key: value for key, value in line.items() if key not in long}
    assert json.loads(done.stdout) == {"rows": {"recommended": told}, "left": {}}
    assert (line["commit"], line["device"], line["torch"]) == ("c0ffee", "cpu", torch.__version__)

    recipe = parse_recipe(line["recipe"])
    rows = simulate(recipe, tmp_path / "run", device="cpu", quiet=True).rows
    for n, point in enumerate(line["curve"]):
        assert point == [n, *(pytest.approx(rows[n][name], abs=2e-6) for name in LOSSES)]
    assert [line[name] for name in LOSSES] == line["curve"][-1][1:]
    assert line["train"] == [[n, pytest.approx(rows[n]["loss_train"], abs=2e-6)] for n in (1, 2)]
    assert line["tokens"] == rows[-1]["tokens"]
    for member in recipe.fleet():
        sent = line["round_bytes"][member.config.name]
        assert (sent["payload_up"], sent["payload_down"]) == outer_bytes(recipe, member)
        for purpose, number in inner_step_bytes(recipe, member).items():
            assert sent[purpose] == recipe.outer.inner_steps * number

    before = (folder / "178m.jsonl").read_bytes()
    assert main([*COMMAND, *only, "--results", str(folder), "--commit", "c0ffee"]) == 0
    assert "recommended, seed 0, is there already in" in capsys.readouterr().out
    assert (folder / "178m.jsonl").read_bytes() == before


def test_the_same_command_runs_only_the_rows_that_have_no_line(tmp_path, capsys, monkeypatch):
    begun, run = [], fullsize_run.run_row

    def spied(task, *rest):
        begun.append(task.row)
        return run(task, *rest)

    monkeypatch.setattr(fullsize_run, "run_row", spied)
    command = [*COMMAND, "--rounds", "1", "--results", str(tmp_path), "--commit", "c0ffee"]
    assert main([*command, "--only", "het-8"]) == 0
    assert main(command) == 0
    assert begun == ["het-8", "dense", "recommended"]
    assert [line["row"] for line in read_fullsize(tmp_path, TOY)] == begun
    assert "het-8, seed 0, is there already" in capsys.readouterr().out


@pytest.mark.parametrize("row", rows_at(TOY))
def test_a_row_that_was_cut_off_and_goes_on_ends_as_one_that_was_not(row, tmp_path, monkeypatch):
    monkeypatch.setattr(fullsize_state, "SAVE_SECONDS", 0.0)  # after every round
    whole = run_row(toy(row), tmp_path / "whole", None, None)
    told, append_row = [], fullsize_state.Kept.append

    def killed(self, row):
        append_row(self, row)
        told.append(row.round)
        if row.round == 3 and told.count(3) == 1:  # its row is written, its state is not
            raise KeyboardInterrupt

    monkeypatch.setattr(fullsize_state.Kept, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        run_row(toy(row), tmp_path / "cut", tmp_path / "state", None)
    assert read_fullsize(tmp_path / "cut", TOY) == []
    line = run_row(toy(row), tmp_path / "cut", tmp_path / "state", None)
    assert told == [0, 1, 2, 3, 3, 4]
    assert computed(line) == computed(whole)
    assert read_fullsize(tmp_path / "cut", TOY) == [line]
    assert list((tmp_path / "state").iterdir()) == []  # gigabytes that nobody needs any more


def test_with_a_state_a_row_stops_before_its_time_is_over_and_the_next_sitting_goes_on(tmp_path, capfd):
    whole = run_row(toy("dense"), tmp_path / "whole", None, None)
    command = [*COMMAND, "--only", "dense", "--results", str(tmp_path), "--commit", "c0ffee"]
    past = 0.0  # of the monotonic clock: one round is trained, and then there is no time
    for _ in range(TOY.rounds - 1):
        assert run_row(toy("dense"), tmp_path, tmp_path / "state", past) is None
    assert main([*command, "--state", str(tmp_path / "state")]) == 0
    [line] = read_fullsize(tmp_path, TOY)
    assert computed(line) == computed(whole)
    err = capfd.readouterr().err
    assert [f"round {n}/4" in err for n in range(5)] == [True] * 5


def test_a_row_that_would_not_end_in_time_is_not_begun(tmp_path, capsys):
    command = [*COMMAND, "--minutes", "0.01", "--results", str(tmp_path / "found"), "--commit", "c0ffee"]
    assert main(command) == 0
    assert main([*command, "--state", str(tmp_path / "state")]) == 0
    err = capsys.readouterr().err
    assert err.count("not begun: it takes about") == err.count("not begun: a few rounds of it take") == 3
    assert not list(tmp_path.iterdir())


def test_a_state_of_another_row_or_text_is_not_continued(tmp_path):
    assert run_row(toy("dense"), tmp_path, tmp_path / "state", 0.0) is None
    [kept] = (tmp_path / "state").iterdir()
    other = toy("dense", "inner.lr=1e-3")
    assert run_row(other, tmp_path, tmp_path / "state", 0.0) is None
    assert len(list((tmp_path / "state").iterdir())) == 2
    (kept / "about.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"about.json has no 'group'; remove .* to begin anew"):
        run_row(toy("dense"), tmp_path, tmp_path / "state", 0.0)


def test_of_a_row_that_diverges_the_rounds_before_are_kept_and_no_line_is_written(tmp_path):
    with pytest.raises(RunError, match=r"the loss is nan.* measured before is in .*178m-het-8\.part"):
        run_row(toy("het-8", "inner.lr=1e6", "inner.weight_decay=1e6"), tmp_path, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["178m-het-8.part"]
    kept = json.loads((tmp_path / "178m-het-8.part").read_text())
    assert [point[0] for point in kept["curve"]] == [0]
    assert (kept["tokens"], kept["commit"]) == (0, "c0ffee")


def test_the_rate_is_that_of_the_median_round_without_the_first():
    recipe = recipe_at(TOY, "dense", "builtin:sample")
    seconds = [1.0, 50.0, 2.0, 3.0, 20.0]
    rows = [
        Row(round=n, loss_full=5.0, loss_pipelined=5.0, loss_mixed=5.0, loss_train=5.0, seconds=took)
        for n, took in enumerate(seconds)
    ]
    found = fullsize_run.summed_up(recipe, rows)
    assert found["tokens_per_second"] == round(recipe.round_tokens / 3)
    assert found["tokens"] == 4 * recipe.round_tokens
    assert found["seconds"] == 76.0
    assert found["sustained_tokens_per_second"] == round(4 * recipe.round_tokens / 76)


def test_rounds_that_were_not_scored_are_not_on_the_curve():
    recipe = parse_recipe(dump_recipe(recipe_at(TOY, "dense", "builtin:sample")), ["data.eval_every=3"])
    rows = [Row(round=n, loss_full=5.0 if recipe.is_scored(n) else None) for n in range(5)]
    assert [point[0] for point in fullsize_run.summed_up(recipe, rows)["curve"]] == [0, 3, 4]


def test_while_it_runs_the_line_so_far_is_beside_the_results(tmp_path, monkeypatch):
    seen, writing = [], fullsize_run.Measured.write

    def spied(self):
        writing(self)
        seen.append(json.loads(self.part.read_text()))

    monkeypatch.setattr(fullsize_run.Measured, "write", spied)
    monkeypatch.setattr(fullsize_run, "PART_SECONDS", float("inf"))
    run_row(toy("dense"), tmp_path / "seldom", None, None)
    assert [len(line["curve"]) for line in seen] == [0]
    seen.clear()
    monkeypatch.setattr(fullsize_run, "PART_SECONDS", 0.0)
    line = run_row(toy("dense"), tmp_path / "often", None, None)
    assert [part["curve"] for part in seen] == [line["curve"][:n] for n in range(6)]


def test_the_rows_are_the_papers_fleets_on_the_same_text_for_150_million_tokens_and_fit_on_one_gpu():
    recipes = {name: recipe_at(REAL, name, "corpus/") for name in rows_at(REAL)}
    dense, het, recommended = recipes.values()
    (edge,), (rack, compressed) = dense.replicas, het.replicas
    assert (edge.kind, edge.count, edge.stages, edge.compressed) == ("pipelined", 8, 4, False)
    assert (rack.kind, rack.count, compressed.count, compressed.stages) == ("full", 4, 4, 4)
    assert (compressed.subspace_dim(1024), compressed.wire, het.outer.keep) == (128, "bf16", 32)
    assert (het.inner.optimizer, recommended.inner.optimizer) == ("adamw", "muon")
    train = open_corpus("builtin:sample").train
    for recipe in recipes.values():
        assert recipe.outer.rounds * recipe.round_tokens >= 150e6
        plan = predicted_plan(recipe)
        assert (plan.group, plan.grad_accum_steps, plan.parked) == (8, 1, False)
        order = (recipe.seed, recipe.num_replicas, recipe.inner.batch, recipe.model.context)
        first = Batches(train, *order).stacked(7)
        assert torch.equal(first, Batches(train, 0, 8, 8, 2048).stacked(7))
    assert recipe_at(REAL, "dense", "corpus/", rounds=3).inner.warmup_steps < dense.inner.warmup_steps


def test_the_recommended_row_sends_no_more_than_the_papers_on_either_kind_of_link():
    het, ours = (recipe_at(REAL, name, "corpus/") for name in ("het-8", "recommended"))
    assert 0.9 * stage_bytes(het) < stage_bytes(ours) <= stage_bytes(het)
    assert 0.5 * replica_bytes(het) < replica_bytes(ours) <= replica_bytes(het)
    for theirs, mine in zip(het.fleet(), ours.fleet(), strict=True):
        assert sum(inner_step_bytes(ours, mine).values()) <= sum(inner_step_bytes(het, theirs).values())
        pairs = zip(outer_bytes(ours, mine), outer_bytes(het, theirs), strict=True)
        assert all(a <= b for a, b in pairs)


def test_a_dry_run_says_what_every_row_would_take(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "178m", "--dry-run", "--rounds", "10", "--json"]) == 0
    told = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [entry["row"] for entry in told] == list(rows_at(REAL))
    recipe = recipe_at(REAL, "het-8", "corpus/", rounds=10)
    assert told[1]["tokens"] == 10 * recipe.round_tokens
    assert (told[1]["digest"], told[1]["there"]) == (digest(recipe), False)
    assert told[1]["predicted_bytes"] == predicted_plan(recipe).predicted_bytes
    append(tmp_path / "results" / "178m.jsonl", fabricated("het-8", tokens_per_second=100_000))
    assert main(["reproduce", "178m", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "178 M parameters" in out
    assert "at 100,000 tokens/s, as measured" in out
    assert out.count("there already") == 1


def test_the_table_has_the_figures_of_each_row():
    text = fullsize_table(three())
    for figure in (
        "4.900",
        "5.000 | +2.04 %",
        "5.200 | +1.96 %",
        "4.800 | -2.04 %",
        "2.0 GB",
        "2.0 MB",
        "23 MB",
    ):
        assert figure in text, figure
    partly = fullsize_table(shown_lines([fabricated("het-8", 5.0)]))
    assert partly.count("not run yet") == 2
    assert fullsize_table({}).startswith("Not run yet")
    facts = fullsize_facts(three())
    for figure in (
        "431 k tokens/s",
        "399 k",
        "80.0 and 64.0 GiB",
        "`c0ffee`",
        "4 min 06 s",
        "a device, torch",
    ):
        assert figure in facts, figure
    assert "177.6 M parameters" in (setup := fullsize_setup(three()))
    assert "2.02 passes over a text of 75.0 M" in setup


def test_the_claim_is_reached_or_it_is_said_that_it_is_not():
    assert fullsize_claim(three(recommended=4.8)).endswith(": reached")
    assert fullsize_claim(three(recommended=4.99)).endswith("**not reached**")
    assert fullsize_claim(shown_lines([fabricated("het-8")])) == "not run yet"


def test_lines_of_other_settings_rounds_or_text_are_not_shown_beside_each_other():
    short = fabricated("dense", 9.0, rounds=10)
    assert list(shown_lines([short, fabricated("het-8")])) == ["het-8"]
    other = fabricated("dense", 4.0, corpus="another text")
    assert list(shown_lines([other, fabricated("het-8")])) == ["het-8"]
    assert shown_lines([fabricated("het-8", 9.0), fabricated("het-8", 5.0)])["het-8"]["loss_full"] == 5.0


def test_the_page_shows_only_finished_rows_and_tables_do_not_count_them(tmp_path):
    scale, results = pick_scale("12m"), tmp_path / "results"
    append(results / "1.jsonl", table_line(scale, "dense", 0, 4.0))
    (tmp_path / "results.in.md").write_bytes((ROOT / "docs" / "results.in.md").read_bytes())
    whole = fabricated()
    append(results / "178m.jsonl", whole | {"curve": whole["curve"][:-1], "seed": 1})  # somebody kept a part
    assert "results-178m.svg" not in [path.name for path in write_page(results, tmp_path, scale)]
    assert "reproduce 178m --corpus DIR" in (tmp_path / "results.md").read_text()
    append(results / "178m.jsonl", whole)
    append(results / "178m.jsonl", fabricated("recommended", 4.8))
    drawn = [{p.name: p.read_bytes() for p in write_page(results, tmp_path, scale)} for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert b"recommended" in drawn[0]["results-178m.svg"]
    page = drawn[0]["results.md"].decode()
    assert "![178m](results-178m.svg)" in page
    assert "mixed loss: -3.92 % (one seed)" in page
    assert len(read(results, scale)) == 1
    append(results / "178m.jsonl", fabricated("dense", peak_bytes=None))
    with pytest.raises(ConfigError, match='line without "peak_bytes"'):
        write_page(results, tmp_path, scale)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["178m"], "--corpus is missing"),
        (["178m", "--corpus", "nowhere"], "isthmus data prepare"),
        (["178m", "--scale", "12m"], "of 178m it is one of 178m, toy"),
        (["178m", "--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["178m", "--seeds", "0,1"], "178m takes one whole number"),
        (["178m", "1", "2"], "give 1 2 in a command of its own"),
        (["178m", "--only", "pp-8"], "178m has dense, het-8, recommended"),
        (["178m", "--jobs", "2"], "--jobs is for tables"),
        (["178m", "--scale", "toy", "--corpus", "builtin:sample"], 'another folder than "results"'),
        ([*COMMAND[1:], "--results", "found", "--device", "tpu"], "one of auto, cpu, cuda"),
        (["1", "--rounds", "9"], "--rounds is for 178m"),
        (["1", "--state", "here"], "--state is for 178m"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_results_that_cannot_be_written_are_said_before_anything_is_trained(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([*COMMAND, "--results", str(tmp_path / "file"), "--commit", "c0ffee"]) == 2
    assert "give --results another folder" in capsys.readouterr().err
