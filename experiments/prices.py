"""planner/loss_prices.toml from results/: what each wire and k/d cost, where all replicas are pipelined.

`isthmus reproduce --render` writes it. A price compares runs that differ in wire and k/d alone, seed by seed.
What results/ has no lines for stays as it is in the file. Standard library only.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean

from experiments.lines import Line, digest
from isthmus.config import Recipe, SubspaceConfig, parse_recipe
from isthmus.files import replace_file
from isthmus.planner.loss_price import FILE

OPEN = ("bf16", "none")
Entry = dict[str, float | int]  # percent, seeds
Points = dict[tuple[str, str], Entry]  # by wire and k/d


def measured(lines: Sequence[Line]) -> dict[str, Points]:
    """By InnerOpt, from the settings under which the most pairs were measured."""
    losses: dict[tuple[str, str], dict[tuple[str, str], dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for line in lines:
        recipe = parse_recipe(line["recipe"])
        if not line.get("failed") and _plainly_pipelined(recipe):
            group = (recipe.inner.optimizer, digest(_opened(recipe)))
            losses[group][_pair(recipe)][line["seed"]] = line["loss_pipelined"]
    found: dict[str, Points] = {}
    for (optimizer, _), by_pair in losses.items():
        points = dict(_prices(by_pair))
        if len(points) > max(1, len(found.get(optimizer, ()))):
            found[optimizer] = points
    return found


def _plainly_pipelined(recipe: Recipe) -> bool:
    """Every replica in stages, and nothing else about boundaries changed: no ablation, no finish."""
    plain = recipe.subspace == SubspaceConfig() and not recipe.finish.rounds
    return plain and len(recipe.replicas) == 1 and recipe.replicas[0].stages > 1


def _opened(recipe: Recipe) -> Recipe:
    wire, compression = OPEN
    return replace(recipe, replicas=(replace(recipe.replicas[0], wire=wire, compression=compression),))


def _pair(recipe: Recipe) -> tuple[str, str]:
    replica = recipe.replicas[0]
    return replica.wire, "none" if replica.ratio is None else str(replica.ratio)


def _prices(
    by_pair: Mapping[tuple[str, str], Mapping[int, float]],
) -> Iterator[tuple[tuple[str, str], Entry]]:
    opened = by_pair.get(OPEN, {})
    for pair, losses in by_pair.items():
        if shared := losses.keys() & opened.keys():
            ratio = fmean(losses[seed] for seed in shared) / fmean(opened[seed] for seed in shared)
            yield pair, {"percent": round(100 * (ratio - 1), 2), "seeds": len(shared)}


def merged(text: str, lines: Sequence[Line]) -> str:
    """The file with what the lines say, its head as it was."""
    head = re.match(r"(?:.*\n)*?(?=\[)", text)
    assert head is not None
    tables = {name: wires for name, wires in tomllib.loads(text).items() if isinstance(wires, dict)}
    for optimizer, points in measured(lines).items():
        for (wire, compression), entry in points.items():
            tables.setdefault(optimizer, {}).setdefault(wire, {})[compression] = entry
    parts = [
        "\n".join([f"[{optimizer}.{wire}]", *_rows(points)])
        for optimizer, wires in tables.items()
        for wire, points in wires.items()
    ]
    return head.group() + "\n\n".join(parts) + "\n"


def _rows(points: Mapping[str, Entry]) -> list[str]:
    mildest_first = sorted(points, key=lambda k: (k != "none", -Fraction(1 if k == "none" else k)))
    return [
        f'"{k}" = {{ percent = {points[k]["percent"]}, seeds = {points[k]["seeds"]} }}' for k in mildest_first
    ]


def write_prices(lines: Sequence[Line], file: Path = FILE) -> Path:
    replace_file(file, merged(file.read_text(encoding="utf-8"), lines))
    return file
