"""Equal tuning: the same number of trials for every method, baselines included, on a text of its own.

Every method tries each learning rate of one grid once: what matters most is not left to a draw. A larger one
comes with a longer warm-up and, where there is one, a smaller outer learning rate: so they went together at
12m, and few trials cannot cross them. The other knobs are dealt evenly over the trials by a seed, alike for
methods that have the same knobs; the first trial has the middle of each. Trials are a quarter as long as the
rows that follow, and are scored on the second half of the held-out text; rows that are reported are scored on
the first. Data only; standard library only.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.recommended import recommended
from experiments.tables import REGIME, Regime, Row, Scale, Shown, Table, recipe_of
from isthmus.errors import ConfigError

SHORTER = 4  # times fewer rounds in a trial
REPORT, TUNING = "report", "tuning"  # the two halves of the held-out text

WARMUPS = ("0.02", "0.05", "0.2")  # shares of a run's inner steps
FOLLOWS_LR = {"warmup": 1, "outer.lr": -1}  # knobs that go up or down with the learning rate
OUTER = {"outer.lr": ("0.6", "0.8", "1.0"), "outer.feedback_decay": ("0.9", "0.95", "0.99")}
STEPPED = {"inner.beta2": ("0.95", "0.98", "0.99"), "inner.weight_decay": ("0.03", "0.1", "0.3")}
NESTEROV = {"outer.lr": ("0.5", "0.7", "0.9"), "outer.momentum": ("0.8", "0.9", "0.95")}


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that share their tuned settings, and what is tuned for them."""

    fleet: str
    settings: tuple[str, ...]
    knobs: Mapping[str, tuple[str, ...]]
    words: str


SCORED = 512  # held-out sequences, whatever a batch has
STEP = ("outer.method=adamw",)
MUON = ("inner.optimizer=muon",)
GROUPS = {
    "dense": Group("dense", (), OUTER, "SparseLoCo"),
    "adamw": Group("dense", STEP, STEPPED, "AdamW, averaged at every step"),
    "het": Group("het", (), OUTER, "SparseLoCo + Het-PP-Compress (1/2)"),
    "pp": Group("pp", (), OUTER, "SparseLoCo + PP-Compress"),
    "diloco": Group("dense", ("outer.method=diloco",), NESTEROV, "DiLoCo"),
    "recommended": Group("het", MUON, OUTER, "recommended: Muon inside, int5, half compressed"),
    "adamw-pp": Group("pp", STEP, STEPPED, "AdamW + PP-Compress"),
    "adamw-het": Group("het", STEP, STEPPED, "AdamW + Het-PP-Compress (1/2)"),
}
# By scale: further trials, as many for every method, in the order of its knobs. At 24m-4: around the best of
# its first six, with the longest warm-up, since the others may have been too short. DiLoCo was best with its
# smallest momentum, the recommended fleet with the largest learning rate. Uncompressed, half and all
# compressed have the same.
_LOCO = ("5e-3 0.2 0.8 0.95", "3.2e-3 0.2 0.8 0.99")
_COMPRESSED_STEP = ("1.25e-3 0.2 0.95 0.3", "2e-3 0.2 0.95 0.3")
FURTHER = {
    REGIME: {
        "dense": _LOCO,
        "het": _LOCO,
        "pp": _LOCO,
        "adamw": ("3.2e-3 0.2 0.99 0.03", "5e-3 0.2 0.98 0.1"),
        "diloco": ("5e-3 0.2 0.5 0.8", "8e-3 0.2 0.5 0.6"),
        "recommended": ("1.25e-2 0.2 0.8 0.99", "2e-2 0.2 0.6 0.99"),
        "adamw-pp": _COMPRESSED_STEP,
        "adamw-het": _COMPRESSED_STEP,
    }
}
# (row, group, its own settings, the row that it is compared with), in the order in which they matter.
ROWS = (
    ("dense", "dense", (), "adamw"),
    ("adamw", "adamw", (), ""),
    ("het-8", "het", (), "dense"),
    ("pp-8", "pp", (), "dense"),
    ("recommended", "recommended", (), "dense"),
    ("diloco", "diloco", (), "dense"),
    ("het-8-frozen", "het", ("subspace.adaptation=false",), "het-8"),
    ("pp-8-projected", "pp", ("subspace.weight_projection=true",), "pp-8"),
    ("het-24", "het", ("replicas.edge.compression=1/24",), "dense"),
    ("pp-24", "pp", ("replicas.edge.compression=1/24",), "dense"),
    ("adamw-pp-8", "adamw-pp", (), "adamw"),
    ("adamw-het-8", "adamw-het", (), "adamw"),
)


