"""The page in a real Chromium: finished, hostile, on a phone, by keyboard, and when its server is gone."""

import re
import signal
from urllib.parse import urlsplit

import pytest
from browser import CHROMIUM, watching
from contrast import EVERY_WORD, PALE
from made import MARKUP, hostile

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here; apt-get install chromium"),
]
SECTIONS = ["The fleet", "Loss", "Round by round", "Bytes", "Plan against actual", "Time"]
WIDTH = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
TOO_WIDE = (
    "[...document.body.querySelectorAll('*')].map(e => [e, e.getBoundingClientRect()])"
    ".filter(([e, box]) => box.width && box.right > document.documentElement.clientWidth)"
    ".map(([e, box]) => `${e.tagName}.${e.className} ${box.right} ${e.textContent.slice(0, 60)}`)"
)


def headings(page):
    return page.value(
        "[...document.querySelectorAll('h2')].filter(h => h.offsetParent).map(h => h.textContent)"
    )


def test_a_finished_run_shows_everything_and_asks_nobody_else(page, run, url):
    page.go(url)
    assert [title for title in headings(page) if title in SECTIONS] == SECTIONS
    text = page.value("document.body.innerText")
    last = run.rows()[-1]
    for forward in ("full", "pipelined", "mixed"):
        assert f"{last[f'loss_{forward}']:.3f}" in text
    assert "All 4 rounds are done." in text
    assert page.value("document.querySelectorAll('[role=gridcell]').length") == 12
    assert page.value("document.querySelectorAll('#picture svg .stage').length") == 4
    assert page.value("document.title") == "small, round 4 of 4 - Isthmus"
    for width in (1280, 700):  # drawn for the width that a chart has, also after the window changed
        page.look_as(width, 900)
        drawn = "[...document.querySelectorAll('.chart svg')].every"
        page.until(f"{drawn}(s => s.clientWidth === s.viewBox.baseVal.width)")
    assert page.value("document.querySelectorAll('svg path.line').length") == 4 + 4 + 1 + 1 + 3
    assert {urlsplit(asked).netloc for asked in page.requests} == {urlsplit(url).netloc}
    assert page.complaints == []


@pytest.mark.parametrize("width", [320, 700, 1280])
def test_a_name_is_not_parted_at_its_hyphen(page, url, width):
    page.look_as(width, 844)
    page.go(url)
    said = "; ".join(["edge-1 (waiting) and lab-berlin, then anna-s-pc-2"] * 30)
    drawn = {
        "#now p": f"top_({{...last, now: {said!r}}})",
        "#problems": f"problems({{problems: [{said!r}]}})",
        "#events": f"changes({{comings: [], events: [{{unix: 1, text: {said!r}}}]}})",
        "#comings": f"changes({{comings: [{{unix: 1, text: {said!r}}}], events: []}})",
        "#words": f"top_({{...last, summary: [{said!r}]}})",
    }
    for place, draw in drawn.items():
        names = f"[...document.querySelectorAll('{place} .whole')]"
        found = page.value(f"({draw}, {names}.map(name => [name.textContent, name.getClientRects().length]))")
        names = [name.strip("(),;") for name, _ in found]
        assert names == ["edge-1", "lab-berlin", "anna-s-pc-2"] * 30, place
        assert {lines for _, lines in found} == {1}, place
        assert said in page.value(f"document.querySelector('{place}').textContent")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 320])
def test_a_phone_has_one_column_and_never_scrolls_sideways(page, run, url, width, dark):
    page.look_as(width, 844, dark=dark, touch=True)
    page.go(url)
    assert page.value(WIDTH) <= 0, page.value(TOO_WIDE)
    page.value("(last.heard_unix -= 86_400 * 100, tick())")  # long words, of a run that ended long ago
    assert page.value(WIDTH) <= 0, page.value(TOO_WIDE)
    # No text is cut off by the picture's edge, and what is wider than the screen scrolls in its own box.
    out = page.value(
        "[...document.querySelectorAll('#picture svg text, .chart svg text')].filter(t => {"
        "const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();"
        "return a.width && (a.left < b.left - 2 || a.right > b.right + 2)}).map(t => t.textContent)"
    )
    assert out == []
    paper = page.value("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 26)" if dark else "rgb(251, 250, 248)")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("state", ["training", "delivering", "catching up", "silent"])
def test_the_table_of_the_fleet_is_whole(page, run, url, state, width):
    """With all the columns of real processes, one of which gives no sign of life."""
    page.look_as(width, 844, touch=width < 500)
    page.go(url)
    page.value(
        "(() => { const state = structuredClone(last), now = Date.now() / 1000; state.run.bucket = true;"
        f"for (const one of state.replicas) Object.assign(one, {{ state: '{state}', seen_unix: now - 17,"
        "  why: 'stage 0 gives no sign of life', inner_step: 14, loss: 5.038, rate: '1.7k tok/s',"
        "  restarts: 2, disk_free: '29.7 GB', last_error: 'its launcher ended without a word' });"
        "members(state); })()"
    )
    said = page.value("document.getElementById('members').innerText")
    assert "Rate in training" in said
    assert "its launcher ended without a word" in said
    box = "document.querySelector('#members .wide')"
    assert page.value(f"{box}.scrollWidth - {box}.clientWidth") <= 0


