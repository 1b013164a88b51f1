"""Plot several runs in one picture: a metric against tokens. Drawn with matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError
from isthmus.files import replacing
from isthmus.page.compare import METRICS, Entry, heading
from isthmus.printing import visible
from isthmus.runlog.words import count

COLOURS = ("#1f66c1", "#c8590a", "#12806a", "#7a4bc2", "#b0308a", "#6b7a12", "#a33a32", "#4a5560")
INK, SOFT, FAINT = "#1d2329", "#5d6770", "#e6e3dd"
MOST_LABEL = 120  # characters
SETTLED = 0.04  # the axis fits the curves after this share of the tokens


def check_plot_path(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f'--plot is "{path}"; the name must end in .png or .svg')
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot is {path}, but there is no folder {path.parent}; make it first")


def draw(entries: Sequence[Entry], found: Mapping[str, Sequence[str]], metric: str, path: Path) -> list[str]:
    """Write the picture; return the labels of runs without this metric."""
    lines = [(entry, points) for entry in entries if (points := entry.points(metric))]
    if not lines:
        others = ", ".join(name for name in METRICS if name != metric)
        raise ConfigError(f"none of these runs has measured {metric}; --metric may be {others}")

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8.6, 4.9), dpi=160, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    handles = []
    for number, (entry, points) in enumerate(lines):
        label = _label(entry, found, entries.index(entry))
        xs, ys = zip(*points, strict=True)
        style: dict[str, Any] = {"color": _colour(number, len(lines)), "linewidth": 1.8}
        (handle,) = axes.plot(xs, ys, marker="o" if len(xs) < 3 else None, **style)
        handles.append((ys[-1], f"{ys[-1]:,.4g}   {label}", handle))
    # List the legend from top to bottom, like the ends of the lines.
    handles.sort(key=lambda item: -item[0])
    axes.legend(
        [handle for _, _, handle in handles],
        [text for _, text, _ in handles],
        title="last value, run",
        title_fontproperties={"size": 8.5},
        alignment="left",
        framealpha=0.9,
        edgecolor="none",
        fontsize=9,
        labelcolor=INK,
        loc="upper right" if metric.startswith("loss") else "best",
        handlelength=1.4,
    )
    axes.set_title(METRICS[metric], loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=12)
    axes.set_xlabel("tokens, all replicas together", color=SOFT, fontsize=9.5)
    axes.set_xlim(0, max(points[-1][0] for _, points in lines) or 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count(x)))
    axes.grid(axis="y", color=FAINT, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    if metric.startswith("loss"):
        axes.set_ylabel("nats", color=SOFT, fontsize=9.5)
        _leave_out_the_fall(axes, lines)
    try:
        with replacing(path) as file:
            figure.savefig(file, format=path.suffix.removeprefix(".").lower())
    except OSError as error:
        raise ConfigError(
            f"cannot write the plot {path}: {error.strerror}; give --plot another name"
        ) from None
    return [entry.label for entry in entries if not entry.points(metric)]


def _colour(number: int, total: int) -> Any:
    if total <= len(COLOURS):
        return COLOURS[number]
    from matplotlib import colormaps

    return colormaps["viridis"](0.92 * number / (total - 1))  # many runs are usually a sweep, an order


def _label(entry: Entry, found: Mapping[str, Sequence[str]], number: int) -> str:
    settings = ", ".join(f"{heading(key)} {values[number]}" for key, values in list(found.items())[:3])
    label = visible(f"{entry.label}: {settings}" if settings else entry.label)
    # Escape dollar signs: matplotlib renders what is between two as a formula.
    return (label if len(label) <= MOST_LABEL else label[:MOST_LABEL] + "…").replace("$", r"\$")


def _leave_out_the_fall(axes: Any, lines: Sequence[tuple[Entry, list[tuple[float, float]]]]) -> None:
    """Fit the axis without the first rounds: their steep fall would squeeze all curves into one line."""
    end = max(points[-1][0] for _, points in lines)
    settled = [y for _, points in lines for x, y in points if x >= SETTLED * end]
    top = max(y for _, points in lines for _, y in points)
    if not settled or min(len(points) for _, points in lines) < 12:
        return
    low, high = min(settled), max(settled)
    air = 0.06 * (high - low) or 0.1
    if top > high + air:
        axes.set_ylim(low - air, high + air)
        words = {"ha": "right", "va": "bottom", "fontsize": 8.5, "color": SOFT}
        axes.text(
            1, 1.02, f"the curves begin at {top:.2f}, above the frame", transform=axes.transAxes, **words
        )
