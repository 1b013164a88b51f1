"""Runs, from recipes to their lines: the simulator without run directory, report or saved state.

A run is seconds to minutes long, so a killed one is repeated rather than resumed.
"""

import dataclasses
import gc
import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from experiments.lines import LOSSES, Line, digest
from experiments.tuning import REPORT, TUNING, scored_on
from isthmus import __version__
from isthmus.config import FinishConfig, Recipe, dump_recipe
from isthmus.data.corpus import Corpus, TokenView
from isthmus.errors import RunError
from isthmus.outer.rounds import run_rounds
from isthmus.planner.memory import plan_simulator
from isthmus.replica.evaluate import Scorer
from isthmus.simulator.exchange import LocalExchange
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.simulator.run import available_host_bytes, checked_corpus, pick_device, pick_precision

# Each k has its own compiled forward; past 8, dynamo would silently continue uncompiled.
torch._dynamo.config.recompile_limit = 64
CURVE_POINTS = 50
SCORED_TOGETHER = 16_384  # held-out tokens in one forward: a small inner batch would leave a GPU idle


State = dict[str, dict[str, Tensor]]


@dataclass
class Course:
    """How a run went so far: held-out losses, the time of each round, and why it ended early if it did."""

    points: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failed: str | None = None
    closed: float | None = None  # at the end, through boundaries that compress, of a run that opened them

    def until(self, round_number: int) -> "Course":
        return Course([point for point in self.points if point["round"] <= round_number])


def run_trial(row: str, scale: str, recipe: Recipe, device: str, commit: str) -> Line:
    """Train, score, and return the line. A run whose loss is not a number has a line too, with `failed`."""
    (line,) = run_trials([(row, recipe)], scale, device, commit)
    return line


def run_trials(
    wanted: Sequence[tuple[str, Recipe]], scale: str, device: str, commit: str, text: str = ""
) -> Iterator[Line]:
    """Lines of runs that differ in how they finish: the rounds that they share are trained once. `text`
    is the half of the held-out text that they are scored on."""
    where = pick_device(device)
    first = wanted[0][1]
    corpus = checked_corpus(first)
    setting = (
        half_of(corpus, text.partition("/")[0]) if text else corpus,
        where,
        pick_precision(first, where),
    )
    begin = {row: recipe.outer.rounds - recipe.finish.rounds for row, recipe in wanted}
    finished = {begin[row] for row, recipe in wanted if recipe.finish.rounds}
    stem, shared = dataclasses.replace(first, finish=FinishConfig()), Course()
    states = _train(stem, *setting, shared, range(1, max(begin.values()) + 1), keep=finished)
    for row, recipe in wanted:
        if recipe.finish.rounds:
            course = shared.until(begin[row])
            if begin[row] in states:
                rounds = range(begin[row] + 1, recipe.outer.rounds + 1)
                _train(recipe, *setting, course, rounds, state=states[begin[row]])
            else:
                course.failed = shared.failed
        else:
            course = shared
        line = _line(row, scale, recipe, *setting, course, commit)
        yield line | {"corpus": scored_on(line["corpus"], text)}


def half_of(corpus: Corpus, text: str) -> Corpus:
    """The same text, with the half of what is held out that is for reporting or for tuning."""
    held_out = corpus.validation
    middle = len(held_out) // 2
    start, stop = {REPORT: (0, middle), TUNING: (middle, len(held_out))}[text]
    half = TokenView(held_out.name, [held_out.slice(start, stop)], held_out.vocab_size)
    return dataclasses.replace(corpus, split=lambda name: corpus.train if name == "train" else half)


