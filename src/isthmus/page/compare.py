"""Compare runs: the differences between their recipes, and their results."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.config import Recipe, ReplicaConfig, nearest
from isthmus.config.toml import as_tables
from isthmus.errors import ConfigError
from isthmus.printing import visible
from isthmus.runlog import Row, totals
from isthmus.runlog.words import count, first_and_last, fleet_in_words, rate, size

METRICS = {
    "loss_mixed": "Held-out loss, each replica as it trains (mixed)",
    "loss_full": "Held-out loss, full forward",
    "loss_pipelined": "Held-out loss, pipelined forward",
    "loss_train": "Training loss",
    "grad_norm": "Gradient norm before clipping",
    "lr": "Learning rate",
    "tokens_per_second": "Tokens per second",
    "seconds": "Seconds a round, here",
    "fleet_seconds": "Seconds a round, on that fleet's links",
}
LOSSES = {"loss_mixed": "mixed", "loss_full": "full", "loss_pipelined": "pipelined"}
SHORT = {"outer.inner_steps": "H", "outer.method": "method", "outer.keep": "keep", "outer.values": "values"}
MAX_COLUMNS = 6  # of recipe keys; more would crowd out the results


def check_metric(metric: str) -> None:
    if metric not in METRICS:
        hint = nearest(metric, list(METRICS)) or f"; it is one of {', '.join(METRICS)}"
        raise ConfigError(f'--metric is "{metric}", which no run records{hint}')


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One run of the comparison; `where` is the path as given."""

    label: str
    where: str
    recipe: Recipe
    rows: list[Row]

    @property
    def results(self) -> dict[str, Any]:
        sums = totals(self.rows)
        last = {field: first_and_last(self.rows, field) for field in LOSSES}
        return {
            "rounds": sums["rounds"],
            "tokens": sums["tokens"],
            **{field: ends[1][field] if ends else None for field, ends in last.items()},
            "stage_bytes": sums["link_bytes"]["stages"],
            "replica_bytes": sums["link_bytes"]["replicas"] - sums["bytes"]["control"],
            "control_bytes": sums["bytes"]["control"],
            "tokens_per_second": sums["tokens"] / sums["seconds"] if sums["seconds"] else None,
        }

    def points(self, metric: str) -> list[tuple[float, float]]:
        return [(row.tokens, row[metric]) for row in self.rows if row[metric] is not None]


def read_runs(paths: Sequence[str | Path]) -> list[Entry]:
    """Read runs by their folders, or by the URLs or folders of their buckets."""
    given = [str(path) for path in paths]
    names = [_name(where) for where in given]
    entries = []
    for where, name in zip(given, names, strict=True):
        recipe, rows = _read(where)
        if not any(row.round > 0 for row in rows):
            raise ConfigError(f"{where} has no rounds yet; leave it out, or wait for its first")
        entries.append(Entry(name if names.count(name) == 1 else where, where, recipe, rows))
    return entries


def _name(where: str) -> str:
    return where.rstrip("/").rpartition("/")[2] if "://" in where else Path(where).resolve().name


def _read(where: str) -> tuple[Recipe, list[Row]]:
    from isthmus.protocol.place import find_place

    if run := find_place(where).run:
        return run.recipe, run.rows()
    from isthmus.protocol.access import open_ledger
    from isthmus.protocol.recorded import bucket_rows

    ledger = open_ledger(where)
    return ledger.run.recipe, bucket_rows(ledger)


def measured_metric(entries: Sequence[Entry]) -> str:
    """Choose the metric to plot by default: a bucket may have no held-out losses."""
    return next(
        (metric for metric in METRICS if any(entry.points(metric) for entry in entries)), "loss_train"
    )


def differences(recipes: Sequence[Recipe]) -> dict[str, list[str]]:
    """Map each recipe key that differs to its value in every run."""
    flat = [flatten(recipe) for recipe in recipes]
    if len({tuple(replica.name for replica in recipe.replicas) for recipe in recipes}) > 1:
        # Different names mean different fleets: compare them as wholes, not entry by entry.
        for table, recipe in zip(flat, recipes, strict=True):
            for key in [key for key in table if key.startswith("replicas.")]:
                del table[key]
            table["fleet"] = " + ".join(_short_fleet(replica) for replica in recipe.replicas)
    keys = list(dict.fromkeys(key for table in flat for key in table))
    found = {key: [table.get(key, "-") for table in flat] for key in keys}
    found = {key: values for key, values in found.items() if len(set(values)) > 1}
    if "model.preset" in found:  # implies width, layers, heads, ...
        found = {
            key: values
            for key, values in found.items()
            if key == "model.preset" or not key.startswith("model.")
        }
    return found


