"""Digests of weights: equal digests mean equal bits.

Each tensor has its own hash; a shard's digest combines its tensors', an anchor's combines its shards'. So
tensors can be hashed in parallel, and no process needs the whole model.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

THREAD_BYTES = 16 << 20  # below this, starting threads takes longer than hashing
STAGING_BYTES = 32 << 20  # of pinned memory, through which a GPU's tensors pass
MAX_THREADS = 8

Copy = Callable[[Tensor], Iterator[memoryview]]


def shard_digest(tensors: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """Digest one shard of an anchor: names, types and bits, as this thread's current stream sees them."""
    return shard_digests(tensors, [names])[0]


def shard_digests(tensors: Mapping[str, Tensor], shards: Sequence[Sequence[str]]) -> list[str]:
    """Digest several shards, with tensors in threads if there is much to hash."""
    names = [name for shard in shards for name in shard]
    hashes = _hashes({name: tensors[name].detach() for name in names})
    return [_combined([hashes[name] for name in shard]) for shard in shards]


def anchor_digest(shard_digests: Sequence[str]) -> str:
    """Digest a whole anchor from the digests of its shards."""
    return _combined(shard_digests)


def _combined(digests: Sequence[str]) -> str:
    return hashlib.sha256("/".join(digests).encode()).hexdigest()


def _hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Hash tensors by name. Each thread has its own way of copying bytes to the host."""
    own, written = threading.local(), _written(tensors)

    def hashed(name: str) -> str:
        if not hasattr(own, "copy"):
            own.copy = _copier(tensors[name].device, written) if written else _plain
        return _hash(name, tensors[name], own.copy)

    threads = min(len(tensors), os.cpu_count() or 1, MAX_THREADS)
    if threads < 2 or sum(tensor.nbytes for tensor in tensors.values()) < THREAD_BYTES:
        return {name: hashed(name) for name in tensors}
    largest_first = sorted(tensors, key=lambda name: -tensors[name].nbytes)
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        return dict(zip(largest_first, pool.map(hashed, largest_first), strict=True))


def _hash(name: str, tensor: Tensor, copy: Copy) -> str:
    digest = hashlib.sha256(f"{name}/{str(tensor.dtype)[6:]}/{tuple(tensor.shape)}\0".encode())
    for part in copy(tensor):
        digest.update(part)  # without the GIL
    return digest.hexdigest()


def _written(tensors: Mapping[str, Tensor]) -> torch.cuda.Event | None:
    """Return an event that marks the end of all work launched so far; None without a GPU."""
    device = next(iter(tensors.values())).device
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _plain(tensor: Tensor) -> Iterator[memoryview]:
    yield _bytes(tensor).numpy().data


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _copier(device: torch.device, written: torch.cuda.Event) -> Copy:
    """Copy a GPU's tensors to the host through one small pinned buffer, which each part overwrites.

    It has its own stream, which waits for the writers of the tensors, but not for later work.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_event(written)
    staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy(tensor: Tensor) -> Iterator[memoryview]:
        with torch.cuda.stream(stream):
            flat = _bytes(tensor)
        for part in flat.split(STAGING_BYTES):
            with torch.cuda.stream(stream):
                staging[: len(part)].copy_(part, non_blocking=True)
            stream.synchronize()
            yield staging[: len(part)].numpy().data

    return copy
