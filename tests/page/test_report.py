import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fabricate import FULL, PIPELINED, make_run, recipe

from isthmus.page.report import write_report
from isthmus.page.svg import Series, Span, line_chart, share_bar, span_chart, ticks
from isthmus.runlog import RunDir

VOID = {"meta", "br", "line", "rect", "path", "circle"}
BARN = PIPELINED.replace("edge", "barn").replace('"1/8"', '"none"').replace("count = 2", "count = 1")


class Balanced(HTMLParser):
    """Fails on a tag that is closed out of turn, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def check(html: str) -> Balanced:
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert not re.search(r'="[^"]*\b(nan|inf)\b', html)
    return parser


def report(run: RunDir) -> str:
    html = write_report(run.path).read_text(encoding="utf-8")
    check(html)
    assert "http" not in html
    assert not {"script", "link", "img", "iframe"} & check(html).seen
    return html


def test_the_report_tells_the_run_and_needs_nothing_but_itself(tmp_path: Path):
    html = report(make_run(tmp_path / "run", recipe(), 20))
    for words in (
        "4 replicas (2 full; 2 pipelined",
        "Held-out loss fell",
        "1/8 (16 of 128)",
        "100 Mb/s, 20 ms",
    ):
        assert words in html
    for title in (
        "Held-out loss",
        "Loss by kind of replica",
        "Tokens per second",
        "Seconds a round",
        "Bytes",
    ):
        assert title in html
    assert "inner_steps = 15" in html  # the resolved recipe
    assert "prefers-color-scheme: dark" in html


@pytest.mark.parametrize("num_rounds", [-1, 0, 1, 2])
def test_a_run_that_has_hardly_begun_can_be_drawn(tmp_path: Path, num_rounds: int):
    html = report(make_run(tmp_path / "run", recipe(), num_rounds, status="running"))
    assert ("Tokens per second" in html) == (num_rounds > 0)


def test_three_thousand_rounds_make_a_small_page(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)
    long = recipe(FULL + PIPELINED + BARN, "outer.rounds=3000")
    assert len(report(make_run(tmp_path / "run", long, 3000))) < 500_000


@pytest.mark.parametrize("fleet", [FULL, PIPELINED, BARN, FULL.replace("2", "1"), FULL + BARN])
@pytest.mark.parametrize("method", ["sparseloco", "diloco", "adamw"])
def test_every_shape_of_fleet_can_be_drawn(tmp_path: Path, fleet: str, method: str):
    html = report(make_run(tmp_path / "run", recipe(fleet, f"outer.method={method}"), 4, eval_every=3))
    assert ("What the compressed forward costs" in html) == ("1/8" in fleet)


def test_losses_that_are_no_numbers_are_skipped(tmp_path: Path):
    run = make_run(tmp_path / "run", recipe(), 4)
    lost = {
        "loss_mixed": math.nan,
        "loss_full": None,
        "loss_train": math.inf,
        "loss_by_kind": None,
        "bytes": None,
    }
    run.append(run.rows()[-1] | {"round": 5} | lost)
    assert "the run diverged" in report(run)


def test_what_came_from_files_is_escaped(tmp_path: Path):
    hostile = '<script>alert("x")</script>'
    run = make_run(
        tmp_path / "run",
        recipe(),
        2,
        status=hostile,
        device=hostile,
        mode=hostile,
        started=hostile,
        **{hostile: hostile},
    )
    html = report(run)  # which looks for a script element
    assert "&lt;script&gt;" in html
    run.update_about(status="failed", error=hostile)
    assert "The run failed after round 2 of 20: &lt;script&gt;" in report(run)
    run.recipe_path.write_text(run.recipe_path.read_text().replace("builtin:sample", "</pre><b>"))
    assert "&lt;/pre&gt;&lt;b&gt;" in report(run)


def test_ticks_are_round_numbers_within_the_range():
    assert ticks(4.14, 7.2) == [4.5, 5.0, 5.5, 6.0, 6.5, 7.0]
    assert ticks(0, 1_228_800) == [0, 200_000, 400_000, 600_000, 800_000, 1_000_000, 1_200_000]
    assert ticks(-0.001, 0.0) == [-0.001, -0.0008, -0.0006, -0.0004, -0.0002, 0.0]


@pytest.mark.parametrize(
    "points", [[], [(0, None)], [(0, 3.0)], [(0, 0.0), (1, 0.0)], [(0, math.nan), (5, -2.0)]]
)
@pytest.mark.parametrize("from_zero", [False, True])
def test_degenerate_lines_are_drawn_or_declined(points, from_zero):
    chart = line_chart(
        "a < b",
        [Series("<i>", points)],
        x_label="x",
        y_label="y",
        x_format=str,
        y_format=str,
        from_zero=from_zero,
    )
    check(chart)
    assert "a &lt; b" in chart
    assert ("Nothing measured" in chart) == (not Series("", points).known)


def test_a_long_line_keeps_its_spike():
    spike = [(float(x), 100.0 if x == 1234 else 1.0) for x in range(5000)]
    chart = line_chart("t", [Series("s", spike)], x_label="", y_label="", x_format=str, y_format=str)
    path = re.search(r'd="M([^"]+)"', chart).group(1)
    heights = [float(point.split()[1]) for point in path.split("L")]
    assert len(heights) < 500
    assert min(heights) < 40 < 200 < sorted(heights)[1]


def test_bars_and_spans_escape_and_balance():
    check(share_bar("<t>", [("<a>", 3.0), ("b", 0.0), ("c", 1e-9)], 0, str))
    for other in (1.0, 5.0, 1e12):
        check(span_chart("<t>", [Span("<l>", 5.0, "<n>", other, "o", "<w>", 0)], str))


def test_the_tile_between_replicas_says_what_the_sentence_says(tmp_path: Path):
    html = report(make_run(tmp_path / "run", recipe(), 20))
    (tile,) = re.findall(r"<span>Between replicas</span><strong>([^<]+)</strong>", html)
    assert f"Between replicas {tile} crossed" in html
    assert re.search(rf"Between replicas: {re.escape(tile)}, and [^<]+ of control", html)
