"""A file is replaced as a whole or not at all."""

import os

import pytest

from isthmus.files import open_own, overwrite_own, own_size, replace_file, replacing


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "about.json"
    replace_file(path, "old")

    def cut_short() -> None:
        with replacing(path) as file:
            file.write(b"ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cut_short()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["about.json"]


def test_a_link_is_replaced_and_what_it_points_to_is_not_touched(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    path = tmp_path / "about.json"
    path.symlink_to(outside)
    replace_file(path, b"new")
    assert (path.read_text(), outside.read_text()) == ("new", "mine")
    assert not path.is_symlink()


def test_a_private_file_is_private_from_its_first_byte(tmp_path):
    replace_file(tmp_path / "key", "secret", mode=0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_our_own_file_is_opened_again_and_a_note_replaces_the_one_before(tmp_path):
    overwrite_own(tmp_path / "note", "a long note")
    overwrite_own(tmp_path / "note", "short")
    assert (tmp_path / "note").read_text() == "short"
    for line in (b"one\n", b"two\n"):
        with open_own(tmp_path / "log", append=True) as file:
            file.write(line)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
    assert own_size(tmp_path / "log") == 8
    assert own_size(tmp_path / "none") is own_size(tmp_path) is None
    with pytest.raises(FileNotFoundError):
        open_own(tmp_path / "none", create=False)
