"""Charts as inline SVG: sharp at any size, small, and coloured by the page's style sheet, so dark mode works.

Every function returns HTML text. Colours are classes `c0` to `c7`. What a chart shows under the pointer is
there from the start and made visible by `:hover`: a report needs no script.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 22, 40
MAX_TIPS = 100  # positions that answer to the pointer
MAX_BUCKETS = 200  # of a line; each keeps its lowest and its highest point


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points in the order of x; a y of None was not measured and is skipped."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 0
    dashed: bool = False

    @property
    def known(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if y is not None and math.isfinite(y)]


def ticks(low: float, high: float, about: int = 7) -> list[float]:
    """Round numbers between `low` and `high`, both included."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _range(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """A little more than the values fill, so that no line runs along the frame."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    if from_zero and high > low:
        return low - air if low else 0.0, high + air if high else 0.0
    return low - air, high + air


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    x_format: Callable[[float], str],
    y_format: Callable[[float], str],
    from_zero: bool = False,
) -> str:
    """Lines over common axes, with a legend that gives the last value of each."""
    series = [line for line in series if line.known]
    if not series:
        return _figure(title, "", '<p class="empty">Nothing measured yet.</p>')
    xs = [x for line in series for x, _ in line.known]
    ys = [y for line in series for _, y in line.known]
    x_low, x_high = min(0.0, *xs), max(xs) or 1.0  # x starts at zero, and the line ends at the frame
    y_low, y_high = _range(ys, from_zero)

    def at_x(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    x_ticks = ticks(x_low, x_high) if max(xs) else [0.0]
    parts = _axes(x_ticks, ticks(y_low, y_high), at_x, at_y, x_format, x_label, y_label)
    for line in series:
        spots = [(at_x(x), at_y(y)) for x, y in thin(line.known)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        parts.append(f'<path class="line c{line.colour}{" dashed" if line.dashed else ""}" d="{path}"/>')
        if len(spots) <= 2:
            parts += [_dot(x, y, line.colour) for x, y in spots]
    parts += _tips(series, at_x, at_y, x_format, y_format, x_label)
    legend = "".join(
        f'<li class="c{line.colour}{" dashed" if line.dashed else ""}"><i></i>{escape(line.name)} '
        f"<b>{escape(y_format(line.known[-1][1]))}</b></li>"
        for line in series
    )
    body = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
    return _figure(title, f'<ul class="legend">{legend}</ul>', body)


def _axes(
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
    x_format: Callable[[float], str],
    x_label: str,
    y_label: str,
) -> list[str]:
    parts = []
    decimals = max((len(f"{y:.6g}".partition(".")[2]) for y in y_ticks), default=0)
    for y in y_ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>'
        )
        parts.append(f'<text class="end" x="{LEFT - 8}" y="{at_y(y) + 4:.1f}">{y:,.{decimals}f}</text>')
    base = HEIGHT - BOTTOM
    for x in x_ticks:
        # A label under the right edge would stick out of the picture.
        anchor = "end" if at_x(x) > WIDTH - RIGHT - 16 else "mid"
        parts.append(
            f'<line class="axis" x1="{at_x(x):.1f}" x2="{at_x(x):.1f}" y1="{base}" y2="{base + 4}"/>'
        )
        parts.append(f'<text class="{anchor}" x="{at_x(x):.1f}" y="{base + 17}">{escape(x_format(x))}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    parts.append(f'<text class="end" x="{LEFT - 8}" y="11">{escape(y_label)}</text>')
    parts.append(f'<text class="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}">{escape(x_label)}</text>')
    return parts


def _tips(
    series: Sequence[Series],
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
    x_format: Callable[[float], str],
    y_format: Callable[[float], str],
    x_label: str,
) -> list[str]:
    """One strip for each x: hidden marks and words that `:hover` shows."""
    by_x: dict[float, list[tuple[Series, float]]] = {}
    for line in series:
        for x, y in line.known:
            by_x.setdefault(x, []).append((line, y))
    places = sorted(by_x)
    places = [*places[: -1 : math.ceil(len(places) / MAX_TIPS)], places[-1]]
    middles = [(at_x(a) + at_x(b)) / 2 for a, b in itertools.pairwise(places)]
    parts = []
    for x, left, right in zip(places, [LEFT, *middles], [*middles, WIDTH - RIGHT], strict=True):
        words = ", ".join(f"{line.name} {y_format(y)}" for line, y in by_x[x])
        figures = "".join(
            f'<tspan class="c{line.colour}" dx="8">{y_format(y)}</tspan>' for line, y in by_x[x]
        )
        dots = "".join(_dot(at_x(x), at_y(y), line.colour) for line, y in by_x[x])
        height = HEIGHT - TOP - BOTTOM
        parts.append(
            f'<g class="tip"><title>{escape(f"{x_format(x)} {x_label}: {words}")}</title>'
            f'<rect x="{left:.1f}" y="{TOP}" width="{max(0.5, right - left):.1f}" height="{height}"/>'
            f'<line x1="{at_x(x):.1f}" x2="{at_x(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>{dots}'
            f'<text class="end" x="{WIDTH - RIGHT}" y="11">{escape(x_format(x))}{figures}</text></g>'
        )
    return parts


def _dot(x: float, y: float, colour: int) -> str:
    return f'<circle class="c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most two points a bucket, its lowest and its highest, so that no spike disappears."""
    if len(points) <= 2 * MAX_BUCKETS:
        return points
    each = math.ceil(len(points) / MAX_BUCKETS)
    kept = []
    for start in range(0, len(points), each):
        bucket = points[start : start + each]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return sorted({points[0], *kept, points[-1]})


def share_bar(
    title: str, parts: Sequence[tuple[str, float]], colour: int, show: Callable[[float], str]
) -> str:
    """One bar cut into its parts, (name, value), in shades of one colour, with the values in the legend."""
    total, at, blocks, legend = sum(value for _, value in parts), 0.0, [], []
    for shade, (name, value) in enumerate(parts):
        if not value:
            continue
        width = WIDTH * value / total
        style = f"c{colour} shade{shade}"
        words = escape(f"{name} {show(value)} ({100 * value / total:.0f} %)")
        # A little air between neighbours, as long as there is something to take it from.
        blocks.append(
            f'<rect class="block {style}" x="{at:.1f}" width="{max(1.0, width - 1.5):.1f}" height="26">'
            f"<title>{words}</title></rect>"
        )
        legend.append(f'<li class="square {style}"><i></i>{escape(name)} <b>{escape(show(value))}</b></li>')
        at += width
    bar = f'<svg viewBox="0 0 {WIDTH} 26" preserveAspectRatio="none" class="bar">{"".join(blocks)}</svg>'
    return _figure(title, f'<ul class="legend">{"".join(legend)}</ul>', bar)


@dataclass(frozen=True, slots=True)
class Span:
    """A value, another that it is held against, and what to say of the two."""

    label: str
    value: float
    name: str
    other: float
    other_name: str
    words: str
    colour: int


def span_chart(title: str, spans: Sequence[Span], show: Callable[[float], str]) -> str:
    """Pairs on a logarithmic axis: a thousand times as much still fits beside twice as much."""
    values = [value for span in spans for value in (span.value, span.other)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 2)
    margin, each = 24, 70
    height = each * len(spans) + 30

    def at(value: float) -> float:
        return margin + (math.log10(value) - low) / (high - low) * (WIDTH - 2 * margin)

    parts = []
    for power in range(low, high + 1, 1 if high - low < 7 else 3):
        x, words = at(10.0**power), escape(show(10.0**power))
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 20}"/>')
        parts.append(f'<text class="mid" x="{x:.1f}" y="{height - 6}">{words}</text>')
    for number, span in enumerate(spans):
        y, left, right = each * number + 36, *sorted((at(span.value), at(span.other)))
        parts.append(f'<text class="strong" x="0" y="{y - 18}">{escape(span.label)}</text>')
        parts.append(f'<text class="strong end" x="{WIDTH}" y="{y - 18}">{escape(span.words)}</text>')
        parts.append(
            f'<line class="span c{span.colour}" x1="{left:.1f}" x2="{right:.1f}" y1="{y}" y2="{y}"/>'
        )
        for value, name, hollow in ((span.value, span.name, ""), (span.other, span.other_name, " hollow")):
            x, text = at(value), f"{name} {show(value)}"
            # Words point away from the span; at an edge of the picture they turn back.
            room = 6.5 * len(text)
            anchor = "end" if (x == left and x > room) or (x != left and x + room > WIDTH) else ""
            shift = 5 if anchor else -5
            parts.append(f'<circle class="c{span.colour}{hollow}" cx="{x:.1f}" cy="{y}" r="5"/>')
            parts.append(f'<text class="{anchor}" x="{x + shift:.1f}" y="{y + 18}">{escape(text)}</text>')
    body = (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
    return _figure(title, "", body)


def _figure(title: str, legend: str, body: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{body}</figure>"
