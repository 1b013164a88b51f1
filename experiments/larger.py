"""The larger run: one mixed fleet of the paper's 178M model on one GPU, as data; and its lines.

Standard library only: the page is drawn, and the run is listed, without torch.
"""

import json
from pathlib import Path

from experiments.lines import Line, read
from experiments.tables import Scale
from experiments.work import COMPILE_SECONDS
from isthmus.config import Recipe, load_recipe, parse_recipe
from isthmus.errors import ConfigError
from isthmus.planner.memory import SimulatorPlan, plan_simulator
from isthmus.runlog.words import count, duration, fleet_in_words

ROW = "larger"
FILE = "larger.jsonl"
# Table 1, 178M: M = 8 replicas, half of them S = 4 stages at k/d = 1/8.
RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "178m-het-half-k128.toml"
FIELDS = ("sustained_tokens_per_second", "predicted_bytes", "peak_bytes", "round_bytes")
ASSUMED_FREE_BYTES = int(0.92 * 139 * 2**30)  # of an H200, for a list made on a machine without one

# A thirtieth of the paper's tokens. The recipe's batch of 32 and H = 50 would leave too few rounds, so both
# are smaller. With `nano` on a CPU and 390 inner steps, H = 30 ended at 5.22, 15 at 4.97, 10 at 4.86.
# The learning rate is the one tuned at 12M, lowered because the model is wider; it is not tuned at this size.
_BATCH, _H = 8, 15
SCALES = {
    "178m": Scale(
        "larger-178m",
        "the paper's smaller model",
        (f"inner.batch={_BATCH}", "inner.micro_batches=4", "outer.values=2bit"),
        inner_steps=_H,
        # Four minutes at the assumed rate: 240 s x 430,000 tokens/s = 103 M tokens. A round is 15 inner steps
        # of 8 replicas x 8 x 2,048 tokens = 1.97 M, so 52 rounds.
        rounds=52,
        lr={"sparseloco": 6e-4},
        tokens_per_second=430_000.0,  # the bench had 416,000 with a batch of 4, which hides less
    ),
    "toy": Scale(
        "larger-toy",
        "two rounds of nano, to try the machinery",
        ("model.preset=nano", "model.context=32", "inner.batch=2", "inner.micro_batches=1",
         "outer.values=2bit"),
        inner_steps=2,
        rounds=2,
        lr={"sparseloco": 4e-3},
        record=False,
        tokens_per_second=2e3,
    ),
}  # fmt: skip


def pick_larger(name: str | None) -> Scale:
    if name not in (None, *SCALES):
        raise ConfigError(f'--scale is "{name}"; of larger it is one of {", ".join(SCALES)}')
    return SCALES[name or "178m"]


def larger_recipe(scale: Scale, corpus: str, seed: int = 0, rounds: int | None = None) -> Recipe:
    """The recipe with its end known: the cosine falls over exactly these rounds, after a tenth of warm-up."""
    rounds = scale.rounds if rounds is None else rounds
    if rounds < 1:
        raise ConfigError(f"--rounds is {rounds}; it must be at least 1")
    settings = [
        *scale.settings,
        f"name={scale.name}",
        f"seed={seed}",
        f"data.corpus={json.dumps(corpus)}",
        f"inner.lr={scale.lr['sparseloco']:g}",
        f"inner.warmup_steps={max(1, rounds * scale.inner_steps // 10)}",
        f"outer.inner_steps={scale.inner_steps}",
        f"outer.rounds={rounds}",
    ]
    return load_recipe(RECIPE, settings)


def rounds_within(scale: Scale, minutes: float) -> int:
    """How many rounds should end within these minutes, including the first compilation."""
    seconds = minutes * 60 - (COMPILE_SECONDS if scale.record else 0.0)
    rounds = int(seconds * scale.tokens_per_second / larger_recipe(scale, "").round_tokens)
    if rounds < 1:
        raise ConfigError(
            f"--minutes is {minutes:g}; not one round ends within it at {scale.tokens_per_second:,.0f} "
            "tokens/s, which is assumed; give more, or give --rounds"
        )
    return rounds


def predicted_seconds(scale: Scale, recipe: Recipe) -> float:
    tokens = recipe.outer.rounds * recipe.round_tokens
    return tokens / scale.tokens_per_second + (COMPILE_SECONDS if scale.record else 0.0)


def predicted_plan(recipe: Recipe) -> SimulatorPlan:
    """The simulator's plan for a GPU as large as an H200."""
    return plan_simulator(recipe, "bf16", ASSUMED_FREE_BYTES, compiled=True, can_park=True)


def read_larger(folder: Path, scale: Scale = SCALES["178m"]) -> list[Line]:
    """Its finished lines; a run that was cut off before its last round does not count."""
    found = []
    for line in read(folder, scale):
        lacking = [name for name in FIELDS if line.get(name) is None]
        if lacking:
            raise ConfigError(f'{folder / FILE} has a line without "{lacking[0]}"; remove it, run it anew')
        if line["curve"] and line["curve"][-1][0] == parse_recipe(line["recipe"]).outer.rounds:
            found.append(line)
    return found


def describe(scale: Scale, recipe: Recipe) -> str:
    """The plan of a run, before it starts."""
    tokens, plan = recipe.outer.rounds * recipe.round_tokens, predicted_plan(recipe)
    return (
        f"{recipe.name}: {fleet_in_words(recipe)}, {count(recipe.model.num_parameters)} parameters, "
        f"{recipe.outer.rounds} rounds of H = {recipe.outer.inner_steps}, {tokens / 1e6:.1f} Mtok\n"
        f"on a GPU in bf16: {plan.describe(recipe.num_replicas)}\n"
        f"about {duration(predicted_seconds(scale, recipe))} at {scale.tokens_per_second:,.0f} tokens/s, "
        "which is assumed"
    )
