"""run.json is pinned in every key file: whoever replaces it reaches nobody who has a key."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from little import RECIPE, Little
from little import hasty as hasty

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.errors import ConfigError
from isthmus.protocol.access import open_as
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.trust import Signer, canonical, load_signer, new_secret, save_secret, sha256
from isthmus.runtime import create as module
from isthmus.runtime.create import create
from isthmus.store import open_store

pytestmark = pytest.mark.usefixtures("hasty")
REPLACED = r"run\.json in this bucket is not the one that the key of \w was made for"


def replace_run(url: str, **changed: object) -> None:
    """As whoever can write the bucket may."""
    store = open_store(url)
    body = json.loads(store.get("run.json", max_bytes=1 << 22))
    store.put("run.json", canonical(body | changed))


def test_a_key_file_has_its_key_and_the_digest_of_its_run(any_store_url: str, tmp_path: Path):
    run = Little(any_store_url, tmp_path)
    stored = open_store(any_store_url).get("run.json", max_bytes=1 << 22)
    for name in run.names:
        first, second = (run.keys / f"{name}.key").read_text().splitlines()
        assert Signer(name, bytes.fromhex(first)).public_key == run.run.keys[name]
        assert second == f"run {sha256(stored)}" == f"run {run.run.digest}"
        assert (run.keys / f"{name}.key").stat().st_mode & 0o777 == 0o600


def test_another_run_json_is_refused_by_everything_with_a_key(any_store_url: str, tmp_path: Path, capsys):
    run = Little(any_store_url, tmp_path)
    evil = Signer("a", new_secret()).public_key
    replace_run(any_store_url, keys=dict(run.run.keys) | {"a": evil}, closers=["a"])
    key = str(run.keys / "b.key")
    with pytest.raises(ConfigError, match=REPLACED):
        open_as(open_store(any_store_url), "b", key)
    with pytest.raises(ConfigError, match=REPLACED):
        Ledger(open_store(any_store_url), read_run(open_store(any_store_url)), run.signer("b"))
    before = open_store(any_store_url).list()
    for words in (
        ["join", any_store_url, "--replica", "b", "--key", key, "--work", str(tmp_path / "work")],
        ["leave", any_store_url, "--replica", "b", "--key", key],
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert "is not the one that the key of b was made for" in err
        assert err.count("\n") == 1
    assert open_store(any_store_url).list() == before
    assert not (tmp_path / "work").exists()


def test_nothing_in_another_run_json_is_read_before_it_is_refused(folder_url: str, tmp_path: Path):
    run = Little(folder_url, tmp_path)
    Path(folder_url, "run.json").write_bytes(b"not even JSON")
    with pytest.raises(ConfigError, match=REPLACED):
        open_as(open_store(folder_url), "b", str(run.keys / "b.key"))


def test_a_key_of_an_older_version_is_answered_by_one_line(tmp_path: Path):
    path = tmp_path / "a.key"
    path.write_text(new_secret().hex() + "\n")
    with pytest.raises(ConfigError, match=r"made by isthmus 0\.2; train or export it there"):
        load_signer(path, "a")


@pytest.mark.parametrize("second", ["run", "run xyz", "run " + "0" * 63, "ran " + "0" * 64, "0" * 64])
def test_a_key_file_with_another_second_line_is_no_key(tmp_path: Path, second: str):
    path = tmp_path / "a.key"
    path.write_text(new_secret().hex() + "\n" + second + "\n")
    with pytest.raises(ConfigError, match="is not a key of `isthmus init`"):
        load_signer(path, "a")


def test_a_key_that_is_a_pipe_or_too_long_hangs_nobody(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.key")
    (tmp_path / "long.key").write_text("0" * 5000)
    for name in ("pipe", "long"):
        with pytest.raises(ConfigError, match="is not a key of `isthmus init`"):
            load_signer(tmp_path / f"{name}.key", "a")


# A kill in `init`


class Killed(BaseException):
    pass


POINTS = [(module, "save_secret"), (module, "create_run"), (module.os, "rename")]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("where", "what"), POINTS, ids=[what for _, what in POINTS])
def test_an_init_that_is_killed_leaves_nothing_half_and_can_be_typed_again(
    folder_url: str, tmp_path: Path, monkeypatch, where: object, what: str, after: bool
):
    real: Callable[..., object] = getattr(where, what)

    def strike(*args: object, **more: object) -> object:
        if after:
            real(*args, **more)
        raise Killed

    monkeypatch.setattr(where, what, strike)
    monkeypatch.setattr(module.shutil, "rmtree", lambda path: None)  # a kill cleans nothing up
    keys = tmp_path / "keys" / "little"
    with pytest.raises(Killed):
        create(parse_recipe(RECIPE), folder_url, keys)
    monkeypatch.undo()
    made_before = Path(folder_url, "run.json").exists()
    if keys.exists():  # the last act: then the run is whole
        ledger, _ = open_as(open_store(folder_url), "a", str(keys / "a.key"))
        assert ledger.run.closers == ("a", "b")
        return
    run = create(parse_recipe(RECIPE), folder_url, keys)
    assert made_before == (what != "save_secret" and (what, after) != ("create_run", False))
    for name in "abc":
        assert open_as(open_store(folder_url), name, str(keys / f"{name}.key"))[0].run == run


def test_an_init_that_fails_leaves_no_keys(folder_url: str, tmp_path: Path):
    create(parse_recipe(RECIPE), folder_url, tmp_path / "one" / "keys")
    with pytest.raises(ConfigError, match="the bucket already holds the run"):
        create(parse_recipe(RECIPE), folder_url, tmp_path / "two" / "keys")
    assert not list((tmp_path / "two").glob("*")) if (tmp_path / "two").exists() else True
    save_secret(tmp_path / "three" / "a.key", new_secret(), "0" * 64)
    with pytest.raises(ConfigError, match="already holds keys"):
        create(parse_recipe(RECIPE), str(tmp_path / "other"), tmp_path / "three")
