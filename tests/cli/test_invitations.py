"""`invite`, `join --token`, `members`, `revoke`, `rotate`, `extend`: what an owner and a friend type."""

import json
import re
import shutil
from pathlib import Path

import pytest
from little import hasty as hasty
from owned import MORE, Owned, settled

from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.protocol.access import find_member, open_as
from isthmus.protocol.invitations import Token, invitation_key, request_key
from isthmus.protocol.trust import load_signer, new_secret
from isthmus.runtime import newcomer
from isthmus.runtime.newcomer import ask, prepare
from isthmus.store import open_store

pytestmark = pytest.mark.usefixtures("hasty")


@pytest.fixture
def owned(tmp_path: Path, monkeypatch) -> Owned:
    monkeypatch.chdir(tmp_path)
    owned = Owned("bucket", tmp_path, MORE, closers=["a"])
    (tmp_path / "keys").rename(tmp_path / "owners")
    owned.keys = tmp_path / "owners"
    return owned


def typed(capsys, *words: str, status: int = 0) -> tuple[str, str]:
    assert main(list(words)) == status
    return capsys.readouterr()


def invited(capsys, name: str, *options: str) -> Token:
    key = ("--key", "owners/run.owner.key")
    out, err = typed(capsys, "invite", "bucket", "--replica", name, *key, *options)
    assert out.count("\n") == 1
    assert len(out) < 160 + len(name)
    assert f"send that line to whoever runs {name}" in err
    return Token.parse(out)


def asks(token: Token, key: str) -> None:
    """What a newcomer does until it waits for a closer."""
    ask(open_as(open_store("bucket"), token.name, str(prepare("bucket", token, key)))[0])


def test_a_token_becomes_a_replica_whose_key_never_left_its_machine(owned, capsys):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    token = invited(capsys, "edge-7", "--like", "c", "--batch", "2")
    asks(token, "friend/edge-7.key")
    assert Path("friend/edge-7.key").stat().st_mode & 0o777 == 0o600
    settled(2, a, a, b, c)
    assert Path("friend/edge-7.key.invited").exists()
    key = prepare("bucket", token, "friend/edge-7.key")  # typed again: it is in
    assert not Path("friend/edge-7.key.invited").exists()
    assert owned.epoch.run.keys["edge-7"] == load_signer(key, "edge-7").public_key
    config = owned.epoch.run.recipe.fleet()[-1].config
    assert (config.stages, config.batch) == (2, 2)
    secrets = [Path("friend/edge-7.key").read_text().split()[0], token.seed.hex()]
    stored = b"".join(path.read_bytes() for path in Path("bucket").rglob("*") if path.is_file())
    assert not any(secret.encode() in stored or bytes.fromhex(secret) in stored for secret in secrets)


def test_who_is_invited_sees_the_run_with_itself_before_it_is_admitted_and_nobody_else_does(owned, capsys):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    key = prepare("bucket", invited(capsys, "edge-7", "--like", "c"), "friend/edge-7.key")
    assert not list(Path("bucket").glob("requests/*"))  # it gets ready first, and asks then
    ledger, _ = open_as(open_store("bucket"), "edge-7", str(key))
    assert find_member(ledger.run, "edge-7").config.stages == 2
    assert "edge-7" not in ledger.at(2).keys
    settled(2, a, a, b, c)
    assert "edge-7" not in owned.epoch.run.keys
    ask(ledger)
    settled(3, a, a, b, c)
    assert ledger.manifest(3).next_epoch == 1
    assert ledger.run.keys == owned.epoch.run.keys


def test_a_later_stage_takes_the_key_that_stage_0_made(owned, capsys):
    token = invited(capsys, "edge-7", "--like", "c")
    with pytest.raises(ConfigError, match=r"copy it from the machine of stage 0"):
        prepare("bucket", token, "second/edge-7.key", stage=1)
    assert not Path("second").exists()
    key = prepare("bucket", token, "first/edge-7.key", stage=0)
    shutil.copytree("first", "second", ignore=shutil.ignore_patterns("*.invited"))
    assert prepare("bucket", token, "second/edge-7.key", stage=1).read_bytes() == key.read_bytes()


