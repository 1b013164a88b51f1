"""Rows by the code of several commits: what is asked, and a real run by the code that git has."""

import json
import subprocess
from pathlib import Path

import pytest
from result_lines import line

from experiments import same_code
from experiments.lines import FIELDS
from experiments.runner import git
from experiments.same_code import Replay, read_curves, run_replays, same, shortened, wanted
from experiments.tables import pick_scale
from experiments.trial import run_trial
from isthmus.cli.main import main
from isthmus.config import parse_recipe

SCALE = pick_scale("12m")
TOY = pick_scale("toy")
WHEN = {"first": 1, "second": 2, "third": 3}


def by(row, commit, scale=SCALE):
    return line(scale, row, 0, 4.0, commit=commit)


def test_the_earlier_rows_recipe_is_asked_of_both_commits_once(monkeypatch):
    monkeypatch.setattr(same_code, "_time", WHEN.__getitem__)
    dense, pp = by("dense", "second"), by("pp-8", "first")
    pairs = [(dense, pp), (pp, by("het-8", "third")), (by("dense", "first"), by("pp-24", "first+changes"))]
    asked = wanted(pairs, {})
    assert {(one.row, one.commit) for one in asked} == {("pp-8", commit) for commit in WHEN}
    assert {one.recipe for one in asked} == {pp["recipe"]}
    there = {(pp["digest"], "first"): [], (pp["digest"], "third"): []}
    assert [one.commit for one in wanted(pairs, there)] == ["second"]


def test_a_shortened_recipe_keeps_the_method():
    row = by("pp-8-grassmann", "first")
    short = parse_recipe(row["recipe"], shortened(row["recipe"], "builtin:sample", 512))
    whole = parse_recipe(row["recipe"])
    assert short.replicas == whole.replicas
    assert (short.model.width, short.model.layers) == (whole.model.width, whole.model.layers)
    assert (short.outer.keep, short.outer.lr, short.inner.lr) == (
        whole.outer.keep,
        whole.outer.lr,
        whole.inner.lr,
    )
    assert 0 < short.subspace.grassmann_every <= short.outer.inner_steps
    assert short.outer.rounds * short.round_tokens < 20_000


def head():
    try:
        return git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout, so that no commit can be run")


def test_a_commits_own_code_runs_the_row_to_a_line(tmp_path):
    commit, row = head(), by("het-8", "first", TOY)
    asked = [
        Replay(row["row"], row["digest"], row["recipe"], commit),
        Replay("no-such", "0", 'name = "no"', commit),
    ]
    said = []
    (fault,) = run_replays(asked, "builtin:sample", tmp_path, 1, said.append)
    assert fault.startswith(f"no-such by {commit}: ")
    assert len(said) == 2
    (found,) = [json.loads(text) for text in (tmp_path / "commits.jsonl").read_text().splitlines()]
    assert all(name in found for name in FIELDS)
    assert (found["of"], found["commit"], found["device"]) == (row["digest"], commit, "cpu")
    recipe = parse_recipe(row["recipe"], shortened(row["recipe"], "builtin:sample", found_vocab(found)))
    here = run_trial(row["row"], "commits", recipe, "cpu", commit)
    for ours, theirs in zip(here["curve"], found["curve"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)  # threads may sum in another order
    curves = read_curves(tmp_path)
    assert same(curves, row["digest"], commit, commit)
    assert same(curves, row["digest"], commit, "another") is None


def found_vocab(found):
    return parse_recipe(found["recipe"]).model.vocab


def test_bad_input_is_one_line_and_runs_nothing(tmp_path, capsys):
    def told(*words):
        assert main(["reproduce", "commits", *words]) == 2
        (said,) = capsys.readouterr().err.strip().splitlines()
        return said

    results = Path(same_code.CHECKOUT / "results")
    for path in results.glob("*.jsonl"):  # all but the lines of several commits
        if path.name != same_code.FILE:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    before = sorted(tmp_path.iterdir())
    found = ["--results", str(tmp_path)]
    assert "--jobs, --commit and --dry-run alone" in told("--only", "pp-8", *found)
    assert "--jobs is 0" in told("--jobs", "0", *found)
    if not (same_code.CHECKOUT / ".git").is_dir() or (same_code.CHECKOUT / ".git" / "shallow").exists():
        pytest.skip("this checkout has not the history that the rows were run by")
    assert "git does not know the commit no-such" in told("--dry-run", "--commit", "no-such", *found)
    assert "--corpus is missing" in told(*found)
    assert "there is no corpus in" in told("--corpus", str(tmp_path / "nowhere"), *found)
    assert sorted(tmp_path.iterdir()) == before
