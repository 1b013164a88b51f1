"""Every claim of both papers, each with its answer: holds, does not hold, cannot be told here, or not yet.

An answer is computed when the page is drawn, from the rows of the small scale and again from those of the
regime in which the base works; all its tests are among those that are corrected together at that scale.
Standard library only.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.claim_judges import (
    ABSENT,
    FAILS,
    HIGHER,
    HOLDS,
    LOWER,
    OPEN,
    YET,
    All,
    AtMost,
    ByRatio,
    Fixed,
    Judge,
    Law,
    Names,
    Order,
    Same,
    Trend,
    answered,
    is_small,
)
from experiments.claim_trends import ADAMW_COSTS, BY_H, GROWS, PRICE, trends
from experiments.estimates import Book, Compared
from experiments.law import MARGIN as POINTS
from experiments.tables import REGIME, rung, size_of
from experiments.tuning import regime_name

PART = "in part"  # answers differ by score, ratio or fleet
NOT_ASKED = "–"  # of the regime: what no row answers at any scale


@dataclass(frozen=True)
class Claim:
    words: str
    source: str
    judge: Judge
    regime: Judge | None = None  # how the regime is asked instead
    why: str = ""  # and what makes it the same question

    def asked(self, names: Names) -> Judge:
        return self.judge if is_small(names) else self.regime or self.judge


def claims_of(book: Book) -> tuple[Claim, ...]:
    """Of arXiv 2601.02360, then of arXiv 2508.15706, of which the abstract was at hand."""
    ladder = book.scale.ladder()
    steepest = ladder[-1]
    half = tuple((ratio, Order(rung("het", ratio), rung("pp", ratio), LOWER)) for ratio in ladder)
    both = ("pp", "all compressed"), ("het", "half compressed")
    by_h = tuple(f"{row}-h{h}" for h in book.scale.by_h for row in ("dense", "het-8"))
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
              ByRatio(GROWS, ("mixed", "pipelined"), HIGHER, "points of price with each halving of k/d")),
        Claim("At the steepest ratio half compressed costs less than ten percent", "sec. 3.1",
              AtMost(rung("het", steepest), "dense", 10.0)),
        Claim("Settings tuned for compression lower the loss of compressed fleets", "Table 1, *",
              All(tuple((words, Order(f"{f}-8-star", f"{f}-8", LOWER)) for f, words in both))),
        Claim("With them half is still below all", "Table 1, *", Order("het-8-star", "pp-8-star", LOWER),
              Order("het-8", "pp-8", LOWER), "at 1/8, where each is tuned for itself"),
        Claim("With a fifth more tokens half compressed is nearly level (+0.7 %; asked: at most twice that)",
              "Table 3", AtMost("het-8-more", "dense", 1.4)),
        Claim("SparseLoCo is level with per-step AdamW (0.7 % below; asked: at most 1 % above)",
              "Tables 1, 4", AtMost("dense", "adamw", 1.0, "full")),
        Claim("Under AdamW compressing all costs no more (+2.2 against +4.0 %; asked: at most half a point)",
              "Table 4",
              Trend(ADAMW_COSTS, ("mixed",), LOWER, "points more than under SparseLoCo",
                    ("adamw-pp-8", "adamw", "pp-8", "dense"), POINTS)),
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
              ByRatio(PRICE, ("mixed",), HIGHER, "points of price with each halving of k/d", fleets=("pp",))),
        Claim("H lets bias compound", "sec. 2.4", Law(1)),
        Claim("so that the price of half compressed grows with H, at equal tokens", "sec. 2.4",
              Trend(BY_H, ("full", "mixed"), HIGHER, "as the power of H", ("dense", "het-8", *by_h))),
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
    tests = [one for claim in claims_of(book) for one in claim.asked(names).tests(book, names)]
    return [one for one in tests if one not in book.apart]


def claims_table(book: Book) -> str:
    """One row for each claim, with its answer at this scale and in the regime where the base works. What is
    clear depends on the families of both books, which the page has to set."""
    regime, last = book.regime, f"{REGIME}: every method tuned"
    if regime:
        recipe = regime.recipe(regime_name("dense"))
        last += f" ({size_of(recipe)}, {recipe.num_replicas} replicas)"
    head = ["claim", "where", "small model, short run", "what was measured there", "seeds", last]
    rows = [head, ["---"] * len(head)]
    for claim in claims_of(book):
        answer, evidence = answered(claim.judge, book, str)
        seeds = _seeds(book, claim.judge.tests(book, str))
        there = _in_regime(claim, regime, book.scale.name)
        rows.append([claim.words, claim.source, f"**{answer}**", evidence, seeds, there])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def tally(book: Book) -> str:
    """How many claims have which answer, at both scales, by own and by pooled errors."""
    said = [f"at `{book.scale.name}` {_tallied(book, str)}"]
    if book.regime and book.regime.lines:
        said.append(f"at `{book.regime.scale.name}` {_tallied(book.regime, regime_name)}")
    return "; ".join(said)


def _tallied(book: Book, names: Names) -> str:
    judges = [claim.asked(names) for claim in claims_of(book)]
    asked = [judge for judge in judges if is_small(names) or not isinstance(judge, Fixed)]
    own, pooled = (
        Counter(_kind(answer) for judge in asked if (answer := judge(each, names)[0]) != ABSENT)
        for each in (book, book.with_pooled_errors())
    )
    kinds = {
        HOLDS: "hold",
        FAILS: "do not hold",
        PART: "differ by score, ratio or fleet",
        OPEN: "cannot be told",
    }
    counts = ", ".join(f"{own[kind]} {words}" for kind, words in kinds.items())
    second = ", ".join(str(pooled[kind]) for kind in kinds)
    return f"of {own.total()} claims that were asked {counts} (by pooled errors {second})"


def _kind(answer: str) -> str:
    """Of an answer that may have several parts: the one that all have."""
    found = [word for word in (HOLDS, FAILS, OPEN, YET) if word in answer]
    if set(found) <= {OPEN, YET}:
        return OPEN
    return found[0] if len(found) == 1 else PART


def _seeds(book: Book, tests: Sequence[Compared]) -> str:
    """The fewest behind an answer."""
    counts = [found.count for one in tests if (found := book.measured(one))]
    return str(min(counts)) if counts else ""


def _in_regime(claim: Claim, book: Book | None, small: str) -> str:
    judge = claim.asked(regime_name)
    if isinstance(judge, Fixed):
        return NOT_ASKED
    if book is None:
        return YET
    answer, evidence = answered(judge, book, regime_name)
    if answer == ABSENT:
        return f"asked at {small} only"
    if not book.lines:
        return YET
    seeds = _seeds(book, judge.tests(book, regime_name))
    counted = f"; {seeds} seeds" if seeds not in ("", "1") else ""  # one seed is told in the evidence
    why = f"{claim.why}: " if claim.why else ""
    return f"**{answer}** ({why}{evidence}{counted})"
