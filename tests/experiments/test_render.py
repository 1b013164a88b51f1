"""The page: the one in docs/ is what results/ gives, and its numbers are what the lines say."""

import math
import re
import statistics
from pathlib import Path

import pytest
from regime_lines import regime_seeds
from result_lines import line

from experiments.estimates import Book
from experiments.lines import append, digest, read
from experiments.render import render, runs_page, write_page
from experiments.tables import EIGHT, REGIME, SCALES, pick_scale
from experiments.tuning import regime_name
from isthmus.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCALE = pick_scale("12m")
TEMPLATE = ROOT / "docs" / "results.in.md"


def book_of(*lines):
    return Book(lines, SCALE)


def three_seeds(row, fulls, pipelined=None):
    pairs = zip(fulls, pipelined or fulls, strict=True)
    return [line(SCALE, row, seed, full, pipe) for seed, (full, pipe) in enumerate(pairs)]


def test_the_page_in_docs_is_what_results_give(tmp_path):
    (tmp_path / TEMPLATE.name).write_bytes(TEMPLATE.read_bytes())
    for path in write_page(ROOT / "results", tmp_path, SCALE):
        assert path.read_bytes() == (ROOT / "docs" / path.name).read_bytes(), path.name


def test_every_line_in_results_names_where_it_comes_from_and_none_is_a_trial():
    for scale in SCALES.values():  # read() refuses a line without recipe, seed, commit, device
        assert scale.record or not read(ROOT / "results", scale)


def test_no_measured_number_is_typed_into_the_prose():
    prose = re.sub(r"\{\{.*?\}\}|`[^`]*`|arXiv [\d.]+", "", TEMPLATE.read_text(encoding="utf-8"))
    assert re.findall(r"\d+\.\d+|\d+ ?%|\d+ (?:percent|nats|tokens|seconds)", prose) == []


def test_means_errors_and_gaps_are_over_seeds_and_gaps_are_paired():
    dense, het = [4.0, 4.2, 4.4], [4.1, 4.31, 4.5]
    book = book_of(*three_seeds("dense", dense), *three_seeds("het-8", het, [5.0, 5.1, 5.3]))
    gaps = [100 * (a - b) / b for a, b in zip(het, dense, strict=True)]
    expected = f"{statistics.mean(gaps):+.2f} ± {statistics.stdev(gaps) / math.sqrt(3):.2f} %"
    assert render("{{gap het-8 full}}", book).splitlines()[-1] == expected
    assert "4.303 ± 0.116" in render("{{loss het-8 full}}", book)
    assert "not run" in render("{{loss pp-8 full}}", book)
    assert "higher by" in render("{{verdict het-8 dense full}}", book)
    assert "one seed" in render("{{verdict het-8 dense full}}", book_of(*book.lines[:1], *book.lines[3:]))


def test_a_difference_within_the_noise_of_the_seeds_is_not_called_one():
    book = book_of(*three_seeds("dense", [4.0, 4.2, 4.4]), *three_seeds("pp-8", [4.1, 4.1, 4.5]))
    assert "not clearly different" in render("{{verdict pp-8 dense full}}", book)


def test_a_table_shows_the_papers_numbers_beside_all_three_losses():
    book = book_of(*three_seeds("dense", [4.0] * 3), *three_seeds("pp-384", [6.0] * 3, [5.0] * 3))
    text = render("{{table 2}}", book)
    [row] = [text for text in text.splitlines() if "PP-Compress, k/d = 1/384" in text and "Het" not in text]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["3.04", "+11.4 %"]
    assert [cell.split()[0] for cell in cells[3:9]] == [
        "6.000",
        "+50.00",
        "5.000",
        "+25.00",
        "5.500",
        "+37.50",
    ]
    assert cells[10] == "3"
    assert "1/768 would leave less than one of 384 dimensions" in text


def test_a_run_that_diverged_is_shown_as_one():
    lost = dict.fromkeys(("loss_full", "loss_pipelined", "loss_mixed"))
    book = book_of(*three_seeds("dense", [4.0] * 3), line(SCALE, "pp-8", 0, 1.0, failed="nan", **lost))
    assert "| diverged |" in render("{{table 1}}", book)


