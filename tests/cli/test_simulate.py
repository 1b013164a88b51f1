"""`isthmus simulate` as a user meets it: what it prints, and what it says to bad input."""

import shlex
import subprocess
import sys

import pytest
from small_recipes import pipelined, recipe_text, replicas

from isthmus.cli.main import main

RECIPE = recipe_text(
    replicas("rack") + pipelined("edge", stages=2, compression="1/4"),
    name="tiny",
    model={"layers": 4, "context": 16},
    outer={"inner_steps": 2, "rounds": 2, "values": "2bit"},
)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE)
    return "r.toml"


def everything_in(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "outer.kep=1"], 'unknown key "outer.kep"; did you mean "keep"?'),
        (["--set", "replicas.edge.compression=0"], 'such as "1/8"'),
        (["--set", "replicas.edge.compression=3/2"], 'such as "1/8"'),
        (["--set", "replicas.edge.compression=abc"], 'such as "1/8"'),
        (["--set", "outer.keep=4097"], "a chunk holds 1 to 4096 entries"),
        (["--set", "replicas.edge.stages=5"], "stages is at most 4"),
        (["--set", "inner.batch=40000"], "it needs 640,001"),
        (["--set", "data.corpus=nowhere/"], "isthmus data prepare"),
        (["--set", "data.corpus="], "no corpus is named; give a prepared folder"),
        (["--set", "data.corpus=."], "data prepare . --to ../"),
        (["--set", "outer.keep=9999999999"], "it must be at most 1,000,000,000\n"),
        (["--set", "model.vocab=100"], "set model.vocab=1024"),
        (["--device", "cuda:9"], "CUDA device"),
        (["--device", "tpu"], "auto, cpu, cuda"),
        (["--mode", "sideways"], "invalid choice"),
        (["--resume", "r.toml"], "or --resume RUN"),
    ],
)
def test_bad_input_is_one_line_and_status_2_and_nothing_is_written(recipe, tmp_path, capsys, arguments, says):
    before = everything_in(tmp_path)
    try:
        status = main(["simulate", recipe, *arguments])
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert status == 2
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert everything_in(tmp_path) == before


def test_a_run_directory_that_holds_another_run_is_left_alone(recipe, tmp_path, capsys):
    assert main(["simulate", recipe, "--run", "mine", "--quiet"]) == 0
    before = everything_in(tmp_path / "mine")
    capsys.readouterr()
    assert main(["simulate", recipe, "--run", "mine", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "already holds a run" in error
    assert error.count("\n") == 1
    assert everything_in(tmp_path / "mine") == before


def test_it_says_in_words_what_happened_and_where_the_report_is(recipe, tmp_path, capsys):
    assert main(["simulate", recipe]) == 0
    printed = capsys.readouterr()
    assert "2 replicas (1 full; 1 pipelined in 2 stages at k/d = 1/4)" in printed.out
    assert "Between stages" in printed.out
    assert "Between replicas" in printed.out
    assert "dense data parallelism would have sent" in printed.out
    assert printed.out.splitlines()[-4].endswith("report.html")  # and what comes next
    assert (tmp_path / "runs" / "tiny" / "report.html").exists()
    assert "round 2/2" in printed.err
    assert "stacked, all together; about" in printed.err


def test_a_finished_run_resumes_to_itself(recipe, tmp_path, capsys):
    assert main(["simulate", recipe, "--run", "mine", "--quiet"]) == 0
    weights = (tmp_path / "mine" / "model.safetensors").read_bytes()
    assert main(["simulate", "--resume", "mine", "--quiet"]) == 0
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == weights


def test_help_answers_without_loading_anything_slow():
    """Whatever command it is of: all of them are registered first."""
    code = "import sys; from isthmus.cli import main; main.build_parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow = {"torch", "numpy", "tokenizers", "safetensors", "pyarrow", "matplotlib", "rich", "obstore"}
    assert not slow & set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train --rezume x", 'isthmus train: there is no option "--rezume"; did you mean "--resume"?'),
        ("data push x y --jsom", 'isthmus data push: there is no option "--jsom"'),
        (
            "data show x --varify",
            'isthmus data show: there is no option "--varify"; did you mean "--verify"?',
        ),
        ("status runs/demo --zzz", 'isthmus status: there is no option "--zzz"'),
        ("status runs/demo runs/other", 'isthmus status: "runs/other" is one argument too many'),
        ("ledger shw x", 'isthmus ledger: there is no command "shw"; did you mean "show"?'),
    ],
)
def test_what_a_command_does_not_take_is_one_line_with_the_nearest(words, told, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    command = told.partition(":")[0]
    assert capsys.readouterr().err == f"{told}; see {command} --help\n"


def test_a_folder_of_texts_in_place_of_a_corpus_is_answered_by_a_command_that_works(recipe, tmp_path, capsys):
    (tmp_path / "my texts").mkdir()
    for i in range(100):
        (tmp_path / "my texts" / f"{i}.txt").write_text(
            f"It was day {i} of the journey over the isthmus.\n" * 20
        )
    assert main(["simulate", recipe, "--set", "data.corpus=my texts"]) == 2
    said = capsys.readouterr().err
    command = said.partition("`")[2].partition("`")[0]
    assert main([*shlex.split(command)[1:], "--vocab", "300"]) == 0
    assert main(["data", "show", shlex.split(command)[-1]]) == 0
