"""The report's section "Plan against actual": `actual.compare` as a table."""

import math
from collections.abc import Sequence
from html import escape

from isthmus.page.actual import Comparison, Line
from isthmus.runlog.words import duration, size

CLOSE = 1.2  # a ratio up to which the plan counts as kept: the bound for step times
FACTORS = 4.0  # from 1/4 to 4 on the little scale; beyond it the mark stays at the edge


def section(comparison: Comparison | None) -> str:
    """Nothing where there is nothing to compare."""
    if comparison is None:
        return ""
    both = any(line.at_measured_rate is not None for line in comparison.lines)
    heads = ["", "", "Predicted", "Measured", "Ratio"]
    heads += ["At the rate here", "Ratio"] if both else []
    head = "".join(
        f'<th class="number">{text}</th>' if at > 1 else f"<th>{text}</th>" for at, text in enumerate(heads)
    )
    kinds = list(dict.fromkeys(line.kind for line in comparison.lines))
    body = "".join(
        _group(name, [x for x in comparison.lines if x.kind == name], len(heads), both) for name in kinds
    )
    table = f"<table><thead><tr>{head}</tr></thead>{body}</table>"
    return f'<h2>Plan against actual</h2>{_note(comparison)}<div class="wide actual">{table}</div>'


def _note(comparison: Comparison) -> str:
    rounds = "1 round" if comparison.rounds == 1 else f"{comparison.rounds:,} rounds"
    told = [
        f"What <code>isthmus plan</code> predicts from this run's own recipe, for {rounds}; bytes are of all "
        "of them. A ratio is measured over predicted; its scale goes from 1/4 to 4."
    ]
    measured = [escape(name) for name, source in comparison.rates.items() if source == "measured"]
    stated = [escape(name) for name, source in comparison.rates.items() if source == "stated"]
    if measured:
        told.append(
            f"The recipe states no training rate for {', '.join(measured)}: the compute rate is the one "
            "measured in this run, so links, bubble, exchange and bytes are what is put to the test."
        )
    if comparison.simulated:
        told.append(
            "The run was simulated: its seconds are those of the virtual clock, a formula for the recipe's "
            "machines and links that leaves out closing a round and uneven stages. Nothing travelled "
            "between stages, so those bytes are by shape; payloads were packed and counted."
        )
    else:
        if stated:
            told.append(
                f"The rate of {', '.join(stated)} is the recipe's; on the right, the same plan at the rate "
                "measured here."
            )
        told.append(
            "Links are predicted as the recipe describes them and measured as they were: processes on one "
            "machine have faster ones. Seconds are medians over the rounds after the first. A link's share "
            "in use is its bytes over its stated rate while inner steps run."
        )
    return f'<p class="note">{" ".join(told)}</p>'


def _group(name: str, lines: Sequence[Line], columns: int, both: bool) -> str:
    title = f'<tr><th colspan="{columns}">{escape(name or "the whole fleet")}</th></tr>'
    return f"<tbody>{title}{''.join(_row(line, both) for line in lines)}</tbody>"


def _row(line: Line, both: bool) -> str:
    measured = value_text(line.measured, line.unit)
    if line.source != "measured" and line.measured is not None:
        measured += f" <small>{escape(line.source)}</small>"
    cells = [f"<td>{escape(line.where)}</td>", f"<td>{escape(line.what)}</td>"]
    cells += [_number(value_text(line.predicted, line.unit)), _number(measured), _ratio(line.ratio)]
    if both:
        cells += [_number(value_text(line.at_measured_rate, line.unit)), _ratio(line.ratio_at_measured_rate)]
    return f"<tr>{''.join(cells)}</tr>"


def _number(text: str) -> str:
    return f'<td class="number">{text}</td>'


def value_text(value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if unit == "bytes":
        return escape(size(value))
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "tflops":
        return f"{value:.3g} TFLOP/s"
    return f"{1e3 * value:.3g} ms" if value < 1 else escape(duration(value))


def _ratio(ratio: float | None) -> str:
    """The figure, and a mark on a scale whose middle is 1."""
    if ratio is None or not math.isfinite(ratio):
        return _number("-")
    place = math.log(max(ratio, 1e-9)) / math.log(FACTORS)
    x = 36 + 30 * max(-1.0, min(1.0, place))
    close = max(ratio, 1 / max(ratio, 1e-9)) <= CLOSE
    mark = (
        f'<svg class="c{1 if close else 2}" viewBox="0 0 72 14" width="72" height="14" aria-hidden="true">'
        '<line class="grid" x1="6" x2="66" y1="7" y2="7"/><line class="axis" x1="36" x2="36" y1="1" y2="13"/>'
        f'<circle cx="{x:.1f}" cy="7" r="4"/></svg>'
    )
    figure = f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"
    return _number(f"{figure} {mark}")
