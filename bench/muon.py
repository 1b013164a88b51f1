"""What a step with Muon costs against AdamW's on an idle GPU, one replica, one stage.

    python bench/muon.py [--size 178m] [--batches 32 8] [--steps 10] [--turns 5] [--json FILE]

Both step in turns, launched kernel by kernel and then as one recorded graph; ratios of medians count. Wanted:
at most 1.10 for the recorded step.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from isthmus import gpu
from isthmus.config import parse_recipe
from isthmus.model.llama import init_params
from isthmus.replica.stack import Stack
from isthmus.subspace.boundaries import BasisSet

RECIPE = """
name = "bench"
[model]
preset = "{size}"
[inner]
batch = {batch}
micro_batches = {micro}
optimizer = "{optimizer}"
[data]
corpus = "builtin:sample"
[[replicas]]
name = "one"
"""
SEQUENCES = 8  # in a micro-batch
WANTED = 1.10


def stack_of(size: str, batch: int, optimizer: str, device: torch.device) -> Stack:
    micro = max(1, batch // SEQUENCES)
    recipe = parse_recipe(RECIPE.format(size=size, batch=batch, micro=micro, optimizer=optimizer))
    anchor = {name: tensor.to(device) for name, tensor in init_params(recipe.model, 0).items()}
    bases = BasisSet(recipe, device, torch.float32)
    table = anchor["tok_embeddings.weight"]
    compiled = device.type == "cuda"
    return Stack(recipe, recipe.fleet(), anchor, table, bases, dtype=torch.bfloat16, shared=True,
                 compiled=compiled, recorded=False)  # fmt: skip


def in_turns(stacks: dict[str, Stack], tokens: torch.Tensor, steps: int, turns: int) -> dict[str, float]:
    """Milliseconds of a step of each; what is first to run compiles, so three steps are not counted."""
    for stack in stacks.values():
        for h in range(4):
            stack.inner_step(tokens, h)
    taken: dict[str, list[float]] = {name: [] for name in stacks}
    for _ in range(turns):
        for name, stack in stacks.items():
            _wait()
            began = time.perf_counter()
            for h in range(steps):
                stack.inner_step(tokens, h)
            _wait()
            taken[name].append(1e3 * (time.perf_counter() - began) / steps)
    return {name: statistics.median(times) for name, times in taken.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(size: str, batch: int, steps: int, turns: int) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stacks = {name: stack_of(size, batch, name, device) for name in ("adamw", "muon")}
    model = stacks["adamw"].recipe.model
    tokens = torch.randint(0, model.vocab, (1, batch, model.context + 1), device=device)
    found: dict[str, Any] = {"size": size, "batch": batch, "context": model.context}
    found["launched"] = in_turns(stacks, tokens, steps, turns)
    if device.type == "cuda":
        for stack in stacks.values():
            stack._work = gpu.Replayed(stack._step)
        found["recorded"] = in_turns(stacks, tokens, steps, turns)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="178m")
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 8])
    parser.add_argument("--steps", type=int, default=10, help="in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line for each batch")
    args = parser.parse_args()
    for batch in args.batches:
        found = measure(args.size, batch, args.steps, args.turns)
        for how in ("launched", "recorded"):
            if how in found:
                adamw, muon = found[how]["adamw"], found[how]["muon"]
                print(f"{args.size}, batch {batch} x {found['context']}, {how}: AdamW {adamw:.2f} ms, "
                      f"Muon {muon:.2f} ms: {muon / adamw:.3f} (wanted: at most {WANTED:.2f})",
                      flush=True)  # fmt: skip
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(found) + "\n")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
