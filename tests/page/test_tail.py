"""metrics.jsonl, looked at again and again: the rows of a fresh reading, for the price of what is new."""

import json
import os

import pytest

from isthmus.page import tail
from isthmus.page.tail import MetricsFile


def line(round, **more):
    return json.dumps({"round": round, "tokens": round, "loss_full": 5.0} | more) + "\n"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(t) for t in range(1000)))
    return path


def fresh(path):
    metrics = MetricsFile(path.parent)
    metrics.look()
    return metrics


def grow(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_a_look_reads_what_was_added_and_not_the_rest(path, monkeypatch):
    metrics, read = fresh(path), []
    whole = tail.read_bytes
    monkeypatch.setattr(
        tail, "read_bytes", lambda *a, **k: read.append(len(found := whole(*a, **k))) or found
    )
    before = metrics.rows
    metrics.look()
    assert metrics.rows is before  # nothing new: the same list
    assert read == []
    for t in range(1000, 1003):
        grow(path, line(t))
        metrics.look()
    assert len(before) == 1000  # whoever has it may keep it
    assert [row.round for row in metrics.rows] == list(range(1003))
    assert max(read) < 5000 < path.stat().st_size


def test_a_line_counts_when_it_is_whole(path):
    metrics, (head, tail) = fresh(path), (line(1000)[:20], line(1000)[20:])
    grow(path, head)
    metrics.look()
    assert (len(metrics.rows), metrics.odd) == (1000, "")
    grow(path, tail + "no row\n")
    metrics.look()
    assert len(metrics.rows) == 1001
    assert metrics.odd == "metrics.jsonl: 1 lines are not rows of a run"
    grow(path, line(1001)[:9])
    metrics.look()
    os.truncate(path, path.stat().st_size - 9)  # as an engine cuts off what a kill has torn
    grow(path, line(1001))
    metrics.look()
    assert (metrics.rows, metrics.odd) == (fresh(path).rows, fresh(path).odd)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: grow(path, line(500, loss_full=1.0) + line(1000)),  # a round that was run again
        lambda path: os.truncate(path, 20_000),
        lambda path: path.write_text(line(0) + line(1)),
        lambda path: (path.rename(path.with_name("old")), path.write_text(line(0) * 2000)),
        lambda path: path.write_text(""),
    ],
    ids=["again", "cut", "short", "replaced", "empty"],
)
def test_however_the_file_changes_the_rows_are_those_of_a_fresh_reading(path, change):
    metrics = fresh(path)
    change(path)
    os.utime(path, ns=(1, 10**18))
    metrics.look()
    assert (metrics.rows, metrics.odd) == (fresh(path).rows, fresh(path).odd)


def test_what_cannot_be_read_is_said_until_it_can_be_read_again(path):
    metrics = fresh(path)
    path.rename(path.with_name("kept"))
    path.mkdir()
    metrics.look()
    assert metrics.rows == []
    assert "metrics.jsonl" in metrics.odd
    path.rmdir()
    path.with_name("kept").rename(path)
    metrics.look()
    assert (len(metrics.rows), metrics.odd) == (1000, "")
