"""The page: the one in docs/ is what results/ gives, and its numbers are what the lines say."""

import math
import re
import statistics
from pathlib import Path

import pytest
from result_lines import line

from experiments.estimates import Book
from experiments.lines import append, read
from experiments.render import render, write_page
from experiments.tables import SCALES, pick_scale
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
    text = render("{{results}}\n{{loss dense full}}\n{{runs}}", book_of(line(SCALE, "dense", 0, 4.0), stale))
    assert "4.000" in text
    assert "1 lines of other settings" in text
    assert "`c0ffee` | a device" in text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("{{loss}}", "the page has {{loss}}, which is none of"),
        ("{{sum x}}", "the page has {{sum x}}, which is none of"),
        ("{{loss nothing full}}", 'there is no row "nothing"'),
        ("{{gap het-8 sideways}}", 'there is no loss "sideways"'),
        ("{{table 6}}", 'there is no table "6"'),
    ],
)
def test_a_wrong_placeholder_is_named(wrong, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        render(wrong, book_of(line(SCALE, "dense", 0, 4.0)))


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
    assert set(drawn[0]) == {"results.md", *plots}
    assert b"{{" not in drawn[0]["results.md"]
