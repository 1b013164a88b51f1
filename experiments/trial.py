"""One run of the simulator, from a recipe to its line, without run directory or report. A run that was cut
off goes on from its saved state."""

import dataclasses
import gc
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo

from experiments.lines import LOSSES, Line, digest, scored_on
from isthmus import __version__
from isthmus.config import Recipe, dump_recipe
from isthmus.data.corpus import Corpus, TokenView
from isthmus.errors import RunError
from isthmus.files import replace_file
from isthmus.model import checkpoint
from isthmus.outer.rounds import run_rounds
from isthmus.replica.evaluate import Scorer
from isthmus.replica.meter import peak_bytes
from isthmus.replica.picks import checked_corpus, pick_device, pick_precision
from isthmus.simulator.exchange import ExchangingFleet, LocalExchange
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.simulator.run import pick_plan

if TYPE_CHECKING:
    from experiments.sweep import Task

# Each k has its own compiled forward; past 8, dynamo would silently continue uncompiled.
torch._dynamo.config.recompile_limit = 64
CURVE_POINTS = 50
SCORED_TOGETHER = 16_384  # held-out tokens in one forward: a small inner batch would leave a GPU idle
SAVE_SECONDS = 180.0  # between two saved states: eight replicas of 178M are 20 GB


@dataclass
class Course:
    """How a run went so far."""

    points: list[dict[str, Any]] = field(default_factory=list)  # held-out losses
    seconds: list[float] = field(default_factory=list)  # of each round
    outside: int = 0  # tokens on stage links with values outside the range of a few-bit wire


def run_trial(task: "Task", recipe: Recipe) -> Line:
    """Train and score. A run whose loss stops being a number has a line too, with `failed`."""
    device = pick_device(task.device)
    corpus = checked_corpus(recipe)
    corpus = half_of(corpus, task.text) if task.text else corpus
    course, failed = Course(), None
    try:
        _train(recipe, corpus, device, course, task.state)
    except RunError as error:
        failed = str(error)
    if not failed and not all(math.isfinite(course.points[-1][name]) for name in LOSSES):
        failed = f"a held-out loss is not a number after round {course.points[-1]['round']}"
    line = _line(task, recipe, corpus, device, course, failed)
    if device.type == "cuda":  # the next run needs the memory
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return line


def half_of(corpus: Corpus, text: str) -> Corpus:
    """The same text with half of what is held out: the first half is for reporting, the second for tuning."""
    held_out = corpus.validation
    middle = len(held_out) // 2
    start, stop = {"report": (0, middle), "tuning": (middle, len(held_out))}[text]
    half = TokenView(held_out.name, [held_out.slice(start, stop)], held_out.vocab_size)
    return dataclasses.replace(corpus, split=lambda name: corpus.train if name == "train" else half)


def _train(recipe: Recipe, corpus: Corpus, device: torch.device, course: Course, folder: Path | None) -> None:
    compiled, precision = device.type == "cuda", pick_precision(recipe, device)
    plan = pick_plan(recipe, device, precision, compiled)
    fleet = SimulatedFleet(recipe, corpus, device, precision, plan, compiled)
    fleet.scorer = Scorer(_scored_together(recipe), corpus, fleet.bases, device, fleet.dtype, fleet.recorded)
    done = _restore(fleet, course, folder) if folder else 0
    if not done:
        course.points.append({"round": 0} | fleet.evaluate())
    clock = saved = time.perf_counter()

    def after(round_number: int, trained_seconds: float) -> None:
        nonlocal clock, saved
        course.outside += sum(count or 0 for count in fleet.outside.values())
        if recipe.is_scored(round_number):
            course.points.append({"round": round_number} | fleet.evaluate())
        now = time.perf_counter()
        course.seconds.append(now - clock)
        if folder and now - saved >= SAVE_SECONDS:
            checkpoint.save(folder, round_number, fleet.state())
            replace_file(folder / "course.json", json.dumps(dataclasses.asdict(course)))
            now = saved = time.perf_counter()
        clock = now

    rounds = range(done + 1, recipe.outer.rounds + 1)
    run_rounds(ExchangingFleet(fleet, LocalExchange(recipe)), rounds, lambda h: None, after)


def _restore(fleet: SimulatedFleet, course: Course, folder: Path) -> int:
    """Go on from the newest state in `folder`; returns its round, or 0 if there is none."""
    found, kept = checkpoint.load(folder), folder / "course.json"
    if found is None or not kept.is_file():
        return 0
    done, state = found
    facts = Course(**json.loads(kept.read_text(encoding="utf-8")))
    if len(facts.seconds) != done:  # a kill fell between the two writes
        return 0
    fleet.restore(state, done)
    course.points, course.seconds, course.outside = facts.points, facts.seconds, facts.outside
    return done


def _scored_together(recipe: Recipe) -> Recipe:
    """The same held-out windows in fewer, larger batches."""
    num_sequences = recipe.inner.batch * recipe.data.eval_batches
    batch = max(1, min(num_sequences, SCORED_TOGETHER // recipe.model.context))
    while num_sequences % batch:
        batch -= 1
    inner = dataclasses.replace(recipe.inner, batch=batch, micro_batches=1)
    data = dataclasses.replace(recipe.data, eval_batches=num_sequences // batch)
    return dataclasses.replace(recipe, inner=inner, data=data)


def _line(
    task: "Task", recipe: Recipe, corpus: Corpus, device: torch.device, course: Course, failed: str | None
) -> Line:
    later = course.seconds[1:] or course.seconds  # the first round compiles
    last = dict.fromkeys(LOSSES) if failed else course.points[-1]
    step = -(-len(course.points) // CURVE_POINTS)
    shown = [p for n, p in enumerate(course.points) if n % step == 0 or p is course.points[-1]]
    return {
        "row": task.row,
        "scale": task.scale,
        "seed": recipe.seed,
        "digest": digest(recipe),
        "recipe": dump_recipe(recipe),
        "commit": task.commit,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "isthmus": __version__,
        "precision": pick_precision(recipe, device),
        "corpus": scored_on(corpus.sha256[:12], task.text),
        "corpus_tokens": len(corpus.train),
        "parameters": recipe.model.num_parameters,
        "tokens": recipe.outer.rounds * recipe.round_tokens,
        "seconds": round(sum(course.seconds), 3),
        "tokens_per_second": round(recipe.round_tokens * len(later) / sum(later)) if later else 0,
        "peak_bytes": peak_bytes(device),
        **{name: _rounded(last[name]) for name in LOSSES},
        "outside_tokens": course.outside,
        "failed": failed,
        "curve": [[point["round"], *(_rounded(point[name]) for name in LOSSES)] for point in shown],
    }


def _rounded(loss: float | None) -> float | None:
    return round(loss, 6) if loss is not None and math.isfinite(loss) else None
