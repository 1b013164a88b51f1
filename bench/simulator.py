"""Tokens per second of the stacked simulator against a plain training loop of one model over the same tokens.

    python bench/simulator.py [--rounds 3] [--device cpu]

Both are measured in one process, alternating, and the ratio is what counts: machines are noisy. The
simulator does all that a run does in a round: inner steps of M replicas, error feedback, packing, unpacking,
aggregation, the three held-out losses. The plain loop is one model, torch's AdamW and gradient clipping, with
M times the batch.
"""

import argparse
import statistics
import time

import torch
from fleets import EIGHT

from isthmus.config import parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.model import Llama
from isthmus.model.llama import token_losses
from isthmus.planner.memory import SimulatorPlan
from isthmus.simulator.exchange import LocalExchange
from isthmus.simulator.fleet import SimulatedFleet

RECIPE = """
name = "bench"
[model]
preset = "nano"
[data]
eval_batches = 2
[inner]
batch = 8
lr = 1e-3
[outer]
inner_steps = 15
values = "2bit"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    recipe = parse_recipe(RECIPE + EIGHT, args.set)
    device = torch.device(args.device)
    precision = "fp32" if device.type == "cpu" else "bf16"
    plan = SimulatorPlan(recipe.num_replicas, 1, False, 0)
    compiled = device.type == "cuda"
    fleet = SimulatedFleet(recipe, open_corpus(recipe.data.corpus), device, precision, plan, compiled)
    exchange = LocalExchange(recipe)
    net = Llama(recipe.model).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    steps = recipe.outer.inner_steps

    def simulated_round(index: int) -> None:
        fleet.apply(index + 1, exchange.close(index + 1, fleet.train_round(index, lambda h: None)))
        fleet.evaluate()

    def plain_round(index: int) -> None:
        for h in range(steps):
            ids = fleet.batches.stacked(index * steps + h).flatten(0, 1).to(device)
            with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
                loss = token_losses(net(ids[:, :-1]), ids[:, 1:])
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()

    def timed(work, index: int) -> float:
        started = time.perf_counter()
        work(index)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    timed(simulated_round, 0), timed(plain_round, 0)  # warm-up
    ratios = []
    print(
        f"{recipe.num_replicas} mixed replicas of {recipe.model.preset}, {recipe.round_tokens} tokens a round"
    )
    for index in range(1, args.rounds + 1):
        plain, simulated = timed(plain_round, index), timed(simulated_round, index)
        ratios.append(plain / simulated)
        print(
            f"round {index}: plain {recipe.round_tokens / plain:9,.0f} tok/s   "
            f"simulator {recipe.round_tokens / simulated:9,.0f} tok/s   ratio {ratios[-1]:.2f}"
        )
    print(f"median ratio simulator / plain: {statistics.median(ratios):.2f} (wanted: at least 0.70)")


if __name__ == "__main__":
    main()
