"""Estimates from lines: the runs of a row, their means and standard errors, and how two rows compare.

Standard library only.
"""

import copy
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.catalog import rows_of
from experiments.evidence import LEVEL, Spread, benjamini_hochberg, holm, two_sided
from experiments.lines import Line, digest, tuned_lrs
from experiments.same_code import Curves
from experiments.tables import VIEWS, Row, Scale, recipe_of, rung
from experiments.tuning import chosen
from isthmus.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds with its standard error, which one seed does not have."""

    mean: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate | None":
        if not values:
            return None
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.mean(values), error, len(values))

    def text(self, digits: int, sign: str = "", unit: str = "") -> str:
        error = "" if self.error is None else f" ± {self.error:.{digits}f}"
        return f"{self.mean:{sign}.{digits}f}{error}{unit}"


# A row, another one, and the loss; also the distance in percent that is asked for, where it is not zero. Or
# the name of an estimate in `Book.derived`, "", and the loss.
Compared = tuple[str, str, str] | tuple[str, str, str, float]


class Book:
    """The lines that the tables of a scale ask for now: those of the current recipes, on one corpus."""

    def __init__(self, lines: Sequence[Line], scale: Scale) -> None:
        self.aliases: dict[str, str] = {}
        # Of other scales, for the page's section on them: where the base works; with eight replicas.
        self.regime: Book | None = None
        self.eight: Book | None = None
        self.family: list[Compared] = []  # what is judged together: all verdicts of a page
        self.derived: dict[Compared, Estimate] = {}  # judged with them: trends, differences of prices
        self.apart: set[Compared] = set()  # judged among themselves: the law's
        self.curves: Curves = {}  # of rows that were run by several commits
        self.twins: dict[str, Line] = {}  # rows by real processes too
        self.pooled: Spread | None = None  # p-values go by this spread and each comparison's own
        self.scale, self.rows, self.lrs = scale, rows_of(scale), tuned_lrs(scale, lines)
        self.chosen = chosen(scale, lines)
        wanted = {name: digest(self.recipe(name)) for name in self.rows}
        known = set(wanted.values())
        asked = [line for line in lines if line["digest"] in known]
        counts = Counter(line["corpus"].partition("/")[0] for line in asked)
        self.corpus = max(sorted(counts), key=counts.__getitem__) if counts else None
        self.lines = [line for line in asked if line["corpus"].partition("/")[0] == self.corpus]
        self.all_lines = lines  # also of settings that no row asks for any more
        self.unused = len(lines) - len(self.lines)
        by_digest: dict[tuple[str, str], dict[int, Line]] = {}
        for line in sorted(self.lines, key=lambda line: line["seed"]):
            key = line["digest"], line["corpus"].partition("/")[2]
            by_digest.setdefault(key, {})[line["seed"]] = line
        self.runs = {name: by_digest.get((wanted[name], row.text), {}) for name, row in self.rows.items()}
        for name, row in self.rows.items():
            if (
                not row.tuned and not row.follows
            ):  # candidates are compared on the seeds that all of them have
                self.runs[name] = {seed: run for seed, run in self.runs[name].items() if seed in row.seeds}
        for fleet in ("pp", "het"):  # the steepest rung of the ladder, for sentences about it
            self.aliases[f"{fleet}-last"] = rung(fleet, scale.ladder()[-1])

    def recipe(self, name: str):
        return recipe_of(self.rows[name], self.scale, 0, "corpus/", self.lrs, self.chosen)

    def row(self, name: str) -> Row:
        if name not in self.rows:
            raise ConfigError(f'there is no row "{name}"; there are {", ".join(self.rows)}')
        return self.rows[name]

    def finished(self, name: str) -> list[Line]:
        self.row(name)
        return [line for line in self.runs[name].values() if not line.get("failed")]

    def failed(self, name: str) -> int:
        return len(self.runs[name]) - len(self.finished(name))

    def losses(self, name: str, view: str) -> dict[int, float]:
        if view not in VIEWS:
            raise ConfigError(f'there is no loss "{view}"; there are {", ".join(VIEWS)}')
        return {line["seed"]: line[f"loss_{view}"] for line in self.finished(name)}

    def loss(self, name: str, view: str) -> Estimate | None:
        return Estimate.of(list(self.losses(name, view).values()))

    def gap(self, name: str, view: str, against: str | None = None) -> Estimate | None:
        """How far this row's loss is above the other's, in percent of it. Runs of one seed are paired: they
        share data and first weights, which removes most of a seed's noise."""
        other = against or self.row(name).against
        if not other or other == name:
            return None
        ours, theirs = self.losses(name, view), self.losses(other, view)
        shared = sorted(ours.keys() & theirs.keys())
        return Estimate.of([100 * (ours[seed] - theirs[seed]) / theirs[seed] for seed in shared])

    def curve(self, name: str, view: str) -> list[tuple[float, float]]:
        """(tokens, mean loss over seeds) at every round that all its runs were scored at."""
        at = 1 + VIEWS.index(view)
        points: dict[float, list[float]] = {}
        lines = self.finished(name)
        for line in lines:
            for point in line["curve"]:
                points.setdefault(line["tokens"] * point[0] / line["curve"][-1][0], []).append(point[at])
        return [(x, statistics.mean(ys)) for x, ys in sorted(points.items()) if len(ys) == len(lines)]

    def same_score(self, compared: Compared) -> Compared:
        """Where two scores of both rows are one number, it is one comparison: a fleet that compresses
        everything is scored through its boundaries, mixed or not; an open one has a single loss."""
        name, other, view, *than = compared
        if compared in self.derived or name not in self.rows or other not in self.rows:
            return compared
        for first in VIEWS[: VIEWS.index(view)] if view in VIEWS else ():
            if all(self.losses(row, first) == self.losses(row, view) for row in (name, other)):
                return (name, other, first, than[0]) if than else (name, other, first)
        return compared

    def measured(self, compared: Compared) -> Estimate | None:
        name, other, view, *_ = compared
        return self.derived.get(compared) or self.gap(name, view, other)

    def chance(self, compared: Compared) -> float | None:
        """That a difference as clear as this one comes about where there is none, or just what is asked."""
        gap, than = self.measured(compared), compared[3] if len(compared) == 4 else 0.0
        if gap is None or gap.error is None:
            return None
        error, freedom = gap.error, gap.count - 1
        if self.pooled and compared not in self.derived:
            variance, freedom = self.pooled.with_own(gap.count * error**2, freedom)
            error = math.sqrt(variance / gap.count)
        return two_sided((gap.mean - than) / error if error else math.inf, freedom)

    def spread(self) -> Spread:
        """Of the difference of two rows between seeds, in percent, from all pairs of the family; estimates in
        other units are left out. The runs know it by what rows and seeds together leave free."""
        asked = [one for one in map(self.same_score, self.family) if one not in self.derived]
        gaps = {
            one[:3]: gap
            for one in asked
            if (gap := self.gap(one[0], one[2], one[1])) and gap.error is not None
        }
        rows = {row for one in gaps for row in one[:2]}
        seeds = [seed for row in rows for seed in self.losses(row, "full")]
        free = len(seeds) - len(rows) - len(set(seeds)) + 1
        found = [(gap.count * (gap.error or 0.0) ** 2, gap.count - 1) for gap in gaps.values()]
        return Spread.of([variance for variance, _ in found], [freedom for _, freedom in found], free)

    def with_pooled_errors(self) -> "Book":
        """The same book, judged by errors that go by all comparisons of the family as far as these agree."""
        found = copy.copy(self)
        found.pooled = self.spread()
        return found

    def clear(self, compared: Compared) -> bool:
        """Among all that the page judges."""
        return self.chance(compared) is not None and self.corrected(compared)[0] <= LEVEL

    def corrected(self, compared: Compared) -> tuple[float, float]:
        """(Benjamini and Hochberg's, Holm's) adjusted p-value of one comparison among its family."""
        compared = self.same_score(compared)
        known = self.apart if compared in self.apart else self.family
        family = list(dict.fromkeys(map(self.same_score, [*known, compared])))
        chances = {one: p for one in family if (p := self.chance(one)) is not None}
        at = list(chances).index(compared)
        return benjamini_hochberg(list(chances.values()))[at], holm(list(chances.values()))[at]

    def verdict(self, name: str, other: str, view: str) -> str:
        """How one row's loss compares with another's, in words that claim only what the seeds show, among
        all that the page compares; a dagger where Holm's procedure agrees, a double one where it is clear by
        pooled errors only."""
        gap = self.gap(name, view, other)
        if gap is None:
            return "not compared yet"
        shown = Estimate(abs(gap.mean), gap.error, gap.count).text(2, unit=" %")
        word = "higher" if gap.mean > 0 else "lower"
        if gap.error is None:
            return f"{word} by {shown} (one seed)"
        clear, surely = self.corrected((name, other, view))
        pooled = self.with_pooled_errors().clear((name, other, view))
        if clear <= LEVEL:
            return f"{word} by {shown}" + " †" * (surely <= LEVEL) + " (not by pooled errors)" * (not pooled)
        mark = " ‡" * pooled
        if (self.chance((name, other, view)) or 0) <= LEVEL:
            return f"{word} by {shown} before correction only{mark}"
        return f"not clearly different ({gap.text(2, '+', ' %')}{mark})"
