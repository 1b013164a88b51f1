"""Where one outer round of a row of `isthmus reproduce` goes: wall time by part, and kernels by their time.

    python bench/round.py --row regime-dense --scale 24m --corpus corpus24m/ [--most 128] [--kernels 40]

The fleet is the simulator's, alone on the device. `--most 128` takes the codec's kernels away from rows that
keep more of a chunk, as it was before: what they gain is the ratio of the two.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from experiments.catalog import rows_of
from experiments.tables import pick_scale, recipe_of
from isthmus.data.corpus import open_corpus
from isthmus.planner.memory import plan_simulator
from isthmus.replica.picks import pick_device, pick_precision
from isthmus.simulator.exchange import LocalExchange
from isthmus.simulator.fleet import SimulatedFleet

WARM = 2  # rounds that compile and record


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and its milliseconds to the last kernel's end."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", default="regime-dense")
    parser.add_argument("--scale", default="24m")
    parser.add_argument("--corpus", required=True, help="a folder made by `isthmus data prepare`")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=4, help="that are timed (default 4)")
    parser.add_argument("--most", type=int, help="entries of a chunk that the codec's kernels take")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels, the longest first")
    args = parser.parse_args()
    if args.most:
        from isthmus.sparse import launch  # needs Triton

        launch.MAX_KEEP = args.most
    scale, device = pick_scale(args.scale), pick_device(args.device)
    recipe = recipe_of(rows_of(scale)[args.row], scale, 0, args.corpus, scale.lr)
    compiled = device.type == "cuda"
    free = int(torch.cuda.mem_get_info(device)[0] * 0.92) if compiled else 2**34
    precision = pick_precision(recipe, device)
    plan = plan_simulator(recipe, precision, free, compiled=compiled, can_park=compiled)
    fleet = SimulatedFleet(recipe, open_corpus(args.corpus), device, precision, plan, compiled)
    exchange = LocalExchange(recipe)

    def one_round(index: int) -> tuple[float, float]:
        sent, training = timed(device, lambda: fleet.train_round(index, lambda h: None))
        _, applying = timed(device, lambda: fleet.apply(index + 1, exchange.close(index + 1, sent)))
        return training, applying

    for index in range(WARM):
        one_round(index)
    times = [one_round(WARM + n) for n in range(args.rounds)]
    training, applying = (statistics.median(part) for part in zip(*times, strict=True))
    print(f"{args.row}, {scale.name}: {recipe.outer.inner_steps} inner steps and encoding {training:.1f} ms,")
    print(f"decoding and the outer step {applying:.1f} ms")
    print(f"{1e3 * recipe.round_tokens / (training + applying):,.0f} tokens a second")
    if args.kernels:
        activity = ProfilerActivity.CUDA if compiled else ProfilerActivity.CPU
        with profile(activities=[activity]) as found:
            one_round(WARM + args.rounds)
        spent, number = Counter[str](), Counter[str]()
        for event in found.events() or ():
            spent[event.name] += event.time_range.elapsed_us() / 1e3
            number[event.name] += 1
        print(f"kernels: {spent.total():.1f} ms in all")
        for name, took in spent.most_common(args.kernels):
            print(f"{took:9.2f} ms {number[name]:6} x  {name[:100]}")


if __name__ == "__main__":
    main()
