"""Estimates behind claims that are about several rows at once, seed by seed. Standard library only."""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

from experiments.estimates import Book, Compared, Estimate
from experiments.law import MARGIN, line_through, power_of
from experiments.tables import rung

GROWS, PRICE, BY_H, ADAMW_COSTS = "advantage-by-ratio", "price-by-ratio", "price-by-h", "price-under-adamw"
Curve = Mapping[float, float]
Names = Callable[[str], str]  # a row's name at a scale


def trends(book: Book, names: Names = str) -> dict[Compared, Estimate]:
    """Those that have two seeds; each is judged by its distance from zero, or from what its key names."""
    found: dict[Compared, Estimate | None] = {}
    for view in ("mixed", "pipelined"):
        found[GROWS, "", view] = _slopes(_over_seeds(_advantages(book, names, view)))
    found[PRICE, "", "mixed"] = _slopes(_over_seeds(_prices(book, names, "mixed")))
    for view in ("full", "mixed"):
        powers = [power_of(curve) for curve in _over_seeds(_by_h(book, names, view))]
        known = [power for power in powers if power is not None]
        found[BY_H, "", view] = Estimate.of(known) if len(known) == len(powers) else None
    pairs = (("adamw-pp-8", "adamw"), ("pp-8", "dense"))
    ours, theirs = (_paid(book, names(row), names(base), "mixed") for row, base in pairs)
    shared = sorted(ours.keys() & theirs.keys())
    found[ADAMW_COSTS, "", "mixed", MARGIN] = Estimate.of([ours[seed] - theirs[seed] for seed in shared])
    return {key: one for key, one in found.items() if one is not None and one.error is not None}


def _paid(book: Book, row: str, base: str, view: str) -> dict[int, float]:
    """By seed: percent above the base."""
    if row not in book.rows or base not in book.rows:
        return {}
    ours, theirs = book.losses(row, view), book.losses(base, view)
    return {seed: 100 * (ours[seed] / theirs[seed] - 1) for seed in ours.keys() & theirs.keys()}


def rungs(book: Book, names: Names) -> dict[float, str]:
    """By halvings of k/d: the ratios at which the scale has both fleets."""
    there = [r for r in book.scale.ladder() if all(names(rung(f, r)) in book.rows for f in ("pp", "het"))]
    return {-math.log2(Fraction(ratio)): ratio for ratio in there}


def _prices(book: Book, names: Names, view: str) -> dict[float, dict[int, float]]:
    """By halvings of k/d: what compressing everything costs."""
    dense = names("dense")
    return {x: _paid(book, names(rung("pp", r)), dense, view) for x, r in rungs(book, names).items()}


def _advantages(book: Book, names: Names, view: str) -> dict[float, dict[int, float]]:
    """By halvings of k/d: how much less half compressed costs."""
    found = {}
    for x, ratio in rungs(book, names).items():
        fleets = (names(rung(fleet, ratio)) for fleet in ("pp", "het"))
        every, half = (_paid(book, row, names("dense"), view) for row in fleets)
        found[x] = {seed: every[seed] - half[seed] for seed in every.keys() & half.keys()}
    return found


def _by_h(book: Book, names: Names, view: str) -> dict[float, dict[int, float]]:
    own = book.scale.inner_steps
    found = {}
    for h in (*book.scale.by_h, own):
        row, base = ("het-8", "dense") if h == own else (f"het-8-h{h}", f"dense-h{h}")
        found[float(h)] = _paid(book, names(row), names(base), view)
    return found


def _over_seeds(by_x: Mapping[float, Mapping[int, float]]) -> list[Curve]:
    """The curve of each seed that has every point."""
    shared = set.intersection(*(set(one) for one in by_x.values())) if by_x else set()
    return [{x: by_x[x][seed] for x in sorted(by_x)} for seed in sorted(shared)]


def _slopes(curves: list[Curve]) -> Estimate | None:
    return Estimate.of([line_through(list(c), list(c.values()))[1] for c in curves if len(c) > 1])