def flatten(recipe: Recipe) -> dict[str, str]:
    """Flatten to `outer.keep` -> `32`, `replicas.edge.link.mbps` -> `100`, without the run's name."""
    table = as_tables(recipe)
    del table["name"]
    table["replicas"] = {replica.pop("name"): replica for replica in table["replicas"]}
    return dict(_leaves(table, ""))


def _leaves(table: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    leaves = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            leaves += _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            leaves.append((f"{prefix}{key}", f"{value:g}" if isinstance(value, float) else visible(value)))
    return leaves


def _short_fleet(replica: ReplicaConfig) -> str:
    if replica.kind == "full":
        return f"{replica.count} full"
    return f"{replica.count} of {replica.stages} stages" + (f" {replica.ratio}" if replica.compressed else "")


def heading(key: str) -> str:
    """Shorten `replicas.edge.compression` to `edge k/d`; `inner.lr` stays."""
    if key.startswith("replicas."):
        _, name, rest = key.split(".", 2)
        return f"{name} {'k/d' if rest == 'compression' else rest}"
    return SHORT.get(key, key)


def preamble(entries: Sequence[Entry], found: Mapping[str, Sequence[str]]) -> list[str]:
    """Describe what differs, and what the runs have in common."""
    if len(entries) == 1:
        first = "One run."
    elif not found:
        first = f"{len(entries)} runs of the same recipe."
    else:
        first = f"{len(entries)} runs; their recipes differ in {', '.join(found)}."
    recipe = entries[0].recipe
    outer, common = recipe.outer, []
    if not any(key.startswith("model.") for key in found):
        common.append(f"{recipe.model.preset} ({count(recipe.model.num_parameters)} parameters)")
    if "fleet" not in found and not any(key.startswith("replicas.") for key in found):
        common.append(fleet_in_words(recipe).rstrip(","))
    common += [
        f"{SHORT[key]} {value}"
        for key, value in (
            ("outer.method", outer.method),
            ("outer.inner_steps", outer.inner_steps),
            ("outer.keep", outer.keep if outer.method == "sparseloco" else None),
            ("outer.values", outer.values if outer.method == "sparseloco" else None),
        )
        if key not in found and value is not None
    ]
    lines = [first, *([f"In common: {', '.join(common)}."] if common and len(entries) > 1 else [])]
    if len({entry.results["control_bytes"] > 0 for entry in entries}) == 2:
        lines.append(
            "control: snapshots, manifests and heartbeats in the bucket. A simulation has no bucket, so its "
            "updates (replicas) are all that it counts."
        )
    return lines


def table(entries: Sequence[Entry], found: Mapping[str, Sequence[str]]) -> str:
    """Return aligned text: the run, the differing settings, the results."""
    results = [entry.results for entry in entries]
    columns: dict[str, list[str]] = {"run": [entry.label for entry in entries]}
    for key in list(found)[:MAX_COLUMNS]:
        columns[heading(key)] = list(found[key])
    num_replicas = [str(entry.recipe.num_replicas) for entry in entries]
    if len(set(num_replicas)) > 1:
        columns["M"] = num_replicas
    columns["rounds"] = [str(result["rounds"]) for result in results]
    columns["tokens"] = [count(result["tokens"]) for result in results]
    pipelined = any(result["loss_pipelined"] is not None for result in results)
    for field, name in LOSSES.items() if pipelined else [("loss_mixed", "loss")]:
        columns[name] = [
            f"{value:.3f}" if (value := result[field]) is not None else "-" for result in results
        ]
    for field, name in (
        ("stage_bytes", "stages"),
        ("replica_bytes", "replicas"),
        ("control_bytes", "control"),
    ):
        if any(result[field] for result in results):
            columns[name] = [size(result[field]) if result[field] else "-" for result in results]
    columns["tok/s"] = [
        rate(value).removesuffix(" tok/s") if (value := result["tokens_per_second"]) else "-"
        for result in results
    ]
    return align(columns)


def align(columns: Mapping[str, Sequence[str]]) -> str:
    """Align words on the left and figures on the right."""
    padded = []
    for name, cells in columns.items():
        width = max(len(text) for text in (name, *cells))
        words = name == "run" or any(text[0].isalpha() or " + " in text for text in cells if text)
        padded.append([text.ljust(width) if words else text.rjust(width) for text in (name, *cells)])
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))
