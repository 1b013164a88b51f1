"""Looking writes nothing, and goes nowhere that nobody typed."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from fabricate import make_run, recipe
from little import Little, hasty, rounds  # noqa: F401 - a fixture

from isthmus.cli.main import main
from isthmus.cli.status import gather, table
from isthmus.page.source import open_source
from isthmus.runlog import REAL
from isthmus.store.objects import Store

pytestmark = pytest.mark.usefixtures("hasty")


def run_at(url, folder):
    little = Little(url, folder)
    rounds(little.replicas(), (1, 2))
    return little


def no_writes(monkeypatch):
    def write(self, key, *rest, **more):
        raise AssertionError(f"{key} was written or deleted")

    for verb in ("put", "create", "delete"):
        monkeypatch.setattr(Store, verb, write)


def test_reading_never_writes_to_the_bucket(any_store_url, tmp_path, monkeypatch, capsys):
    little = run_at(any_store_url, tmp_path)
    before = little.ledger().store.list()
    no_writes(monkeypatch)
    for command in (
        ("status", any_store_url),
        ("status", any_store_url, "--json"),
        ("ledger", "show", any_store_url),
        ("ledger", "verify", any_store_url),
        ("ledger", "rebuild", any_store_url, "--to", str(tmp_path / "theta.safetensors")),
    ):
        assert main(list(command)) == 0, capsys.readouterr().err
    assert len(open_source(any_store_url).look(60.0).settled) == 2
    assert little.ledger().store.list() == before


def test_ages_are_by_this_machines_clock_and_one_that_is_behind_is_told(folder_url, tmp_path):
    little = Little(folder_url, tmp_path)
    little.replica("a").beat()
    ledger = little.ledger()
    _, written = ledger.heartbeat("a")
    late = gather(ledger, lambda: written + 60.0)
    assert late.members[0].heartbeat_age_seconds == pytest.approx(60.0)
    assert "clock" not in table(late)
    early = gather(ledger, lambda: written - 60.0)
    assert early.members[0].heartbeat_age_seconds == 0.0
    assert "this machine's clock is 60 s behind the bucket's" in table(early)


# Addresses from files


@pytest.fixture
def elsewhere(folder_url, tmp_path, monkeypatch):
    """A run directory by a stranger, whose recipe names a bucket outside of it."""
    run_at(folder_url, tmp_path)
    stranger = recipe('[[replicas]]\nname = "rack"\n', f'bucket.url="{folder_url}"')
    make_run(tmp_path / "run", stranger, 0, mode=REAL, status="interrupted")
    monkeypatch.chdir(tmp_path)
    return folder_url


COMMANDS = [
    ("status", "run"),
    ("ledger", "show", "run"),
    ("ledger", "verify", "run"),
    ("ledger", "rebuild", "run", "--to", "theta.safetensors"),
    ("ledger", "sweep", "run"),
    ("export", "run", "--to", "hf", "exported"),
    ("generate", "run", "a"),
    ("eval", "run"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_an_address_from_a_file_is_not_followed(elsewhere, command, capsys, monkeypatch):
    def reached(self, *rest, **more):
        raise AssertionError("the address was followed")

    for verb in ("get", "head", "list", "put", "create", "delete"):
        monkeypatch.setattr(Store, verb, reached)
    assert main(list(command)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"isthmus: run says that its bucket is {elsewhere}; an address from a file is not followed: "
        "give that URL itself if you trust it\n"
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("Yes\n", 0), ("\n", 2), ("no\n", 2), ("", 2)])
def test_in_a_terminal_a_person_is_asked(elsewhere, answer, code, monkeypatch):
    said, told = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setattr(sys, "stdout", told)
    assert main(["status", "run", "--json"]) == code
    question = f"isthmus: run says that its bucket is {elsewhere}; read from there? [y/N] "
    assert said.getvalue().startswith(question)
    if code == 0:
        assert said.getvalue() == question
        assert json.loads(told.getvalue())["round"] == 2
    else:
        assert told.getvalue() == ""


def test_a_link_from_the_run_directory_to_a_bucket_elsewhere_is_not_followed(elsewhere, tmp_path, capsys):
    shutil.rmtree(tmp_path / "run")
    make_run(tmp_path / "run", recipe(), 0, mode=REAL)
    (tmp_path / "run" / "bucket").symlink_to(elsewhere)
    assert main(["status", "run"]) == 2
    assert f"its bucket is {Path(elsewhere).resolve()}" in capsys.readouterr().err


def test_a_bucket_inside_the_run_directory_needs_no_question(elsewhere, tmp_path, capsys):
    shutil.rmtree(tmp_path / "run")
    make_run(tmp_path / "run", recipe(), 0, mode=REAL)
    shutil.copytree(elsewhere, tmp_path / "run" / "bucket")
    assert main(["status", "run"]) == 0
    assert 'run "little"' in capsys.readouterr().out
