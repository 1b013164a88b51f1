"""What a trial, a quarter as long, says of a whole run: methods that were run to the end with the settings of
more than one of their trials. Standard library only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.lines import Line, digest
from experiments.tables import Scale, recipe_of
from experiments.tuning import (
    GROUPS,
    REPORT,
    ROWS,
    drawn,
    regime_name,
    regime_rows,
    results_of,
    scored_on,
    settings_of,
)

SEED = 0  # of every trial
# Methods whose difference a claim is about.
CLAIMED = (("dense", "adamw"), ("pp", "dense"), ("het", "dense"), ("het", "pp"), ("adamw-pp", "adamw"),
           ("adamw-het", "adamw"), ("adamw-het", "adamw-pp"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Both:
    """The same settings, tried and run to the end; losses as they train."""

    number: int
    trial: float
    whole: float


def run_to_the_end(scale: Scale, lines: Sequence[Line]) -> dict[str, list[Both]]:
    """By method, the best trial first. A method's first row stands for it: it has no settings of its own."""
    rows = {row.name: row for row in regime_rows(scale)}
    whole = {
        line["digest"]: line["loss_mixed"]
        for line in lines
        if line["seed"] == SEED
        and not line.get("failed")
        and line["corpus"] == scored_on(line["corpus"].partition("/")[0], REPORT)
    }
    found = {}
    for group, trials in results_of(scale, lines).items():
        row = rows[
            regime_name(next(name for name, own, settings, _ in ROWS if own == group and not settings))
        ]
        both = []
        for number, (tuned, trial) in enumerate(zip(drawn(group, scale), trials, strict=True)):
            settings = {group: settings_of(tuned, scale.rounds, scale.inner_steps)}
            loss = whole.get(digest(recipe_of(row, scale, SEED, "", scale.lr, settings)))
            if trial is not None and loss is not None:
                both.append(Both(number, trial, loss))
        if len(both) > 1:
            found[group] = sorted(both, key=lambda one: one.trial)
    return found


def lengths(scale: Scale, lines: Sequence[Line]) -> str:
    """A table of them, and for how many the better trial gave the better run."""
    found = run_to_the_end(scale, lines)
    if not found:
        return "No method was run to the end with the settings of two trials."
    kept = [group for group, (best, *rest) in found.items() if best.whole <= min(one.whole for one in rest)]
    rows = ["| method | settings | trial | whole run | |", "| --- | --- | ---: | ---: | ---: |"]
    for group, (best, *rest) in found.items():
        for one in (best, *rest):
            settings = ", ".join(setting.partition("=")[2] for setting in drawn(group, scale)[one.number])
            gap = "" if one is best else f"{100 * (one.whole / best.whole - 1):+.2f} %"
            name = GROUPS[group].words if one is best else ""
            rows.append(f"| {name} | {settings} | {one.trial:.3f} | {one.whole:.3f} | {gap} |")
    count = f"{len(kept)} of {len(found)}"
    return "\n".join([f"The better trial gave the better run for {count} methods (one seed).", "", *rows])


def by_tuning(scale: Scale, lines: Sequence[Line]) -> str:
    """How differences of methods move where each has the best whole run that is known of it, in place of the
    one with the settings that its trials picked."""
    found = run_to_the_end(scale, lines)
    rows = ["| | as picked | best run of each | |", "| --- | ---: | ---: | --- |"]
    for group, other in CLAIMED:
        if not {group, other} <= found.keys():
            continue
        picked, best = (
            100 * (pick(found[group]) / pick(found[other]) - 1)
            for pick in (lambda both: both[0].whole, lambda both: min(one.whole for one in both))
        )
        turns = "the sign turns" if picked * best < 0 else ""
        words = f"{GROUPS[group].words}, against {GROUPS[other].words}"
        rows.append(f"| {words} | {picked:+.2f} % | {best:+.2f} % | {turns} |")
    return "\n".join(rows) if len(rows) > 2 else "No two methods were run so."