def test_lines_of_other_settings_are_counted_and_not_shown():
    stale = line(SCALE, "dense", 0, 1.0, digest="feedfeedfeed")
    book = book_of(line(SCALE, "dense", 0, 4.0), stale)
    assert "4.000" in render("{{results}}\n{{loss dense full}}", book)
    text = runs_page(book)
    assert "1 lines of other settings" in text
    assert "## `12m`" in text
    assert "`c0ffee` | a device" in text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("{{loss}}", "the page has {{loss}}, which is none of"),
        ("{{sum x}}", "the page has {{sum x}}, which is none of"),
        ("{{loss nothing full}}", 'there is no row "nothing"'),
        ("{{gap het-8 sideways}}", 'there is no loss "sideways"'),
        ("{{table 6}}", 'there is no table "6"'),
        ("{{regime verdict het-8 dense}}", "the page has {{regime verdict het-8 dense}}, which is none of"),
        ("{{regime gap het-96 full}}", 'the regime has no row "het-96"; it has dense, adamw, het-8,'),
        ("{{regime gap het-8 sideways}}", 'there is no loss "sideways"'),
    ],
)
def test_a_wrong_placeholder_is_named(wrong, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        render(wrong, with_regime(line(SCALE, "dense", 0, 4.0)))


def with_regime(*lines):
    book = book_of(line(SCALE, "dense", 0, 4.0))
    book.regime, book.eight = Book(lines, pick_scale(REGIME)), Book([], pick_scale(EIGHT))
    return book


def last_line(page, book):
    return render(page, book).splitlines()[-1]


def test_the_regimes_rows_are_compared_by_their_short_names():
    dense, half = regime_seeds("dense", 3.0, 3.1), regime_seeds("het-8", 3.3, 3.42)
    book = with_regime(*dense, *half, *regime_seeds("adamw", 2.9))
    gaps = [100 * (3.3 / 3.0 - 1), 100 * (3.42 / 3.1 - 1)]
    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(2)
    assert last_line("{{regime gap het-8 mixed}}", book) == f"{mean:+.2f} ± {error:.2f} %"
    assert last_line("{{regime gap dense full}}", book) == "+3.45 % (one seed)"  # of its own baseline
    assert last_line("{{regime gap dense full het-8}}", book).startswith("-9.22 ±")
    assert last_line("{{regime verdict dense adamw full}}", book) == "higher by 3.45 % (one seed)"
    assert last_line("{{regime verdict het-8 dense full}}", book).startswith("higher by 10.16 ±")


def test_every_verdict_of_the_regime_is_of_its_family_and_of_no_other():
    noise = (3.1, 3.12, 3.5)
    lines = [*regime_seeds("dense", 3.0, 3.2, 3.4), *regime_seeds("het-8", 3.1, 3.27, 3.5)]
    for row in ("pp-8", "het-24", "pp-24"):
        lines += regime_seeds(row, *noise)
    book = with_regime(*lines)
    alone = "{{regime verdict het-8 dense full}}"
    assert "before correction" not in render(alone, book)
    rest = [f"{{{{regime verdict {row} dense full}}}}" for row in ("pp-8", "het-24", "pp-24")]
    page = "\n".join([alone, *rest, "{{verdict pp-8 dense full}}"])
    assert "higher by 2.82 ± 0.34 % before correction only" in render(page, book)
    rows = ("het-8", "pp-8", "het-24", "pp-24")
    named = [(regime_name(row), regime_name("dense"), "full") for row in rows]
    assert book.regime.family == named
    assert book.family == [("pp-8", "dense", "full")]
    told = last_line(f"{page}\n{{{{regime judged}}}}", book)
    assert told.startswith("of 4 comparisons 1 are clear one by one, 0 among all, 0 by Holm's (by pooled")
    render(page + "{{papers}}", book)
    assert set(book.regime.family) > set(named)  # and the tests behind its answers to the claims
    assert len(book.regime.family) == len(set(book.regime.family))
    assert {row for row, *_ in book.regime.family if row not in book.regime.rows} == {
        row for row, *_ in book.regime.derived
    }


def test_what_the_regime_says_of_its_comparisons():
    half = [*regime_seeds("het-8", 3.0, 3.02, pipelined=3.2, mixed=3.1)]
    every = [*regime_seeds("pp-8", 3.5, 3.52, pipelined=3.3, mixed=3.3, commit="other")]
    book = with_regime(*half, *every, *regime_seeds("dense", 2.9, 2.95))
    assert last_line("{{regime scoring het-8 pp-8}}", book) == "50 %"  # 0.2 mixed, 0.1 through boundaries
    page = "{{regime verdict het-8 pp-8 full}} {{regime verdict het-8 dense full}}\n{{regime commits}}"
    assert last_line(page, book) == "1 of 2; not of `regime-het-8` and `regime-pp-8`"
    one = with_regime(half[0], every[0])
    assert last_line("{{regime scoring het-8 pp-8}}", one) == "50 % (one seed)"
    assert last_line(page, one) == "no pair has two seeds yet"


def test_percentages_of_each_size_stand_beside_that_size():
    lines = [line(pick_scale(EIGHT), "dense", 0, 3.0)]
    book = with_regime(*regime_seeds("dense", 3.0))
    book.eight = Book(lines, pick_scale(EIGHT))
    size = "Percentages here are of a small model and a short run ({}, {})."
    assert last_line("{{small}}", book) == size.format("11.9 M parameters", "24.6 M tokens")
    for part in ("regime", "eight"):
        assert last_line(f"{{{{{part} small}}}}", book) == size.format("20.5 M parameters", "102.2 M tokens")


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("verdict het-8 pp-8 mixed", "not compared yet"),
        ("gap recommended mixed", "not run"),
        ("gap dense full diloco", "not run"),
        ("scoring het-8 pp-8", "not run"),
        ("judged", "none of 0 comparisons can be judged yet, since none has two seeds"),
        ("commits", "no pair has two seeds yet"),
        ("repeats", "not run yet"),
    ],
)
def test_what_is_missing_of_the_regime_is_said_in_words(part, says):
    assert last_line(f"{{{{regime {part}}}}}", with_regime()) == says
    assert last_line(f"{{{{regime {part}}}}}", book_of(line(SCALE, "dense", 0, 4.0))) == "not run yet"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_page_is_drawn_whatever_rows_and_seeds_the_regime_has(count):
    rows = ["dense", "het-8", "pp-8", "recommended", "diloco", "adamw", "dense-again"]
    lines = []
    for n, row in enumerate(rows[: 2 + count]):
        lines += regime_seeds(row, *(3.0 + (n * 7 + seed * 3) % 11 / 100 for seed in range(1 + n % count)))
    lines += regime_seeds("het-8-frozen", 3.3, 3.4)[1:]  # not the seed that others have
    page = render(TEMPLATE.read_text(encoding="utf-8"), with_regime(*lines))
    assert "{{" not in page
    assert "(one seed)" in page


