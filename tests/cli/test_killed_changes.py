"""An owner who is killed while it changes a run types the same line again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from little import hasty as hasty
from owned import MORE, Owned, settled

from isthmus.cli.main import main
from isthmus.protocol import bundle
from isthmus.protocol.bundle import read_bundle
from isthmus.protocol.trust import load_signer
from isthmus.store import Store

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


@WHEN
@pytest.mark.parametrize("where", [(bundle, "replace_file"), (Store, "create")], ids=lambda w: w[1])
def test_an_invitation_killed_at_any_step_leaves_a_file_that_joins(owned, capsys, monkeypatch, where, after):
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    typed = ["invite", "bucket", "d", "--key", "keys/run.owner.key"]
    with monkeypatch.context() as patch:
        patch.setattr(*where, deadly(getattr(*where), after))
        with pytest.raises(Killed):
            main(typed)
    done = where[1] == "create" and after
    assert main(typed) == (2 if done else 0)
    assert ("d is in this run already" in capsys.readouterr().err) == done
    key = read_bundle(Path("keys/d.isthmus.toml")).save_key("friend/d.key")
    settled(2, a, a, b, c)
    assert owned.epoch.run.keys["d"] == load_signer(key, "d").public_key


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
    said = "c was revoked before (epoch 1)" if after else "c is revoked"
    assert said in capsys.readouterr().out
    assert list(owned.epoch.run.keys) == ["a", "b"]
