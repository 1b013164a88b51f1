"""The notebook runs, docs/results.md has its tables, and cites no price that the notebook does not print."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.page import filled, run_notebook
from experiments.study import Price, compare, difference, holm, proportional, within

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    tables, printed = run_notebook(ROOT, folder)
    return tables, printed, folder


def test_the_page_has_the_tables_of_the_notebook(notebook):
    tables, _, _ = notebook
    text = PAGE.read_text(encoding="utf-8")
    assert set(tables) == {"costs", "claims"}
    assert filled(text, tables) == text, (
        "results/ or the notebook has changed: run `python -m experiments page`"
    )


def test_every_figure_that_the_page_shows_is_drawn(notebook):
    _, _, folder = notebook
    shown = re.findall(r"\((results-\w+\.svg)\)", PAGE.read_text(encoding="utf-8"))
    assert len(shown) == 2
    for name in shown:
        assert (folder / name).read_text(encoding="utf-8").startswith("<?xml")
        assert (PAGE.parent / name).is_file()


@pytest.mark.parametrize("name", ["docs/results.md", "README.md"])
def test_every_price_with_an_error_that_is_cited_is_printed_by_the_notebook(notebook, name):
    _, printed, _ = notebook
    text = (ROOT / name).read_text(encoding="utf-8")
    cited = re.findall(r"[+-]\d+\.\d+ ± \d+\.\d+ %|[+-]\d+\.\d+ % \(one seed\)|\d\.\d{3} ± \d\.\d{3}", text)
    for figure in cited:
        assert figure in printed, figure


def test_claims_are_at_most_fifteen_and_in_three_groups(notebook):
    tables, _, _ = notebook
    answers = [row.split(" | ")[0].strip("| ") for row in tables["claims"].splitlines()[2:]]
    assert len(answers) <= 15
    groups = [next(g for g in ("seen", "not seen", "not testable") if a.startswith(g)) for a in answers]
    assert list(dict.fromkeys(groups)) == ["seen", "not seen", "not testable"]
    assert groups == sorted(groups, key=["seen", "not seen", "not testable"].index)


def test_a_price_is_paired_by_seed():
    one, other = pd.Series({0: 4.4, 1: 5.5, 2: 9.0}), pd.Series({0: 4.0, 1: 5.0, 3: 1.0})
    assert compare(one, other).mean == pytest.approx(10)
    assert compare(one, other).seeds == 2
    assert str(compare(one[[0]], other)) == "+10.00 % (one seed)"
    assert difference((one, other), (other, other)).mean == pytest.approx(10)


def test_students_t_is_that_of_the_tables():
    """Three gaps of 1, 2 and 3: mean 2, error 1 / sqrt(3), t = 3.464 with two degrees of freedom."""
    base = pd.Series({0: 100.0, 1: 100.0, 2: 100.0})
    price = compare(pd.Series({0: 101.0, 1: 102.0, 2: 103.0}), base)
    assert price.error == pytest.approx(3**-0.5)
    assert price.p == pytest.approx(0.0742, abs=1e-4)


def test_holm_stops_at_the_first_that_is_not_clear():
    assert holm({"a": 0.001, "b": 0.02, "c": 0.03, "d": float("nan")}) == {
        "a": True, "b": True, "c": True, "d": False,
    }  # fmt: skip
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a": True, "b": False, "c": False}


def test_no_change_has_to_be_shown():
    assert within(Price(0.0, 0.01, 1.0, 5), 0.5) < 1e-4
    assert within(Price(0.0, 1.0, 1.0, 5), 0.5) > 0.3  # a large error shows nothing
    assert within(Price(0.9, 0.01, 1.0, 5), 0.5) > 0.99


def test_a_straight_price_fits_and_a_bent_one_does_not():
    shares, draw = [0.25, 0.5, 0.75, 1.0], np.random.default_rng(0)
    noise = 0.05 * draw.standard_normal((4, 5))
    straight = 6 * np.array(shares)[:, None] + noise
    assert proportional(shares, straight.tolist()).p > 0.05
    bent = straight + np.array([0.5, 0, 0, 0.5])[:, None]
    fit = proportional(shares, bent.tolist())
    assert fit.p < 1e-4
    assert 0.2 < fit.largest < 0.6
    together = bent + draw.standard_normal(5)  # one baseline for all prices of a seed
    assert proportional(shares, together.tolist()).p < 1e-4