def test_a_distance_from_smaller_steps_says_how_many_seeds_it_has():
    scale = pick_scale(EIGHT)
    book = with_regime(*regime_seeds("dense", 3.3, 3.4))
    assert last_line("{{eight steps}}", book) == "not run"
    few = Book([], scale).recipe(regime_name("adamw"))
    for count, says in ((1, "+10.00 % (one seed)"), (2, "+11.67 ± 1.67 % (2 seeds)")):
        lines = [line(scale, regime_name("adamw"), seed, 3.0) for seed in range(count)]
        found = {"digest": digest(few), "corpus": "0123456789ab/report"}
        book.eight = Book([one | found for one in lines], scale)
        assert last_line("{{eight steps}}", book) == says


def test_every_percentage_can_have_the_size_of_its_run_beside_it():
    book, small = with_regime(*regime_seeds("dense", 3.3)), "11.9 M parameters, 24.6 M tokens"
    large = "20.5 M parameters, 102.2 M tokens"
    assert last_line("{{small}}", book).endswith(f"a small model and a short run ({small}).")
    assert last_line("{{regime small}}", book).endswith(f"a small model and a short run ({large}).")
    both = f"small models and short runs (`12m`: {small}; `24m-4`: {large})."
    assert last_line("{{sizes}}", book).endswith(both)
    book.regime = None
    assert last_line("{{sizes}}", book).endswith(f"(`12m`: {small}).")


def test_the_whole_page_and_its_plots_are_the_same_bytes_twice(tmp_path):
    for n, row in enumerate(("dense", "pp-8", "het-8", "het-8-h15", "dense-h15", "adamw")):
        for entry in three_seeds(row, [4.0 + n / 10, 4.1 + n / 9, 4.2 + n / 8]):
            append(tmp_path / "results" / "1.jsonl", entry)
    drawn = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / TEMPLATE.name).write_bytes(TEMPLATE.read_bytes())
        drawn.append({p.name: p.read_bytes() for p in write_page(tmp_path / "results", folder, SCALE)})
    assert drawn[0] == drawn[1]
    plots = {f"results-{name}.svg" for name in ("curves", "ladder", "h", "bytes")}
    assert set(drawn[0]) == {"results.md", "results-runs.md", *plots}
    assert b"{{" not in drawn[0]["results.md"]
