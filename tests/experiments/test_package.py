"""What `reproduce` says to those who have only the wheel (whose contents tests/cli/test_wheel.py checks)."""

import pytest

from isthmus.cli import reproduce


@pytest.mark.parametrize("arguments", [["reproduce", "1", "--dry-run"], ["plan", "--figure", "wallclock"]])
def test_without_the_repository_one_line_says_where_it_is(arguments, tmp_path, monkeypatch, isthmus):
    monkeypatch.setattr(reproduce, "CHECKOUT", tmp_path)
    status, out, err = isthmus(*arguments)
    assert (status, out) == (2, "")
    assert err == f"isthmus: {reproduce.WHERE}\n"
