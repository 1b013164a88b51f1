import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fabricate import FULL, PIPELINED, recipe, rows

from isthmus.runlog import Row, totals
from isthmus.runlog.live import View


def shown(run_recipe, made, **options) -> str:
    stream = io.StringIO()
    with View(run_recipe, 0, 20, stream=stream, **options) as view:
        for row in made:
            for step in range(15 if row.round else 0):
                view.inner(step + 1, 15, [5.0, 5.2])
            view.round(row)
        view.note("replica edge-1 [left]")
    return stream.getvalue()


def test_without_a_terminal_every_round_is_one_aligned_line():
    made = rows(recipe(), 12)
    lines = shown(recipe(), made).splitlines()
    assert len(lines) == 14
    assert lines[0].startswith("round  0/20  loss mixed  7.01 full  6.95 pipelined  7.07")
    pattern = (
        r"round +\d+/20  loss mixed +\d\.\d\d full +\d\.\d\d pipelined +\d\.\d\d"
        r"  train +\d\.\d\d +[\d.]+k tok/s  ETA \S+ +sent [\d.]+ MB \(dense [\d.]+ [MG]B\)"
    )
    for line in lines[1:13]:
        assert re.fullmatch(pattern, line), line
    assert len({line.index("ETA") for line in lines[1:13]}) == 1
    assert lines[13] == "replica edge-1 [left]"


def test_in_a_long_round_a_line_says_how_long_it_takes(monkeypatch):
    now, stream = 1000.0, io.StringIO()
    monkeypatch.setattr("isthmus.runlog.live.time", SimpleNamespace(monotonic=lambda: now))
    with View(recipe(), 0, 20, stream=stream) as view:
        for step in range(1, 7):  # the first of 20 rounds, 10 s for each of its 15 steps
            now += 10.0
            view.inner(step, 15, [5.0, 5.2] if step > 3 else None)
    assert stream.getvalue().splitlines() == [
        "round 1/20, inner step 3 of 15  ETA 49m30s",
        "round 1/20, inner step 6 of 15  train  5.10  ETA 49m00s",
    ]


def unscored(row: Row) -> Row:
    return replace(row, loss_full=None, loss_pipelined=None, loss_mixed=None, loss_by_kind={})


@pytest.mark.parametrize("fleet", [FULL, FULL + PIPELINED], ids=["full", "mixed"])
def test_losses_that_come_later_are_in_the_line_or_right_after_it(fleet):
    whole = rows(recipe(fleet), 3)
    at_once = shown(recipe(fleet), whole).splitlines()
    stream = io.StringIO()
    with View(recipe(fleet), 0, 20, stream=stream) as view:
        view.round(unscored(whole[0]), awaited=True)
        assert stream.getvalue() == ""
        view.losses(whole[0])
        view.round(unscored(whole[1]), awaited=True)
        view.round(unscored(whole[2]), awaited=True)
        view.losses(whole[1])
        view.losses(whole[2])
        view.round(unscored(whole[3]), awaited=True)
    lines = stream.getvalue().splitlines()
    assert lines[0] == at_once[0]
    assert re.match(r"round  1/20  loss .* -", lines[1])
    full, pipelined, mixed = (whole[1][f"loss_{name}"] for name in ("full", "pipelined", "mixed"))
    losses = f"mixed {mixed:.2f}, full {full:.2f}, pipelined {pipelined or 0:.2f}"
    assert lines[2] == f"round 1: held-out loss {f'full {full:.2f}' if fleet == FULL else losses}"
    assert lines[3].partition("ETA")[0] == at_once[2].partition("ETA")[0]
    assert lines[4].startswith("round  3/20")  # printed at the end, without
    assert len(lines) == 5


def test_a_resumed_run_counts_the_bytes_of_the_rounds_before():
    made = rows(recipe(), 4)
    view = View(recipe(), 3, 20, stream=io.StringIO(), rows=made[:4])
    view.round(made[4])
    assert view.sent == sum(totals(made)["link_bytes"].values())


def test_a_closed_stream_does_not_stop_the_run():
    stream = io.StringIO()
    with View(recipe(), 0, 20, stream=stream) as view:
        stream.close()
        view.round(rows(recipe(), 0)[0])


def test_quiet_says_nothing():
    assert shown(recipe(), rows(recipe(), 3), quiet=True) == ""
