"""What the hash of a saved state costs: a gigabyte written and read with it and without, and the edge of a
round.

    python bench/state_hash.py [--gib 1] [--folder DIR]

The hash is made in the thread that writes, while a round trains: the edge pays only for that of its update.
"""

import argparse
import hashlib
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

from isthmus.model import checkpoint

TRIES = 3


def best(*works: Callable[[], object], tries: int = TRIES) -> list[float]:
    """The shortest time of each; they take turns, so that another process disturbs them alike."""
    seconds = [[] for _ in works]
    for _ in range(tries):
        for work, taken in zip(works, seconds, strict=True):
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return [min(taken) for taken in seconds]


def without_hash(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with mock.patch.object(checkpoint, "zlib", mock.Mock(crc32=lambda *data: 0)):
        checkpoint.save_tensors(path, tensors)


def read_all(tensors: dict[str, torch.Tensor]) -> None:
    """As a restore does: every byte is copied."""
    for tensor in tensors.values():
        tensor.clone()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk that is measured")
    args = parser.parse_args()
    data = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8).numpy().tobytes()
    print("one core, GB/s of memory:")
    for name, function in (
        ("sha256", lambda: hashlib.sha256(data)),
        ("blake2b", lambda: hashlib.blake2b(data)),
        ("crc32", lambda: zlib.crc32(data)),
    ):
        print(f"  {name:<10}{len(data) / best(function)[0] / 1e9:6.2f}")
    count = int(args.gib * (1 << 30) / 4 / 8)
    state = {f"w{i}": torch.randn(count) for i in range(8)}
    update = {"shard-0": torch.randint(0, 256, (8 << 20,), dtype=torch.uint8)}
    size = sum(t.nbytes for t in state.values())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "state.safetensors"
        small = Path(folder) / "update.safetensors"
        save = checkpoint.save_tensors
        edge = best(lambda: without_hash(small, update), lambda: save(small, update), tries=20)
        write = best(lambda: without_hash(path, state), lambda: save(path, state))
        read = best(lambda: read_all(load_file(path)), lambda: read_all(checkpoint.load_tensors(path)))
    print(f"{'':<42}{'without':>10}{'with hash':>11}")
    rows = (
        (f"write {size / 1e9:.2f} GB in the thread, s", *write),
        (f"read and copy {size / 1e9:.2f} GB, s", *read),
        ("write an update of 8 MiB at the edge, ms", *(1e3 * seconds for seconds in edge)),
    )
    for name, before, after in rows:
        print(f"{name:<42}{before:>10.2f}{after:>11.2f}")


if __name__ == "__main__":
    main()
