"""The paper's untested law: compression's bias falls with the share of full replicas, as (1 - alpha) of
eq. 5, and compounds with H. The fit, and what the page says of it. Standard library only.

What can be measured is the price in loss against the same fleet uncompressed, at the same H, seed by seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.estimates import Book, Estimate
from experiments.evidence import LEVEL, two_sided
from experiments.law_rows import FULL, HS, OF, law_name

VIEWS = ("full", "pipelined")
Line = tuple[float, float]  # intercept and slope
Prices = dict[int, dict[float, float]]  # by seed: 1 - alpha -> percent


@dataclass(frozen=True, slots=True)
class Fit:
    """Over seeds: percent at 1 - alpha = 1 of the line through the origin, the intercept of the free line,
    and the power of (1 - alpha), 1 where the law holds."""

    slope: Estimate
    intercept: Estimate
    free_slope: Estimate
    power: Estimate | None


def prices(book: Book, h: int, view: str) -> Prices:
    """Of the seeds that have every share at this H."""
    dense = book.losses(law_name(h, OF), view)
    found: Prices = {}
    for seed, base in dense.items():
        losses = {full: book.losses(law_name(h, full), view).get(seed) for full in FULL}
        if all(losses.values()):
            found[seed] = {1 - full / OF: 100 * (loss - base) / base for full, loss in losses.items() if loss}
    return found


def line_through(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Least squares."""
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)
    return y0 - slope * x0, slope


def slope_from_origin(by_x: Mapping[float, float]) -> float:
    return sum(x * y for x, y in by_x.items()) / sum(x * x for x in by_x)


def power_of(by_x: Mapping[float, float]) -> float | None:
    """p of y = a x^p; None where a price is not above zero."""
    if min(by_x.values()) <= 0:
        return None
    return line_through([math.log(x) for x in by_x], [math.log(y) for y in by_x.values()])[1]


def fit(found: Prices) -> Fit | None:
    if not found:
        return None
    lines = [line_through(list(p), list(p.values())) for p in found.values()]
    powers = [power_of(p) for p in found.values()]
    known = [p for p in powers if p is not None]
    return Fit(
        _over([slope_from_origin(p) for p in found.values()]),
        _over([intercept for intercept, _ in lines]),
        _over([slope for _, slope in lines]),
        _over(known) if len(known) == len(powers) else None,
    )


def growth(book: Book, view: str) -> Estimate | None:
    """q of price = a H^q at every share together, seed by seed: above 0 where bias compounds with H."""
    by_h = {h: prices(book, h, view) for h in HS}
    shared = set.intersection(*(set(found) for found in by_h.values()))
    found = []
    for seed in sorted(shared):
        slopes = {float(h): slope_from_origin(by_h[h][seed]) for h in HS}
        power = power_of(slopes)
        if power is not None:
            found.append(power)
    return Estimate.of(found)


def _over(values: Sequence[float]) -> Estimate:
    found = Estimate.of(values)
    assert found is not None
    return found


def _differs(found: Estimate, value: float) -> bool | None:
    """Clearly, over seeds; None of one seed."""
    if found.error is None:
        return None
    if not found.error:
        return found.mean != value
    return two_sided((found.mean - value) / found.error, found.count - 1) <= LEVEL


def law_table(book: Book) -> str:
    head = ["H", "score", "slope through the origin", "intercept of a free line", "its slope",
            "power of (1 - alpha)", "proportional?", "seeds"]  # fmt: skip
    rows = [head, ["---:", "---", *["---:"] * 4, "---", "---:"]]
    for view in VIEWS:
        for h in HS:
            found = fit(prices(book, h, view))
            cells = _cells(found) if found else ["not run", *[""] * (len(head) - 3)]
            rows.append([str(h), view, *cells])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _cells(found: Fit) -> list[str]:
    apart = _differs(found.intercept, 0.0)
    words = {None: "one seed", True: "no", False: "not told from it"}[apart]
    estimates = (found.slope, found.intercept, found.free_slope)
    power = found.power.text(2) if found.power else "a price is below zero"
    texts = [estimate.text(2, "+", " %") for estimate in estimates]
    return [*texts, power, words, str(found.slope.count)]


def law_answer(book: Book) -> str:
    """One paragraph: does the price fall as (1 - alpha), and does it grow with H?"""
    parts = []
    for view in VIEWS:
        fits = {h: fit(prices(book, h, view)) for h in HS}
        if not all(fits.values()):
            return "Not run yet: `isthmus reproduce law --dry-run` lists what is missing."
        there = {h: found for h, found in fits.items() if found}
        falls = [h for h, found in there.items() if found.free_slope.mean > 0 and _clear(found.free_slope)]
        level = [h for h, found in there.items() if _differs(found.intercept, 0.0)]
        grows = growth(book, view)
        parts.append(
            f"Scored {view}, the price falls clearly with the share of full replicas at {_listed(falls)}, "
            f"and not in proportion to what is compressed at {_listed(level)} (an intercept clearly "
            f"apart from zero); {_growth_words(grows)}."
        )
    return " ".join(parts)


def _clear(found: Estimate) -> bool:
    return bool(_differs(found, 0.0))


def _growth_words(grows: Estimate | None) -> str:
    if grows is None:
        return "how it goes with H cannot be said"
    word = "grows" if grows.mean > 0 else "falls"
    sure = "it clearly" if _clear(grows) else "it does so not clearly: it"
    return f"with H {sure} {word}, as H to the power {grows.text(2, '+')}"


def _listed(hs: Sequence[int]) -> str:
    return "H = " + ", ".join(map(str, hs)) if hs else "no H"
