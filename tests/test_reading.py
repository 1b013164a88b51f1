"""What lies in a folder may be a pipe, a device, a file without end: it is refused by one line, at once."""

import os
import socket

import pytest

from isthmus.errors import ConfigError
from isthmus.reading import (
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_lines,
    read_text,
    stat_regular,
)

READERS = {
    "open_regular": open_regular,
    "stat_regular": stat_regular,
    "read_bytes": lambda path: read_bytes(path, 100),
    "read_text": lambda path: read_text(path, 100),
    "read_json": lambda path: read_json(path, 100),
    "read_lines": lambda path: list(read_lines(path, 100)),
}


def make_odd(path, kind):
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device", "a socket"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_not_a_regular_file_is_refused_at_once_and_by_name(tmp_path, monkeypatch, reader, kind):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    make_odd(tmp_path / "odd", kind)
    with pytest.raises(ConfigError, match=f"odd is {kind}, not a regular file") as refusal:
        READERS[reader]("odd")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("reader", READERS)
def test_an_absent_file_is_told_from_a_refused_one(tmp_path, reader):
    (tmp_path / "file").write_text("")
    for absent in (tmp_path / "none", tmp_path / "file" / "below"):
        with pytest.raises(FileNotFoundError):
            READERS[reader](absent)
    (tmp_path / "loop").symlink_to("loop")
    for odd in (tmp_path / "loop", f"{tmp_path}/\0", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match="cannot be read"):
            READERS[reader](odd)


def test_links_are_followed_to_regular_files_unless_the_caller_says_no(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("here")
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "link").symlink_to("real/file")
    assert read_text(tmp_path / "folder" / "file", 4) == read_text(tmp_path / "link", 4) == "here"
    with pytest.raises(ConfigError, match="symbolic link"):
        read_bytes(tmp_path / "link", 4, follow=False)


def test_a_file_is_read_whole_or_refused_by_its_size(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_bytes(path, 10) == b"0123456789"
    assert read_bytes(path, 4, start=8) == b"89"
    assert read_bytes(path, 4, start=0) == b"0123"
    with pytest.raises(ConfigError, match="file holds 10 bytes; at most 9 are read"):
        read_bytes(path, 9)
    with open(path, "r+b") as file:
        file.truncate(1 << 40)  # it takes no room on disk, and would take all of the memory
    for reader in ("read_bytes", "read_text", "read_json"):
        with pytest.raises(ConfigError, match="at most 100 are read"):
            READERS[reader](path)
    with pytest.raises(ConfigError, match="line 1 is longer than 100 bytes"):
        READERS["read_lines"](path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" + "1," * 1_000_001 + "1]", "JSON values"),
        ("1" * 5000, "is not JSON"),
        ("{", "is not JSON"),
        ("", "is not JSON"),
        (b"\xff\xff", "is not JSON"),
    ],
)
def test_json_that_would_break_its_reader_is_refused_in_one_line(text, words):
    with pytest.raises(ConfigError, match=f"^odd.json .*{words}") as refusal:
        parse_json(text, "odd.json")
    assert "\n" not in str(refusal.value)


def test_json_holds_no_number_that_is_not_finite():
    assert parse_json("[NaN, -Infinity, 1e999, 1.5, 2]", "") == [None, None, None, 1.5, 2]


def test_lines_are_those_of_the_file_and_none_is_too_long(tmp_path):
    path = tmp_path / "lines"
    for size in (1, 7, 1 << 20):
        expected = [b"x" * size + b"\n", b"\n", b"a\rb\n", b"last"]
        path.write_bytes(b"".join(expected))
        assert list(read_lines(path, size + 6)) == expected
    with pytest.raises(ConfigError, match="line 1 is longer than 1,000 bytes"):
        next(read_lines(path, 1000))
    path.write_bytes(b"")
    assert list(read_lines(path, 10)) == []