# What brings SparseLoCo near to averaging at every step: fewer replicas, each with a larger batch; a smaller
# H; larger steps for all; Muon. Nothing is compressed between stages. By name: the group whose settings it
# takes, replicas, sequences in a batch of each, H. It is compared with averaging at steps of the same size.
NEARER = {
    "step-64": ("adamw", 8, 8, 15),
    "m8-h5-64": ("dense", 8, 8, 5),
    "m4-h15-64": ("dense", 4, 16, 15),
    "m4-h5-64": ("dense", 4, 16, 5),
    "m2-h15-64": ("dense", 2, 32, 15),
    "muon-m8-h5-64": ("recommended", 8, 8, 5),
    "step-128": ("adamw", 8, 16, 15),
    "m4-h15-128": ("dense", 4, 32, 15),
    "m4-h10-128": ("dense", 4, 32, 10),
    "m4-h5-128": ("dense", 4, 32, 5),
    "m2-h30-128": ("dense", 2, 64, 30),
}
# Run once more with seeds that they have: their distance from themselves is the GPU's noise.
AGAIN, AGAIN_SEEDS, AGAIN_TEXT = ("dense", "het-8"), 2, f"{REPORT}/again"


def scored_on(fingerprint: str, text: str) -> str:
    """What a line calls its text: the fingerprint, and the half that was scored if it was not all."""
    return f"{fingerprint}/{text}" if text else fingerprint


def regime_name(row: str) -> str:
    return f"regime-{row}"


def again_name(row: str) -> str:
    return f"{regime_name(row)}-again"


def trial_name(group: str, number: int) -> str:
    return f"trial-{group}-{number}"


def nearer_name(name: str) -> str:
    return f"nearer-{name}"


def base_name(inner_steps: int, keep: int) -> str:
    return f"base-h{inner_steps}-k{keep}"


def _regime(scale: Scale) -> Regime:
    if scale.regime is None:
        raise ConfigError(f"at --scale {scale.name} nothing is tuned alike; {REGIME} is for that")
    return scale.regime


