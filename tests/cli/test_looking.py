"""Looking writes nothing, and a folder means the same to every command."""

import json
import shutil

import pytest
from fabricate import make_run, recipe
from little import Little, hasty, rounds  # noqa: F401 - a fixture

from isthmus.cli.main import main
from isthmus.cli.status import table
from isthmus.page.source import RunSource, open_source
from isthmus.protocol.fleet_state import look as look_at
from isthmus.protocol.place import find_place
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
    late = look_at(ledger, written + 60.0)
    assert late.members[0].heartbeat_age_seconds == pytest.approx(60.0)
    assert "clock" not in table(late)
    early = look_at(ledger, written - 60.0)
    assert early.members[0].heartbeat_age_seconds == 0.0
    assert "this machine's clock is 60 s behind the bucket's" in table(early)


def test_the_bucket_that_a_run_directory_names_is_read(folder_url, tmp_path, monkeypatch, capsys):
    run_at(folder_url, tmp_path)
    named = recipe('[[replicas]]\nname = "rack"\n', f'bucket.url="{folder_url}"')
    make_run(tmp_path / "run", named, 0, mode=REAL, status="interrupted")
    assert main(["status", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["round"] == 2


def test_a_folder_that_holds_a_run_directory_and_a_bucket_is_the_run_directory(folder_url, tmp_path, capsys):
    run_at(folder_url, tmp_path)
    both = tmp_path / "both"
    shutil.copytree(folder_url, both)
    make_run(tmp_path / "run", recipe(), 3)
    shutil.copytree(tmp_path / "run", both, dirs_exist_ok=True)
    place = find_place(str(both))
    assert place.run is not None
    assert place.bucket == ""
    assert main(["report", str(both), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["rounds"] == 3
    assert isinstance(open_source(str(both)), RunSource)
    assert main(["compare", str(both), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["rounds"] == 3
    assert main(["status", str(both)]) == 2  # a simulated run has no bucket
    assert "as a simulated run" in capsys.readouterr().err


def test_a_run_that_has_no_bucket_yet_is_not_called_simulated(tmp_path, capsys):
    make_run(tmp_path / "run", recipe(), 0, mode=REAL)
    assert main(["status", str(tmp_path / "run")]) == 2
    assert "has no bucket yet" in capsys.readouterr().err
