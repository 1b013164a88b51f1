"""report.html: one run on one page that needs nothing but itself."""

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from isthmus.config import LinkConfig, Recipe, ReplicaConfig, dump_recipe
from isthmus.files import replace_file
from isthmus.page.actual import compare
from isthmus.page.planned import section
from isthmus.page.style import CSS
from isthmus.page.svg import Series, Span, line_chart, share_bar, span_chart
from isthmus.runlog import Row, RunDir, totals
from isthmus.runlog.words import SAME, count, duration, first_and_last, size, summary, times

STATUSES = ("finished", "running", "interrupted", "failed")
PURPOSES = {
    "stages": [("activations", "activations"), ("gradients", "gradients"), ("tokens", "token ids")],
    "replicas": [("payload_up", "up"), ("payload_down", "down"), ("control", "control")],
}
CONTROL = "Control is all else that the bucket moved: snapshots, manifests, heartbeats."


def write_report(run_dir: str | Path) -> Path:
    """Draw the run as it stands; may be called while it goes on."""
    run = RunDir.open(run_dir)
    replace_file(run.report_path, render(run))
    return run.report_path


def render(run: RunDir) -> str:
    rows, about, recipe = run.rows(), run.about, run.recipe
    sums = totals(rows)
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in summary(run))
    sections = [
        _header(recipe, about),
        _tiles(rows, sums),
        f'<ul class="words">{sentences}</ul>',
        f"<h2>The fleet</h2>{_fleet(recipe)}",
        f'<h2>Loss</h2><div class="charts">{_losses(rows, recipe)}</div>' if rows else "",
        _traffic(sums),
        f'<h2>Time</h2><div class="charts">{_times(rows)}</div>' if sums["rounds"] else "",
        section(compare(run)),
        "<h2>Details</h2>",
        _details("The resolved recipe", f"<pre>{escape(dump_recipe(recipe))}</pre>"),
        _details("About this run", _about(about)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(recipe.name)} - Isthmus run</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(sections)}\n</main>\n</body>\n</html>\n"
    )


def _header(recipe: Recipe, about: dict[str, Any]) -> str:
    status = str(about.get("status") or "unknown")
    style = status if status in STATUSES else ""
    facts = [about.get("device"), about.get("mode"), str(about.get("started") or "")[:16].replace("T", " ")]
    return (
        f"<header><p>Isthmus run</p><h1>{escape(recipe.name)} "
        f'<span class="badge {style}">{escape(status)}</span></h1>'
        f"<p>{escape(', '.join(str(fact) for fact in facts if fact))}</p></header>"
    )


def _tiles(rows: list[Row], sums: dict[str, Any]) -> str:
    """The four figures people look for first; those that do not apply are left out."""
    tiles = []
    if ends := first_and_last(rows, "loss_mixed"):
        first, last = (row["loss_mixed"] for row in ends)
        tiles.append(
            ("Held-out loss", f"{last:.3f}", f"nats, from {first:.3f}" if ends[1]["round"] else "nats")
        )
    if sums["tokens"]:
        tiles.append(("Trained on", count(sums["tokens"]), f"tokens in {duration(sums['seconds'])}"))
    for link, other in (("stages", "uncompressed"), ("replicas", "dense")):
        sent, dense = crossed(sums, link), sums["dense_bytes"][link]
        if sent:
            words = f"{other} {size(dense)}" if dense else "crossed"
            tiles.append((f"Between {link}", size(sent), words))
    cells = "".join(
        f"<div><span>{escape(name)}</span><strong>{escape(value)}</strong><span>{escape(words)}</span></div>"
        for name, value, words in tiles
    )
    return f'<div class="tiles">{cells}</div>' if tiles else ""


