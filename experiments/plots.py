"""The page's plots as SVG: the same lines give the same bytes."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from experiments.bytes_plot import draw_bytes, draw_regime_bytes
from experiments.estimates import VIEWS, Book, Estimate
from experiments.finish import finishing_tokens, price
from experiments.law import VIEWS as LAW_VIEWS
from experiments.law import Line as Straight
from experiments.law import line_through, prices, slope_from_origin
from experiments.law_rows import HS
from experiments.lines import Line
from experiments.paper import PAPER_LADDER, finish_name, finishes
from experiments.search import FRONTIER, STEMS, anchors, frontier
from experiments.search_page import best
from experiments.tables import rung
from isthmus.page.plot import COLOURS, FAINT, INK, SOFT

FLEETS = (("pp", "all compressed"), ("het", "half compressed"))


def draw_all(book: Book, folder: Path, fullsize: Mapping[str, Line] | None = None) -> list[Path]:
    """Every plot that has something to show; `fullsize` are the lines of the paper's size by row."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    plots = {"curves": _curves, "ladder": _ladder, "h": _by_h, "finish": _finish, "frontier": _frontier,
             "bytes": draw_bytes, "bytes-regime": lambda book: draw_regime_bytes(book.regime),
             "law": _law}  # fmt: skip
    for name, draw in (plots | {"178m": lambda book: _fullsize(fullsize or {})}).items():
        # Text stays text, ids hash to the same names, and no date: the file depends on the numbers alone.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "isthmus"}):
            figure = draw(book)
            if figure is None:
                continue
            path = folder / f"results-{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
            drawn.append(path)
    return drawn


def _panels(count: int, titles: list[str], y: str, sharey: bool = True) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.5 * count, 3.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, count, sharey=sharey, squeeze=False)[0]
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
        axes.grid(axis="y", color=FAINT, linewidth=0.9)
        axes.set_axisbelow(True)
        axes.tick_params(colors=SOFT, labelsize=8.5, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(SOFT)
    panels[0].set_ylabel(y, color=SOFT, fontsize=9)
    return figure, list(panels)


def _legend(axes: Any, where: str = "best") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=where, fontsize=8, framealpha=0.9, edgecolor="none", labelcolor=INK)


def _points(axes: Any, xs: list, estimates: list, colour: str, label: str, line: str = "-") -> None:
    found = [(x, e) for x, e in zip(xs, estimates, strict=True) if e]
    if found:
        ys, errors = [e.mean for _, e in found], [e.error or 0 for _, e in found]
        axes.errorbar([x for x, _ in found], ys, errors, color=colour, marker="o", markersize=4,
                      linestyle=line, linewidth=1.6, capsize=2.5, label=label)  # fmt: skip


def _ladder(book: Book) -> Any:
    """Distance from the open baseline by k/d, for each of the three losses; the paper's beside the mixed."""
    ladder = book.scale.ladder()
    names = {fleet: [rung(fleet, ratio) for ratio in ladder] for fleet, _ in FLEETS}
    if not any(book.gap(name, "full") for row in names.values() for name in row):
        return None
    figure, panels = _panels(3, [f"as a {v} forward" for v in VIEWS[:2]] + ["mixed"], "% above SparseLoCo")
    xs = list(range(len(ladder)))
    for axes, view in zip(panels, VIEWS, strict=True):
        for at, (fleet, words) in enumerate(FLEETS):
            _points(axes, xs, [book.gap(name, view) for name in names[fleet]], COLOURS[at], words)
            if view == "mixed":
                paper = [PAPER_LADDER[ratio][at][1] for ratio in ladder]
                axes.plot(xs, paper, ":", color=COLOURS[at], linewidth=1.3, label=f"{words}, paper, 512M")
        axes.set_xticks(xs, [str(Fraction(ratio)) for ratio in ladder])
        axes.set_xlabel("k/d", color=SOFT, fontsize=9)
        _legend(axes)
    return figure


def _curves(book: Book) -> Any:
    """Loss by tokens of Table 1's rows, the first fall left out."""
    rows = (("dense", "SparseLoCo"), ("pp-8", "PP-Compress"), ("het-8", "Het-PP-Compress (1/2)"))
    if not any(book.curve(name, "full") for name, _ in rows):
        return None
    figure, panels = _panels(2, [f"as a {view} forward" for view in VIEWS[:2]], "held-out loss, nats")
    for axes, view in zip(panels, VIEWS, strict=False):
        for at, (name, words) in enumerate(rows):
            curve = book.curve(name, view)
            settled = [point for point in curve if point[0] >= 0.1 * curve[-1][0]]
            if settled:
                xs, ys = zip(*settled, strict=True)
                axes.plot([x / 1e6 for x in xs], ys, color=COLOURS[at], linewidth=1.6, label=words)
        axes.set_xlabel("M tokens, all replicas together", color=SOFT, fontsize=9)
        _legend(axes)
    return figure


def _by_h(book: Book) -> Any:
    """The gap of the half-compressed fleet to the open one, by H."""
    hs = sorted({*book.scale.by_h, book.scale.inner_steps})
    own = book.scale.inner_steps
    names = ["het-8" if h == own else f"het-8-h{h}" for h in hs]
    if not any(book.gap(name, "full") for name in names):
        return None
    figure, (axes,) = _panels(1, ["half compressed, k/d = 1/8"], "% above SparseLoCo at the same H")
    xs = list(range(len(hs)))
    for at, view in enumerate(VIEWS):
        _points(axes, xs, [book.gap(name, view) for name in names], COLOURS[at], view)
    axes.set_xticks(xs, [str(h) for h in hs])
    axes.set_xlabel("H", color=SOFT, fontsize=9)
    _legend(axes)
    return figure