def test_a_token_is_good_for_one_machine(owned, capsys):
    token = invited(capsys, "d")
    asks(token, "one/d.key")
    with pytest.raises(ConfigError, match="was used on another machine"):
        asks(token, "two/d.key")
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    with pytest.raises(ConfigError, match=r"its key is not two/d\.key"):
        asks(token, "two/d.key")


def expired(owned: Owned, token: Token, monkeypatch) -> Token:
    monkeypatch.setattr(newcomer.time, "time", lambda: token.expires + 1.0)
    return token


def of_another_run(owned: Owned, token: Token, monkeypatch) -> Token:
    return Token(token.name, token.kind, token.expires, token.seed, "0" * 64)


def with_another_secret(owned: Owned, token: Token, monkeypatch) -> Token:
    return Token(token.name, token.kind, token.expires, new_secret(), token.run_digest)


def of_another_name(owned: Owned, token: Token, monkeypatch) -> Token:
    return Token("e", token.kind, token.expires, token.seed, token.run_digest)


def taken_back(owned: Owned, token: Token, monkeypatch) -> Token:
    owned.order(revoked=["d"])
    return token


def forged(owned: Owned, token: Token, monkeypatch) -> Token:
    key = invitation_key(token.signer.public_key)
    sealed = json.loads(owned.store.get(key, max_bytes=1 << 20))
    sealed["body"]["expires"] += 1
    owned.store.put(key, json.dumps(sealed).encode())
    return token


def in_the_way(owned: Owned, token: Token, monkeypatch) -> Token:
    owned.store.put(request_key(token.signer.public_key), b"junk")
    return token


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        (expired, "has expired"),
        (of_another_run, "is not the one that the key of @invited was made for"),
        (with_another_secret, "does not count: it is not in the bucket"),
        (of_another_name, "does not count: it is for d"),
        (taken_back, "the owner has taken it back"),
        (forged, "does not carry @owner's signature"),
        (in_the_way, "is in the way"),
    ],
)
def test_a_token_that_is_not_good_is_one_line(owned, capsys, monkeypatch, spoilt, says):
    token = spoilt(owned, invited(capsys, "d"), monkeypatch)
    with pytest.raises(ConfigError, match=says):
        asks(token, "friend/d.key")


OWNER = ("--key", "owners/run.owner.key")
BAD = {
    "no token": (("join", "bucket", "--token", "isthmus1.x"), "that is no token of `isthmus invite`"),
    "both": (
        ("join", "bucket", "--replica", "a", "--token", "x"),
        "give --replica NAME, with its key; or --token",
    ),
    "taken": (("invite", "bucket", "--replica", "a", *OWNER), "there is a replica a in this run"),
    "like": (("invite", "bucket", "--replica", "d", "--like", "z", *OWNER), 'there is no replica "z"'),
    "stages": (("invite", "bucket", "--replica", "d", "--stages", "9", *OWNER), "stages for 2 layers"),
    "batch": (
        ("invite", "bucket", "--replica", "d", "--batch", "-1", *OWNER),
        "batch is -1; it must be at least 0",
    ),
    "days": (("invite", "bucket", "--replica", "d", "--days", "0", *OWNER), "--days is 0"),
    "no key": (("invite", "bucket", "--replica", "d"), "no owner's key at keys/little/run.owner.key"),
    "a replica's key": (
        ("revoke", "bucket", "b", "--key", "owners/a.key"),
        "is not the key of this run's owner",
    ),
    "last closer": (
        ("revoke", "bucket", "a", *OWNER),
        "a is the only closer of this run; name another first",
    ),
    "closers": (
        ("members", "bucket", "--closers", "a,z", *OWNER),
        'there is no replica "z" in this run; there is a, b, c',
    ),
    "a name that no store takes": (
        ("invite", "bucket", "--replica", "Zoë", *OWNER),
        '--replica "Zoë" becomes a name in the bucket',
    ),
    "a file that no command knows": (
        ("invite", "bucket", "--replica", "d", "--to", "d.toml", *OWNER),
        "--to is d.toml; by its end, .isthmus.toml",
    ),
    "revoke of nobody": (
        ("revoke", "bucket", "bb", *OWNER),
        'nobody is called "bb" in this run; there is a, b, c',
    ),
    "whose key": (("rotate", "bucket"), "whose key? isthmus rotate bucket NAME"),
    "whose lines": (("logs", "bucket"), "whose lines? isthmus logs bucket --replica NAME"),
    "rotate": (("rotate", "bucket", "z"), 'there is no replica "z" in this run'),
    "rounds": (("extend", "bucket", "--rounds", "0", *OWNER), "--rounds is 0"),
}