def _fleet(recipe: Recipe) -> str:
    heads = ("Name", "Replicas", "Kind", "Stages", "k/d", "Link between stages", "Link to the other replicas")
    colours = colours_of(recipe)
    body = "".join(_fleet_row(replica, recipe, colours[replica.name]) for replica in recipe.replicas)
    head = "".join(f"<th>{text}</th>" for text in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide fleet">{table}</div>'


def _fleet_row(replica: ReplicaConfig, recipe: Recipe, colour: int) -> str:
    ratio = "-"
    if replica.kind == "pipelined":
        width = recipe.model.width
        ratio = (
            f"{replica.ratio} ({replica.subspace_dim(width)} of {width})"
            if replica.compressed
            else "uncompressed"
        )
    cells = [
        str(replica.count),
        replica.kind,
        None,
        ratio,
        f"{link_text(replica.link)}, {replica.wire}" if replica.kind == "pipelined" else "-",
        link_text(replica.outer_link) if recipe.num_replicas > 1 else "-",
    ]
    picture = _stages(replica, colour)
    inner = "".join(f"<td>{escape(cell) if cell is not None else picture}</td>" for cell in cells)
    return f"<tr><th>{escape(replica.name)}</th>{inner}</tr>"


def _stages(replica: ReplicaConfig, colour: int) -> str:
    """One box a stage; a thin link is compressed, a thick one is not."""
    boxes, style = min(replica.stages, 12), "thin" if replica.compressed else "thick"
    links = "".join(
        f'<line class="link {style}" x1="{28 * i + 14}" x2="{28 * i + 28}" y1="10" y2="10"/>'
        for i in range(boxes - 1)
    )
    stages = "".join(
        f'<rect class="block" x="{28 * i}" y="3" width="14" height="14" rx="3"/>' for i in range(boxes)
    )
    words = f"{replica.stages} stages" if replica.stages > 1 else "the whole model in one place"
    width = 28 * boxes - 14
    return (
        f'<svg class="c{colour}" viewBox="0 0 {width} 20" width="{width}" height="20" role="img" '
        f'aria-label="{words}"><title>{words}</title>{links}{stages}</svg> {replica.stages}'
    )


def link_text(link: LinkConfig) -> str:
    rate = f"{link.mbps / 1000:g} Gb/s" if link.mbps >= 1000 else f"{link.mbps:g} Mb/s"
    return f"{rate}, {link.latency_ms:g} ms" if link.latency_ms else rate


def colours_of(recipe: Recipe) -> dict[str, int]:
    """The first full kind has the full forward's colour, the first pipelined one the pipelined's."""
    colours: dict[str, int] = {}
    for replica in recipe.replicas:
        own = 1 if replica.kind == "full" else 2
        colours[replica.name] = own if own not in colours.values() else 3 + len(colours) % 5
    return colours


def _series(
    rows: list[Row], name: str, value: Callable[[Row], Any], colour: int, dashed: bool = False
) -> Series:
    return Series(name, [(row.get("tokens") or 0, _number(value(row))) for row in rows], colour, dashed)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _losses(rows: list[Row], recipe: Recipe) -> str:
    pipelined = any(replica.kind == "pipelined" for replica in recipe.replicas)
    axes: dict[str, Any] = {"x_label": "tokens", "y_label": "nats", "x_format": count}
    three = [("mixed", "loss_mixed", 0), ("full", "loss_full", 1), ("pipelined", "loss_pipelined", 2)]
    if not pipelined:
        three = [("held-out", "loss_full", 0)]  # the other two say the same
    lines = [_series(rows, name, lambda row, f=field: row.get(f), colour) for name, field, colour in three]
    charts = [line_chart("Held-out loss", lines, y_format=lambda y: f"{y:.3f}", **axes)]
    by_kind = []
    for name, colour in colours_of(recipe).items():
        for field, words, dashed in (
            ("loss_by_kind", "held-out", False),
            ("train_by_kind", "training", True),
        ):
            value = lambda row, f=field, n=name: (row.get(f) or {}).get(n)  # noqa: E731
            by_kind.append(_series(rows, f"{name}, {words}", value, colour, dashed))
    charts.append(line_chart("Loss by kind of replica", by_kind, y_format=lambda y: f"{y:.3f}", **axes))
    if any(replica.compressed for replica in recipe.replicas):
        gap = _series(rows, "pipelined minus full", _gap, 2)
        title = "What the compressed forward costs"
        charts.append(line_chart(title, [gap], y_format=lambda y: f"{y:+.3f}", from_zero=True, **axes))
    axes |= {"from_zero": True, "y_format": lambda y: f"{y:.3g}"}
    norm = _series(rows, "mean over replicas", lambda row: row.get("grad_norm"), 0)
    charts.append(line_chart("Gradient norm before clipping", [norm], **axes | {"y_label": "norm"}))
    if len(charts) % 2:  # the page has two columns
        rate = _series(rows, "inner optimiser", lambda row: row.get("lr"), 0)
        charts.append(line_chart("Learning rate", [rate], **axes | {"y_label": "lr"}))
    return "".join(charts)


def _gap(row: Row) -> float | None:
    full, pipelined = _number(row.get("loss_full")), _number(row.get("loss_pipelined"))
    return pipelined - full if full is not None and pipelined is not None else None


def crossed(sums: dict[str, Any], link: str) -> int:
    """As the sentences count it: updates between replicas, without snapshots, manifests and heartbeats."""
    return sums["link_bytes"][link] - (sums["bytes"]["control"] if link == "replicas" else 0)


def bytes_title(sums: dict[str, Any], link: str) -> str:
    """Of a bar by purpose: control is a part of the bar, but not of what crossed between replicas."""
    control = sums["bytes"]["control"] if link == "replicas" else 0
    more = f", and {size(control)} of control" if control else ""
    return f"Between {link}: {size(crossed(sums, link))}{more}"


def _traffic(sums: dict[str, Any]) -> str:
    spans, bars = [], []
    for link, other in (("stages", "uncompressed"), ("replicas", "dense")):
        sent, dense = crossed(sums, link), sums["dense_bytes"][link]
        if not sent:
            continue
        colour = 0 if link == "stages" else 3
        parts = [(name, sums["bytes"][key]) for key, name in PURPOSES[link]]
        bars.append(share_bar(bytes_title(sums, link), parts, colour, size))
        if dense and (words := times(dense / sent)) != SAME:
            spans.append(Span(f"Between {link}", sent, "sent", dense, other, words, colour))
    if not bars:
        return ""
    control = f" {CONTROL}" if sums["bytes"]["control"] else ""
    chart = span_chart("Sent, against what dense methods would have sent", spans, size) if spans else ""
    note = (
        '<p class="note">All links of the fleet together, over the whole run. Uncompressed stages would send '
        "activations and their gradients in all dimensions; dense replicas would average fp32 gradients "
        f"after every inner step. The scale on which they are compared is logarithmic.{control}</p>"
    )
    return f'<h2>Bytes</h2>{note}<div class="charts">{chart}<div class="stack">{"".join(bars)}</div></div>'


def _times(rows: list[Row]) -> str:
    trained = [row for row in rows if row["round"] > 0]
    axes: dict[str, Any] = {"x_label": "tokens", "x_format": count, "from_zero": True}
    speed = _series(trained, "all replicas together", lambda row: row.get("tokens_per_second"), 0)
    here = _series(trained, "here", lambda row: row.get("seconds"), 0)
    fleet = _series(trained, "on that fleet's links", lambda row: row.get("fleet_seconds"), 2)
    return line_chart(
        "Tokens per second", [speed], y_label="tok/s", y_format=lambda y: f"{y:,.0f}", **axes
    ) + line_chart("Seconds a round", [here, fleet], y_label="s", y_format=duration, **axes)


def _details(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>{body}</details>"


def _about(about: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>" for key, value in about.items()
    )
    return f"<table><tbody>{rows}</tbody></table>"
