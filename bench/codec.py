"""Seconds and bits of the sparse codec, against a bare top-k of the same chunks.

python bench/codec.py [--device cuda] [--rows 4096] [--cols 4096] [--rounds 15]

Every round times all parts one after another, so that a busy machine slows them alike; a ratio is the median
over rounds of the ratio within a round.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from math import comb, log2

import torch

from isthmus.layout.chunks import SCALE_BYTES, index_code, layout, packed_many_bytes
from isthmus.outer import codec_for
from isthmus.sparse import to_chunks

SIDE, KEEP = 64, 32
TARGETS = {"encode": "1.30", "decode and accumulate": "0.25"}


def seconds(part: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    part()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(parts: dict[str, Callable[[], object]], rounds: int, num_chunks: int, device: str) -> None:
    """Time all parts in turns and print each beside the first."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(rounds + 2):
        for name, part in parts.items():
            took = seconds(part, device)
            if turn >= 2:
                times[name].append(took)
    print(f"{device}, {torch.get_num_threads()} CPU threads")
    print(f"{'':24}{'us/chunk':>10}{'to topk':>10}{'target':>8}")
    for name, took in times.items():
        each = statistics.median(took) / num_chunks * 1e6
        ratio = statistics.median(a / b for a, b in zip(took, times["topk"], strict=True))
        print(f"{name:24}{each:10.2f}{ratio:10.2f}{TARGETS.get(name, ''):>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--tensors", type=int, default=4, help="the rows are spread over so many tensors")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    torch.manual_seed(0)
    rows = args.rows // args.tensors
    carried = {f"layers.{i}": torch.randn(rows, args.cols, device=args.device) for i in range(args.tensors)}
    chunks = torch.cat([to_chunks(tensor, SIDE) for tensor in carried.values()])  # (C, P)
    codec = codec_for(args.device, SIDE, KEEP, "2bit")
    payloads = codec.encode_many(carried)
    data = codec.pack_many(payloads)
    mean = codec.running_mean("contributors")
    parts: dict[str, Callable[[], object]] = {
        "topk": lambda: chunks.abs().topk(KEEP, dim=1),
        "encode": lambda: codec.pack_many(codec.encode_many(carried)),
        "of which pack": lambda: codec.pack_many(payloads),
        "decode and accumulate": lambda: mean.add(codec.unpack_many(data)),
        "of which unpack": lambda: codec.unpack_many(data),
    }
    print(f"{len(chunks)} chunks of {SIDE}x{SIDE}, {KEEP} kept, in {args.tensors} tensors")
    all_threads = torch.get_num_threads()
    # One thread first: with more, a core that is busy elsewhere makes every operation wait for its share.
    for num_threads in sorted({1, all_threads}) if args.device == "cpu" else [all_threads]:
        torch.set_num_threads(num_threads)
        compare(parts, args.rounds, len(chunks), args.device)

    entries = layout((rows, args.cols), SIDE, KEEP).entries
    assert len(data) == packed_many_bytes({name: t.shape for name, t in carried.items()}, SIDE, KEEP, "2bit")
    bound = log2(comb(entries, KEEP)) / KEEP
    print(f"bits per kept index    {index_code(entries, KEEP).bits(KEEP) / KEEP:.2f} (bound {bound:.2f})")
    print(f"bits per kept value    {2 + 8 * SCALE_BYTES / KEEP:.2f}")
    print(f"both, as packed        {8 * len(data) / (len(chunks) * KEEP):.3f}")


if __name__ == "__main__":
    main()
