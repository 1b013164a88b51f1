"""Every claim of both papers, each with its answer: holds, does not hold, cannot be told here, or not yet.

An answer is computed when the page is drawn, from the rows of the small scale and again from those of the
regime in which the base works; all its tests are among those that the page corrects for. Standard library
only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.catalog import home_of
from experiments.claim_trends import ADAMW_COSTS, BY_H, GROWS, PRICE, trends
from experiments.estimates import Book, Compared
from experiments.law import law_claims
from experiments.tables import REGIME, rung
from experiments.tuning import regime_name

HOLDS, FAILS, OPEN, YET = "holds", "does not hold", "cannot be told here", "cannot be told yet"
MARGIN = 0.5  # percent of loss: closer than this is "no change"; the paper prints losses to a third of one
LOWER, HIGHER = -1, 1
Names = Callable[[str], str]  # a row's name at a scale
Said = tuple[str, str]  # the answer, and what was measured


class Judge(ABC):
    """How one claim is answered from the rows of a scale."""

    def tests(self, book: Book, names: Names) -> list[Compared]:
        return []

    @abstractmethod
    def __call__(self, book: Book, names: Names) -> Said: ...


@dataclass(frozen=True)
class Pair(Judge):
    """Of two rows."""

    row: str
    other: str

    def tests(self, book: Book, names: Names) -> list[Compared]:
        """None where the scale has not both rows; one of two scores that are one number by definition."""
        row, other = names(self.row), names(self.other)
        if row not in book.rows or other not in book.rows:
            return []
        return list(dict.fromkeys(book.same_score((row, other, *rest)) for rest in self._asked()))

    @abstractmethod
    def _asked(self) -> list[tuple[str] | tuple[str, float]]:
        """By which scores; and than how many percent, if not than none."""


@dataclass(frozen=True)
class Order(Pair):
    """One row lies below (or above) another: by the mixed score, which is the paper's, and, where that
    differs, with both scored through their boundaries."""

    sign: int
    view: str = "mixed"

    def _asked(self) -> list[tuple[str] | tuple[str, float]]:
        return [(self.view,), ("pipelined",)] if self.view == "mixed" else [(self.view,)]

    def __call__(self, book: Book, names: Names) -> Said:
        tests = self.tests(book, names)
        if early := _missing(book, tests):
            return early
        said = {one[2]: (self._answer(book, one), book.verdict(one[0], one[1], one[2])) for one in tests}
        evidence = "; ".join(f"{view}: {words}" for view, (_, words) in said.items())
        answers = list(dict.fromkeys(answer for answer, _ in said.values()))
        if len(answers) == 1:
            return answers[0], evidence
        own = said.get("mixed", next(iter(said.values())))[0]
        return f"{own} by the paper's score; through the same boundaries it {answers[1]}", evidence

    def _answer(self, book: Book, one: Compared) -> str:
        gap = book.measured(one)
        if gap is None or not book.clear(one):
            return OPEN
        return HOLDS if gap.mean * self.sign > 0 else FAILS


@dataclass(frozen=True)
class AtMost(Pair):
    """A row is at most so many percent above another."""

    percent: float
    view: str = "mixed"

    def _asked(self) -> list[tuple[str] | tuple[str, float]]:
        return [(self.view, self.percent)]

    def __call__(self, book: Book, names: Names) -> Said:
        tests = self.tests(book, names)
        if early := _missing(book, tests):
            return early
        gap = book.measured(tests[0])
        assert gap is not None
        evidence = f"{gap.text(2, '+', ' %')}, asked: at most {self.percent:+g} %"
        if not book.clear(tests[0]):
            return OPEN, evidence
        return (HOLDS if gap.mean < self.percent else FAILS), evidence


@dataclass(frozen=True)
class Same(Pair):
    """Two rows are the same to within MARGIN: shown by being clearly below it and above its negative, not by
    a difference that is not clear."""

    view: str = "pipelined"

    def _asked(self) -> list[tuple[str] | tuple[str, float]]:
        return [(self.view, -MARGIN), (self.view, MARGIN)]

    def __call__(self, book: Book, names: Names) -> Said:
        tests = self.tests(book, names)
        if early := _missing(book, tests):
            return early
        gap = book.measured(tests[0])
        assert gap is not None
        evidence = f"{gap.text(2, '+', ' %')}, asked: within {MARGIN:g} %"
        clear = all(book.clear(one) for one in tests)
        return (HOLDS if abs(gap.mean) < MARGIN else FAILS) if clear else OPEN, evidence


@dataclass(frozen=True)
class Trend(Judge):
    """The sign of an estimate that is made of several rows (claim_trends.py)."""

    name: str
    views: tuple[str, ...]
    sign: int
    unit: str
    rows: tuple[str, ...]

    def tests(self, book: Book, names: Names) -> list[Compared]:
        return [one for view in self.views if (one := (self.name, "", view)) in book.derived]

    def __call__(self, book: Book, names: Names) -> Said:
        tests = self.tests(book, names)
        if not tests:
            return _yet(book, names, self.rows)
        parts, answers = [], []
        for one in tests:
            found, clear = book.derived[one], book.clear(one)
            answers.append((HOLDS if found.mean * self.sign > 0 else FAILS) if clear else OPEN)
            parts.append(f"{one[2]}: {found.text(2, '+')} {self.unit}")
        answer = answers[0]
        if len(set(answers)) > 1:
            answer = "; ".join(f"{view}: {each}" for view, each in zip(self.views, answers, strict=True))
        return answer, "; ".join(parts)


@dataclass(frozen=True)
class All(Judge):
    """Several claims in one, each with its answer where they differ."""

    parts: tuple[tuple[str, Judge], ...]
    shown: str = ""  # where the page has what was measured

    def tests(self, book: Book, names: Names) -> list[Compared]:
        return [one for _, part in self.parts for one in part.tests(book, names)]

    def __call__(self, book: Book, names: Names) -> Said:
        said = {words: part(book, names) for words, part in self.parts}
        by_answer: dict[str, list[str]] = {}
        for words, (answer, evidence) in said.items():
            if evidence:  # or else this scale has no such row
                by_answer.setdefault(answer, []).append(words)
        if not by_answer:
            return OPEN, ""
        evidence = "; ".join(f"{words}: {one[1]}" for words, one in said.items() if one[1])
        if len(by_answer) == 1:
            return next(iter(by_answer)), self.shown or evidence
        parts = [f"{', '.join(words)}: {answer}" for answer, words in by_answer.items()]
        return "; ".join(parts), self.shown or evidence


@dataclass(frozen=True)
class Fixed(Judge):
    """What no row can answer."""

    answer: str
    evidence: str

    def __call__(self, book: Book, names: Names) -> Said:
        return self.answer, self.evidence


@dataclass(frozen=True)
class Law(Judge):
    part: int

    def tests(self, book: Book, names: Names) -> list[Compared]:
        return [one for one in book.apart if one[2] == "full"]

    def __call__(self, book: Book, names: Names) -> Said:
        if names("dense") != "dense":
            return OPEN, ""  # its rows are of the small scale
        return law_claims(book)[self.part]


def _missing(book: Book, tests: Sequence[Compared]) -> Said | None:
    """What is said where rows or seeds are missing."""
    if not tests:
        return OPEN, ""
    rows = [row for one in tests for row in one[:2]]
    if any(not book.finished(row) for row in rows):
        return YET, _command(book, [row for row in rows if not book.finished(row)])
    if any(book.chance(one) is None for one in tests):
        gap = book.measured(tests[0])
        found = f"{gap.text(2, '+', ' %')}, one seed; " if gap else ""
        return YET, found + _command(book, [row for row in rows if len(book.finished(row)) < 2])
    return None


def _yet(book: Book, names: Names, rows: Sequence[str]) -> Said:
    known = [names(row) for row in rows if names(row) in book.rows]
    lacking = [row for row in known if len(book.finished(row)) < 2]
    return (YET, _command(book, lacking)) if known and lacking else (OPEN, "")


def _command(book: Book, rows: Sequence[str]) -> str:
    row = rows[0]
    scale = f" --scale {book.scale.name}" if book.scale.name == REGIME else ""
    return f"`isthmus reproduce {home_of(row, book.scale)}{scale} --only {row}`"


@dataclass(frozen=True)
class Claim:
    words: str
    source: str
    judge: Judge


def claims_of(book: Book) -> tuple[Claim, ...]:
    """Of arXiv 2601.02360, then of arXiv 2508.15706, of which the abstract was at hand."""
    ladder = book.scale.ladder()
    steepest = ladder[-1]
    half = tuple((ratio, Order(rung("het", ratio), rung("pp", ratio), LOWER)) for ratio in ladder)
    both = ("pp", "all compressed"), ("het", "half compressed")
    return (
        Claim("Compressing all boundaries to 1/8 costs little (+4.0 %; asked: at most twice that)", "Table 1",
              AtMost("pp-8", "dense", 8.0)),
        Claim("The same at 1B (+5.9 %)", "Table 7", Fixed(OPEN, "no machine for it")),
        Claim("The same on C4, and half below all there", "Table 8", Fixed(OPEN, "one text only")),
        Claim("At 178M half compressed costs +1.6 % and is below all", "Table 1",
              Fixed(OPEN, "one seed, no row with all compressed: see \"At the paper's size\"")),
        Claim("Half compressed is below all compressed at 1/8", "Tables 1, 2", half[0][1]),
        Claim("It is at every ratio", "Table 2", All(half, "the table of scores below")),
        Claim("Its advantage grows as k/d falls", "Table 2",
              Trend(GROWS, ("mixed", "pipelined"), HIGHER, "points of price with each halving of k/d",
                    ("pp-192", "het-192"))),
        Claim("At the steepest ratio half compressed costs less than ten percent", "sec. 3.1",
              AtMost(rung("het", steepest), "dense", 10.0)),
        Claim("Settings tuned for compression lower the loss of compressed fleets", "Table 1, *",
              All(tuple((words, Order(f"{f}-8-star", f"{f}-8", LOWER)) for f, words in both))),
        Claim("With them half is still below all", "Table 1, *", Order("het-8-star", "pp-8-star", LOWER)),
        Claim("With a fifth more tokens half compressed is nearly level (+0.7 %; asked: at most twice that)",
              "Table 3", AtMost("het-8-more", "dense", 1.4)),
        Claim("SparseLoCo is level with per-step AdamW (0.7 % below; asked: at most 1 % above)",
              "Tables 1, 4", AtMost("dense", "adamw", 1.0, "full")),
        Claim("Under AdamW compression costs about as much (asked: not clearly more)", "Table 4",
              Trend(ADAMW_COSTS, ("mixed",), LOWER, "points more than under SparseLoCo",
                    ("adamw-pp-8", "pp-8"))),
        Claim("Under AdamW half compressed is above all compressed", "Table 4",
              Order("adamw-het-8", "adamw-pp-8", HIGHER)),
        Claim("Without adapting T_perp the loss is higher", "Table 5a",
              Order("het-8-frozen", "het-8", HIGHER)),
        Claim("Projecting weights raises the loss", "Table 5b",
              All(tuple((words, Order(f"{f}-8-projected", f"{f}-8", HIGHER)) for f, words in both))),
        Claim("Grassmann steps change nothing: a random U suffices", "Table 5c",
              All(tuple((words, Same(f"{f}-8-grassmann", f"{f}-8")) for f, words in both))),
        Claim("The modified AdamW changes nothing", "Table 5d",
              All(tuple((words, Same(f"{f}-8-modified", f"{f}-8")) for f, words in both))),
        Claim("Bias falls as (1 - alpha) with the share of full replicas", "eq. 5", Law(0)),
        Claim("Bias grows as k/d falls: so does the price", "sec. 2.4",
              Trend(PRICE, ("mixed",), HIGHER, "points of price with each halving of k/d",
                    ("pp-192", "dense"))),
        Claim("H lets bias compound", "sec. 2.4", Law(1)),
        Claim("so that the price of half compressed grows with H, at equal tokens", "sec. 2.4",
               Trend(BY_H, ("full", "mixed"), HIGHER, "as the power of H",
                                tuple(f"het-8-h{h}" for h in book.scale.by_h))),
        Claim("After a round TE is the same everywhere, and T_S in the subspace", "eqs. 3, 4",
              Fixed(HOLDS, "by construction, tested to rounding: docs/method.md")),
        Claim("97 % utilisation at 100 Mb/s to 1 Gb/s", "Fig. 2",
              Fixed(OPEN, "a formula agrees, with assumptions chosen so that it does: docs/plan.md")),
        Claim("At 1 Gb/s compressed training is much faster, and has time for more tokens", "Fig. 3",
              Fixed(OPEN, "by the same formula: docs/plan.md")),
        Claim("A density of 1 to 3 in a hundred and 2 bits are below full-precision DiLoCo", "SparseLoCo",
              All((("64 of 4096", Order("adamw-k64-2bit", "diloco", LOWER, "full")),
                   ("128 of 4096", Order("adamw-k128-2bit", "diloco", LOWER, "full"))))),
        Claim("Two bits for a value are enough", "SparseLoCo", Same("dense-2bit", "dense", "full")),
        Claim("DiLoCo is above per-step AdamW (slightly, it says)", "SparseLoCo",
              Order("diloco", "adamw", HIGHER, "full")),
        Claim("Sparse means can be better than dense ones", "SparseLoCo",
              Order("adamw-k128-2bit", "adamw-k4096-2bit", LOWER, "full")),
        Claim("Error feedback stands in for outer momentum", "SparseLoCo",
              Fixed(OPEN, "momentum on the sparse mean was tried once: results/README.md")),
    )  # fmt: skip


def claim_tests(book: Book, names: Names = str) -> list[Compared]:
    """Every test behind the answers, for the family that is corrected together."""
    book.derived |= trends(book, names)
    tests = [one for claim in claims_of(book) for one in claim.judge.tests(book, names)]
    return [one for one in tests if one not in book.apart]


def claims_table(book: Book) -> str:
    """One row for each claim, with its answer at this scale and in the regime where the base works."""
    regime = book.regime
    if regime:
        regime.family = claim_tests(regime, regime_name)
    head = ["claim", "where", "small model, short run", "what was measured there", "seeds",
            f"{REGIME}: every method tuned"]  # fmt: skip
    rows = [head, ["---"] * len(head)]
    for claim in claims_of(book):
        answer, evidence = claim.judge(book, str)
        seeds = _seeds(book, claim.judge.tests(book, str))
        rows.append([claim.words, claim.source, f"**{answer}**", evidence, seeds, _in_regime(claim, regime)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _seeds(book: Book, tests: Sequence[Compared]) -> str:
    """The fewest behind an answer."""
    counts = [found.count for one in tests if (found := book.measured(one))]
    return str(min(counts)) if counts else ""


def _in_regime(claim: Claim, book: Book | None) -> str:
    if isinstance(claim.judge, Fixed | Law):
        return ""
    if book is None:
        return YET
    answer, evidence = claim.judge(book, regime_name)
    if evidence and not book.lines:
        return YET
    seeds = _seeds(book, claim.judge.tests(book, regime_name))
    counted = f"; {seeds} seeds" if seeds not in ("", "1") else ""  # one seed is told in the evidence
    return f"**{answer}** ({evidence}{counted})" if evidence else "no such row"