def _finish(book: Book) -> Any:
    """How far the plain model is above the compressed one, by the tokens of the finishing rounds."""
    ways = finishes(book.scale)
    ratios = [
        ratio
        for ratio in book.scale.finished()
        if any(price(book, finish_name(ratio, *way), ratio) for way in ways)
    ]
    if not ratios:
        return None
    titles = [f"all compressed, k/d = {ratio}" for ratio in ratios]
    figure, panels = _panels(len(ratios), titles, "plain model, % above the compressed one", sharey=False)
    for axes, ratio in zip(panels, ratios, strict=True):
        plain = rung("pp", ratio)
        for at, (how, words) in enumerate((("open", "opened step by step"), ("full", "open at once"))):
            names = [plain, *(finish_name(ratio, *way) for way in ways if way[0] == how)]
            xs = [finishing_tokens(book, name) / 1e6 for name in names]
            _points(axes, xs, [price(book, name, ratio) for name in names], COLOURS[at], words)
        axes.axhline(0, linestyle=":", color=SOFT, linewidth=1.3, label="compressed to the end")
        axes.set_xlabel("M tokens in finishing rounds", color=SOFT, fontsize=9)
        _legend(axes)
    return figure


def _frontier(book: Book) -> Any:
    """The price of compressing everything by bytes between stages, each against its own baseline."""
    ways = ("the paper: bf16 in k/d, AdamW", "few bits, AdamW", "bf16 in k/d, Muon", "few bits, Muon",
            "and learned anchors")  # fmt: skip
    points: dict[str, list[Any]] = {way: [] for way in ways}
    for factor in FRONTIER:
        names: list[str | None] = []
        for stem in STEMS:
            first, *few = frontier(book.scale, stem, factor) or [None]
            names += [first, best(book, [name for name in few if name])]
        names.append(next(iter(anchors(book.scale, factor)), None))
        for way, name in zip(ways, names, strict=True):
            points[way].append(book.gap(name, "mixed") if name else None)
    if not any(points["few bits, Muon"]) and not any(points["few bits, AdamW"]):
        return None
    figure, (axes,) = _panels(1, ["all compressed"], "% above the same, uncompressed")
    xs = list(range(len(FRONTIER)))
    for at, way in enumerate(ways):
        _points(axes, xs, points[way], COLOURS[at], way)
    axes.set_xticks(xs, [f"{factor} x" for factor in FRONTIER])
    axes.set_xlabel("fewer bytes between stages", color=SOFT, fontsize=9)
    _legend(axes)
    return figure


def _law(book: Book) -> Any:
    """The price by the share that is compressed, at each H, with the law's line through the origin; as a
    pipelined forward a free line. Bars and bands are one standard error over seeds."""
    found = {view: {h: prices(book, h, view) for h in HS} for view in LAW_VIEWS}
    if not any(found["full"].values()):
        return None
    titles = [f"as a {view} forward" for view in LAW_VIEWS]
    figure, panels = _panels(len(LAW_VIEWS), titles, "% above the same, uncompressed")
    for axes, view in zip(panels, LAW_VIEWS, strict=True):
        for at, h in enumerate(HS):
            seeds = list(found[view][h].values())
            if not seeds:
                continue
            shares = sorted(seeds[0])
            estimates = [Estimate.of([seed[share] for seed in seeds]) for share in shares]
            _points(axes, shares, estimates, COLOURS[at], f"H = {h}", line="")
            if view == "full":
                _straight(axes, [(0.0, slope_from_origin(seed)) for seed in seeds], 0.0, COLOURS[at], "-")
            else:  # only the full score is the law's: here a free line, where there are points
                lines = [line_through(list(seed), list(seed.values())) for seed in seeds]
                _straight(axes, lines, shares[0], COLOURS[at], "--")
        axes.set_xlim(-0.05, 1.05)
        axes.set_xlabel("1 - alpha: the share of replicas that compress", color=SOFT, fontsize=9)
        _legend(axes, "upper left" if view == "full" else "lower left")  # where no points are
    return figure


def _straight(axes: Any, lines: Sequence[Straight], first: float, colour: str, style: str) -> None:
    """The mean of the lines of all seeds up to 1, with a band of one standard error at each point."""
    xs = [first + (1 - first) * n / 20 for n in range(21)]
    found = [e for x in xs if (e := Estimate.of([start + slope * x for start, slope in lines]))]
    axes.plot(xs, [e.mean for e in found], style, color=colour, linewidth=1.3)
    low, high = ([e.mean + sign * (e.error or 0.0) for e in found] for sign in (-1, 1))
    axes.fill_between(xs, low, high, color=colour, alpha=0.18)


def _fullsize(lines: Mapping[str, Line]) -> Any:
    """Loss by tokens of the rows of the paper's size, the first fall left out."""
    if not lines:
        return None
    views = ("full", "mixed")
    figure, panels = _panels(2, ["as a full forward", "mixed"], "held-out loss, nats")
    for axes, view in zip(panels, views, strict=True):
        for at, (name, line) in enumerate(lines.items()):
            last = line["curve"][-1][0]
            points = [point for point in line["curve"] if point[0] >= 0.1 * last]
            xs = [line["tokens"] * point[0] / last / 1e6 for point in points]
            ys = [point[1 + VIEWS.index(view)] for point in points]
            axes.plot(xs, ys, color=COLOURS[at], linewidth=1.6, label=name)
        axes.set_xlabel("M tokens, all replicas together", color=SOFT, fontsize=9)
        _legend(axes)
    return figure