def drawn(group: str, scale: Scale) -> list[tuple[str, ...]]:
    """The settings of each trial, all different; the first is the middle of every grid, the further ones come
    last. A warm-up is a share of the run, so it is written apart, see `settings_of`."""
    grids = {"warmup": WARMUPS, **GROUPS[group].knobs}
    draw = random.Random(" ".join(grids))
    regime = _regime(scale)
    lrs = _dealt(regime.lrs, regime.trials)
    places = [sorted(lrs, key=float).index(lr) for lr in lrs]
    columns = {"inner.lr": lrs}
    for knob, grid in grids.items():
        if way := FOLLOWS_LR.get(knob):
            columns[knob] = [grid[::way][place * len(grid) // regime.trials] for place in places]
            continue
        first, *rest = _dealt(grid, regime.trials)
        draw.shuffle(rest)
        columns[knob] = [first, *rest]
    rows = list(zip(*columns.values(), strict=True))
    rows += [tuple(words.split()) for words in FURTHER.get(scale.name, {}).get(group, ())]
    return [tuple(f"{knob}={value}" for knob, value in zip(columns, row, strict=True)) for row in rows]


def _dealt(grid: Sequence[str], count: int) -> list[str]:
    """So many of a grid, its middle first, then outward on both sides, and again from the middle."""
    middle = len(grid) // 2
    outward = sorted(range(len(grid)), key=lambda at: abs(at - middle))
    return [grid[outward[n % len(grid)]] for n in range(count)]


def settings_of(tuned: Sequence[str], rounds: int, inner_steps: int) -> tuple[str, ...]:
    """As `--set` takes them, for a run of so many rounds."""
    pairs = dict(one.split("=") for one in tuned)
    steps = round(float(pairs.pop("warmup")) * rounds * inner_steps)
    return (*(f"{knob}={value}" for knob, value in pairs.items()), f"inner.warmup_steps={steps}")


def sparse(scale: Scale, base: tuple[int, int], rounds: int) -> tuple[str, ...]:
    """This H and keep, for as many inner steps as so many of the scale's rounds have."""
    (inner_steps, keep), steps = base, rounds * scale.inner_steps
    settings = (f"outer.keep={keep}", "outer.values=2bit", f"outer.inner_steps={inner_steps}")
    return (*settings, f"outer.rounds={max(1, steps // inner_steps)}")


def base_settings(group: str, scale: Scale, rounds: int) -> tuple[str, ...]:
    wired = recommended(scale.model) if group == "recommended" else ()
    kept = tuple(s for s in wired if s.startswith("replicas."))  # keep and values are the same for all
    lasts = sparse(scale, _regime(scale).base, rounds)
    if GROUPS[group].knobs is not OUTER:
        lasts = lasts[2:]  # nothing is sparse
    if GROUPS[group].knobs is STEPPED:
        lasts = (f"outer.rounds={rounds}",)  # nor is there an H
    return (*GROUPS[group].settings, *kept, *lasts)


def regime_rows(scale: Scale) -> list[Row]:
    if (regime := scale.regime) is None:
        return []
    rows, rounds = [], max(1, scale.rounds // SHORTER)
    for group, about in GROUPS.items():
        base = base_settings(group, scale, rounds)
        for number, tuned in enumerate(drawn(group, scale)):
            settings = (*base, *settings_of(tuned, rounds, scale.inner_steps))
            title = f"{about.words}: {', '.join(tuned)}"
            rows.append(Row(trial_name(group, number), title, about.fleet, settings, "", group,
                            seeds=(0,), tuned=False, text=TUNING))  # fmt: skip
    for base in regime.bases:
        (first, *_) = drawn("dense", scale)
        settings = (*sparse(scale, base, rounds), *settings_of(first, rounds, scale.inner_steps))
        title = f"{GROUPS['dense'].words}, H = {base[0]}, {base[1]} of 4096: {', '.join(first)}"
        rows.append(Row(base_name(*base), title, "dense", settings, "", "dense", seeds=(0,),
                        tuned=False, text=TUNING))  # fmt: skip
    for name, group, own, against in ROWS:
        title = GROUPS[group].words + (f", {own[0]}" if own else "")
        base = base_settings(group, scale, scale.rounds)
        other = regime_name(against) if against else ""
        rows.append(Row(regime_name(name), title, GROUPS[group].fleet, (*base, *own), other, group,
                        regime.seeds, tuned=False, text=REPORT, follows=group))  # fmt: skip
        if name in AGAIN:
            rows.append(Row(again_name(name), f"{title}, the same once more", GROUPS[group].fleet,
                            (*base, *own), regime_name(name), group, regime.seeds[:AGAIN_SEEDS], tuned=False,
                            text=AGAIN_TEXT, follows=group, repeats=True))  # fmt: skip
    rows += [_nearer_row(name, scale) for name in NEARER if regime.sequences]
    return rows


def _nearer_row(name: str, scale: Scale) -> Row:
    """Half as long as a reported row, and scored on the text for tuning: by it a regime is chosen."""
    group, replicas, batch, inner_steps = NEARER[name]
    regime, together = _regime(scale), replicas * batch
    steps = scale.rounds * scale.inner_steps * regime.sequences // (2 * together)
    rounds = max(1, steps // inner_steps)
    settings = (
        *(s for s in GROUPS[group].settings if s in (*STEP, *MUON)),
        *(() if group == "adamw" else (f"outer.keep={regime.base[1]}", "outer.values=2bit")),
        f"outer.inner_steps={inner_steps}",
        f"outer.rounds={rounds}",
        f"inner.warmup_steps={rounds * inner_steps // 5}",
        f"replicas.edge.count={replicas}",
        f"inner.batch={batch}",
        f"data.eval_batches={SCORED // batch}",
        f"data.eval_every={rounds}",
    )
    inside = f"SparseLoCo, {'Muon' if group == 'recommended' else 'AdamW'} inside"
    words = GROUPS[group].words if group == "adamw" else f"{inside}, {replicas} replicas, H = {inner_steps}"
    return Row(nearer_name(name), f"{words}, {together} sequences a step", "dense", settings,
               nearer_name(f"step-{together}"), group, (0,), tuned=False, text=TUNING,
               follows=group)  # fmt: skip


def regime_tables(scale: Scale) -> list[Table]:
    if (regime := scale.regime) is None:
        return []
    numbers = range(len(drawn("dense", scale)))
    trials = [Shown(trial_name(g, n)) for n in numbers for g in GROUPS]
    shown = [Shown(regime_name(name)) for name, *_ in ROWS] + [Shown(again_name(name)) for name in AGAIN]
    bases = tuple(Shown(base_name(*base)) for base in regime.bases)
    tables = [
        Table("tune-base", "Which H and how many entries, on the text for tuning", bases, views=("full",),
              bytes=("replicas",)),
        Table("tune-regime", "The same number of trials for every method, on a text of its own",
              tuple(trials), views=("mixed",)),
        Table("regime", "The regime in which the base works, every method tuned alike", tuple(shown),
              bytes=("stages", "replicas")),
    ]  # fmt: skip
    if regime.sequences:
        near = tuple(Shown(nearer_name(name)) for name in NEARER)
        title = "What brings SparseLoCo near to averaging at every step"
        tables.append(Table("nearer", title, near, views=("full",), bytes=("replicas",)))
    return tables


def results_of(scale: Scale, lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """By group: the loss of each of its trials as it trains; infinite where it diverged, None if not run."""
    from experiments.lines import digest  # which imports the catalog, which imports this

    if scale.regime is None:
        return {}
    losses = {
        line["digest"]: float("inf") if line.get("failed") else line["loss_mixed"]
        for line in lines
        if line["corpus"] == scored_on(line["corpus"].partition("/")[0], TUNING)
    }
    rows, found = {row.name: row for row in regime_rows(scale)}, {}
    for group in GROUPS:
        trials = [rows[trial_name(group, number)] for number in range(len(drawn(group, scale)))]
        found[group] = [losses.get(digest(recipe_of(row, scale, 0, "", scale.lr))) for row in trials]
    return found


def best_trial(results: Sequence[float | None], first: int) -> int | None:
    """Its number: of all, once all are there; before, of the first so many, once these are."""
    found = results if None not in results else results[:first]
    known = [loss for loss in found if loss is not None]
    return known.index(min(known)) if len(known) == len(found) else None


def chosen(scale: Scale, lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """By group: the settings of its best trial as it trains; those of its first trial where too many are
    missing to tell."""
    results = results_of(scale, lines)
    if not results:
        return {}
    first = _regime(scale).trials
    picks = {group: drawn(group, scale)[best_trial(found, first) or 0] for group, found in results.items()}
    return {group: settings_of(tuned, scale.rounds, scale.inner_steps) for group, tuned in picks.items()}


def unsettled(scale: Scale, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Groups with a trial that is not there: their rows would be run with what may not be the best."""
    return [group for group, found in results_of(scale, lines).items() if None in found]


def picks_table(scale: Scale, lines: Sequence[Mapping[str, Any]]) -> str:
    """What each method takes, and which of its knobs lie at an edge of what it tried, where a better value
    may lie beyond."""
    rows = ["| method | picked | at an edge of what it tried |", "| --- | --- | --- |"]
    for group, found in results_of(scale, lines).items():
        best = best_trial(found, _regime(scale).trials)
        there = f"{len(found) - found.count(None)} of {len(found)} trials"
        if best is None:
            rows.append(f"| {GROUPS[group].words} | {there} | |")
            continue
        trials = drawn(group, scale)
        tried = [trial for trial, loss in zip(trials, found, strict=True) if loss is not None]
        so_far = f" (best of {there})" if None in found else ""
        edges = ", ".join(edges_of(trials[best], tried)) or "none"
        rows.append(f"| {GROUPS[group].words} | {', '.join(trials[best])}{so_far} | {edges} |")
    return "\n".join(rows)


def edges_of(pick: Sequence[str], tried: Sequence[Sequence[str]]) -> list[str]:
    """The knobs of a pick that no trial had larger, or none smaller."""
    found = []
    for setting, column in zip(pick, zip(*tried, strict=True), strict=True):
        knob, _, value = setting.partition("=")
        values = [float(one.partition("=")[2]) for one in column]
        ends = [word for word, end in (("smallest", min(values)), ("largest", max(values)))
                if float(value) == end]  # fmt: skip
        found += [f"{knob} ({' and '.join(ends)})"] if ends else []
    return found


def trials_table(scale: Scale, lines: Sequence[Mapping[str, Any]]) -> str:
    """The loss of every trial as it trains, by method and learning rate, then of the further ones with their
    settings; the best of each method is bold."""
    regime = _regime(scale)
    count = len(drawn("dense", scale)) - regime.trials
    head = [*regime.lrs, *(f"further, {n}" for n in range(1, count + 1))]
    rows = [f"| method | {' | '.join(head)} |", "| --- |" + " ---: |" * len(head)]
    for group, found in results_of(scale, lines).items():
        best = best_trial(found, regime.trials)
        words = ["not run" if loss is None else f"{loss:.3f}" for loss in found]
        words = [f"**{word}**" if number == best else word for number, word in enumerate(words)]
        tried = [one[0].partition("=")[2] for one in drawn(group, scale)]
        by_lr = dict(zip(tried[: regime.trials], words[: regime.trials], strict=True))
        further = [
            f"{word} ({', '.join(value.partition('=')[2] for value in one)})"
            for word, one in zip(words, drawn(group, scale), strict=True)
        ][regime.trials :]
        cells = [*(by_lr.get(lr, "not run") for lr in regime.lrs), *further]
        rows.append(f"| {GROUPS[group].words} | {' | '.join(cells)} |")
    return "\n".join(rows)
