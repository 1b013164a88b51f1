"""What a reviewer asks of the verdicts: how many are judged, which share of a gain is the score's, whether
both sides ran the same code, and how far one run is from itself. Standard library only.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from experiments.estimates import Book, Compared
from experiments.evidence import LEVEL
from experiments.lines import Line
from experiments.real_fleet import alike, can_be_real
from experiments.same_code import same
from experiments.tables import rung
from experiments.tuning import AGAIN, ROWS, again_name, regime_name


def judged(book: Book) -> str:
    """How many comparisons the page makes, and how many are clear by which procedure and by which errors."""
    asked = dict.fromkeys(map(book.same_score, book.family))
    there = [one for one in asked if book.chance(one) is not None]
    if not there:
        return f"none of {len(asked)} comparisons can be judged yet, since none has two seeds"
    alone, clear, surely = _clear(book, there)
    own = f"of {len(there)} comparisons {alone} are clear one by one, {clear} among all, {surely} by Holm's"
    alone, clear, surely = _clear(book.with_pooled_errors(), there)
    return f"{own} (by pooled errors {alone}, {clear} and {surely})"


def _clear(book: Book, there: Sequence[Compared]) -> tuple[int, int, int]:
    """How many by themselves, among all, by Holm's procedure."""
    corrected = [book.corrected(one) for one in there]
    alone = sum((book.chance(one) or 0) <= LEVEL for one in there)
    return alone, *(sum(pair[at] <= LEVEL for pair in corrected) for at in (0, 1))


def pooled(book: Book) -> str:
    """The pooled spread, and which differences so many seeds would show by it."""
    spread = book.spread()
    if not spread.freedom:
        return "not known yet"
    shown = ", ".join(f"{seeds} seeds {spread.seen(seeds):.2f} %" for seeds in (2, 3, 5))
    return (
        f"{math.sqrt(spread.variance):.2f} % (known by {spread.freedom:.1f} degrees of freedom), so that "
        f"taken alone a difference of this size is seen four times in five: {shown}"
    )


def scoring(book: Book, name: str, other: str) -> str:
    """The share of the mixed gain of a row over another that the same boundaries for both do not show."""
    ours, theirs = ([book.losses(row, view) for view in ("mixed", "pipelined")] for row in (name, other))
    shared = set.intersection(*(set(losses) for losses in (*ours, *theirs)))
    if not shared:
        return "not run"
    mixed, pipelined = (
        statistics.mean(theirs[at][seed] - ours[at][seed] for seed in shared) for at in (0, 1)
    )
    share = f"{100 * (1 - pipelined / mixed):.0f} %" if mixed > 0 else "no gain"
    return share + " (one seed)" * (len(shared) == 1)


def of_two_commits(book: Book) -> dict[tuple[str, str], list[tuple[Line, Line]]]:
    """By pair of compared rows: the lines of each seed that two commits ran; none where one ran all."""
    found = {}
    judged = [one for one in book.family if one[0] in book.rows and book.chance(one) is not None]
    for name, other in dict.fromkeys((one[0], one[1]) for one in judged):
        ours, theirs = book.runs[name], book.runs[other]
        both = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        found[name, other] = [pair for pair in both if pair[0]["commit"] != pair[1]["commit"]]
    return found


def commits(book: Book) -> str:
    """How many of the compared pairs are, seed by seed, of one commit, or of two that compute the same."""
    pairs = of_two_commits(book)
    if not pairs:
        return "no pair has two seeds yet"
    one, alike, rest = 0, 0, []
    for (name, other), lines in pairs.items():
        shown = [alike_by_two(book, *pair) for pair in lines]
        one, alike = one + (not lines), alike + bool(lines and all(shown))
        rest += [f"`{name}` and `{other}`"] if not all(shown) else []
    told = f"{one} of {len(pairs)}"
    told += f"; {alike} more are of commits that compute the same for them on a CPU" * bool(alike)
    return told + (f"; not of {', '.join(rest)}" if rest else "")


def alike_by_two(book: Book, line: Line, other: Line) -> bool:
    """Whether one of two lines is shown to be the same by the other's commit: then both could be of it."""
    commits = line["commit"], other["commit"]
    return any(same(book.curves, each["digest"], *commits) for each in (line, other))


def compared_lines(book: Book) -> list[Line]:
    """One line of every row that is compared."""
    rows = dict.fromkeys(row for pair in of_two_commits(book) for row in pair)
    return list({line["digest"]: line for row in rows for line in book.finished(row)[:1]}.values())


