"""Expected prices: measured ones are given back, nothing between overshoots, the words tell them apart."""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.lines import read
from experiments.prices import SCALE, merged
from experiments.prices import measured as from_lines
from isthmus.layout.wire import INT_BITS
from isthmus.planner import loss_price
from isthmus.planner.loss_price import FEW, FILE, Measured, measured, price_of, tables

RESULTS = Path(__file__).parents[2] / "results"
WIRES = ("bf16", *INT_BITS)


def known(wire):
    """k/d -> percent as the file has them, mildest first."""
    points = {Fraction(1 if k == "none" else k): p for k, p in tables()["adamw"].percents[wire].items()}
    return sorted(points.items(), reverse=True)


def test_the_file_has_every_wire_and_prices_are_against_open_bf16():
    assert set(tables()["adamw"].percents) == set(WIRES)
    assert price_of("adamw", "bf16", "none").percent == 0
    for by_wire in (table.percents for table in tables().values()):
        assert all(-5 < percent < 200 for points in by_wire.values() for percent in points.values())


def test_the_file_says_what_the_lines_in_results_say():
    lines = [line for line in read(RESULTS) if line["scale"] == SCALE]
    text = FILE.read_text(encoding="utf-8")
    assert from_lines(lines)["adamw"]["bf16", "1/8"]["seeds"] >= 3
    assert merged(text, lines) == text, "results/ has changed: run `python -m experiments prices`"
    assert {line["parameters"] for line in lines} == {tables()["adamw"].parameters}


def line(wire, compression, seed, loss, more="", optimizer="adamw"):
    recipe = (
        f'name = "x"\n[model]\npreset = "nano"\n[inner]\noptimizer = "{optimizer}"\n[[replicas]]\n'
        f'name = "e"\nkind = "pipelined"\nstages = 4\ncompression = "{compression}"\nwire = "{wire}"\n{more}'
    )
    return {"recipe": recipe, "seed": seed, "loss_pipelined": loss, "scale": SCALE, "digest": ""}


def test_a_price_compares_runs_that_differ_in_wire_and_k_alone_seed_by_seed():
    lines = [
        line("bf16", "none", 0, 4.0),
        line("bf16", "none", 1, 5.0),
        line("int4", "24/96", 1, 5.5),
        line("int4", "1/8", 0, 4.2),
        line("int4", "1/8", 1, 5.1),
        line("int4", "1/8", 2, 99.0),  # no open run of this seed
        line("int4", "1/16", 0, 99.0) | {"failed": "diverged"},
        line("int4", "1/32", 0, 9.0, "[finish]\nrounds = 5\n"),
        line("int8", "1/2", 0, 9.0, optimizer="muon"),  # nothing to compare it with
    ]
    assert from_lines(lines) == {
        "adamw": {
            ("bf16", "none"): {"percent": 0.0, "seeds": 2},
            ("int4", "1/4"): {"percent": 10.0, "seeds": 1},
            ("int4", "1/8"): {"percent": 3.33, "seeds": 2},
        }
    }
    head = '# words\nscale = "12m"\n\n'
    kept = head + '[adamw.int4]\n"1/8" = { percent = 7.0, seeds = 1 }\n"1/9" = { percent = 8.0, seeds = 1 }\n'
    text = merged(kept, lines)
    assert text.startswith(head + '[adamw.int4]\n"1/4" = { percent = 10.0')
    assert '"1/8" = { percent = 3.33, seeds = 2 }\n"1/9" = { percent = 8.0, seeds = 1 }' in text
    assert merged(text, lines) == text


def test_learned_anchors_are_compared_with_the_open_fleet_of_fixed_ones():
    """They keep fewer entries, so that both kinds of link carry no more bytes."""
    learned = '[subspace]\nanchor = "learned"\n[outer]\nkeep = 72\n'
    lines = [line("int4", "1/4", 0, 4.4, learned), line("bf16", "none", 0, 4.0), line("int4", "1/4", 0, 4.8)]
    found = from_lines(lines)
    assert found["adamw"]["int4", "1/4"]["percent"] == 20
    assert found["adamw-learned"] == {("int4", "1/4"): {"percent": 10.0, "seeds": 1}}


@pytest.mark.parametrize("wire", WIRES)
def test_what_was_measured_is_given_back_and_nothing_between_overshoots(wire):
    for k, percent in known(wire):
        price = price_of("adamw", wire, str(k))
        assert (price.percent, price.basis) == (percent, "measured")
    for (mild, low), (strong, high) in pairwise(known(wire)):
        between = [mild * Fraction(n, 20) + strong * Fraction(20 - n, 20) for n in range(19, 0, -1)]
        found = [price_of("adamw", wire, str(k)) for k in between]
        assert {price.basis for price in found} == {"between"}
        percents = [low, *(price.percent for price in found), high]
        assert percents == sorted(percents, reverse=high < low)


