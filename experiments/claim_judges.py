"""How a claim is answered from rows: an order, a bound, no change, a trend, or several of them.

An answer is "holds", "does not hold", "cannot be told here" or "yet". Standard library only.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.claim_runs import Lacks, commands, lacking
from experiments.claim_trends import Names, rungs
from experiments.estimates import Book, Compared
from experiments.law import law_claims
from experiments.tables import rung

HOLDS, FAILS, OPEN, YET = "holds", "does not hold", "cannot be told here", "cannot be told yet"
ABSENT = "no such row"  # at this scale
MARGIN = 0.5  # percent of loss: closer than this is "no change"; the paper prints losses to a third of one
LOWER, HIGHER = -1, 1
Said = tuple[str, str]  # the answer, and what was measured


class Judge(ABC):
    """How one claim is answered from the rows of a scale."""

    def tests(self, book: Book, names: Names) -> list[Compared]:
        return []

    def lacks(self, book: Book, names: Names) -> Lacks:
        """What has to be run before it can be answered."""
        found: Lacks = {}
        for one in self.tests(book, names):
            found |= lacking(book, one[:2])
        return found

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

    def __call__(self, book: Book, names: Names) -> Said:
        tests = self.tests(book, names)
        return _missing(book, tests) or self._said(book, tests)

    @abstractmethod
    def _asked(self) -> list[tuple[str] | tuple[str, float]]:
        """By which scores; and than how many percent, if not than none."""

    @abstractmethod
    def _said(self, book: Book, tests: Sequence[Compared]) -> Said:
        """The answer, where every test has two seeds."""


@dataclass(frozen=True)
class Order(Pair):
    """One row lies below (or above) another: by the mixed score, which is the paper's, and, where that
    differs, with both scored through their boundaries."""

    sign: int
    view: str = "mixed"

    def _asked(self) -> list[tuple[str] | tuple[str, float]]:
        return [(self.view,), ("pipelined",)] if self.view == "mixed" else [(self.view,)]

    def _said(self, book: Book, tests: Sequence[Compared]) -> Said:
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

    def _said(self, book: Book, tests: Sequence[Compared]) -> Said:
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

    def _said(self, book: Book, tests: Sequence[Compared]) -> Said:
        gap = book.measured(tests[0])
        assert gap is not None
        evidence = f"{gap.text(2, '+', ' %')}, asked: within {MARGIN:g} %"
        clear = all(book.clear(one) for one in tests)
        return (HOLDS if abs(gap.mean) < MARGIN else FAILS) if clear else OPEN, evidence


@dataclass(frozen=True)
class Trend(Judge):
    """The side of zero, or of `than`, on which an estimate from several rows lies (claim_trends.py)."""

    name: str
    views: tuple[str, ...]
    sign: int
    unit: str
    rows: tuple[str, ...] = ()  # all that it is made of
    than: float = 0.0

    def tests(self, book: Book, names: Names) -> list[Compared]:
        asked: list[Compared] = [
            (self.name, "", view, self.than) if self.than else (self.name, "", view) for view in self.views
        ]
        return [one for one in asked if one in book.derived]

    def lacks(self, book: Book, names: Names) -> Lacks:
        return lacking(book, self._made_of(book, names))

    def _made_of(self, book: Book, names: Names) -> list[str]:
        """None where the scale has not all of them."""
        rows = [names(row) for row in self.rows]
        return rows if all(row in book.rows for row in rows) else []

    def __call__(self, book: Book, names: Names) -> Said:
        tests = self.tests(book, names)
        if not self._made_of(book, names):
            return ABSENT, ""
        if not tests:
            return (YET, "") if self.lacks(book, names) else (OPEN, "a price is not above zero")
        parts, answers = [], {}
        for one in tests:
            found, clear = book.derived[one], book.clear(one)
            side = HOLDS if (found.mean - self.than) * self.sign > 0 else FAILS
            answers[one[2]] = side if clear else OPEN
            parts.append(f"{one[2]}: {found.text(2, '+')} {self.unit}")
        if self.than:
            parts[-1] += f", asked: at most {self.than:+g}"
        if len(set(answers.values())) == 1:
            return next(iter(answers.values())), "; ".join(parts)
        return "; ".join(f"{view}: {each}" for view, each in answers.items()), "; ".join(parts)


@dataclass(frozen=True)
class ByRatio(Trend):
    """Over the ratios of the ladder that a scale has, two at least; those without a row are named."""

    fleets: tuple[str, ...] = ("pp", "het")

    def _made_of(self, book: Book, names: Names) -> list[str]:
        there = rungs(book, names).values()
        fleets = [names(rung(fleet, ratio)) for ratio in there for fleet in self.fleets]
        return [names("dense"), *fleets] if len(there) > 1 else []

    def __call__(self, book: Book, names: Names) -> Said:
        answer, evidence = super().__call__(book, names)
        there = list(rungs(book, names).values())
        absent = [ratio for ratio in book.scale.ladder() if ratio not in there]
        if answer == ABSENT or not absent:
            return answer, evidence
        from_to = f"from {there[0]} to {there[-1]}"
        return f"{from_to}: {answer}", "; ".join(filter(None, [evidence, _no_row(book, absent)]))


@dataclass(frozen=True)
class All(Judge):
    """Several claims in one, each with its answer where they differ."""

    parts: tuple[tuple[str, Judge], ...]
    shown: str = ""  # where the page has what was measured at the small scale

    def tests(self, book: Book, names: Names) -> list[Compared]:
        return [one for _, part in self.parts for one in part.tests(book, names)]

    def lacks(self, book: Book, names: Names) -> Lacks:
        return {row: seeds for _, part in self.parts for row, seeds in part.lacks(book, names).items()}

    def __call__(self, book: Book, names: Names) -> Said:
        said = {words: part(book, names) for words, part in self.parts}
        by_answer: dict[str, list[str]] = {}
        for words, (answer, _) in said.items():
            by_answer.setdefault(answer, []).append(words)
        absent = by_answer.pop(ABSENT, [])
        if not by_answer:
            return ABSENT, ""
        measured = [f"{words}: {evidence}" for words, (_, evidence) in said.items() if evidence]
        if absent:
            measured.append(_no_row(book, absent))
        elif self.shown and is_small(names):
            measured = [self.shown]
        if len(by_answer) == 1 and not absent:
            return next(iter(by_answer)), "; ".join(measured)
        parts = [f"{', '.join(words)}: {answer}" for answer, words in by_answer.items()]
        return "; ".join(parts), "; ".join(measured)


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

    def lacks(self, book: Book, names: Names) -> Lacks:
        return {}  # law_claims names its command

    def __call__(self, book: Book, names: Names) -> Said:
        return law_claims(book)[self.part] if is_small(names) else (ABSENT, "")


def is_small(names: Names) -> bool:
    """Whether these are the rows of the small scale."""
    return names("dense") == "dense"


def _no_row(book: Book, absent: Sequence[str]) -> str:
    return f"{', '.join(absent)}: {ABSENT} at {book.scale.name}"


def _missing(book: Book, tests: Sequence[Compared]) -> Said | None:
    """What is said where rows or seeds are missing; `answered` adds the command."""
    if not tests:
        return ABSENT, ""
    if all(book.chance(one) is not None for one in tests):
        return None
    gap = book.measured(tests[0])
    return YET, f"{gap.text(2, '+', ' %')}, one seed" if gap else ""


def answered(judge: Judge, book: Book, names: Names) -> Said:
    """The answer, and what was measured, with the answer by pooled errors where it is another one, and the
    command that makes what is missing."""
    answer, evidence = judge(book, names)
    pooled, _ = judge(book.with_pooled_errors(), names)
    other = f"by pooled errors: {pooled}" if pooled != answer else ""
    command = commands(book, judge.lacks(book, names)) if YET in answer else ""
    return answer, "; ".join(filter(None, [evidence, other, command]))
