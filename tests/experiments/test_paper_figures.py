"""Figures 2 and 3 of arXiv 2601.02360: the numbers of docs/plan.md, and files that can be looked at."""

from pathlib import Path

import pytest

from experiments import paper_figures as figures

ROOT = Path(__file__).parents[2]


def test_wall_clock_hours_are_methods():  # docs/plan.md, The paper's utilisation
    overlapped, serial = figures.wallclock_hours(), figures.wallclock_hours(overlap=False)
    slow = figures.wallclock_hours(flops_per_stage=60e12)
    hours = [overlapped[name]["same_tokens"] for name in ("1", "1/8", "1/24")]
    assert hours == pytest.approx([8.75, 1.10, 0.69], abs=0.006)
    assert overlapped["1/8"]["more_tokens"] == pytest.approx(1.32, abs=0.006)
    assert overlapped["1"]["more_tokens"] == overlapped["1"]["same_tokens"]
    assert [serial[name]["same_tokens"] for name in ("1", "1/8", "1/24")] == pytest.approx(
        [18.2, 2.88, 1.43], abs=0.05
    )
    assert [slow[name]["same_tokens"] for name in ("1", "1/8")] == pytest.approx([8.75, 4.56], abs=0.006)


def test_curves_rise_with_bandwidth_and_with_compression():
    rates, curves = figures.utilisation_curves(31)
    assert (rates[0], rates[-1]) == pytest.approx((10, 10_000))
    for values in curves.values():
        assert values == sorted(values)
    assert [curves[name][0] for name in curves] == sorted(curves[name][0] for name in curves)
    assert all(a <= b for a, b in zip(figures.pessimistic_curve(rates), curves["1/8"], strict=True))


@pytest.mark.parametrize("name", ["utilisation", "wallclock"])
def test_a_figure_is_drawn_with_its_assumptions_on_it(name, tmp_path):
    from matplotlib.figure import Figure

    figure = Figure()
    {"utilisation": figures._utilisation, "wallclock": figures._wallclock}[name](figure)
    words = " ".join(" ".join(text.get_text() for text in figure.texts).split())
    for assumed in ("Assumed:", "H100 at 40 %", "14 bits", "L = 2048", "verlap", "no latency", "16-bit"):
        assert assumed.lower() in words.lower(), assumed
    assert figures.draw(name, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_the_docs_have_both_figures_in_both_forms():
    for name in ("utilisation", "wallclock"):
        assert (ROOT / "docs" / f"plan-{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (ROOT / "docs" / f"plan-{name}.svg").read_text(encoding="utf-8").startswith("<?xml")
