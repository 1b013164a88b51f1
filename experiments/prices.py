"""planner/loss_prices.toml from results/: what each wire and k/d cost if all replicas are pipelined.

`python -m experiments prices` writes it. A price compares runs that differ in wire and k/d alone, by seed.
What results/ has no lines for stays as it is in the file. A few-bit wire that was not causal counts only
until its causal form has a line at the same k/d.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean

from experiments.lines import Line, digest, wire_version
from isthmus.config import Recipe, SubspaceConfig, stored_recipe
from isthmus.files import replace_file
from isthmus.planner.loss_price import FILE, LEARNED

OPEN = ("bf16", "none")
SCALE = "12m"
Entry = dict[str, float | int]  # percent, seeds
Pair = tuple[str, str]  # wire and k/d
Points = dict[Pair, Entry]
ByPair = dict[Pair, dict[int, float]]  # losses by seed


def measured(lines: Sequence[Line]) -> dict[str, Points]:
    """By InnerOpt, from the settings under which the most pairs were measured.

    With learned anchors they are compared with the same open boundaries: fewer entries are kept then, so that
    tables and all take the bytes of fixed anchors.
    """
    losses: dict[str, dict[str, ByPair]] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    mine = [line for line in lines if line["scale"] == SCALE]
    causal = {_pair(stored_recipe(line["recipe"])) for line in mine if wire_version(line) > 1}
    for line in mine:
        recipe = stored_recipe(line["recipe"])
        old = wire_version(line) == 1 and _pair(recipe) in causal
        if not old and not line.get("failed") and _plainly_pipelined(recipe):
            learned = LEARNED if recipe.subspace.anchor == "learned" else ""
            group = losses[f"{recipe.inner.optimizer}{learned}"][digest(_opened(recipe))]
            group[_pair(recipe)][line["seed"]] = line["loss_pipelined"]
    found: dict[str, Points] = {}
    opened: dict[str, Mapping[int, float]] = {}
    for name in sorted(losses):  # fixed anchors before learned ones
        groups = losses[name].values()
        given = opened.get(name.removesuffix(LEARNED), {}) if name.endswith(LEARNED) else None
        priced = [(dict(_prices(group, given)), group) for group in groups]
        points, group = max(priced, key=lambda each: (len(each[0]), _num_seeds(each[0])))
        if points and (given or len(points) > 1):
            found[name], opened[name] = points, group.get(OPEN, {})
    return found


def _num_seeds(points: Points) -> float:
    return sum(entry["seeds"] for entry in points.values())


def _plainly_pipelined(recipe: Recipe) -> bool:
    """Every replica in stages, and nothing else about boundaries changed: no ablation, no finish."""
    subspace = recipe.subspace
    plain = SubspaceConfig(anchor=subspace.anchor, decay_t_perp=subspace.decay_t_perp)
    one = len(recipe.replicas) == 1 and recipe.replicas[0].stages > 1
    return one and subspace == plain and not recipe.finish.rounds


def _opened(recipe: Recipe) -> Recipe:
    wire, compression = OPEN
    replica = replace(recipe.replicas[0], wire=wire, compression=compression)
    subspace = SubspaceConfig(decay_t_perp=recipe.subspace.decay_t_perp)
    return replace(recipe, subspace=subspace, replicas=(replica,))


def _pair(recipe: Recipe) -> Pair:
    replica = recipe.replicas[0]
    return replica.wire, "none" if replica.ratio is None else str(replica.ratio)


def _prices(by_pair: ByPair, given: Mapping[int, float] | None) -> Iterator[tuple[Pair, Entry]]:
    opened = by_pair.get(OPEN, {}) if given is None else given
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


def write(lines: Sequence[Line], file: Path = FILE) -> Path:
    replace_file(file, merged(file.read_text(encoding="utf-8"), lines))
    return file