@pytest.mark.parametrize(("words", "says"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_status_2(owned, capsys, words, says):
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    out, err = typed(capsys, *words, status=2)
    assert out == ""
    assert err.count("\n") == 1
    assert says in err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_members_tells_who_since_when_and_how_often(owned, capsys):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    token = invited(capsys, "d", "--closer")
    asks(token, "friend/d.key")
    settled(2, a, a, b, c)
    typed(capsys, "revoke", "bucket", "b", *OWNER)
    settled(3, a, a, b, c)
    out, _ = typed(capsys, "members", "bucket", "--json")
    found = json.loads(out)
    assert (found["epoch"], found["written"], found["round"]) == (2, 2, 3)
    rows = {
        m["replica"]: (m["since_round"], m["until_round"], m["given"], m["closes"]) for m in found["members"]
    }
    assert rows == {
        "a": (1, None, 3, True),
        "b": (1, 3, 3, False),
        "c": (1, None, 3, False),
        "d": (3, None, 0, True),
    }
    typed(capsys, "revoke", "bucket", "c", *OWNER)
    out, _ = typed(capsys, "members", "bucket")
    assert "epoch 3 is written; a closer takes it up when it settles the open round" in out


def test_members_tells_who_is_invited_and_has_not_come(owned, capsys):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)

    def listed() -> list[tuple[str, int, bool]]:
        found = json.loads(typed(capsys, "members", "bucket", "--json")[0])["invited"]
        return [(each["replica"], each["stages"], each["asked"]) for each in found]

    assert listed() == []
    token = invited(capsys, "d", "--days", "2")
    invited(capsys, "edge-7", "--like", "c", "--days", "1")
    owned.store.put(f"invitations/{'0' * 64}.json", b"junk")
    assert listed() == [("edge-7", 2, False), ("d", 1, False)]
    asks(token, "friend/d.key")
    typed(capsys, "revoke", "bucket", "edge-7", *OWNER)
    assert listed() == [("d", 1, True)]
    out, _ = typed(capsys, "members", "bucket")
    assert re.search(r"^d +full +- +invited: ready, admitted when the open round is settled$", out, re.M)
    settled(2, a, a, b, c)
    assert listed() == []


def test_long_names_leave_the_columns_of_members_and_status_apart(owned, capsys):
    long = "n" * 60
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    asks(invited(capsys, long), "friend/long.key")
    settled(2, a, a, b, c)
    invited(capsys, "m" * 59)
    for command in ("members", "status"):
        out, _ = typed(capsys, command, "bucket")
        assert re.search(rf"^{long}  full +", out, re.M), out
        assert len({line.index("full") for line in out.splitlines() if line.startswith(("a ", long))}) == 1
    assert re.search(r"^m{59} +full +- +invited", typed(capsys, "members", "bucket")[0], re.M)


def test_a_rotated_key_is_beside_the_old_one_until_it_counts(owned, capsys):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    key = ("--key", "owners/b.key")
    for _ in range(2):  # typed again it is the same
        typed(capsys, "rotate", "bucket", "b", *key)
    new = load_signer(Path("owners/b.key.next"), "b").public_key
    settled(2, a, a, b, c)
    assert owned.epoch.run.keys["b"] == new
    b.beat()
    typed(capsys, "leave", "bucket", "--replica", "b", *key, status=2)  # whoever opens the run takes it up
    assert not Path("owners/b.key.next").exists()
    assert load_signer(Path("owners/b.key"), "b").public_key == new


def test_a_longer_run_says_its_schedule(owned, capsys):
    out, _ = typed(capsys, "extend", "bucket", "--rounds", "10", *OWNER)
    assert '"little" goes on from 30 to 40 rounds (epoch 1)' in out
    assert "after inner step 30 it is 3e-05" in out
    assert owned.epoch.run.recipe.outer.rounds == 40