@pytest.mark.parametrize("width", [1280, 360])
def test_what_went_wrong_on_a_machine_stands_below_its_replica_as_text(page, run, url, width):
    page.look_as(width, 844, touch=width < 500)
    page.go(url)
    assert page.value("document.querySelectorAll('.trouble').length") == 0
    page.value(
        "(() => { const state = structuredClone(last); Object.assign(state.replicas[0], { restarts: 3,"
        " last_error: 'OSError: <b>no space</b> left on ' + 'device'.repeat(20), disk_free: '12.5 MB',"
        " last_error_unix: Date.now() / 1000 - 7, disk_short: true });"
        " Object.assign(state.replicas[1], { restarts: 1 }); draw(state) })()"
    )
    said = page.value("[...document.querySelectorAll('.trouble')].map(row => row.textContent)")
    assert len(said) == 2
    assert re.match(r"started again 3 times; last error \d+ s ago: OSError: <b>no space</b> left on", said[0])
    assert said[0].endswith("; 12.5 MB free on its disk: its next save needs more")
    assert said[1] == "started again once"
    below = page.value("document.querySelector('[data-trouble]').previousElementSibling.dataset.replica")
    assert below == run.recipe.fleet()[0].name
    assert page.value(WIDTH) <= 0, page.value(TOO_WIDE)
    assert page.complaints == []


def test_it_can_be_used_by_keyboard_alone(page, run, url):
    page.go(url)
    page.press("Tab")
    assert page.value("document.activeElement.className") == "skip"
    assert page.value("document.activeElement.getBoundingClientRect().top") >= 0
    for _ in range(80):  # words and links to sections come first
        page.press("Tab")
        if page.value("document.activeElement.getAttribute('role')") == "gridcell":
            break
    outline = page.value("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    assert page.value("document.querySelector('.why').textContent") == "Round 4, rack-0: contributed"
    for key in ("ArrowLeft", "ArrowDown", "ArrowDown"):
        page.press(key)
    assert page.value("document.querySelector('.why').textContent") == "Round 3, edge: contributed"
    assert page.value("document.querySelectorAll('[role=gridcell][tabindex=\"0\"]').length") == 1
    page.value("document.querySelector('.chart svg').focus()")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    reading = page.value("document.querySelector('.chart figcaption span').textContent")
    assert reading == "at 864 tokens"
    row = run.rows()[3]
    assert f"{row['loss_mixed']:.3f}" in page.value("document.querySelector('.chart .legend').textContent")


def test_every_picture_has_words_and_every_plot_a_table(page, run, url):
    page.go(url)
    nameless = page.value(
        "[...document.querySelectorAll('svg')].filter(s => s.getAttribute('aria-hidden') !== 'true'"
        " && !s.getAttribute('aria-label')).length"
    )
    assert nameless == 0
    assert page.value("[...document.querySelectorAll('.chart')].every(f => f.querySelector('table'))")
    assert page.value("[...document.querySelectorAll('main table')].every(t => t.querySelector('th'))")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_stands_out_from_what_is_behind_it(page, run, url, dark):
    page.look_as(1280, 900, dark=dark)
    page.go(url)
    page.value(EVERY_WORD)
    page.value("document.querySelector('main .word').click()")  # its answer has text, too
    assert page.value("document.querySelectorAll('.late, .refused, .missing, .events .wait').length") >= 4
    assert page.value(PALE) == []
    page.value("document.getElementById('heard').style.color = 'color-mix(in srgb, gray, transparent)'")
    assert len(page.value(PALE)) == 1  # it does find what is pale


def test_a_screen_reader_hears_changes_and_not_every_second(page, run, url):
    with watching(run.path) as (url, process):
        page.go(url)
        page.until("document.getElementById('announced').textContent === 'the run has ended'")
        page.value(EVERY_WORD)
        alert = "document.querySelector('[role=alert]')"
        page.value(
            f"window.before = {alert}; draw({{...last, now: 'else', problems: ['something is wrong']}})"
        )
        assert page.value("document.getElementById('now').textContent.startsWith('else')")
        assert page.value(f"before === {alert}")  # the same node: it is not said again
        aged = "[...document.querySelectorAll('[role=status], [aria-live], [role=alert]')].some"
        assert page.value(f"{aged}((node) => / ago/.test(node.textContent))") is False
        page.value("document.querySelector('.chart svg').focus()")
        page.press("ArrowLeft")
        aloud = page.value("document.querySelector('.chart [aria-live]').textContent")
        assert aloud.startswith("at ")
        assert f"mixed {run.rows()[-1]['loss_mixed']:.3f}" in aloud
        process.send_signal(signal.SIGINT)
        process.wait(60)
        page.until(
            "document.getElementById('announced').textContent === \"no answer from this page's server\""
        )


def test_a_hostile_run_is_shown_as_text_and_breaks_nothing(page, tmp_path):
    page.look_as(390, 844, touch=True)
    with watching(hostile(tmp_path / "run")) as (url, _):
        page.go(url)
        assert page.value("document.getElementById('status').textContent") == MARKUP
        assert page.value("document.querySelectorAll('img, iframe, script:not([src])').length") == 0
        assert page.value("document.body.innerText.includes('are not rows of a run')")
        assert "Loss" in headings(page)
        assert page.value("document.body.innerHTML.includes('NaN')") is False
        assert page.value(WIDTH) <= 0
        # Again with the next poll: nothing was left half drawn.
        page.until("document.getElementById('heard').textContent !== 'connecting'")
        assert {urlsplit(asked).netloc for asked in page.requests} == {urlsplit(url).netloc}
    assert page.complaints == []


def test_a_server_that_is_gone_is_noticed_and_the_page_stays(page, run, url):
    with watching(run.path) as (url, process):
        page.go(url)
        page.until("document.getElementById('heard').textContent.startsWith('the run has ended, last heard')")
        process.send_signal(signal.SIGINT)
        process.wait(60)
        gone = r"/^no answer from this page's server, last heard \d+ s ago$/"
        page.until(f"{gone}.test(document.getElementById('heard').textContent)")
        assert page.value("document.getElementById('heard').className") == "heard gone"
        assert page.value("document.querySelectorAll('#picture svg .stage').length") == 4
