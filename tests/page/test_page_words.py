"""Contents, and the words that can be asked: by keyboard and touch, at a desk and on a phone."""

import pytest
from browser import CHROMIUM

from isthmus.page.report import write_report

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium here; apt-get install chromium"),
]
ODD = ["T_perp", "kappa", "error feedback", "pseudo-gradient", "anchor", "closer", "k/d"]
TOO_WIDE = (  # also in a box that would scroll by itself
    "[...document.querySelectorAll('main *, nav *')].filter(e => e.checkVisibility()"
    " && !e.closest('.unseen, .skip, thead, pre, .cells')).map(e => [e.getBoundingClientRect(), e])"
    ".filter(([box]) => box.width > 1 && box.right > innerWidth + 0.5)"
    ".map(([box, e]) => `${e.tagName}.${e.getAttribute('class')} ${box.right} ${e.textContent.slice(0, 40)}`)"
)


def shown(page):
    """What the box of answers says; None while it is closed."""
    return page.value("document.getElementById('answer').hidden ? null : answer_.textContent")


@pytest.fixture
def drawn(page, url):
    page.go(url)
    page.value("window.answer_ = document.getElementById('answer')")
    return page


def test_every_word_answers_once_in_its_section_and_stays_in_the_window(page, url):
    page.look_as(360, 740, touch=True)
    page.go(url)
    page.value("window.answer_ = document.getElementById('answer')")
    marked = page.value("[...document.querySelectorAll('main .word')].map(w => w.dataset.word)")
    assert {"boundary", "held-out loss", "dense methods", "outer round"} <= set(marked)
    doubled = page.value(
        "[...document.querySelectorAll('main section')].filter(s => { const words ="
        " [...s.querySelectorAll('.word')].map(w => w.dataset.word);"
        " return words.length !== new Set(words).size }).length"
    )
    assert doubled == 0
    bad = page.value(
        "[...document.querySelectorAll('main .word')].filter(word => {"
        " word.scrollIntoView({block: 'center'}); word.click(); const box = answer_.getBoundingClientRect();"
        " return answer_.hidden || !answer_.textContent.startsWith(`${word.dataset.word} `)"
        " || box.left < 0 || box.right > innerWidth || box.bottom > innerHeight || box.height < 20"
        " || word.getAttribute('aria-expanded') !== 'true' }).map(word => word.textContent)"
    )
    assert bad == []
    assert page.value("document.querySelectorAll('[aria-expanded=true]').length") == 1
    page.value("dispatchEvent(new Event('resize'))")  # as when a phone's address bar comes or goes
    assert shown(page) is not None
    page.value("document.querySelector('h1').click()")
    assert shown(page) is None


def test_a_word_is_asked_and_dismissed_by_keyboard_and_survives_a_new_state(drawn, page):
    word = "document.querySelector('#plan [data-word=\"virtual clock\"]')"
    page.value(f"{word}.focus()")
    page.press("Enter")
    assert shown(page).startswith("virtual clock A formula")
    assert page.value("answer_.getAttribute('role')") == "status"  # so that it is read out
    page.value(f"window.before = {word}")
    page.value("(() => { const state = structuredClone(last); state.plan.rounds = 99; draw(state) })()")
    assert page.value(f"before.isConnected === false && document.activeElement === {word}")
    assert shown(page).startswith("virtual clock")
    assert page.value(f"{word}.getAttribute('aria-expanded')") == "true"
    page.press("Escape")
    assert shown(page) is None
    assert page.value(f"document.activeElement === {word}")


def test_all_words_are_explained_at_the_end_of_page_and_report(drawn, page, run):
    for place in (None, write_report(run.path).as_uri()):
        if place:
            page.go(place)
        found = page.value("[...document.querySelectorAll('.glossary dt')].map(t => t.textContent)")
        assert set(ODD) <= set(found)
        assert found == sorted(found, key=str.lower) == list(dict.fromkeys(found))
        texts = page.value("[...document.querySelectorAll('.glossary dd')].map(t => t.textContent)")
        assert len(texts) == len(found)
        assert all(20 < len(text) < 240 for text in texts)


def test_a_text_from_outside_stays_text_when_words_are_marked_in_it(drawn, page):
    page.value(
        "(() => { const state = structuredClone(last); state.now ="
        " 'the anchor <img src=x onerror=alert(1)> of closer-1 and closer'; draw(state) })()"
    )
    assert page.value("document.getElementById('now').querySelectorAll('img').length") == 0
    assert "<img src=x onerror=alert(1)> of closer-1" in page.value(
        "document.getElementById('now').innerText"
    )
    marked = page.value("[...document.querySelectorAll('#now .word')].map(w => w.textContent)")
    assert marked == ["anchor", "closer"]
    assert page.complaints == []


def test_contents_stand_at_the_side_of_a_desk_and_lead_to_every_section(drawn, page):
    titles = page.value(
        "[...document.querySelectorAll('main h2')].filter(h => h.offsetParent).map(h => h.textContent)"
    )
    links = "[...document.querySelectorAll('#contents-list a')]"
    assert page.value(f"{links}.map(a => a.textContent)") == titles
    box = page.value(
        "(b => [b.left, b.right, b.top])(document.getElementById('contents').getBoundingClientRect())"
    )
    assert (
        0 <= box[0] < box[1] <= page.value("document.querySelector('main').getBoundingClientRect().left") + 1
    )
    page.value(f"{links}.find(a => a.textContent === 'Plan against actual').click()")
    page.until("Math.abs(document.getElementById('plan-title').getBoundingClientRect().top) < 200")
    page.until(
        "document.querySelector('#contents-list [aria-current]')?.textContent === 'Plan against actual'"
    )
    top = page.value("document.getElementById('contents').getBoundingClientRect().top")
    assert 0 <= top < 60  # still there


@pytest.mark.parametrize("width", [360, 320])
def test_a_phone_shows_the_numbers_of_plan_against_actual(page, run, width):
    page.look_as(width, 740, touch=True)
    page.go(write_report(run.path).as_uri())
    assert page.value(TOO_WIDE) == []
    rows = page.value(
        "[...document.querySelectorAll('#against tbody tr:not(.group)')].map(row =>"
        " [...row.querySelectorAll('td')].map(cell => { const box = cell.getBoundingClientRect();"
        " return [cell.dataset.head, cell.textContent,"
        " box.width > 0 && box.left >= 0 && box.right <= innerWidth] }))"
    )
    lines = page.value("(drawn.get(against) && JSON.parse(drawn.get(against))[0]).lines")
    assert len(rows) == len(lines) > 3
    for row in rows:
        assert [head for head, _, _ in row] == ["Predicted", "Measured", "Ratio"]
        assert all(inside for _, _, inside in row)
    figures = {(row[0][1], row[1][1]) for row in rows}
    source = lambda line: f" {line['source']}" if line["source"] else ""  # noqa: E731
    assert figures == {(line["predicted"], line["measured"] + source(line)) for line in lines}
