"""report.html: the page of a run in one file, which asks for nothing and runs nothing but its own parts."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM
from fabricate import FULL, PIPELINED, make_run, recipe
from made import MARKUP, hostile

from isthmus.page.report import inlined, write_report
from isthmus.page.source import RunSource
from isthmus.page.state import StateBuilder
from isthmus.runlog import RunDir, summary

BARN = PIPELINED.replace("edge", "barn").replace('"1/8"', '"none"').replace("count = 2", "count = 1")
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028<!--"
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here; apt-get install chromium")


class Parts(HTMLParser):
    """What is inline in a page, as a browser cuts it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: dict[str, list[str]] = {"script": [], "style": [], "json": [], "noscript": []}
        self.links: list[str] = []
        self.policy = ""
        self.inside: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.links += [attributes[name] for name in ("src", "href") if name in attributes]
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]
        if tag in self.found:
            self.inside.append("json" if attributes.get("type") == "application/json" else tag)
            self.found[self.inside[-1]].append("")

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1] in (tag, "json") and tag in self.found:
            self.inside.pop()

    def handle_data(self, data):
        if self.inside:
            self.found[self.inside[-1]][-1] += data


def parts_of(html: str) -> Parts:
    """One script, one style and one state; the policy names the first two by their hashes."""
    parts = Parts(html)
    assert {name: len(found) for name, found in parts.found.items()} == dict.fromkeys(parts.found, 1)
    for name in ("script", "style"):
        digest = hashlib.sha256(parts.found[name][0].encode()).digest()
        assert f"{name}-src 'sha256-{base64.b64encode(digest).decode()}'" in parts.policy
    assert parts.policy.startswith("default-src 'none';")
    assert "connect-src" not in parts.policy
    assert all(link.startswith(("data:", "#")) for link in parts.links)
    return parts


def report(run: RunDir) -> tuple[Parts, dict]:
    parts = parts_of(write_report(run.path).read_text(encoding="utf-8"))
    return parts, json.loads(parts.found["json"][0], parse_constant=pytest.fail)


def test_the_report_is_the_page_and_the_state_that_the_server_would_answer(run):
    _, state = report(run)
    again = StateBuilder(lambda: 0.0).build(RunSource(run).look())
    again["run"]["where"] = ""
    assert {key: state[key] for key in again} == json.loads(json.dumps(again))
    assert state["written_unix"] > 0


def test_without_a_script_the_summary_is_there_in_words(tmp_path: Path):
    run = make_run(tmp_path / "run", recipe(), 20)
    parts, _ = report(run)
    assert all(sentence in parts.found["noscript"][0] for sentence in summary(run))


@pytest.mark.parametrize("num_rounds", [-1, 0, 1, 2])
def test_a_run_that_has_hardly_begun_can_be_drawn(tmp_path: Path, num_rounds: int):
    _, state = report(make_run(tmp_path / "run", recipe(), num_rounds, status="running"))
    assert bool(state["speeds"]) == (num_rounds > 0)


def test_three_thousand_rounds_make_a_small_page(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)
    long = recipe(FULL + PIPELINED + BARN, "outer.rounds=3000")
    run = make_run(tmp_path / "run", long, 3000)
    report(run)
    assert run.report_path.stat().st_size < 500_000


@pytest.mark.parametrize("fleet", [FULL, PIPELINED, BARN, FULL.replace("2", "1"), FULL + BARN])
@pytest.mark.parametrize("method", ["sparseloco", "diloco", "adamw"])
def test_every_shape_of_fleet_has_its_charts(tmp_path: Path, fleet: str, method: str):
    _, state = report(make_run(tmp_path / "run", recipe(fleet, f"outer.method={method}"), 4, eval_every=3))
    titles = [chart["title"] for chart in state["charts"]]
    assert ("What the compressed forward costs" in titles) == ("1/8" in fleet)
    assert {"Gradient norm before clipping", "Loss by kind of replica"} <= set(titles)
    assert len(titles) == 4


def test_losses_that_are_not_numbers_are_skipped(tmp_path: Path):
    run = make_run(tmp_path / "run", recipe(), 4)
    lost = {"loss_mixed": math.nan, "loss_full": None, "loss_train": math.inf, "loss_by_kind": None}
    run.append(run.rows()[-1] | {"round": 5, "bytes": None} | lost)
    _, state = report(run)
    assert "the run diverged" in " ".join(state["summary"])


def test_what_came_from_files_cannot_leave_its_place(tmp_path: Path):
    facts = {"status": HOSTILE, "device": HOSTILE, "mode": HOSTILE, HOSTILE: HOSTILE}
    run = make_run(tmp_path / "run", recipe(), 2, **facts)
    parts, state = report(run)  # of which parts_of finds one script, one style and one state
    assert state["run"]["status"].startswith("</script><img src=x")
    assert not re.search(r"[<>&\u2028\u2029]", parts.found["json"][0])
    run.update_about(status="failed", error=HOSTILE)
    parts, _ = report(run)
    assert "The run failed after round 2 of 20: </script><img" in parts.found["noscript"][0]
    state["run"]["name"] = HOSTILE
    parts_of(inlined(state))


@in_a_browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_opened_as_a_file_it_is_drawn_and_asks_for_nothing(page, run, width, dark):
    page.look_as(width, 844, dark=dark, touch=width < 500)
    url = write_report(run.path).as_uri()
    page.go(url)
    shown = page.value("document.body.innerText")
    for sentence in summary(run):
        assert sentence in shown.replace("\u00a0", " ")
    for title in ("The fleet", "Loss", "Round by round", "Bytes", "Plan against actual", "Time"):
        assert title in shown
    assert "What has changed" not in shown
    assert "report of 20" in shown
    assert page.value("document.querySelectorAll('svg path.line').length") == 13
    assert page.value("document.querySelectorAll('#spans circle').length") == 4
    assert page.value("document.documentElement.scrollWidth - innerWidth") <= 0
    assert [asked for asked in page.requests if not asked.startswith("data:")] == [url]
    assert page.complaints == []


@in_a_browser
def test_the_policy_lets_nothing_else_run_or_load(page, run):
    page.go(write_report(run.path).as_uri())
    page.value(
        "(() => { const bad = document.createElement('script'); bad.textContent = 'window.ran = 1';"
        "document.body.append(bad); const far = new Image(); far.src = 'http://127.0.0.1:9/x.png'; })()"
    )
    assert page.value("window.ran === undefined")
    assert page.value("fetch('http://127.0.0.1:9/').then(() => 'loaded', () => 'refused')") == "refused"
    refusals = [text for text in page.complaints if "Content Security Policy" in text]
    assert any("inline script" in text for text in refusals)
    assert any("x.png" in text for text in refusals)


@in_a_browser
def test_hostile_names_are_shown_as_text(page, tmp_path: Path):
    page.go(write_report(hostile(tmp_path / "run")).as_uri())
    assert page.value("document.getElementById('status').textContent") == MARKUP
    assert page.value("document.querySelectorAll('img, iframe').length") == 0
    assert page.complaints == []


@in_a_browser
def test_it_can_be_printed(page, run):
    page.go(write_report(run.path).as_uri())
    pdf = base64.b64decode(page.call("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 8