def by_later(book: Book) -> str:
    """For how many of the compared rows the commit that was asked about most computes what theirs did."""
    lines = compared_lines(book)
    own = {line["digest"]: line["commit"] for line in lines}
    asked = Counter(commit for digest, commit in book.curves if own.get(digest, commit) != commit)
    if not asked:
        return "not run"
    commit = max(sorted(asked), key=asked.__getitem__)
    found = {line["row"]: same(book.curves, line["digest"], line["commit"], commit) for line in lines}
    rest = [f"`{row}`" for row, alike in found.items() if not alike]
    told = (
        f"the code of `{commit}` computes the same as the commit that ran it for {len(lines) - len(rest)} of "
    )
    return told + f"{len(lines)} compared rows" + (f"; not shown of {', '.join(rest)}" if rest else "")


def of_regime(book: Book) -> list[Line]:
    """A line of every row of the regime that has one."""
    names = [regime_name(name) for name, *_ in ROWS]
    return [line for name in names if name in book.rows for line in book.finished(name)[:1]]


def by_fleet(book: Book) -> str:
    """How many of the regime's rows real processes computed as the simulator did."""
    lines = [line for line in of_regime(book) if can_be_real(line)]
    found = {line["row"]: book.twins.get(line["digest"]) for line in lines}
    same_ = [row for row, twin in found.items() if twin and alike(twin)]
    apart = [f"`{row}`" for row, twin in found.items() if twin and not alike(twin)]
    told = f"{len(same_)} of the {len(lines)} rows that a fleet can run"
    return told + (f"; not equal: {', '.join(apart)}" if apart else "")


def repeated(book: Book, ratio: str) -> dict[int, float]:
    """By seed, in percent: a run that compressed to the end against the one that its finishing runs share, at
    the last round at which both were scored before any boundary opened. Nothing but the GPU differs. Equal to
    the last digit: they were trained as one, and say nothing."""
    plain, found = book.runs.get(rung("pp", ratio), {}), {}
    for name, row in book.rows.items():
        if not (name.startswith(f"{rung('pp', ratio)}-") and any("finish.rounds" in s for s in row.settings)):
            continue
        for seed, line in book.runs[name].items():
            if seed not in plain:
                continue
            mine = {point[0]: point[2] for point in plain[seed]["curve"] if point[2]}
            its = {p[0]: p[2] for p in line["curve"] if p[2] and 0 < p[0] <= line["rounds_shared"]}
            both = mine.keys() & its.keys()
            if both and mine[at := max(both)] != its[at]:
                found.setdefault(seed, 100 * (its[at] - mine[at]) / mine[at])
    return dict(sorted(found.items()))


def repeats(book: Book, ratio: str) -> str:
    """The mean size of that difference beside the spread of seeds, both in percent of the loss."""
    again = [abs(value) for value in repeated(book, ratio).values()]
    losses = list(book.losses(rung("pp", ratio), "pipelined").values())
    if not again or len(losses) < 2:
        return "not run"
    return _beside(again, losses)


def _beside(again: Sequence[float], losses: Sequence[float]) -> str:
    times = "once" if len(again) == 1 else f"{len(again)} times"
    size = f"{statistics.mean(again):.2f} % (repeated {times})"
    if len(losses) < 2:
        return f"{size}, where there is one seed"
    return f"{size}, where seeds differ by {100 * statistics.stdev(losses) / statistics.mean(losses):.2f} %"


def run_again(book: Book) -> str:
    """Of the rows that the regime runs once more with the same seeds: the mean size of the distance of a run
    from itself beside the spread of that row's seeds, both in percent of the mixed loss."""
    found = {}
    for row in AGAIN:
        first, second = (book.losses(name, "mixed") for name in (regime_name(row), again_name(row)))
        shared = sorted(first.keys() & second.keys())
        sizes = [100 * abs(second[seed] / first[seed] - 1) for seed in shared]
        if sizes:
            runs = [book.runs[name] for name in (regime_name(row), again_name(row))]
            apart = any(runs[0][seed]["commit"] != runs[1][seed]["commit"] for seed in shared)
            found[row] = _beside(sizes, list(first.values())) + ", by another commit" * apart
    if not found:
        return "not run yet"
    return "; ".join(f"`{row}` {found.get(row, 'not run yet')}" for row in AGAIN)
