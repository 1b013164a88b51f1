"""The larger run: a toy of it for real, what is kept of one that is cut off, and what the page says of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from result_lines import line as table_line

from experiments import larger_run
from experiments.larger import SCALES, larger_recipe, predicted_plan, read_larger, rounds_within
from experiments.larger_page import larger_table
from experiments.lines import append, digest, read
from experiments.render import write_page
from experiments.tables import pick_scale
from isthmus.cli.main import main
from isthmus.config import dump_recipe, parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.errors import ConfigError, RunError
from isthmus.layout.traffic import inner_step_bytes, outer_bytes
from isthmus.runlog import Row
from isthmus.simulator.run import simulate

ROOT = Path(__file__).parents[2]
REAL, TOY = SCALES["178m"], SCALES["toy"]
COMMAND = ["reproduce", "larger", "--scale", "toy", "--corpus", "builtin:sample", "--device", "cpu"]
LOSSES = ("loss_full", "loss_pipelined", "loss_mixed")


def fabricated(rounds=4, **facts):
    """A line as a GPU would write it."""
    recipe = larger_recipe(REAL, "corpus/", rounds=rounds)
    last = {"loss_full": 5.1234, "loss_pipelined": 5.4321, "loss_mixed": 5.2778}
    falling = [[n, *(loss + rounds - n for loss in last.values())] for n in range(rounds + 1)]
    bytes_of = {"activations": 10**9, "gradients": 10**9, "tokens": 10**6, "payload_up": 2 * 10**6}
    return {
        "row": "larger", "scale": REAL.name, "seed": 0, "digest": digest(recipe),
        "recipe": dump_recipe(recipe), "commit": "c0ffee", "device": "a device", "torch": "2.11.0",
        "precision": "bf16", "corpus": "0123456789ab", "corpus_tokens": 25_000_000,
        "parameters": recipe.model.num_parameters, "tokens": rounds * recipe.round_tokens, "seconds": 245.6,
        "tokens_per_second": 431_000, "sustained_tokens_per_second": 399_000,
        "predicted_bytes": 80 * 2**30, "peak_bytes": 64 * 2**30, "failed": None, "curve": falling,
        "round_bytes": {"edge": bytes_of | {"payload_down": 23 * 10**6}},
        **last,
    } | facts  # fmt: skip


def test_a_toy_of_it_runs_without_what_only_fleets_need_and_scores_as_the_simulator_does(tmp_path, capsys):
    for name in ("obstore", "cryptography", "pyarrow", "rich", "matplotlib", "tensorboardX"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not on this machine')\n")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}", "ISTHMUS_COMMIT": "c0ffee"}
    command = [sys.executable, "-m", "isthmus", *COMMAND, "--results", "found", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "round 2/2" in done.stderr
    folder = tmp_path / "found"
    assert [path.name for path in folder.iterdir()] == ["larger.jsonl"]  # no part is left
    [line] = read_larger(folder, TOY)
    told = json.loads(done.stdout)
    assert told == {key: value for key, value in line.items() if key not in ("curve", "train", "recipe")}
    assert (line["commit"], line["device"], line["torch"]) == ("c0ffee", "cpu", torch.__version__)

    recipe = parse_recipe(line["recipe"])
    rows = simulate(recipe, tmp_path / "run", device="cpu", quiet=True).rows
    for n, point in enumerate(line["curve"]):
        assert point == [n, *(pytest.approx(rows[n][name], abs=2e-6) for name in LOSSES)]
    assert [line[name] for name in LOSSES] == line["curve"][-1][1:]
    assert line["train"] == [[n, pytest.approx(rows[n]["loss_train"], abs=2e-6)] for n in (1, 2)]
    assert line["tokens"] == rows[-1]["tokens"]
    sustained = line["tokens"] / line["seconds"]  # of which the seconds are rounded
    assert 0 < sustained == pytest.approx(line["sustained_tokens_per_second"], rel=2e-3)
    assert line["peak_bytes"] > 100 * 2**20
    assert line["predicted_bytes"] > 100 * 2**20

    for member in recipe.fleet():
        sent = line["round_bytes"][member.config.name]
        assert (sent["payload_up"], sent["payload_down"]) == outer_bytes(recipe, member)
        for purpose, number in inner_step_bytes(recipe, member).items():
            assert sent[purpose] == recipe.outer.inner_steps * number

    before = (folder / "larger.jsonl").read_bytes()
    assert main([*COMMAND, "--results", str(folder), "--commit", "c0ffee"]) == 0
    assert "is there already in" in capsys.readouterr().out
    assert (folder / "larger.jsonl").read_bytes() == before


def run_toy(folder, *settings):
    recipe = parse_recipe(dump_recipe(larger_recipe(TOY, "builtin:sample")), settings)
    corpus = open_corpus("builtin:sample")
    return larger_run.run_larger(TOY.name, recipe, corpus, torch.device("cpu"), "c0ffee", folder)


def test_of_a_run_that_diverges_the_rounds_before_are_kept_and_no_line_is_written(tmp_path):
    with pytest.raises(RunError, match=r"the loss is nan.* measured before is in .*larger\.jsonl\.part"):
        run_toy(tmp_path, "inner.lr=1e6", "inner.weight_decay=1e6")
    assert [path.name for path in tmp_path.iterdir()] == ["larger.jsonl.part"]
    kept = json.loads((tmp_path / "larger.jsonl.part").read_text())
    assert [point[0] for point in kept["curve"]] == [0]
    assert (kept["tokens"], kept["commit"]) == (0, "c0ffee")


def test_the_rate_is_that_of_the_median_round_without_the_first():
    recipe = larger_recipe(TOY, "builtin:sample")
    rows = [Row(round=n, loss_full=5.0, loss_pipelined=5.0, loss_mixed=5.0, loss_train=5.0) for n in range(5)]
    found = larger_run.summed_up(recipe, rows, [0.0, 50.0, 52.0, 55.0, 75.0])  # rounds of 50, 2, 3 and 20 s
    assert found["tokens_per_second"] == round(recipe.round_tokens / 3)
    assert found["tokens"] == 4 * recipe.round_tokens


def test_while_it_runs_the_line_so_far_is_beside_the_results(tmp_path, monkeypatch):
    seen, writing = [], larger_run.Measured.write

    def spied(self):
        writing(self)
        seen.append(json.loads(self.part.read_text()))

    monkeypatch.setattr(larger_run.Measured, "write", spied)
    monkeypatch.setattr(larger_run, "PART_SECONDS", float("inf"))
    run_toy(tmp_path / "seldom")
    assert [len(line["curve"]) for line in seen] == [0]
    seen.clear()
    monkeypatch.setattr(larger_run, "PART_SECONDS", 0.0)
    line = run_toy(tmp_path / "often")
    assert [part["curve"] for part in seen] == [line["curve"][:n] for n in range(4)]
    assert [part["tokens"] for part in seen[2:]] == [line["tokens"] // 2, line["tokens"]]


def test_by_default_it_is_the_papers_fleet_for_four_minutes_and_fits_on_one_gpu():
    recipe = larger_recipe(REAL, "corpus/")
    rack, edge = recipe.replicas
    assert (rack.kind, rack.count, edge.count, edge.stages) == ("full", 4, 4, 4)
    assert edge.subspace_dim(recipe.model.width) * 8 == recipe.model.width == 1024
    tokens = recipe.outer.rounds * recipe.round_tokens
    assert 220 < tokens / REAL.tokens_per_second <= 240
    assert rounds_within(REAL, 4) < recipe.outer.rounds < rounds_within(REAL, 5)
    plan = predicted_plan(recipe)
    assert (plan.group, plan.grad_accum_steps, plan.parked) == (8, 1, False)
    assert plan.predicted_bytes < 128 * 2**30
    assert larger_recipe(REAL, "corpus/", rounds=3).inner.warmup_steps < recipe.inner.warmup_steps


def test_a_dry_run_says_what_it_would_take(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "larger", "--dry-run", "--rounds", "10", "--json"]) == 0
    recipe = larger_recipe(REAL, "corpus/", rounds=10)
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] == 10 * recipe.round_tokens
    assert told["digest"] == digest(recipe)
    assert told["predicted_bytes"] == predicted_plan(recipe).predicted_bytes
    assert main(["reproduce", "larger", "--dry-run", "--minutes", "3"]) == 0
    out = capsys.readouterr().out
    assert "178 M parameters" in out
    assert f"{rounds_within(REAL, 3)} rounds" in out
    assert not list(tmp_path.iterdir())


def test_the_table_has_the_figures_of_the_last_finished_line():
    text = larger_table([fabricated(loss_full=9.0), fabricated()])
    figures = (
        "177.6 M", "8 replicas (4 full; 4 pipelined in 4 stages at k/d = 1/8)", "7.9 M in 4 rounds",
        "0.31 passes over a text of 25.0 M", "5.123", "5.432", "5.278", "431 k tokens/s", "399 k",
        "80.0 GiB predicted, 64.0 GiB measured: 1.25", "2.0 MB up, 23 MB down, 2.0 GB between",
        "4 min 06 s", "a device, torch 2.11.0, bf16", "`c0ffee`", "1 earlier run kept",
    )  # fmt: skip
    for figure in figures:
        assert figure in text, figure
    assert "9.000" not in text
    assert larger_table([]).startswith("Not run yet")


def test_the_page_shows_only_a_finished_run_and_tables_do_not_count_it(tmp_path):
    scale, results = pick_scale("12m"), tmp_path / "results"
    append(results / "1.jsonl", table_line(scale, "dense", 0, 4.0))
    (tmp_path / "results.in.md").write_bytes((ROOT / "docs" / "results.in.md").read_bytes())
    whole = fabricated()
    append(results / "larger.jsonl", whole | {"curve": whole["curve"][:-1]})  # somebody kept a part
    assert "results-larger.svg" not in [path.name for path in write_page(results, tmp_path, scale)]
    assert "Not run yet" in (tmp_path / "results.md").read_text()
    append(results / "larger.jsonl", whole | {"seed": 1})
    drawn = [{p.name: p.read_bytes() for p in write_page(results, tmp_path, scale)} for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert b"pipelined" in drawn[0]["results-larger.svg"]
    page = drawn[0]["results.md"].decode()
    assert "![larger](results-larger.svg)" in page
    assert "| held-out loss, pipelined | 5.432 |" in page
    assert len(read(results, scale)) == 1
    append(results / "larger.jsonl", fabricated(seed=2, peak_bytes=None))
    with pytest.raises(ConfigError, match='line without "peak_bytes"'):
        write_page(results, tmp_path, scale)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["larger"], "--corpus is missing"),
        (["larger", "--corpus", "nowhere"], "isthmus data prepare"),
        (["larger", "--scale", "12m"], "of larger it is one of 178m, toy"),
        (["larger", "--rounds", "0"], "--rounds is 0; it must be at least 1"),
        (["larger", "--rounds", "9", "--minutes", "4"], "give one of them"),
        (["larger", "--minutes", "0.1"], "not one round ends within it"),
        (["larger", "--seeds", "0,1"], "larger takes one whole number"),
        (["larger", "1", "2"], "give 1 2 in a command of its own"),
        (["larger", "--only", "het-8"], "--only and --jobs are for tables"),
        (["larger", "--scale", "toy", "--corpus", "builtin:sample"], 'another folder than "results"'),
        ([*COMMAND[1:], "--results", "found", "--device", "tpu"], "one of auto, cpu, cuda"),
        (["1", "--rounds", "9"], "--rounds is for larger"),
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