def test_halfway_is_halfway_in_log_bytes():
    two = Measured("adamw", 12, {"bf16": {"1/4": 2.0, "1/64": 10.0}})
    assert two.price("bf16", "1/16").percent == pytest.approx(6)


@pytest.mark.parametrize("wire", WIRES)
def test_outside_the_measured_points_a_price_is_a_bound_or_rises(wire):
    strongest, most = known(wire)[-1]
    beyond = [price_of("adamw", wire, str(strongest / n)) for n in (2, 3, 10, 1000)]
    assert {price.basis for price in beyond} == {"beyond"}
    percents = [most, *(price.percent for price in beyond)]
    assert percents == sorted(set(percents))
    mildest, least = known(wire)[0]
    if mildest < 1:
        price = price_of("adamw", wire, "1")
        assert (price.percent, price.basis) == (least, "milder")
        assert price.short.startswith("at most ")


def test_beyond_its_points_a_wire_of_few_bits_follows_bf16():
    two = Measured("adamw", 12, {"bf16": {"1/2": 1.0, "1/4": 2.0, "1/16": 10.0}, "int4": {"1/4": 5.0}})
    assert two.price("int4", "1/16").percent == 13
    assert two.price("int4", "1/8").percent == pytest.approx(9)
    assert two.price("bf16", "1/32").percent == pytest.approx(14)  # as from 1/4 to 1/16
    assert two.price("int4", "1/32").percent == pytest.approx(17)


def test_wires_of_higher_precision_cost_what_bf16_does():
    for compression in ("none", "1/8", "1/20"):
        prices = {price_of("adamw", wire, compression) for wire in ("bf16", "fp32", "fp64")}
        assert len(prices) == 1


def test_an_open_boundary_and_k_equal_to_d_may_have_prices_of_their_own():
    both = Measured("adamw", 12, {"int4": {"none": 9.0, "1": 3.0, "1/2": 4.0}})
    assert both.price("int4", "none").percent == 9
    assert both.price("int4", "1").percent == 3
    assert 3 < both.price("int4", "3/4").percent < 4  # the curve is that of U
    assert both.opens("int4")
    assert not Measured("adamw", 12, {"int4": {"1": 3.0}}).opens("int4")
    assert both.opens("bf16")


def test_an_optimiser_that_was_hardly_measured_borrows_from_adamw(monkeypatch):
    few = {"bf16": {"none": 0.0, "1/8": 1.0}, "int4": {"1/4": 1.0}}
    many = {"bf16": {f"1/{n}": float(n) for n in range(1, FEW + 1)}}
    adamw = tables()["adamw"]
    for percents, own in ((few, "adamw"), (many, "muon")):
        found = {"adamw": adamw, "muon": Measured("muon", 12, percents, adamw)}
        monkeypatch.setattr(loss_price, "tables", lambda found=found: found)
        assert measured("muon").name == own
        assert price_of("muon", "bf16", "1/4").optimizer == own
        assert price_of("muon", "int5", "1/4").optimizer == "adamw"  # not measured with Muon in either
        assert set(measured("muon").wires) == set(WIRES)


def test_learned_anchors_have_prices_of_their_own_and_rest_on_fixed_ones(monkeypatch):
    adamw = Measured("adamw", 12, {"bf16": {"none": 0.0, "1/4": 2.0, "1/16": 6.0}})
    learned = Measured("adamw-learned", 12, {"int4": {"1/4": 1.0}}, adamw)
    monkeypatch.setattr(loss_price, "tables", lambda: {"adamw": adamw, "adamw-learned": learned})
    price = price_of("adamw", "int4", "1/4", "learned")
    assert (price.percent, price.learned) == (1, True)
    assert price.text().endswith("with AdamW and learned anchors")
    assert price_of("adamw", "int4", "1/8", "learned").percent == pytest.approx(3)  # it follows bf16
    assert price_of("adamw", "bf16", "1/4", "learned") == price_of("adamw", "bf16", "1/4")
    assert measured("adamw", "learned").wires == ("bf16", "int4")


def test_the_words_say_what_was_measured_and_where():
    k, percent = known("bf16")[-1]
    price = price_of("adamw", "bf16", str(k))
    assert price.text() == f"expected price {percent:+.0f} % of loss, measured at 12 M parameters with AdamW"
    between = price_of("adamw", "bf16", "1/100")
    assert "between points measured at 12 M parameters" in between.text()
    assert price_of("adamw", "bf16", str(k / 7)).short.startswith("about +")
