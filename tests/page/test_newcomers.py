"""The page and `status` of a run whose fleet changes."""

import json
from pathlib import Path

from owned import Owned, settled

from isthmus.cli.main import main
from isthmus.page.source import open_source


def test_a_newcomer_is_shown_and_who_was_revoked_is_not(tmp_path: Path, capsys):
    owned = Owned(str(tmp_path / "bucket"), tmp_path, closers=["a"])
    a, b, c = owned.replicas()
    settled(1, a, a, b, c)
    source = open_source(owned.url)
    assert [member.name for member in source.look(9.0).recipe.fleet()] == ["a", "b", "c"]
    owned.invite("d")
    owned.order(revoked=["b"])
    settled(2, a, a, b, c)
    d = owned.comes("d", 2)
    settled(3, a, a, c, d)
    raw = source.look(9.0)
    assert [member.name for member in raw.recipe.fleet()] == ["a", "c", "d"]
    assert set(raw.settled) == {1, 2, 3}
    assert not raw.problems
    assert main(["status", owned.url, "--json"]) == 0
    assert [m["replica"] for m in json.loads(capsys.readouterr().out)["members"]] == ["a", "c", "d"]
