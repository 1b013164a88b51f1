"""`invite`, `revoke`, `members`, `extend`: what an owner types, and a friend who joins by the file."""

import re
import shlex
from pathlib import Path

import pytest
from little import hasty as hasty
from owned import MORE, Owned, settled

from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.protocol.access import open_as
from isthmus.protocol.bundle import read_bundle
from isthmus.store import open_store

pytestmark = pytest.mark.usefixtures("hasty")


@pytest.fixture
def owned(tmp_path: Path, monkeypatch) -> Owned:
    monkeypatch.chdir(tmp_path)
    owned = Owned("bucket", tmp_path, MORE, closers=["a"])
    (tmp_path / "keys").rename(tmp_path / "owners")
    owned.keys = tmp_path / "owners"
    return owned


OWNER = ("--key", "owners/run.owner.key")


def typed(capsys, *words: str, status: int = 0) -> tuple[str, str]:
    assert main(list(words)) == status
    return capsys.readouterr()


def invited(capsys, name: str, *options: str) -> Path:
    """The file for the friend."""
    out, err = typed(capsys, "invite", "bucket", name, *OWNER, *options)
    assert f"{name} is a member from the end of the open round on" in out
    assert f"isthmus join {name}.isthmus.toml" in err
    return Path(f"owners/{name}.isthmus.toml")


def test_an_invitation_becomes_a_replica_by_one_file(owned, capsys):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    file = invited(capsys, "edge-7", "--like", "c", "--batch", "2")
    assert file.stat().st_mode & 0o777 == 0o600
    bundle = read_bundle(file)
    key = bundle.save_key("friend/edge-7.key")
    assert key.stat().st_mode & 0o777 == 0o600
    ledger, _ = open_as(open_store("bucket"), "edge-7", str(key))
    assert "edge-7" not in ledger.at(2).keys
    settled(2, a, a, b, c)
    assert ledger.manifest(2).next_epoch == 1
    assert "edge-7" in ledger.at(3).keys
    config = owned.epoch.run.recipe.fleet()[-1].config
    assert (config.stages, config.batch) == (2, 2)
    stored = b"".join(path.read_bytes() for path in Path("bucket").rglob("*") if path.is_file())
    assert bundle.key.encode() not in stored
    assert bytes.fromhex(bundle.key) not in stored


def test_a_new_key_is_a_revocation_and_an_invitation(owned, capsys):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    old, there = invited(capsys, "d").read_text(), "friend/d.key"
    read_bundle(Path("owners/d.isthmus.toml")).save_key(there)
    typed(capsys, "revoke", "bucket", "d", *OWNER)
    file = invited(capsys, "d")
    with pytest.raises(ConfigError, match=r"d: you were revoked by the owner in round 2$"):
        open_as(open_store("bucket"), "d", there)
    read_bundle(file).save_key(there)  # what `join` does with the new file
    open_as(open_store("bucket"), "d", there)
    file.write_text(old)
    with pytest.raises(ConfigError, match=r"d: you were revoked by the owner in round 2$"):
        read_bundle(file).save_key(there)


def test_who_was_revoked_learns_in_which_round(owned, capsys):
    a, b, c = owned.replicas()
    for t in (1, 2, 3):
        settled(t, a, a, b, c)
    typed(capsys, "revoke", "bucket", "b", *OWNER)
    with pytest.raises(ConfigError, match=r"b: you were revoked by the owner in round 4$"):
        open_as(open_store("bucket"), "b", "owners/b.key")
    for t in (4, 5, 6):
        settled(t, a, a, c, *[b] * (t == 4))
    with pytest.raises(ConfigError, match=r"b: you were revoked by the owner in round 4$"):
        open_as(open_store("bucket"), "b", "owners/b.key")


BAD = """
join bucket -> give the file that the run's owner sent you, or --replica NAME
invite bucket a OWNER -> a is in this run already; if its key is lost, revoke it
invite bucket d --like z OWNER -> there is no replica "z"
invite bucket d --stages 9 OWNER -> stages for 2 layers
invite bucket d --batch -1 OWNER -> batch is -1; it must be at least 0
invite bucket d -> no owner's key at keys/little/run.owner.key
revoke bucket b --key owners/a.key -> is not the key of this run's owner
revoke bucket a OWNER -> a is the only closer of this run; name another first
closers bucket a,z OWNER -> there is no replica "z" in this run; there is a, b, c
invite bucket 'Zoë' OWNER -> NAME "Zoë" becomes a name in the bucket
invite bucket d --to d.toml OWNER -> --to is d.toml; by its end, .isthmus.toml
revoke bucket bb OWNER -> there is no replica "bb" in this run; there is a, b, c
extend bucket --rounds 0 OWNER -> --rounds is 0
"""


@pytest.mark.parametrize(("words", "says"), [line.split(" -> ") for line in BAD.strip().splitlines()])
def test_bad_input_is_one_line_and_status_2(owned, capsys, words, says):
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    typed_words = shlex.split(words.replace("OWNER", shlex.join(OWNER)))
    out, err = typed(capsys, *typed_words, status=2)
    assert out == ""
    assert err.count("\n") == 1
    assert says in err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


GONE = {
    "join bucket --token isthmus1.x": "there is no join --token any more: a friend joins by the file",
    "invite bucket --replica d": "isthmus invite URL NAME",
    "invite bucket d --days=3": "there is no invite --days any more: an invitation does not expire",
    "members bucket": "`isthmus status URL` lists them",
    "status bucket --follow": "watch -n 5 isthmus status URL",
    "rotate bucket c": "`isthmus revoke URL NAME`, then `isthmus invite URL NAME`",
}


@pytest.mark.parametrize(("words", "says"), GONE.items(), ids=GONE)
def test_what_is_gone_is_answered_by_what_to_use_instead(owned, capsys, words, says):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (2, 1)
    assert says in err


def test_long_names_leave_the_columns_of_status_apart(owned, capsys):
    long = "n" * 60
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    invited(capsys, long)
    settled(2, a, a, b, c)
    out, _ = typed(capsys, "status", "bucket")
    assert re.search(rf"^{long}  full +", out, re.M), out
    assert len({line.index("full") for line in out.splitlines() if line.startswith(("a ", long))}) == 1


def test_a_longer_run_says_its_schedule(owned, capsys):
    out, _ = typed(capsys, "extend", "bucket", "--rounds", "10", *OWNER)
    assert '"little" goes on from 30 to 40 rounds (epoch 1)' in out
    assert "after inner step 30 it is 3e-05" in out
    assert owned.epoch.run.recipe.outer.rounds == 40
