"""Estimate how long a run takes on this machine before it starts."""

import sys
import time

import torch

from isthmus.config import Recipe
from isthmus.planner.cost import step_flops
from isthmus.planner.rate import usable_cores
from isthmus.runlog.words import duration

SHARE = 0.6  # of a core's matrix-product rate that training reaches: 0.61 with demo, 0.70 10m-recommended
LONG_SECONDS = 600.0
TRIAL_SECONDS = 0.02
TRIALS = 5


def announce(recipe: Recipe, device: torch.device, done: int = 0, also: str = "") -> None:
    """Print to stderr how long the rounds after `done` take here, for all replicas, and what `also` adds.

    On a GPU the first rounds give a better estimate within seconds.
    """
    if device.type != "cpu" or done >= recipe.outer.rounds:
        return
    flops, cores = run_flops(recipe, done), usable_cores()
    rate = SHARE * cores * product_rate(recipe.model.width)
    words = f"about {duration(flops / rate)}{also} on this machine, if nothing else uses it"
    basis = f"{flops:.2g} operations at {rate / 1e9:.0f} GFLOP/s, from matrix products timed on {cores} cores"
    print(f"isthmus: {words} ({basis})", file=sys.stderr, flush=True)
    if flops / rate > LONG_SECONDS:
        print("isthmus: for a first result in minutes: isthmus simulate demo", file=sys.stderr, flush=True)


def announce_scoring(recipe: Recipe, num_tokens: int, device: torch.device) -> None:
    """Print to stderr how long scoring this many held-out tokens takes, if that is more than seconds."""
    if device.type != "cpu":
        return
    seconds = scoring_flops(recipe, num_tokens) / (SHARE * usable_cores() * product_rate(recipe.model.width))
    if seconds > 10:
        words = f"scoring {num_tokens:,} held-out tokens takes about {duration(seconds)} on this machine"
        print(f"isthmus: {words}", file=sys.stderr, flush=True)


def run_flops(recipe: Recipe, done: int = 0) -> float:
    """The operations of the inner steps and evaluations after round `done`."""
    rounds = range(done + 1, recipe.outer.rounds + 1)
    step = sum(replica.count * step_flops(recipe, replica) for replica in recipe.replicas)
    scored = sum(map(recipe.is_scored, rounds)) + (done == 0)
    num_tokens = recipe.data.eval_batches * recipe.inner.batch * recipe.model.context
    return len(rounds) * recipe.outer.inner_steps * step + scored * scoring_flops(recipe, num_tokens)


def scoring_flops(recipe: Recipe, num_tokens: int) -> float:
    """2 N per token for each forward: one without boundaries, one through each compressed kind's."""
    forwards = 1 + sum(replica.compressed for replica in recipe.replicas)
    return 2.0 * recipe.model.num_parameters * num_tokens * forwards


def product_rate(width: int) -> float:
    """FLOP/s of one core in matrix products of the model's width: the best of a few trials.

    It counts CPU seconds, so other programs do not distort it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokens, weight = torch.ones(1024, width), torch.ones(width, 4 * width)
        best = 0.0
        for _ in range(TRIALS):
            count, began = 0, time.process_time()
            while (spent := time.process_time() - began) < TRIAL_SECONDS:
                torch.mm(tokens, weight)
                count += 1
            best = max(best, 2.0 * tokens.numel() * 4 * width * count / spent)
        return best
    finally:
        torch.set_num_threads(threads)
