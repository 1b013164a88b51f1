"""`isthmus reproduce 178m`: three fleets of the paper's smaller model as data, and their lines.

Standard library only: the page is drawn, and the runs are listed, without torch.
"""

import dataclasses
from pathlib import Path

from experiments.lines import Line, digest, identity, read
from experiments.recommended import recommended
from experiments.tables import Row, Scale, recipe_of
from experiments.work import COMPILE_SECONDS, rate
from isthmus.config import Recipe, stored_recipe
from isthmus.errors import ConfigError
from isthmus.planner.memory import SimulatorPlan, plan_simulator
from isthmus.runlog.words import count, duration, fleet_in_words

NAME = "178m"
FILE = f"{NAME}.jsonl"
FIELDS = ("sustained_tokens_per_second", "predicted_bytes", "peak_bytes", "round_bytes")
ASSUMED_FREE_BYTES = int(0.92 * 139 * 2**30)  # of an H200, for a list made on a machine without one

# A twentieth of the paper's tokens. The paper's batch of 32 and H = 50 would leave too few rounds, so both
# are smaller. With `nano` on a CPU and 390 inner steps, H = 30 ended at 5.22, 15 at 4.97, 10 at 4.86.
# A round is 15 inner steps of 8 replicas x 8 x 2,048 tokens = 1.97 M tokens, so 77 rounds are 151 M.
SCALES = {
    NAME: Scale(
        NAME,
        "the paper's smaller model",
        ("model.preset=178m", "inner.batch=8", "inner.micro_batches=4", "data.eval_batches=16",
         "data.eval_every=3"),
        inner_steps=15,
        rounds=77,
        lr={},
        tokens_per_second=420_000.0,
        decay_t_perp=True,
    ),
    "toy": Scale(
        f"{NAME}-toy",
        "four rounds of nano, to try the machinery",
        ("model.preset=nano", "model.context=32", "inner.batch=2", "inner.micro_batches=1"),
        inner_steps=2,
        rounds=4,
        lr={},
        record=False,
        tokens_per_second=2e3,
    ),
}  # fmt: skip
# The one tuned at 12M, lowered because the model is wider; not tuned at this size. Muon takes AdamW's.
LR = {"dense": 6e-4, "het-8": 6e-4, "recommended": 6e-4}
LR_TOY = 4e-3


def rows_at(scale: Scale) -> dict[str, Row]:
    """The first two are the paper's. One seed gives all of them the same text in the same order."""
    found = (
        Row("dense", "SparseLoCo", "dense"),
        Row("het-8", "SparseLoCo + Het-PP-Compress (1/2), k/d = 1/8", "het"),
        Row("recommended", "half compressed, recommended settings", "het", recommended(scale.model)),
    )
    return {
        row.name: dataclasses.replace(
            row,
            against="" if row.name == "dense" else "dense",
            settings=(f"inner.lr={LR[row.name] if scale.record else LR_TOY:g}", *row.settings),
            seeds=(0,),
            tuned=False,
        )
        for row in found
    }


def pick_fullsize(name: str | None) -> Scale:
    if name not in (None, *SCALES):
        raise ConfigError(f'--scale is "{name}"; of {NAME} it is one of {", ".join(SCALES)}')
    return SCALES[name or NAME]


def recipe_at(scale: Scale, row: str, corpus: str, seed: int = 0, rounds: int | None = None) -> Recipe:
    """The recipe with its end known: the cosine falls over exactly these rounds, after a tenth of warm-up."""
    rounds = scale.rounds if rounds is None else rounds
    if rounds < 1:
        raise ConfigError(f"--rounds is {rounds}; it must be at least 1")
    warmup = f"inner.warmup_steps={max(1, rounds * scale.inner_steps // 10)}"
    found = rows_at(scale)[row]
    found = dataclasses.replace(found, settings=(f"outer.rounds={rounds}", warmup, *found.settings))
    return recipe_of(found, scale, seed, corpus, {})


def predicted_seconds(scale: Scale, tokens: int, lines: list[Line]) -> float:
    """Of training so many tokens, from the start of a process."""
    return tokens / rate(scale, lines)[0] + (COMPILE_SECONDS if scale.record else 0.0)


def predicted_plan(recipe: Recipe) -> SimulatorPlan:
    """The simulator's plan for a GPU as large as an H200."""
    return plan_simulator(recipe, "bf16", ASSUMED_FREE_BYTES, compiled=True, can_park=True)


def read_fullsize(folder: Path, scale: Scale = SCALES[NAME]) -> list[Line]:
    """Its finished lines; a run that was cut off before its last round does not count."""
    found = []
    for line in read(folder, scale):
        lacking = [name for name in FIELDS if line.get(name) is None]
        if lacking:
            raise ConfigError(f'{folder / FILE} has a line without "{lacking[0]}"; remove it, run it anew')
        if line["curve"] and line["curve"][-1][0] == stored_recipe(line["recipe"]).outer.rounds:
            found.append(line)
    return found


def shown_lines(lines: list[Line], scale: Scale = SCALES[NAME]) -> dict[str, Line]:
    """The line of each row's recipe as it is now, all on one corpus: that of the line that came last."""
    wanted = {digest(recipe_at(scale, name, "")): name for name in rows_at(scale)}
    asked = [line for line in lines if line["digest"] in wanted and line["seed"] == 0]
    found = {
        wanted[line["digest"]]: line
        for line in asked
        if line["corpus"] == asked[-1]["corpus"]  # of two texts, losses cannot be compared
    }
    return {name: found[name] for name in rows_at(scale) if name in found}


def line_of(lines: list[Line], recipe: Recipe, corpus: str) -> Line | None:
    """The finished line of this run; `corpus` is the fingerprint of the text."""
    return {identity(line): line for line in lines}.get((recipe.seed, digest(recipe), corpus))


def describe(scale: Scale, recipe: Recipe, lines: list[Line]) -> str:
    """The plan of a run, before it starts."""
    tokens, plan = recipe.outer.rounds * recipe.round_tokens, predicted_plan(recipe)
    each, measured = rate(scale, lines)
    return (
        f"{recipe.name}: {fleet_in_words(recipe).rstrip(',')}, {count(recipe.model.num_parameters)} "
        "parameters, "
        f"{recipe.outer.rounds} rounds of H = {recipe.outer.inner_steps}, {tokens / 1e6:.1f} Mtok\n"
        f"on a GPU in bf16: {plan.describe(recipe.num_replicas)}\n"
        f"about {duration(predicted_seconds(scale, tokens, lines))} at {each:,.0f} tokens/s, "
        f"{'as measured' if measured else 'which is assumed'}"
    )
