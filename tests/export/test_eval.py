"""`isthmus eval`: the run's own losses, and what follows from them."""

import importlib.util
import json
import math

import pytest
from planted import plant_code

from isthmus.cli.main import main
from isthmus.data.corpus import open_corpus


def scored(capsys, *arguments):
    capsys.readouterr()
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_three_forwards_as_the_run_s_last_row_has_them(runs, capsys):
    found = scored(capsys, runs["mixed"])
    last = json.loads((runs["mixed"] / "metrics.jsonl").read_text().splitlines()[-1])
    split = open_corpus("builtin:sample").manifest.validation
    for name in ("full", "pipelined", "mixed"):
        one = found["forwards"][name]
        assert one["loss"] == pytest.approx(last[f"loss_{name}"], rel=1e-6)
        assert one["perplexity"] == pytest.approx(math.exp(one["loss"]))
        nats = one["loss"] * split.tokens
        assert one["bits_per_byte"] == pytest.approx(nats / math.log(2) / split.bytes)
    assert found["round"] == last["round"]


def test_all_of_the_held_out_text_and_an_exported_folder_agree(runs, folders, capsys):
    whole = scored(capsys, runs["full"], "--batches", 0)
    again = scored(capsys, folders["full"], "--corpus", "builtin:sample")
    windows = (len(open_corpus("builtin:sample").validation) - 1) // 32
    assert whole["held_out_tokens"] == windows // 8 * 8 * 32
    assert again["held_out_tokens"] == whole["held_out_tokens"]
    assert again["forwards"]["full"]["loss"] == pytest.approx(whole["forwards"]["full"]["loss"], rel=1e-5)
    assert whole["forwards"]["pipelined"] is None


def test_a_pipelined_folder_scores_both_forwards_as_its_run_does(runs, tmp_path, capsys):
    folder = tmp_path / "pp"
    assert main(["export", str(runs["compressed"]), "--to", "hf", str(folder), "--as", "pipelined"]) == 0
    whole = scored(capsys, runs["compressed"], "--batches", 0)["forwards"]
    again = scored(capsys, folder, "--corpus", "builtin:sample")["forwards"]
    for name in ("full", "pipelined"):
        assert again[name]["loss"] == pytest.approx(whole[name]["loss"], rel=1e-4)
    assert again["full"]["loss"] != again["pipelined"]["loss"]


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="the harness is installed here")
def test_without_the_harness_one_line_says_how_to_install_it(runs, capsys):
    assert main(["eval", str(runs["full"]), "--harness", "hellaswag"]) == 2
    printed = capsys.readouterr()
    assert "pip install 'isthmus[eval]'" in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="pip install 'isthmus[eval]'")
def test_the_harness_runs_a_task_of_one_s_own_on_a_run_and_on_both_kinds_of_folder(
    runs, folders, tmp_path, capsys
):
    rows = [{"text": "It was the", "choices": [" best", " qzx"], "right": i % 2} for i in range(6)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "mine.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(task))  # which is YAML too
    kept = tmp_path / "pp"
    assert main(["export", str(runs["compressed"]), "--to", "hf", str(kept), "--as", "pipelined"]) == 0
    hit = plant_code(kept)
    for source in (runs["mixed"], folders["full"], kept):
        capsys.readouterr()
        own = ["--harness", "mine", "--include", str(tmp_path), "--json"]
        assert main(["eval", str(source), *own]) == 0
        # Every second answer is the other one, so whichever the model prefers is right half of the time.
        printed = capsys.readouterr().out
        assert json.loads(printed[printed.index("{\n") :])["harness"]["mine"]["acc,none"] == 0.5
    assert main(["eval", str(kept), "--harness", "mine,nosuch", "--include", str(tmp_path)]) == 2
    assert 'no task "nosuch"' in capsys.readouterr().err
    assert not hit.exists()
