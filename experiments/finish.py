"""The finish table: plain and compressed loss before and after boundaries open, by the tokens it takes.

Standard library only.
"""

from dataclasses import replace

from experiments.budget import stage_share
from experiments.estimates import Book, Estimate
from experiments.lines import digest
from experiments.paper import finish_name, finishes
from experiments.tables import rung
from isthmus.config import FinishConfig
from isthmus.errors import ConfigError

HEAD = (
    "k/d",
    "boundaries",
    "tokens in them",
    "bytes between stages, of open",
    "plain before",
    "compressed before",
    "plain after",
    "compressed after",
    "plain, against compressed without finishing",
    "against SparseLoCo",
    "lower with no more bytes",
    "seeds",
)


def finishing_tokens(book: Book, name: str) -> int:
    """Of the rounds in which boundaries open."""
    recipe = book.recipe(name)
    return recipe.finish.rounds * recipe.round_tokens


def before(book: Book, name: str, view: str) -> Estimate | None:
    """The loss at the round where finishing begins; the learning rate is higher there than at the end."""
    recipe, at = book.recipe(name), 1 + ("full", "pipelined").index(view)
    begins = recipe.outer.rounds - recipe.finish.rounds
    points = [point for line in book.finished(name) for point in line["curve"] if point[0] == begins]
    return Estimate.of([point[at] for point in points if point[at] is not None])


def closed(book: Book, name: str) -> Estimate | None:
    """The loss at the end through boundaries that compress, also where they were open by then."""
    lines = book.finished(name)
    key = "loss_closed" if finishing_tokens(book, name) else "loss_pipelined"
    return Estimate.of([line[key] for line in lines if line.get(key) is not None])


def price(book: Book, name: str, ratio: str) -> Estimate | None:
    """Percent that the plain model lies above the compressed one of the run that never opened, by seed."""
    ours, theirs = book.losses(name, "full"), book.losses(rung("pp", ratio), "pipelined")
    shared = sorted(ours.keys() & theirs.keys())
    return Estimate.of([100 * (ours[seed] - theirs[seed]) / theirs[seed] for seed in shared])


def finish_table(book: Book) -> str:
    rows = [list(HEAD), ["---", "---", *["---:"] * (len(HEAD) - 2)]]
    for ratio in book.scale.finished():
        rows.append(_cells(book, ratio, rung("pp", ratio), "compress to the end"))
        for how, n in finishes(book.scale):
            words = f"opened over {n} rounds" if how == "open" else f"open for {n} rounds"
            rows.append(_cells(book, ratio, finish_name(ratio, how, n), words))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _cells(book: Book, ratio: str, name: str, words: str) -> list[str]:
    tokens = finishing_tokens(book, name)
    share = f"{100 * stage_share(book.recipe(name)):.1f} %"
    cells = [ratio, words, f"{tokens / 1e6:.1f} M" if tokens else "", share]
    if not book.finished(name):
        return [*cells, "diverged" if book.failed(name) else "not run", *[""] * (len(HEAD) - 5)]
    both = [before(book, name, view) if tokens else None for view in ("full", "pipelined")]
    both += [book.loss(name, "full"), closed(book, name)]
    cells += [estimate.text(3) if estimate else "" for estimate in both]
    gaps = (price(book, name, ratio), book.gap(name, "full"))
    cells += [gap.text(2, "+", " %") if gap else "" for gap in gaps]
    better = dominating(book, name)
    alone = " (one seed)" if better and len(book.finished(better)) == 1 else ""
    cells.append(f"`{better}` throughout{alone}" if better else "")
    return [*cells, str(len(book.finished(name)))]


def dominating(book: Book, name: str) -> str | None:
    """The row that, held to the end, sends no more bytes between stages and has the lowest plain loss of all
    that are below this one's, seed by seed; None where none is. It differs from this row in what crosses
    boundaries alone: k/d, the wire, and that they stay as they are."""
    own, lower = book.recipe(name), {}
    for other, row in book.rows.items():
        if row.fleet != book.row(name).fleet or not book.finished(other):
            continue
        recipe = book.recipe(other)
        held = replace(own, replicas=recipe.replicas, finish=FinishConfig())
        gap = book.gap(other, "full", name)
        fewer = stage_share(recipe) <= stage_share(own)
        if gap and gap.mean < 0 and fewer and digest(held) == digest(recipe):
            lower[other] = gap.mean
    return min(lower, key=lower.__getitem__) if lower else None


def enough(book: Book, ratio: str, percent: float, how: str) -> str:
    """The fewest rounds, opened in this way, after which the plain model is at most so much worse than the
    compressed one of the run that never opened."""
    if ratio not in book.scale.finished():
        there = ", ".join(book.scale.finished())
        raise ConfigError(f"no run with k/d = {ratio} is finished; there are {there}")
    tried = {n: finish_name(ratio, how, n) for one, n in finishes(book.scale) if one == how}
    if not tried:
        raise ConfigError(f'there is no way to finish "{how}"; there are open, full')
    names = {0: rung("pp", ratio), **tried}
    prices = {n: price(book, name, ratio) for n, name in sorted(names.items())}
    if not all(prices.values()):
        return "not run"
    for n, above in prices.items():
        if above and above.mean <= percent:
            tokens = finishing_tokens(book, names[n])
            return (
                f"{n} of {book.scale.rounds} rounds ({tokens / 1e6:.1f} M tokens)"
                if n
                else "no round: it is so without"
            )
    return f"more than the {max(tried)} rounds that were tried"
