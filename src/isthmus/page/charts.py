"""The page's charts of a run's rows: curves, bytes by purpose, plan against actual."""

import math
from collections.abc import Callable
from typing import Any

from isthmus.config import Recipe
from isthmus.page.actual import Comparison, Line, compare_rows
from isthmus.page.replicas import colours_of
from isthmus.runlog import About, Row, Totals
from isthmus.runlog.words import SAME, duration, size, times

FORWARDS = {"mixed": ("loss_mixed", 0), "full": ("loss_full", 1), "pipelined": ("loss_pipelined", 2)}
PURPOSES = {
    "stages": [("activations", "activations"), ("gradients", "gradients"), ("tokens", "token ids")],
    "replicas": [("payload_up", "up"), ("payload_down", "down"), ("control", "control")],
}
FORWARD_NOTE = "Held-out text by forward: mixed, full, pipelined. Training is the replicas' own text."
CONTROL = "Control is all else that the bucket moved: snapshots, manifests, heartbeats."
CLOSE = 1.2  # up to this ratio a plan counts as met
MAX_BUCKETS = 200  # per line; each keeps its lowest and its highest point


def charts(rows: list[Row], recipe: Recipe) -> list[dict[str, Any]]:
    """Return losses by kind of forward and of replica, and the curves that explain them."""
    split = any(replica.kind == "pipelined" for replica in recipe.replicas)
    forwards = FORWARDS if split else {"held-out": ("loss_full", 0)}  # without stages all three are equal
    lines = [
        _line(rows, name, lambda row, f=field: row[f], colour) for name, (field, colour) in forwards.items()
    ]
    lines.append(_line(rows, "training", lambda row: row.loss_train, 7, dashed=True))
    by_kind = []
    for name, colour in colours_of(recipe).items():
        for field, words, dashed in (
            ("loss_by_kind", "held-out", False),
            ("train_by_kind", "training", True),
        ):
            value = lambda row, f=field, n=name: row[f].get(n)  # noqa: E731
            by_kind.append(_line(rows, f"{name}, {words}", value, colour, dashed))
    drawn = [
        _chart("Loss by kind of forward", lines, "nats", "loss", FORWARD_NOTE if split else ""),
        _chart("Loss by kind of replica", by_kind, "nats", "loss", "One line for each [[replicas]] table."),
    ]
    if any(replica.compressed for replica in recipe.replicas):
        gap = _line(rows, "pipelined minus full", _gap, 2)
        note = "Held-out loss through the compressed boundaries, over that of the full forward."
        drawn.append(_chart("What the compressed forward costs", [gap], "nats", "gap", note, zero=True))
    norm = _line(rows, "mean over replicas", lambda row: row.grad_norm, 0)
    drawn.append(_chart("Gradient norm before clipping", [norm], "norm", "number", "", zero=True))
    if len(drawn) % 2:  # the page has two columns
        rate = _line(rows, "inner optimiser", lambda row: row.lr, 0)
        drawn.append(_chart("Learning rate", [rate], "lr", "number", "", zero=True))
    return [chart for chart in drawn if chart["series"]]


def _gap(row: Row) -> float | None:
    if row.loss_full is None or row.loss_pipelined is None:
        return None
    return row.loss_pipelined - row.loss_full


def speeds(rows: list[Row]) -> list[dict[str, Any]]:
    trained = [row for row in rows if row.round]
    speed = _line(trained, "all replicas together", lambda row: row.tokens_per_second, 0)
    here = _line(trained, "measured", lambda row: row.seconds, 0)
    fleet = _line(trained, "virtual clock", lambda row: row.fleet_seconds, 2)
    drawn = [
        _chart("Tokens per second", [speed], "tok/s", "count", "", zero=True),
        _chart("Seconds a round", [here, fleet], "s", "seconds", "", zero=True),
    ]
    return [chart for chart in drawn if chart["series"]]


def _line(
    rows: list[Row], name: str, value: Callable[[Row], float | None], colour: int, dashed: bool = False
) -> dict[str, Any]:
    known = [(row.tokens, y) for row in rows if (y := value(row)) is not None]
    points = [[x, float(f"{y:.6g}")] for x, y in thin(known)]
    return {"name": name, "colour": colour, "dashed": dashed, "points": points}


def thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Keep at most two points per bucket, the lowest and the highest, so that every spike stays."""
    if len(points) <= 2 * MAX_BUCKETS:
        return points
    each = math.ceil(len(points) / MAX_BUCKETS)
    kept = []
    for start in range(0, len(points), each):
        bucket = points[start : start + each]
        kept += [min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])]
    return sorted({points[0], *kept, points[-1]})


def _chart(
    title: str, series: list[dict[str, Any]], unit: str, form: str, note: str, zero: bool = False
) -> dict[str, Any]:
    series = [line for line in series if line["points"]]
    return {"title": title, "unit": unit, "form": form, "note": note, "zero": zero, "series": series}


def crossed(sums: Totals, link: str) -> int:
    """Count bytes like the summary: updates between replicas, without snapshots, manifests and heartbeats."""
    return sums["link_bytes"][link] - (sums["bytes"]["control"] if link == "replicas" else 0)


def traffic(sums: Totals) -> list[dict[str, Any]]:
    """Return the whole run's bytes by purpose, and what dense methods would have sent."""
    found = []
    for link, other in (("stages", "uncompressed"), ("replicas", "dense")):
        parts = [{"name": name, "bytes": sums["bytes"][key]} for key, name in PURPOSES[link]]
        sent, dense = crossed(sums, link), sums["dense_bytes"][link]
        if not sent:
            continue
        words = times(dense / sent) if dense else SAME
        control = sums["bytes"]["control"] if link == "replicas" else 0
        more = f", and {size(control)} of control" if control else ""
        found.append(
            {
                "link": link,
                "title": f"Between {link}: {size(sent)}{more}",
                "colour": 0 if link == "stages" else 3,
                "parts": [part | {"text": size(part["bytes"])} for part in parts if part["bytes"]],
                "note": CONTROL if control else "",
                "sent": sent,
                "sent_text": size(sent),
                "dense": dense if words != SAME else None,
                "dense_text": f"{other} {size(dense)}",
                "times": words,
            }
        )
    return found


def plan(rows: list[Row], recipe: Recipe, about: About) -> dict[str, Any] | None:
    """Return `isthmus plan` for the run's own recipe, next to the run's measurements."""
    found = compare_rows(recipe, about, rows)
    if found is None:
        return None
    return {
        "rounds": found.rounds,
        "simulated": found.simulated,
        "note": _plan_note(found),
        "lines": [_plan_line(line) for line in found.lines],
    }


def _plan_line(line: Line) -> dict[str, Any]:
    value = line.ratio if line.ratio is not None and math.isfinite(line.ratio) else None
    return {
        "kind": line.kind,
        "where": line.where,
        "what": line.what,
        "predicted": value_text(line.predicted, line.unit),
        "measured": value_text(line.measured, line.unit),
        "source": "" if line.source == "measured" else line.source,
        "ratio": {"value": value, "close": 1 / CLOSE <= value <= CLOSE} if value is not None else None,
    }


def _plan_note(found: Comparison) -> str:
    rounds = "1 round" if found.rounds == 1 else f"{found.rounds:,} rounds"
    notes = [
        f"What isthmus plan predicts from this run's own recipe, for {rounds}; bytes are of all of them. A "
        "ratio is measured over predicted; its scale goes from 1/4 to 4, and green is within 20 %."
    ]
    measured = [name for name, source in found.rates.items() if source == "measured"]
    if measured:
        notes.append(
            f"The compute rate of {', '.join(measured)} is the one measured in this run, so links, bubble, "
            "exchange and bytes are what is put to the test."
        )
    if found.simulated:
        notes.append(
            "The run was simulated: its seconds are those of the virtual clock, a formula for the recipe's "
            "machines and links that leaves out closing a round and uneven stages. Nothing travelled "
            "between stages, so those bytes are by shape; payloads were packed and counted."
        )
        return " ".join(notes)
    notes.append(
        "Links are predicted as the recipe describes them and measured as they were: processes on one "
        "machine have faster ones. Seconds are medians over the rounds after the first. A link's share "
        "in use is its bytes over its stated rate while inner steps run."
    )
    return " ".join(notes)


def value_text(value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    if unit == "bytes":
        return size(value)
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "tflops":
        return f"{value:.3g} TFLOP/s"
    return f"{1e3 * value:.3g} ms" if value < 1 else duration(value)
