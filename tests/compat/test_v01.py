"""Of what version 0.1 wrote, runs are reported and compared; v0.1/README.md says how it was made."""

import argparse
import json
import tarfile
import tomllib
from pathlib import Path

import pytest

from isthmus.cli.main import build_parser
from isthmus.config import dump_recipe, parse_recipe
from isthmus.config.gone import gone_command, gone_option
from isthmus.runlog import RunDir
from isthmus.runlog.words import summary

HERE = Path(__file__).parent / "v0.1"


def unpacked(folder: Path, *names: str) -> Path:
    for name in names:
        with tarfile.open(HERE / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder, also the working directory, with the runs `train` and `simulate` and their corpus."""
    monkeypatch.chdir(unpacked(tmp_path, "corpus", "train", "simulate"))
    return tmp_path


@pytest.mark.parametrize(("name", "rounds"), [("train", 2), ("simulate", 2)])
def test_a_run_directory_is_read(runs, isthmus, name, rounds):
    run = RunDir.open(name)
    assert [row["round"] for row in map(as_dict, run.rows())] == list(range(rounds + 1))
    stored = [json.loads(line) for line in run.metrics_path.read_text(encoding="utf-8").splitlines()]
    for row in stored:
        row.pop("bias", None)  # not kept since 0.3
    assert [as_dict(row) for row in run.rows()] == stored
    words = "\n".join(summary(run))
    assert f"for {rounds} rounds" in words
    assert "interrupted" in words

    status, shown, _ = isthmus("report", name)
    assert status == 0
    assert words.splitlines()[0] in shown
    assert "<html" in run.report_path.read_text(encoding="utf-8")


def as_dict(row):
    return row if isinstance(row, dict) else row.to_dict()


def test_two_run_directories_are_compared(runs, isthmus):
    status, shown, _ = isthmus("compare", "train", "simulate")
    assert status == 0
    assert "simulate" in shown


@pytest.mark.parametrize(
    "words",
    [
        ("status", "train"),
        ("ledger", "verify", "train/bucket"),
        ("ledger", "rebuild", "train/bucket", "--to", "theta"),
        ("generate", "train/bucket", "It was"),
        ("export", "train/bucket", "--to", "hf", "folder"),
        ("train", "--resume", "train"),
    ],
    ids=" ".join,
)
def test_everything_else_says_where_its_bucket_can_be_used(runs, isthmus, words):
    status, shown, said = isthmus(*words)
    assert (status, shown) == (2, "")
    assert "this run was made by isthmus 0.2 or before; train or export it there" in said
    assert said.count("\n") == 1
    assert not {"theta", "folder"} & {path.name for path in runs.iterdir()}


def test_every_key_of_a_recipe_is_still_one_and_keeps_its_value():
    text = (HERE / "everything.toml").read_text(encoding="utf-8")
    stated, resolved = tomllib.loads(text), tomllib.loads(dump_recipe(parse_recipe(text)))
    for section, keys in stated.items():
        if section == "replicas":
            for before, now in zip(keys, resolved["replicas"], strict=True):
                assert before.items() <= now.items()
        elif isinstance(keys, dict):
            assert keys.items() <= resolved[section].items(), section
        else:
            assert resolved[section] == keys


def parsers(parser, name=""):
    """(command, its parser) for every command, also those within `ledger` and `data`."""
    within = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not within:
        yield name, parser
    for action in within:
        for word, inner in action.choices.items():
            yield from parsers(inner, f"{name} {word}".strip())


def test_every_command_and_option_is_still_taken_or_named_as_gone():
    now = {
        name: {word for action in parser._actions for word in action.option_strings or [action.dest]}
        for name, parser in parsers(build_parser())
    }
    for command, options in json.loads((HERE / "commands.json").read_text(encoding="utf-8")).items():
        if gone_command(command.split()):
            continue
        gone = {option for option in options if gone_option(f"{command} {option}")}
        assert set(options) - gone <= now[command], command
