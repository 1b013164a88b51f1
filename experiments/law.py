"""The paper's untested law: compression's bias falls with the share of full replicas, as (1 - alpha) of
eq. 5, and compounds with H. The fit, and what the page says of it. Standard library only.

What can be measured is the price in loss against the same fleet uncompressed, at the same H, seed by seed.
Its tests are corrected among themselves: clear answers to one question make no other one clear.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.estimates import Book, Compared, Estimate
from experiments.law_rows import FULL, HS, OF, law_name

VIEWS = ("full", "pipelined")
MARGIN = 0.5  # points of price: an intercept within this is none
COMMAND = "`isthmus reproduce law --dry-run`"
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
    powers = [power_of({float(h): slope_from_origin(by_h[h][seed]) for h in HS}) for seed in sorted(shared)]
    # A seed whose price is below zero has no power; to leave it out would favour growth.
    return None if None in powers else Estimate.of([power for power in powers if power is not None])


def _over(values: Sequence[float]) -> Estimate:
    found = Estimate.of(values)
    assert found is not None
    return found


def law_tests(book: Book) -> dict[Compared, Estimate]:
    """What is judged of the law, each by its distance from zero."""
    found: dict[Compared, Estimate] = {}
    for view in VIEWS:
        for h in HS:
            if fitted := fit(prices(book, h, view)):
                found[_falls(h, view)], found[_floor(h, view)] = fitted.free_slope, fitted.intercept
                found |= dict.fromkeys(_bounds(h) if view == "full" else (), fitted.intercept)
        if grows := growth(book, view):
            found[_grows(view)] = grows
    return found


def add_tests(book: Book) -> None:
    book.derived |= law_tests(book)
    book.apart |= law_tests(book).keys()


def _falls(h: int, view: str) -> Compared:
    return f"law-slope-h{h}", "", view


def _floor(h: int, view: str) -> Compared:
    return f"law-intercept-h{h}", "", view


def _bounds(h: int) -> list[Compared]:
    """That the full score's intercept lies within the margin has to be shown, too."""
    return [(f"law-intercept-h{h}", "", "full", than) for than in (-MARGIN, MARGIN)]


def _grows(view: str) -> Compared:
    return "law-growth", "", view


def law_table(book: Book) -> str:
    add_tests(book)
    head = ["H", "score", "slope through the origin", "intercept of a free line", "its slope",
            "power of (1 - alpha)", "proportional?", "seeds"]  # fmt: skip
    rows = [head, ["---:", "---", *["---:"] * 4, "---", "---:"]]
    for view in VIEWS:
        for h in HS:
            found = fit(prices(book, h, view))
            cells = _cells(book, h, view, found) if found else ["not run", *[""] * (len(head) - 3)]
            rows.append([str(h), view, *cells])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _cells(book: Book, h: int, view: str, found: Fit) -> list[str]:
    words = "one seed"
    if found.intercept.error is not None:
        words = "no" if book.clear(_floor(h, view)) else "not told from it"
    estimates = (found.slope, found.intercept, found.free_slope)
    power = found.power.text(2) if found.power else "a price is below zero"
    texts = [estimate.text(2, "+", " %") for estimate in estimates]
    return [*texts, power, words, str(found.slope.count)]


def law_answer(book: Book) -> str:
    """One paragraph: does the price fall as (1 - alpha), and does it grow with H?"""
    add_tests(book)
    parts = []
    for view in VIEWS:
        fits = {h: found for h in HS if (found := fit(prices(book, h, view)))}
        if not fits:
            return f"Not run yet: {COMMAND} lists what is missing."
        if all(found.slope.error is None for found in fits.values()):
            return f"One seed so far, so nothing is judged: {COMMAND} lists what is missing."
        falls = [h for h, found in fits.items() if found.free_slope.mean > 0 and book.clear(_falls(h, view))]
        level = [h for h in fits if book.clear(_floor(h, view))]
        parts.append(
            f"Scored {view}, the price falls clearly with the share of full replicas at {_listed(falls)}; "
            f"that it is not in proportion to what is compressed is clear at {_listed(level)} (by an "
            f"intercept apart from zero); {_growth_words(book, view)}."
        )
        if missing := [h for h in HS if h not in fits]:
            parts.append(f"Of {_listed(missing)} no seed has every share yet ({COMMAND}).")
    return " ".join(parts)


def law_claims(book: Book) -> tuple[tuple[str, str], tuple[str, str]]:
    """(answer, what was measured) of both parts of the law, by the full score: bias falls in proportion to
    what is compressed, and H lets it grow."""
    add_tests(book)
    fits = {h: found for h in HS if (found := fit(prices(book, h, "full")))}
    told = [found for found in fits.values() if found.slope.error is not None]
    if not told or len(fits) < len(HS):
        missing = ("cannot be told yet", f"`isthmus reproduce law --corpus {book.scale.corpus}`")
        return missing, missing
    falls = all(book.clear(_falls(h, "full")) and found.free_slope.mean > 0 for h, found in fits.items())
    level = any(book.clear(_floor(h, "full")) for h in fits)
    none = all(abs(found.intercept.mean) < MARGIN and all(map(book.clear, _bounds(h)))
               for h, found in fits.items())  # fmt: skip
    answer = "holds" if falls and none else "does not hold" if level else "cannot be told here"
    slopes = "; ".join(
        f"H = {h}: {found.free_slope.text(2, '+', ' %')} from none to all compressed, "
        f"{found.intercept.text(2, '+', ' %')} left at none"
        for h, found in fits.items()
    )
    return (answer, slopes), _growth_claim(book)


def _growth_claim(book: Book) -> tuple[str, str]:
    grows = growth(book, "full")
    if grows is None:
        return "cannot be told here", "a price is below zero"
    answer = "cannot be told here"
    if book.clear(_grows("full")):
        answer = "holds" if grows.mean > 0 else "does not hold"
    return answer, f"the price goes as H to the power {grows.text(2, '+')}"


def _growth_words(book: Book, view: str) -> str:
    grows = growth(book, view)
    if grows is None:
        return "how it goes with H cannot be said"
    word = "grows" if grows.mean > 0 else "falls"
    sure = "clearly" if book.clear(_grows(view)) else "not clearly"
    return f"with H it {word}, {sure}: as H to the power {grows.text(2, '+')}"


def _listed(hs: Sequence[int]) -> str:
    return "H = " + ", ".join(map(str, hs)) if hs else "no H"
