"""Who joins by a token, replaces a key or invites, and is killed anywhere, goes on by the same line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from little import hasty as hasty
from owned import MORE, Owned, settled

from isthmus.cli.main import main
from isthmus.protocol import access, bundle, trust
from isthmus.protocol.access import open_as
from isthmus.protocol.invitations import Token
from isthmus.protocol.trust import load_signer
from isthmus.runtime import newcomer
from isthmus.store import Store, open_store

pytestmark = pytest.mark.usefixtures("hasty")
WHEN = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])


class Killed(BaseException):
    """Stands for SIGKILL."""


def deadly(real: Callable[..., Any], after: bool) -> Callable[..., Any]:
    def kill(*args: Any, **more: Any) -> Any:
        if after:
            real(*args, **more)
        raise Killed

    return kill


@pytest.fixture
def owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Owned:
    monkeypatch.chdir(tmp_path)
    return Owned("bucket", tmp_path, MORE, closers=["a"])


def invited(capsys: pytest.CaptureFixture[str]) -> Token:
    assert main(["invite", "bucket", "--replica", "d", "--key", "keys/run.owner.key"]) == 0
    return Token.parse(capsys.readouterr().out)


def asks(token: Token) -> None:
    key = newcomer.prepare("bucket", token, "friend/d.key")
    newcomer.ask(open_as(open_store("bucket"), "d", str(key))[0])


@WHEN
@pytest.mark.parametrize(
    "where", [(newcomer, "save_secret"), (newcomer, "replace_file"), (Store, "create")], ids=lambda w: w[1]
)
def test_a_newcomer_killed_at_any_step_comes_in_by_the_same_line(owned, capsys, monkeypatch, where, after):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    token = invited(capsys)
    with monkeypatch.context() as patch:
        patch.setattr(*where, deadly(getattr(*where), after))
        with pytest.raises(Killed):
            asks(token)
    asks(token)
    settled(2, a, a, b, c)
    assert owned.epoch.run.keys["d"] == load_signer(Path("friend/d.key"), "d").public_key
    owned.own["d"] = load_signer(Path("friend/d.key"), "d")
    settled(3, a, a, b, c, owned.comes("d", 2))
    assert "d" in owned.members(3)
    assert len(list(Path("bucket/requests").iterdir())) == 1


@WHEN
@pytest.mark.parametrize("where", [(trust, "save_secret"), (Store, "create")], ids=lambda w: w[1])
def test_a_rotation_killed_at_any_step_is_typed_again(owned, capsys, monkeypatch, where, after):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    typed = ["rotate", "bucket", "c", "--key", "keys/c.key"]
    with monkeypatch.context() as patch:
        patch.setattr(*where, deadly(getattr(*where), after))
        with pytest.raises(Killed):
            main(typed)
    assert main(typed) == 0
    settled(2, a, a, b, c)
    key = load_signer(Path("keys/c.key.next"), "c").public_key
    assert owned.epoch.run.keys["c"] == key


@WHEN
def test_a_replica_killed_while_it_takes_up_its_new_key_has_it_at_its_next_start(owned, monkeypatch, after):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    assert main(["rotate", "bucket", "c", "--key", "keys/c.key"]) == 0
    settled(2, a, a, b, c)
    with monkeypatch.context() as patch:
        patch.setattr(access.os, "replace", deadly(access.os.replace, after))
        with pytest.raises(Killed):
            open_as(open_store("bucket"), "c", "keys/c.key")
    ledger, _ = open_as(open_store("bucket"), "c", "keys/c.key")
    assert ledger.signer.public_key == owned.epoch.run.keys["c"]
    assert not Path("keys/c.key.next").exists()


@WHEN
@pytest.mark.parametrize("where", [(bundle, "replace_file"), (Store, "create")], ids=lambda w: w[1])
def test_an_invitation_killed_at_any_step_is_typed_again(owned, capsys, monkeypatch, where, after):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    with monkeypatch.context() as patch:
        patch.setattr(*where, deadly(getattr(*where), after))
        with pytest.raises(Killed):
            main(["invite", "bucket", "--replica", "d", "--key", "keys/run.owner.key"])
    asks(invited(capsys))
    settled(2, a, a, b, c)
    assert "d" in owned.epoch.run.keys


@WHEN
def test_an_extension_killed_at_its_order_is_typed_again_and_made_once(owned, capsys, monkeypatch, after):
    typed = ["extend", "bucket", "--rounds", "5", "--key", "keys/run.owner.key"]
    with monkeypatch.context() as patch:
        patch.setattr(Store, "create", deadly(Store.create, after))
        with pytest.raises(Killed):
            main(typed)
    assert main(typed) == 0
    assert "goes on from 30 to 35 rounds (epoch 1)" in capsys.readouterr().out
    assert (owned.epoch.number, owned.epoch.run.recipe.outer.rounds) == (1, 35)
    assert main(typed) == 0  # which is another one
    assert "goes on from 35 to 40 rounds (epoch 2)" in capsys.readouterr().out


@WHEN
def test_a_revocation_killed_at_its_order_is_typed_again_and_says_what_is_so(
    owned, capsys, monkeypatch, after
):
    typed = ["revoke", "bucket", "c", "--key", "keys/run.owner.key"]
    with monkeypatch.context() as patch:
        patch.setattr(Store, "create", deadly(Store.create, after))
        with pytest.raises(Killed):
            main(typed)
    assert main(typed) == 0
    said = "c was revoked before (epoch 1); no invitation of c counts any more" if after else "c is revoked"
    assert said in capsys.readouterr().out
    assert list(owned.epoch.run.keys) == ["a", "b"]


def test_a_key_that_was_replaced_elsewhere_is_told_from_a_wrong_one(owned, capsys):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    Path("elsewhere.key").write_bytes(Path("keys/c.key").read_bytes())
    assert main(["rotate", "bucket", "c", "--key", "keys/c.key"]) == 0
    settled(2, a, a, b, c)
    assert main(["leave", "bucket", "--replica", "c", "--key", "elsewhere.key"]) == 2
    assert "copy the one from the machine where `isthmus rotate` was typed" in capsys.readouterr().err