def _line(
    row: str,
    scale: str,
    recipe: Recipe,
    corpus: Corpus,
    device: torch.device,
    precision: str,
    course: Course,
    commit: str,
) -> Line:
    points, failed = course.points, course.failed
    if not failed and not all(math.isfinite(points[-1][name]) for name in LOSSES):
        failed = f"a held-out loss is not a number after round {points[-1]['round']}"
    later = course.seconds[1:] or course.seconds  # the first round compiles
    last = dict.fromkeys(LOSSES) if failed else points[-1]
    kept = recipe.outer.rounds - recipe.finish.rounds
    return origin(row, scale, recipe, corpus, device, precision, commit) | {
        "tokens": recipe.outer.rounds * recipe.round_tokens,
        "rounds_shared": kept if recipe.finish.rounds else 0,  # with the other runs of its job
        "seconds": round(sum(course.seconds), 3),  # without the shared rounds
        "tokens_per_second": round(recipe.round_tokens * len(later) / sum(later)) if later else 0,
        **{name: _rounded(last[name]) for name in LOSSES},
        "loss_closed": _rounded(course.closed),
        "failed": failed,
        "curve": [
            [point["round"], *(_rounded(point[name]) for name in LOSSES)] for point in _thin(points, kept)
        ],
    }


def origin(
    row: str, scale: str, recipe: Recipe, corpus: Corpus, device: torch.device, precision: str, commit: str
) -> Line:
    """What every line names: the run that it comes from."""
    return {
        "row": row,
        "scale": scale,
        "seed": recipe.seed,
        "digest": digest(recipe),
        "recipe": dump_recipe(recipe),
        "commit": commit,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "isthmus": __version__,
        "precision": precision,
        "corpus": corpus.sha256[:12],
        "corpus_tokens": len(corpus.train),
        "parameters": recipe.model.num_parameters,
    }


def _train(
    recipe: Recipe,
    corpus: Corpus,
    device: torch.device,
    precision: str,
    course: Course,
    rounds: range,
    *,
    state: State | None = None,
    keep: Collection[int] = (),
) -> dict[int, State]:
    """Train these rounds, from `state` or else from theta^(0), and add to the course round by round. Returns
    the states after the rounds in `keep`, on the host."""
    compiled = device.type == "cuda"
    states: dict[int, State] = {}

    def train() -> None:  # a function of its own, so that its fleet is gone before the memory is collected
        free = int(torch.cuda.mem_get_info(device)[0] * 0.92) if compiled else available_host_bytes()
        plan = plan_simulator(recipe, precision, free, compiled=compiled, can_park=compiled)
        fleet = SimulatedFleet(recipe, corpus, device, precision, plan, compiled)
        fleet.scorer = Scorer(
            _scored_together(recipe), corpus, fleet.bases, device, fleet.dtype, fleet.recorded
        )
        if state is not None:
            fleet.restore(state, rounds.start - 1)
        else:
            course.points.append({"round": 0} | fleet.evaluate())
        clock = time.perf_counter()

        def after(round_number: int, trained_seconds: float) -> None:
            nonlocal clock
            if recipe.is_scored(round_number) or round_number in keep:
                course.points.append({"round": round_number} | fleet.evaluate())
            if round_number in keep:
                states[round_number] = _on_host(fleet.state())
            now = time.perf_counter()
            course.seconds.append(now - clock)
            clock = now

        run_rounds(fleet, LocalExchange(recipe), rounds, lambda h: None, after)
        if recipe.finish.rounds:
            fleet.bases.begin_round(0)  # as if no boundary had opened
            course.closed = fleet.evaluate()["loss_pipelined"]

    try:
        train()
    except RunError as error:
        course.failed = str(error)
    finally:
        if compiled:
            gc.collect()
            torch.cuda.empty_cache()
    return states


def _on_host(state: State) -> State:
    return {
        file: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        for file, tensors in state.items()
    }


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
    """At most CURVE_POINTS or so, with the last one and that of round `kept`, where finishing begins."""
    step = -(-len(points) // CURVE_POINTS)
    ends = (kept, points[-1]["round"])
    return [point for n, point in enumerate(points) if n % step == 0 or point["round"] in ends]


def _rounded(loss: float | None) -> float | None:
    return round(loss, 6) if loss is not None and math.isfinite(loss) else None
