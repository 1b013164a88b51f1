"""One run, from a recipe to its line: the simulator without run directory, report or saved state.

A run is seconds to minutes long, so a killed one is repeated rather than resumed.
"""

import dataclasses
import gc
import math
import time
from typing import Any

import torch
import torch._dynamo

from isthmus import __version__
from isthmus.comm.local import LocalExchange
from isthmus.config import Recipe, dump_recipe
from isthmus.data.corpus import Corpus
from isthmus.engine.evaluate import Scorer
from isthmus.engine.loop import run_rounds
from isthmus.engine.simulated import SimulatedFleet
from isthmus.engine.start import available_host_bytes, checked_corpus, pick_device, pick_precision
from isthmus.errors import RunError
from isthmus.planner.memory import plan_simulator
from isthmus.reproduce.lines import LOSSES, Line, digest

# Each k is a compiled forward of its own; dynamo gives up at 8 and would go on uncompiled.
torch._dynamo.config.recompile_limit = 64
CURVE_POINTS = 50
SCORED_TOGETHER = 16_384  # held-out tokens in one forward: a small inner batch would leave a GPU idle


def run_trial(row: str, scale: str, recipe: Recipe, device: str, commit: str) -> Line:
    """Train, score, and say what came of it. A loss that is no number is a result too: `failed` says so."""
    where = pick_device(device)
    precision = pick_precision(recipe, where)
    corpus = checked_corpus(recipe)
    started = time.perf_counter()
    failed: str | None = None
    points: list[dict[str, Any]] = []
    seconds: list[float] = []
    try:
        _train(recipe, corpus, where, precision, points, seconds)
    except RunError as error:
        failed = str(error)
    finally:
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()
    if not failed and not all(math.isfinite(points[-1][name]) for name in LOSSES):
        failed = f"a held-out loss is no number after round {points[-1]['round']}"
    later = seconds[1:] or seconds  # the first round compiles
    last = dict.fromkeys(LOSSES) if failed else points[-1]
    kept = recipe.outer.rounds - recipe.finish.rounds
    return {
        "row": row,
        "scale": scale,
        "seed": recipe.seed,
        "digest": digest(recipe),
        "recipe": dump_recipe(recipe),
        "commit": commit,
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "isthmus": __version__,
        "precision": precision,
        "corpus": corpus.sha256[:12],
        "corpus_tokens": len(corpus.train),
        "parameters": recipe.model.num_parameters,
        "tokens": recipe.outer.rounds * recipe.round_tokens,
        "seconds": round(time.perf_counter() - started, 3),
        "tokens_per_second": round(recipe.round_tokens * len(later) / sum(later)) if later else 0,
        **{name: _rounded(last[name]) for name in LOSSES},
        "failed": failed,
        "curve": [
            [point["round"], *(_rounded(point[name]) for name in LOSSES)] for point in _thin(points, kept)
        ],
    }


def _train(
    recipe: Recipe,
    corpus: Corpus,
    device: torch.device,
    precision: str,
    points: list[dict[str, Any]],
    seconds: list[float],
) -> None:
    """Adds the held-out losses to `points` and each round's time to `seconds`, as it goes."""
    compiled = device.type == "cuda"
    free = int(torch.cuda.mem_get_info(device)[0] * 0.92) if compiled else available_host_bytes()
    plan = plan_simulator(recipe, precision, free, compiled=compiled, can_park=compiled)
    fleet = SimulatedFleet(recipe, corpus, device, precision, plan, compiled)
    fleet.scorer = Scorer(_scored_together(recipe), corpus, fleet.bases, device, fleet.dtype)
    points.append({"round": 0} | fleet.evaluate())
    clock = time.perf_counter()

    def after(round_number: int, trained_seconds: float) -> None:
        nonlocal clock
        if recipe.is_scored(round_number):
            points.append({"round": round_number} | fleet.evaluate())
        now = time.perf_counter()
        seconds.append(now - clock)
        clock = now

    run_rounds(fleet, LocalExchange(recipe), range(1, recipe.outer.rounds + 1), lambda h: None, after)


def _scored_together(recipe: Recipe) -> Recipe:
    """The same held-out windows in fewer, larger batches."""
    num_sequences = recipe.inner.batch * recipe.data.eval_batches
    batch = max(1, min(num_sequences, SCORED_TOGETHER // recipe.model.context))
    while num_sequences % batch:
        batch -= 1
    inner = dataclasses.replace(recipe.inner, batch=batch, micro_batches=1)
    data = dataclasses.replace(recipe.data, eval_batches=num_sequences // batch)
    return dataclasses.replace(recipe, inner=inner, data=data)


def _thin(points: list, kept: int) -> list:
    """Some of them, the last and that of round `kept` among them: where finishing begins."""
    step = -(-len(points) // CURVE_POINTS)
    ends = (kept, points[-1]["round"])
    return [point for n, point in enumerate(points) if n % step == 0 or point["round"] in ends]


def _rounded(loss: float | None) -> float | None:
    return round(loss, 6) if loss is not None and math.isfinite(loss) else None
