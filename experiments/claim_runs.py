"""What has to be run before a claim can be answered, as a command to paste. Standard library only."""

from collections import Counter
from collections.abc import Sequence

from experiments.catalog import home_of
from experiments.estimates import Book
from experiments.tables import DEFAULT_SCALE
from experiments.tuning import results_of, trial_name

Lacks = dict[str, tuple[int, ...]]  # by row: the seeds that are wanted of it; none named: all of its own


def lacking(book: Book, rows: Sequence[str]) -> Lacks:
    """What gives these rows two seeds that all of them have: rows with fewer than two; or else, of two seeds
    that most rows have, those that a row has not."""
    if few := [row for row in rows if len(book.finished(row)) < 2]:
        return dict.fromkeys(few, ())
    seeds = {row: {line["seed"] for line in book.finished(row)} for row in rows}
    if not seeds or len(set.intersection(*seeds.values())) >= 2:
        return {}
    counts = Counter(seed for own in seeds.values() for seed in own)
    wanted = set(sorted(counts, key=lambda seed: (-counts[seed], seed))[:2])
    return {row: tuple(sorted(wanted - own)) for row, own in seeds.items() if wanted - own}


def commands(book: Book, lacks: Lacks) -> str:
    """One command for all rows that lack the same seeds; "" where nothing is lacking."""
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for row, seeds in lacks.items():
        by_seeds.setdefault(seeds, []).append(row)
    return "; ".join(_command(book, rows, seeds) for seeds, rows in by_seeds.items())


def _command(book: Book, rows: Sequence[str], seeds: Sequence[int]) -> str:
    named = [*_trials(book, rows), *rows]
    tables = " ".join(dict.fromkeys(home_of(row, book.scale) for row in named))
    scale = f" --scale {book.scale.name}" if book.scale.name != DEFAULT_SCALE else ""
    only = "".join(f" --only {row}" for row in named)
    listed = ",".join(map(str, seeds))
    command = f"isthmus reproduce {tables}{scale} --corpus {book.scale.corpus}{only}"
    if not seeds:
        return f"`{command}`"
    without = " and ".join(f"`{row}`" for row in rows)
    plural = "s" * (len(seeds) > 1)
    return f"{without} without seed{plural} {listed.replace(',', ', ')}: `{command} --seeds {listed}`"


def _trials(book: Book, rows: Sequence[str]) -> list[str]:
    """Those that are missing of the methods of these rows, which wait for them."""
    groups = {book.rows[row].follows for row in rows}
    found = results_of(book.scale, book.lines)
    return [
        trial_name(group, number)
        for group in found
        if group in groups
        for number, loss in enumerate(found[group])
        if loss is None
    ]
