"""One figure of everything that was run at a scale: loss against bytes on either kind of link.

A row that is lower and sends no more than every row that sends as little as it does is on the frontier. There
are two: of all rows, and of those that send no more on the other kind of link than the paper's fleets do.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.budget import open_stage_bytes, per_token, stage_share
from experiments.estimates import Book
from experiments.tuning import ROWS, regime_name
from isthmus.page.plot import COLOURS, FAINT, INK, SOFT

PAPERS = ("dense", "pp-8", "pp-24", "pp-96", "pp-192", "pp-384", "het-8", "het-24", "het-96", "het-192",
          "het-384")  # fmt: skip

NAMED = 16  # points at most that are called by name


@dataclass(frozen=True, slots=True)
class Point:
    """A row: its loss as it trains, and what it sends for a token, over its whole run."""

    name: str
    loss: float
    stages: float  # of a pipelined replica, all its boundaries, both ways
    replicas: float  # of any replica, up and down
    kind: str
    seeds: int


# What a row is, by the first that fits.
KINDS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("the paper's: bf16 in k/d, all or half", lambda name: name in PAPERS),
    (
        "averaged at every step",
        lambda name: "step" in name or (name.startswith("adamw") and "-k" not in name),
    ),
    ("finished dense", lambda name: "-open-" in name or "-full-" in name),
    ("learned anchors, Muon inside", lambda name: "anchors" in name),
    ("Muon inside, recommended", lambda name: name.startswith(("muon", "recommended"))),
    ("others: H, keep, values, ablations, DiLoCo", lambda name: True),
)


def points(book: Book, rows: Mapping[str, str] | None = None) -> list[Point]:
    """Every row with a result; candidates of a learning rate are left out, and runs with more tokens. `rows`:
    these alone, by the name that they have here."""
    rows = rows or {name: name for name, row in book.rows.items() if row.tuned}
    found, dense = [], book.recipe(rows["dense"])
    for name, full_name in rows.items():
        loss, recipe = book.loss(full_name, "mixed"), book.recipe(full_name)
        tokens = recipe.outer.rounds * recipe.round_tokens
        if not loss or tokens > 1.05 * dense.outer.rounds * dense.round_tokens:
            continue
        own = recipe.outer.inner_steps * recipe.inner.batch * recipe.model.context
        stages = stage_share(recipe) * open_stage_bytes(recipe) / own
        kind = next(kind for kind, fits in KINDS if fits(name))
        found.append(Point(name, loss.mean, stages, per_token(recipe)[1], kind, loss.count))
    return found


def frontier(found: Sequence[Point], sent: Callable[[Point], float]) -> list[Point]:
    """Those that are lower than all that send no more, from the fewest bytes up."""
    best: list[Point] = []
    for point in sorted(found, key=lambda p: (sent(p), p.loss)):
        if not best or point.loss < best[-1].loss:
            best.append(point)
    return best


def draw_regime_bytes(book: Book | None) -> Any:
    """The regime in which every method is tuned alike."""
    return draw_bytes(book, {name: regime_name(name) for name, *_ in ROWS}) if book else None


def draw_bytes(book: Book, rows: Mapping[str, str] | None = None) -> Any:
    from matplotlib.figure import Figure

    found = points(book, rows)
    papers = [point for point in found if point.name in PAPERS]
    if len(found) < 3 or not papers:
        return None
    figure = Figure(figsize=(11.5, 5.2), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True)
    most = max(p.replicas for p in papers)
    eighth = max((p.stages for p in papers if p.name in ("pp-8", "het-8")), default=0.0)
    _panel(left, found, lambda p: p.stages, [p for p in found if p.replicas <= most],
           "no more than the paper's between replicas")  # fmt: skip
    few = [p for p in found if p.stages <= eighth]
    _panel(right, found, lambda p: p.replicas, few, "no more than 1/8 in bf16 between stages")
    left.set_title("between stages", loc="left", fontsize=10.5, fontweight="bold", color=INK)
    right.set_title("between replicas", loc="left", fontsize=10.5, fontweight="bold", color=INK)
    left.set_ylabel("held-out loss, mixed, nats", color=SOFT, fontsize=9)
    left.set_xlabel("bytes a token of a pipelined replica, over the whole run", color=SOFT, fontsize=9)
    right.set_xlabel("bytes a token, up and down", color=SOFT, fontsize=9)
    handles, labels = left.get_legend_handles_labels()
    right.legend(*right.get_legend_handles_labels(), fontsize=8, framealpha=0.9, edgecolor="none",
                 labelcolor=INK, loc="upper right")  # fmt: skip
    lines = [(h, t) for h, t in zip(handles, labels, strict=True) if "frontier" in t]
    left.legend(*zip(*lines, strict=True), fontsize=8, framealpha=0.9, edgecolor="none", labelcolor=INK)
    return figure


def _panel(
    axes: Any, found: Sequence[Point], sent: Callable[[Point], float], few: Sequence[Point], words: str
) -> None:
    axes.set_xscale("log")
    axes.grid(color=FAINT, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, labelsize=8.5, length=0)
    axes.minorticks_off()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for at, (kind, _) in enumerate(KINDS):
        own = [point for point in found if point.kind == kind]
        colour = INK if at == 0 else COLOURS[at - 1]
        faces = [colour if point.seeds > 1 else "white" for point in own]  # hollow: one seed
        if own:
            axes.scatter([sent(p) for p in own], [p.loss for p in own], s=42 if at == 0 else 26,
                         marker="D" if at == 0 else "o", facecolors=faces, edgecolors=colour, label=kind,
                         zorder=4 if at == 0 else 3)  # fmt: skip
    if len(found) <= NAMED:
        axes.margins(x=0.12)  # room for the names
        for at, names in _named(found, sent).items():
            axes.annotate(", ".join(names), at, xytext=(5, 3), textcoords="offset points", fontsize=7,
                          color=SOFT)  # fmt: skip
    for chosen, style, label in ((found, "-", "frontier of all"), (few, "--", f"frontier, {words}")):
        best = frontier(chosen, sent)
        axes.step([sent(p) for p in best], [p.loss for p in best], style, where="post", color=SOFT,
                  linewidth=1.3, label=label, zorder=2)  # fmt: skip


def _named(found: Sequence[Point], sent: Callable[[Point], float]) -> dict[tuple[float, float], list[str]]:
    """Where the names go; points that lie on one another to the eye have one place."""
    places: dict[tuple[float, float], tuple[float, float]] = {}
    names: dict[tuple[float, float], list[str]] = {}
    for point in found:
        near = round(math.log10(sent(point)), 1), round(point.loss, 2)
        names.setdefault(places.setdefault(near, (sent(point), point.loss)), []).append(point.name)
    return names
