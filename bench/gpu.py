"""What one GPU gives: a simulated fleet's speed against plain training's, and the codec's against memory's.

    python bench/gpu.py [--parts codec train] [--sizes 10m 178m] [--codec-sizes 178m 512m] [--keep 32]
        [--json FILE]

Everything is measured in one process, in turns, and ratios are what counts. Plain training is one model of
the same code, compiled, with fused AdamW and gradient clipping, over the same tokens a step. The simulated
fleet is M = 8 replicas, S = 4, half of them compressed at 1/8; its rounds count whole: inner steps, error
feedback, top-k, quantising, packing to bytes on the host, unpacking, the mean, the step and the three
held-out losses. Only the first steps are left out: they compile, and record what is launched as one graph.
"""

import argparse
import dataclasses
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fleets import EIGHT

from isthmus import gpu
from isthmus.config import Recipe, parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.model import presets
from isthmus.model.llama import forward, init_params, rope_table, token_losses
from isthmus.outer import PlainCodec, codec_for
from isthmus.planner.memory import plan_simulator
from isthmus.simulator.exchange import LocalExchange
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.sparse import Bundle, to_chunks

RECIPE = """
name = "bench"
[model]
preset = "{size}"
[data]
corpus = "{corpus}"
eval_batches = 2
[inner]
batch = {batch}
micro_batches = 4
lr = 1e-3
[outer]
inner_steps = {steps}
values = "2bit"
"""
BATCH = {"10m": 32, "178m": 4}  # of each replica; 4 for the others
STEPS = {"10m": 50, "178m": 50}  # H


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def medians(parts: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Milliseconds of each part, measured in turns; the first two turns are not counted."""
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(turns + 2):
        for name, part in parts.items():
            took = seconds(part)
            if turn > 1:
                taken[name].append(took)
    return {name: 1e3 * statistics.median(times) for name, times in taken.items()}


def matrix_rate() -> float:
    """FLOP/s of a large bf16 matrix product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = medians({"product": lambda: [a @ b for _ in range(10)]}, 5)
    return 10 * 2 * 8192**3 / (times["product"] / 1e3)


def codec(size: str, turns: int, keep: int) -> dict[str, Any]:
    """Encoding and decoding a whole model's update, against moving its bytes once and a bare top-k."""
    shapes = presets[size].shapes()
    count = sum(math.prod(shape) for shape in shapes.values())
    flat = [torch.randn(count, device="cuda") * scale for scale in (1.0, 1e-3, 1e-3)]
    flat[1] += flat[0]
    cut = [x.split([math.prod(shape) for shape in shapes.values()]) for x in flat]
    anchor, params, feedback = (
        {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        for parts in cut
    )
    fast, plain = codec_for("cuda", 64, keep, "2bit"), PlainCodec(64, keep, "2bit", "cuda")
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]

    def contribute(codec: PlainCodec) -> list[Bundle]:
        return codec.contribute_all(anchor, [params], [feedback], 0.95)

    data = [fast.pack_all(contribute(fast))[0] for _ in range(8)]
    sent = contribute(fast)
    read = fast.unpack_all(data)

    times = medians(
        {
            "move": lambda: torch.addcmul(flat[2], flat[0], flat[1], out=flat[2]),
            "encode": lambda: fast.pack_all(contribute(fast)),
            "encode_on_device": lambda: contribute(fast),
            "pack": lambda: fast.pack_all(sent),
            "decode_8": lambda: fast.step(anchor, fast.unpack_all(data), 1e-9),
            "unpack_8": lambda: fast.unpack_all(data),
            "sum_and_step_8": lambda: fast.step(anchor, read, 1e-9),
        },
        turns,
    )
    magnitude = torch.cat([to_chunks(feedback[name], 64) for name in matrices]).abs()
    times |= medians({"topk": lambda: magnitude.topk(keep, dim=1)}, turns)
    magnitude = read = None
    by_torch = {
        "encode_plain": lambda: plain.pack_all(contribute(plain)),
        "decode_8_plain": lambda: plain.step(anchor, plain.unpack_all(data), 1e-9),
    }
    times |= medians(by_torch, 2)
    return {
        "size": size, "keep": keep, "parameters": count, "payload_bytes": len(data[0]), "milliseconds": times,
        "encode_to_move": times["encode"] / times["move"], "encode_to_topk": times["encode"] / times["topk"],
        "decode_8_to_move": times["decode_8"] / times["move"],
        "decode_8_to_topk": times["decode_8"] / times["topk"],
    }  # fmt: skip


class Plain:
    """One model, compiled, with torch's own fused AdamW and clipping, in bf16 over fp32 weights.

    On a CPU, where bench/fleet.py is only tried out, all is fp32.
    """

    def __init__(self, recipe: Recipe, device: torch.device, compiled: bool = True) -> None:
        model, self.device = recipe.model, device
        first = init_params(model, recipe.seed)
        self.params = {name: tensor.to(device).requires_grad_() for name, tensor in first.items()}
        inner = recipe.inner
        self.clip, betas = inner.clip, (inner.beta1, inner.beta2)
        self.opt = torch.optim.AdamW(
            self.params.values(), inner.lr, betas, inner.eps, inner.weight_decay, fused=True
        )
        rope = rope_table(model, model.context, device=device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def loss(params: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
            return token_losses(forward(params, ids[:, :-1], model, rope, None, dtype), ids[:, 1:])

        self.loss = torch.compile(loss, dynamic=False) if compiled else loss

    def step(self, ids: torch.Tensor) -> None:
        self.opt.zero_grad()
        self.loss(self.params, ids).backward()
        torch.nn.utils.clip_grad_norm_(self.params.values(), self.clip, foreach=True)
        self.opt.step()

    def steps(self, batches: Batches, first: int, count: int) -> None:
        """`count` steps from step `first` on, over all replicas' batches, to the last kernel's end."""
        for step in range(first, first + count):
            ids = batches.stacked(step).flatten(0, 1)
            ids = ids.pin_memory() if self.device.type == "cuda" else ids
            self.step(ids.to(self.device, non_blocking=True).long())
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def train(size: str, corpus: str, rounds: int, steps: int, batch: int) -> dict[str, Any]:
    """Tokens per second of plain training and of the simulated fleet, in turns."""
    recipe = parse_recipe(RECIPE.format(size=size, corpus=corpus, batch=batch, steps=steps) + EIGHT)
    device = torch.device("cuda")
    free = torch.cuda.mem_get_info()[0]
    plan = plan_simulator(recipe, "bf16", int(0.92 * free), compiled=True, can_park=False)
    torch.cuda.reset_peak_memory_stats()
    fleet = SimulatedFleet(recipe, open_corpus(corpus), device, "bf16", plan, True)
    exchange = LocalExchange(recipe)
    parts: dict[str, list[float]] = {}

    def part(name: str, work: Callable[[], Any]) -> Any:
        if name not in parts:
            parts[name] = []
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        parts[name].append(time.perf_counter() - start)
        return result

    def simulated(index: int) -> None:
        own = part("train and encode", lambda: fleet.train_round(index, lambda h: None))
        part("decode and step", lambda: fleet.apply(index + 1, exchange.close(index + 1, own)))
        part("evaluate", fleet.evaluate)

    # Short rounds compile everything and record it.
    fleet.recipe = dataclasses.replace(recipe, outer=dataclasses.replace(recipe.outer, inner_steps=2))
    for _ in range(gpu.Replayed.WARM + 1):
        simulated(0)
    fleet.recipe = recipe
    peak_fleet = torch.cuda.max_memory_allocated()
    plain = Plain(recipe, device)
    plain.steps(fleet.batches, 0, 2)
    parts.clear()
    rows = []
    for index in range(1, rounds + 1):
        one = seconds(lambda i=index: plain.steps(fleet.batches, i * steps, steps))
        all_of_them = seconds(lambda i=index: simulated(i))
        rows.append((recipe.round_tokens / one, recipe.round_tokens / all_of_them))
        print(
            f"  {size} round {index}: plain {rows[-1][0]:,.0f} tok/s, fleet {rows[-1][1]:,.0f} tok/s",
            flush=True,
        )
    model = recipe.model
    embedding = math.prod(model.shapes()["tok_embeddings.weight"])
    per_token = 6 * (model.num_parameters - embedding)
    attention = 6 * model.layers * model.context * model.width  # causal: half of the products
    plain_rate, fleet_rate = (statistics.median(r[i] for r in rows) for i in (0, 1))
    return {
        "size": size, "batch": batch, "context": model.context, "inner_steps": steps,
        "grad_accum_steps": plan.grad_accum_steps,
        "recorded": fleet.recorded,
        "plain_tokens_per_second": plain_rate, "fleet_tokens_per_second": fleet_rate,
        "fleet_to_plain": statistics.median(f / p for p, f in rows),
        "flops_per_token": per_token, "attention_flops_per_token": attention,
        "plain_flops_per_second": plain_rate * (per_token + attention),
        "peak_bytes_fleet": peak_fleet, "predicted_bytes_fleet": plan.predicted_bytes,
        "seconds": {name: statistics.median(times) for name, times in parts.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["codec", "train"], choices=["codec", "train"])
    parser.add_argument("--sizes", nargs="+", default=["10m", "178m"])
    parser.add_argument("--codec-sizes", nargs="+", default=["178m", "512m"])
    parser.add_argument("--keep", type=int, default=32, help="entries of a chunk that the codec sends")
    parser.add_argument("--corpus", default="builtin:sample", help="a prepared folder; default: built in")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="inner steps a round (default: 50)")
    parser.add_argument("--batch", type=int, help="of each replica (default: 32 for 10m, else 8 or 4)")
    parser.add_argument("--turns", type=int, default=7, help="of the codec's parts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line of results")
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "matrix_flops": matrix_rate()}
    print(f"{device}, torch {torch.__version__}: bf16 matrices at {found['matrix_flops'] / 1e12:.0f} TFLOP/s")
    if "codec" in args.parts:
        found["codec"] = []
        for size in args.codec_sizes:
            result = codec(size, args.turns, args.keep)
            found["codec"].append(result)
            print(f"codec, {size}, {args.keep} of 4096: payload {result['payload_bytes'] / 1e6:.2f} MB")
            for name, took in result["milliseconds"].items():
                print(f"  {name:20}{took:9.2f} ms   {took / result['milliseconds']['move']:6.2f} x move")
            torch.cuda.empty_cache()
    if "train" in args.parts:
        found["train"] = []
        for size in args.sizes:
            result = train(
                size,
                args.corpus,
                args.rounds,
                args.steps or STEPS.get(size, 50),
                args.batch or BATCH.get(size, 4),
            )
            found["train"].append(result)
            share = result["plain_flops_per_second"] / found["matrix_flops"]
            print(
                f"train, {size}: fleet / plain {result['fleet_to_plain']:.3f}; "
                f"plain at {share:.2f} of the matrix rate"
            )
            print(
                f"  memory of the fleet {result['peak_bytes_fleet'] / 2**30:.1f} GiB, "
                f"predicted {result['predicted_bytes_fleet'] / 2**30:.1f}; {result['seconds']}"
            )
            gc.collect()
            torch.cuda.empty_cache()
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
