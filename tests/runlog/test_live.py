import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fabricate import FULL, PIPELINED, recipe, rows

from isthmus.runlog import Row, totals
from isthmus.runlog.live import PlainView, is_interactive, open_view
from isthmus.runlog.terminal import TerminalView


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(run_recipe, made, stream=None, **options) -> str:
    stream = stream or io.StringIO()
    with open_view(run_recipe, 0, 20, stream=stream, **options) as view:
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
    with open_view(recipe(), 0, 20, stream=stream) as view:
        for step in range(1, 7):  # the first of 20 rounds, 10 s for each of its 15 steps
            now += 10.0
            view.inner(step, 15, [5.0, 5.2] if step > 3 else None)
    assert stream.getvalue().splitlines() == [
        "round 1/20, inner step 3 of 15  ETA 49m30s",
        "round 1/20, inner step 6 of 15  train  5.10  ETA 49m00s",
    ]


def test_unevaluated_rounds_and_fleets_without_pipelines_keep_the_columns():
    lines = shown(recipe(FULL), rows(recipe(FULL), 4, eval_every=2)).splitlines()
    assert lines[1].startswith("round  1/20  loss     -  train")
    assert lines[2].startswith("round  2/20  loss  6.15  train")
    assert "pipelined" not in "".join(lines[:5])


def unscored(row: Row) -> Row:
    return replace(row, loss_full=None, loss_pipelined=None, loss_mixed=None, loss_by_kind={}, bias={})


@pytest.mark.parametrize("fleet", [FULL, FULL + PIPELINED], ids=["full", "mixed"])
def test_losses_that_come_later_are_in_the_line_or_right_after_it(fleet):
    whole = rows(recipe(fleet), 3)
    at_once = shown(recipe(fleet), whole).splitlines()
    stream = io.StringIO()
    with open_view(recipe(fleet), 0, 20, stream=stream) as view:
        view.round(unscored(whole[0]), awaited=True)
        assert stream.getvalue() == ""
        view.losses(whole[0])
        view.round(unscored(whole[1]), awaited=True)
        view.round(unscored(whole[2]), awaited=True)
        view.losses(whole[1])
        assert view.progress.awaited == {2}
        view.losses(whole[2])
        view.round(unscored(whole[3]), awaited=True)
    lines = stream.getvalue().splitlines()
    assert lines[0] == at_once[0]
    assert re.match(r"round  1/20  loss .* -", lines[1])
    full, pipelined, mixed = (whole[1][f"loss_{name}"] for name in ("full", "pipelined", "mixed"))
    losses = f"losses full {full:.2f}, pipelined {pipelined or 0:.2f}, mixed {mixed:.2f}"
    assert lines[2] == f"round 1: {f'loss {full:.2f}' if fleet == FULL else losses}"
    assert lines[3].partition("ETA")[0] == at_once[2].partition("ETA")[0]
    assert lines[4].startswith("round  3/20")  # printed at the end, without
    assert len(lines) == 5
    assert view.progress.loss_and_change("loss_full")[0] == whole[2].loss_full


def test_one_replica_sends_nothing_and_the_line_says_nothing_of_it():
    alone = recipe(FULL.replace("2", "1"))
    assert "sent" not in shown(alone, rows(alone, 3))


def test_a_resumed_run_counts_the_bytes_of_the_rounds_before():
    made = rows(recipe(), 4)
    view = open_view(recipe(), 3, 20, stream=io.StringIO(), rows=made[:4])
    view.round(made[4])
    assert view.progress.sums["link_bytes"] == totals(made)["link_bytes"]
    assert view.progress.sums["fleet_seconds"] == totals(made)["fleet_seconds"]


def test_a_closed_stream_does_not_stop_the_run():
    stream = io.StringIO()
    with open_view(recipe(), 0, 20, stream=stream) as view:
        stream.close()
        view.round(rows(recipe(), 0)[0])


def test_quiet_says_nothing():
    assert shown(recipe(), rows(recipe(), 3), quiet=True) == ""


@pytest.mark.parametrize(
    ("term", "ci", "interactive"),
    [("xterm", "", True), ("dumb", "", False), ("xterm", "true", False), ("", "", False)],
)
def test_only_a_terminal_with_somebody_before_it_is_redrawn(monkeypatch, term, ci, interactive):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("CI", ci)
    assert is_interactive(Terminal()) is interactive
    assert not is_interactive(io.StringIO())
    view = open_view(recipe(), 0, 20, stream=Terminal())
    assert isinstance(view, TerminalView if interactive else PlainView)


def test_on_a_terminal_losses_are_amended_in_place(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("CI", raising=False)
    made = rows(recipe(), 2)
    with open_view(recipe(), 0, 20, stream=Terminal()) as view:
        assert isinstance(view, TerminalView)

        def drawn() -> str:
            with view.console.capture() as capture:
                view.console.print(view.draw())
            return capture.get()

        view.round(made[0])
        view.round(unscored(made[1]), awaited=True)
        view.round(unscored(made[2]), awaited=True)
        assert f"{made[0].loss_full:.3f}" in drawn()
        assert "scoring rounds 1 to 2" in drawn()
        view.losses(made[1])
        assert f"{made[1].loss_full:.3f}" in drawn()
        assert "scoring round 2" in drawn()
        view.losses(made[2])
        assert f"{made[2].loss_full:.3f}" in drawn()
        assert "scoring" not in drawn()


def test_the_terminal_view_fits_80_columns_and_tells_losses_bytes_and_time(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("CI", raising=False)
    text = shown(recipe(FULL + PIPELINED), rows(recipe(), 3), stream=Terminal())
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "replica edge-1 [left]" in plain
    last = [line.rstrip() for line in plain.splitlines()][-6:]
    assert all(len(line) <= 80 for line in last)
    assert last[0].startswith("demo  4 replicas (2 full; 2 pipelined")
    for word in (
        "round 4/20",
        "mixed",
        "full",
        "pipelined",
        "tok/s",
        "by the virtual clock",
        "uncompressed",
        "dense",
    ):
        assert word in "\n".join(last)
