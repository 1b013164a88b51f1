"""What the page draws of a run's rows: curves, bytes by purpose, plan against actual, the bias gauge."""

from collections.abc import Callable
from typing import Any

from isthmus.config import Recipe
from isthmus.page.actual import compare_rows
from isthmus.page.planned import CLOSE, value_text
from isthmus.page.report import CONTROL, PURPOSES, bytes_title, colours_of, crossed
from isthmus.page.svg import thin
from isthmus.runlog import Row
from isthmus.runlog.words import SAME, size, times

BARE = {"mixed": ("loss_mixed", 0), "full": ("loss_full", 1), "pipelined": ("loss_pipelined", 2)}


def charts(rows: list[Row], recipe: Recipe) -> list[dict[str, Any]]:
    """The report's curves: the same names, the same colours."""
    split = any(replica.kind == "pipelined" for replica in recipe.replicas)
    three = BARE if split else {"held-out": ("loss_full", 0)}
    lines = [
        _line(rows, name, lambda row, f=field: row[f], colour) for name, (field, colour) in three.items()
    ]
    lines.append(_line(rows, "training", lambda row: row["loss_train"], 7, dashed=True))
    drawn = [
        _chart("Loss by kind of forward", lines, "nats", "loss", "Held-out text, and the replicas' own.")
    ]
    by_kind = []
    for name, colour in colours_of(recipe).items():
        for field, words, dashed in (
            ("loss_by_kind", "held-out", False),
            ("train_by_kind", "training", True),
        ):
            value = lambda row, f=field, n=name: row[f].get(n)  # noqa: E731
            by_kind.append(_line(rows, f"{name}, {words}", value, colour, dashed))
    drawn.append(_chart("Loss by kind of replica", by_kind, "nats", "loss", "One line a [[replicas]] table."))
    return [chart for chart in drawn if chart["series"]]


def speeds(rows: list[Row]) -> list[dict[str, Any]]:
    trained = [row for row in rows if row["round"]]
    speed = _line(trained, "all replicas together", lambda row: row["tokens_per_second"], 0)
    here = _line(trained, "measured", lambda row: row["seconds"], 0)
    fleet = _line(trained, "virtual clock", lambda row: row["fleet_seconds"], 2)
    drawn = [
        _chart("Tokens per second", [speed], "tok/s", "count", "", zero=True),
        _chart("Seconds a round", [here, fleet], "s", "seconds", "", zero=True),
    ]
    return [chart for chart in drawn if chart["series"]]


def _line(
    rows: list[Row], name: str, value: Callable[[Row], float | None], colour: int, dashed: bool = False
) -> dict[str, Any]:
    points = [(row["tokens"], value(row)) for row in rows]
    known = [(x, y) for x, y in points if y is not None]
    points = [[x, float(f"{y:.6g}")] for x, y in thin(known)]
    return {"name": name, "colour": colour, "dashed": dashed, "points": points}


def _chart(
    title: str, series: list[dict[str, Any]], unit: str, form: str, note: str, zero: bool = False
) -> dict[str, Any]:
    series = [line for line in series if line["points"]]
    return {"title": title, "unit": unit, "form": form, "note": note, "zero": zero, "series": series}


def traffic(sums: dict[str, Any]) -> list[dict[str, Any]]:
    """Bytes of the whole run by purpose, between stages and between replicas."""
    told = []
    for link, other in (("stages", "uncompressed"), ("replicas", "dense")):
        parts = [{"name": name, "bytes": sums["bytes"][key]} for key, name in PURPOSES[link]]
        sent, dense = crossed(sums, link), sums["dense_bytes"][link]
        if not sent:
            continue
        words = times(dense / sent) if dense else SAME
        notes = [] if words == SAME else [f"{other.capitalize()} {size(dense)}, {words}."]
        if link == "replicas" and sums["bytes"]["control"]:
            notes.append(CONTROL)
        told.append(
            {
                "link": link,
                "title": bytes_title(sums, link),
                "colour": 0 if link == "stages" else 3,
                "parts": [part | {"text": size(part["bytes"])} for part in parts if part["bytes"]],
                "note": " ".join(notes),
            }
        )
    return told


def plan(rows: list[Row], recipe: Recipe, about: dict[str, Any]) -> dict[str, Any] | None:
    """`isthmus plan` on the run's own recipe, beside what the run measured."""
    found = compare_rows(recipe, about, rows)
    if found is None:
        return None
    lines = []
    for line in found.lines:
        ratio = line.ratio if line.ratio_at_measured_rate is None else line.ratio_at_measured_rate
        expected = line.predicted if line.at_measured_rate is None else line.at_measured_rate
        lines.append(
            {
                "kind": line.kind,
                "where": line.where,
                "what": line.what,
                "predicted": value_text(line.predicted, line.unit),
                "expected": value_text(expected, line.unit),
                "measured": value_text(line.measured, line.unit),
                "source": "" if line.source == "measured" else line.source,
                "ratio": ratio,
                "close": ratio is not None and 1 / CLOSE <= ratio <= CLOSE,
            }
        )
    both = any(line.at_measured_rate is not None for line in found.lines)
    return {"rounds": found.rounds, "simulated": found.simulated, "both": both, "lines": lines}


def bias(rows: list[Row], recipe: Recipe) -> dict[str, Any] | None:
    """The share of energy outside S at each boundary, and the embedding's drift in a round."""
    told = [row for row in rows if row["bias"]]
    if not told:
        return None
    kinds, shares, drifts = [], [], []
    for at, replica in enumerate(r for r in recipe.replicas if r.compressed):
        own = [(row, row["bias"][replica.name]) for row in told if replica.name in row["bias"]]
        if not own:
            continue
        first, last = own[0][1], own[-1][1]
        gauges = [
            {"boundary": b, "now": share, "first": first["outside"][b] if b < len(first["outside"]) else None}
            for b, share in enumerate(last["outside"])
        ]
        kinds.append(
            {"kind": replica.name, "gauges": gauges, "drift": last["drift"], "round": own[-1][0]["round"]}
        )
        for b in range(min(len(last["outside"]), 8)):
            value = lambda row, n=replica.name, b=b: _at(row["bias"].get(n, {}).get("outside"), b)  # noqa: E731
            shares.append(_line(told, f"{replica.name}, boundary {b}", value, (2 + 3 * at + b) % 7))
        value = lambda row, n=replica.name: row["bias"].get(n, {}).get("drift")  # noqa: E731
        drifts.append(_line(told, replica.name, value, 2 + 2 * at))
    note = "||r - r U Uᵀ||² / ||r||² of r = x - T_perp[tokens], on one held-out batch."
    other = "||TE (I - U Uᵀ) - T_perp|| / ||T_perp|| after each round, before re-projection."
    drawn = [
        _chart("Energy outside the subspace", shares, "%", "share", note, zero=True),
        _chart("Drift of the embedding", drifts, "%", "share", other, zero=True),
    ]
    return {"kinds": kinds, "charts": [chart for chart in drawn if chart["series"]]}


def _at(values: list[float] | None, place: int) -> float | None:
    return values[place] if values and place < len(values) else None
