"""The search on the page: the frontier between stages, and what was wanted beside what was found.

Standard library only.
"""

from collections.abc import Sequence

from experiments.budget import (
    of_every_step,
    open_stage_bytes,
    per_token,
    replica_bytes,
    stage_bytes,
)
from experiments.estimates import Book, Estimate
from experiments.search import FRONTIER, INNER, STEMS, anchors, frontier
from isthmus.config import Recipe

BYTES = {  # the columns of what is sent, by kind of link
    "stages": ["between stages, bytes a token"],
    "replicas": ["between replicas, bytes a token", "of averaging at every step"],
}
NOT_YET = "not run yet"
PRICES = {8: 2.5, 24: 5.0, 96: 9.0}  # times fewer bytes between stages -> the most percent that it may cost
BELOW = 3.0  # percent below the paper's uncompressed fleet, of the recommended mixed one
NEAR, SHARE = 5.0, 1 / 100  # percent above AdamW of every step, with this share of its bytes


def bytes_of(recipe: Recipe, kinds: Sequence[str]) -> list[str]:
    """What a row sends: for a token of a pipelined replica, all its boundaries, both ways; and for a token of
    any replica, up and down."""
    stages, replicas = per_token(recipe)
    less = open_stage_bytes(recipe) / stage_bytes(recipe)
    cells = {
        "stages": [f"{stages:,.0f}" + (f" ({less:.1f} x less)" if less > 1.005 else "")],
        "replicas": [f"{replicas:,.1f}" if replicas < 1000 else f"{replicas:,.0f}",
                     _share(of_every_step(recipe))],
    }  # fmt: skip
    return [cell for kind in kinds for cell in cells[kind]]


def _share(share: float) -> str:
    return f"1/{1 / share:,.0f}" if share < 0.7 else f"{share:.2f}"


def frontier_table(book: Book) -> str:
    """By bytes between stages: bf16 in k/d beside the best of few bits, with either InnerOpt."""
    head = ["fewer bytes between stages", "bf16 in k/d, AdamW inside: the paper", "few bits, AdamW inside",
            "bf16 in k/d, Muon inside", "few bits, Muon inside", "and learned anchors, the same bytes",
            "the best, against SparseLoCo"]  # fmt: skip
    rows = [head, ["---:"] * len(head)]
    for factor in FRONTIER:
        cells = [f"{factor} x"]
        few = None
        for stem in STEMS:
            names = frontier(book.scale, stem, factor)
            few = best(book, names[1:])
            cells += [_gap(book, names[0]) if names else "", _gap(book, few, sent=True) or NOT_YET]
        learned = anchors(book.scale, factor)
        tried = [name for name in (few, *learned) if name]
        cells.append(_gap(book, learned[0] if learned else None))
        rows.append([*cells, _gap(book, best(book, tried), "dense")])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def best(book: Book, names: list[str], view: str = "mixed") -> str | None:
    """The row with the lowest loss, of those that were run with the most seeds."""
    found = [(name, loss) for name in names if (loss := book.loss(name, view))]
    most = max((loss.count for _, loss in found), default=0)
    settled = {name: loss.mean for name, loss in found if loss.count == most}
    return min(settled, key=settled.__getitem__) if settled else None


def _gap(book: Book, name: str | None, against: str | None = None, sent: bool = False) -> str:
    if name is None:
        return ""
    gap = book.gap(name, "mixed", against)
    if gap is None:
        return NOT_YET
    return gap.text(2, "+", " %") + (f" ({_sent(book, name)})" if sent else "")


def _sent(book: Book, name: str) -> str:
    edge = book.recipe(name).replicas[-1]
    learned = ", learned anchors" * (book.recipe(name).subspace.anchor == "learned")
    return f"{edge.wire} in {edge.ratio or 'all'}{learned}"


def claims(book: Book) -> str:
    """What was wanted, what was found, and whether that is enough; one line each."""
    lines = [_price(book, factor, most) for factor, most in PRICES.items()]
    return "\n".join(f"- {line}" for line in [*lines, _recommended(book), _distance(book)])


def counted(found: Estimate) -> str:
    """An estimate in percent, and of how many seeds it is."""
    seeds = f"{found.count} seeds" if found.count > 1 else "one seed"
    return f"{found.text(2, '+', ' %')} ({seeds})"


def verdict(found: Estimate, most: float) -> str:
    word = "reached" if found.mean <= most else "**not reached**"
    if found.error and abs(found.mean - most) < found.error:
        word += ", by less than its standard error"
    return f"{counted(found)}, wanted: at most {most:+g} %: {word}."


def _price(book: Book, factor: int, most: float) -> str:
    """Of the fleet with Muon inside, against itself uncompressed; AdamW and the paper's way beside it."""
    what = f"All compressed, {factor} x fewer bytes between stages, Muon inside: "
    name = best(book, [*frontier(book.scale, "muon-", factor)[1:], *anchors(book.scale, factor)])
    gap = book.gap(name, "mixed") if name else None
    adamw = best(book, frontier(book.scale, "", factor)[1:])
    beside = f" AdamW inside: {_gap(book, adamw, sent=True) or NOT_YET}"
    beside += f"; the paper's way: {_gap(book, frontier(book.scale, '', factor)[0])}."
    if name is None or gap is None:
        return f"{what}{NOT_YET}, wanted: at most {most:+g} %.{beside}"
    return f"{what}{_sent(book, name)}, {verdict(gap, most)}{beside}"


def _recommended(book: Book) -> str:
    paper, ours = book.recipe("het-8"), book.recipe("recommended")
    stages = stage_bytes(ours) / stage_bytes(paper)
    replicas = replica_bytes(ours) / replica_bytes(paper)
    what = (
        f"Half compressed, recommended settings, which send {stages:.2f} of the bytes of the paper's mixed "
        f"fleet between stages and {replicas:.2f} between replicas, against the paper's uncompressed fleet: "
    )
    gap = book.gap("recommended", "mixed", "dense")
    if gap is None:
        return f"{what}{NOT_YET}, wanted: at most {-BELOW:+g} %."
    own = book.gap("recommended", "mixed", "muon")
    beside = f" Against the same uncompressed, with Muon inside: {own.text(2, '+', ' %')}." if own else ""
    return what + verdict(gap, -BELOW) + beside


def _distance(book: Book) -> str:
    """Of what sends little enough, the nearest to AdamW that averages at every step, as well as that could be
    tuned: a baseline that is given less would flatter us."""
    names = ["muon", *(one.name for one in INNER if one.inner == "muon" and one.method == "sparseloco")]
    steps = ["adamw", *(one.name for one in INNER if one.inner == "adamw" and one.method == "adamw")]
    what = "SparseLoCo with Muon inside, against the best of AdamW averaged at every step: "
    few = [name for name in names if of_every_step(book.recipe(name)) <= SHARE]
    name, step = best(book, few, "full"), best(book, steps, "full")
    gap = book.gap(name, "full", step) if name and step else None
    if name is None or step is None or gap is None:
        return f"{what}{NOT_YET}, wanted: at most {NEAR:+g} % with {_share(SHARE)} of the bytes."
    sent = _share(of_every_step(book.recipe(name)))
    line = f"{what}{book.row(name).title}, with {sent} of the bytes: {verdict(gap, NEAR)}"
    table = book.gap(name, "full", "adamw") if step != "adamw" else None
    beside = f" The best: {book.row(step).title}; with the settings of Table 4: " if table else ""
    return line + beside + (table.text(2, "+", " %.") if table else "")
