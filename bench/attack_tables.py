"""The tables of what bench/attacks.py wrote: what bad replicas cost, real and simulated side by side, and how
often honest updates were refused.

    .venv/bin/python bench/attack_tables.py FILE...
"""

import itertools
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def cost_table(lines: Sequence[Line]) -> str:
    """Mean over the seeds: the loss, what it is more than honest under the first setting, and the updates of
    bad and of honest replicas that were refused."""
    settings = list(dict.fromkeys(line["setting"] for line in lines))
    base = {
        line["seed"]: line["loss_mixed"]
        for line in lines
        if line["kind"] == "honest" and line["setting"] == settings[0]
    }
    rows = [
        "| | " + " | ".join(f"{setting} | cost | refused" for setting in settings) + " |",
        "| --- |" + " ---: | ---: | ---: |" * len(settings),
    ]
    for kind in dict.fromkeys(line["kind"] for line in lines):
        words = [kind]
        for setting in settings:
            some = [line for line in lines if (line["kind"], line["setting"]) == (kind, setting)]
            words += _cells(some, base)
        rows.append("| " + " | ".join(words) + " |")
    return "\n".join(rows)


def _cells(some: Sequence[Line], base: dict[int, float]) -> list[str]:
    if not some:
        return ["", "", ""]
    costs = [line["loss_mixed"] - base[line["seed"]] for line in some if line["seed"] in base]
    loss = statistics.mean(line["loss_mixed"] for line in some)
    judged = sum(line["rounds"] * line["num_bad"] for line in some)
    bad, honest = (sum(len(refused(line, of_bad)) for line in some) for of_bad in (True, False))
    words = f"{bad} of {judged}" if judged else str(honest)
    if judged and honest:
        words += f", and {honest} honest"
    return [f"{loss:.3f}", f"{statistics.mean(costs):+.3f}" if costs else "", words]


def refused(line: Line, of_bad: bool) -> list[str]:
    """The updates of the bad ones that were refused, or those of the honest ones."""
    return [each for each in line["refused"] if (each.split()[1].rstrip(":") in line["bad"]) == of_bad]


def side_by_side(lines: Iterable[Line]) -> str:
    """Real and simulated runs of the same recipe and seed."""
    found: dict[tuple, dict[str, Line]] = {}
    for line in lines:
        key = tuple(
            json.dumps(line[name]) for name in ("kind", "setting", "fleet", "seed", "rounds", "norm", "set")
        )
        found.setdefault(key, {})[line["engine"]] = line
    rows = [
        "| | | real | simulated | difference | refused, real | simulated |",
        "| --- | --- |" + " ---: |" * 5,
    ]
    for both in found.values():
        if len(both) == 2 and not both["real"]["missing"]:
            real, simulated = both["real"], both["simulated"]
            losses = real["loss_mixed"], simulated["loss_mixed"]
            words = [f"{loss:.4f}" for loss in losses] + [f"{losses[0] - losses[1]:+.4f}"]
            words += [str(len(line["refused"])) for line in (real, simulated)]
            rows.append("| " + " | ".join([real["kind"], real["setting"], *words]) + " |")
    return "\n".join(rows)


def honest_summary(lines: Iterable[Line]) -> str:
    """How many honest updates were judged, scored and refused, and their scores beside those of bad ones."""
    some = [line for line in lines if line["setting"] == "now"]
    good = [s for line in some for each in line["scores"] for n, s in each.items() if n not in line["bad"]]
    bad = [s for line in some for each in line["scores"] for n, s in each.items() if n in line["bad"]]
    judged = sum(line["rounds"] * (line["fleet"] - line["num_bad"]) for line in some)
    lost = [each for line in some for each in refused(line, of_bad=False)]
    words = f"{len(some)} runs, {judged} honest updates, {len(lost)} refused; {len(good)} scored"
    if good:
        ordered = sorted(good)
        words += (
            f", median {statistics.median(ordered):+.4f}, 99 % {ordered[int(0.99 * (len(ordered) - 1))]:+.4f}"
        )
        words += f", largest {ordered[-1]:+.4f}, over 0: {sum(s > 0 for s in good)}"
    if bad:
        words += f"; {len(bad)} scores of bad ones, {min(bad):+.4f} to {max(bad):+.4f}"
    return "\n".join([words, *lost])


def main() -> None:
    texts = [Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    for line in lines:
        if line["missing"]:
            print(f"left out: {line['kind']}, {line['setting']}, {line['engine']}: missing {line['missing']}")
    whole = [line for line in lines if not line["missing"]]

    def group(line: Line) -> tuple:
        return line["engine"], line["fleet"], line["rounds"], json.dumps(line["set"])

    for (engine, fleet, rounds, extra), some in itertools.groupby(sorted(whole, key=group), key=group):
        some = list(some)
        honest = [line for line in some if not line["num_bad"]]
        for bad, norm in sorted({(line["num_bad"], line["norm"]) for line in some if line["num_bad"]}):
            print(f"\n{engine}, {bad} of {fleet}, {rounds} rounds, norm {norm}, {extra}\n")
            print(cost_table([*honest, *(x for x in some if (x["num_bad"], x["norm"]) == (bad, norm))]))
        print(f"\nhonest runs of {fleet}: {honest_summary(honest)}")
        print(f"all runs of {fleet}: {honest_summary(some)}")
    print("\n" + side_by_side(whole))


if __name__ == "__main__":
    main()
