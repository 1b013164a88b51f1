"""Digests of weights: equal digests mean equal bits."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

THREAD_BYTES = 16 << 20  # with less than this, starting threads takes longer than hashing
STAGING_BYTES = 32 << 20  # of pinned memory, through which the bytes of a GPU's tensors pass
MAX_THREADS = 8


def shard_digest(tensors: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """Digest of one shard of an anchor: names, types and bits, as this thread's current stream has them."""
    return _digest(tensors, names, _written(tensors))


def shard_digests(tensors: Mapping[str, Tensor], shards: Sequence[Sequence[str]]) -> list[str]:
    """Digests of all shards, in threads where there is much to hash. A shard is one stream of SHA-256: cut
    further, it would have another digest."""
    sizes = [sum(tensors[name].nbytes for name in names) for names in shards]
    threads, written = min(len(shards), os.cpu_count() or 1, MAX_THREADS), _written(tensors)
    if threads < 2 or sum(sizes) < THREAD_BYTES:
        return [_digest(tensors, names, written) for names in shards]
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        largest_first = sorted(range(len(shards)), key=lambda i: -sizes[i])
        found = {i: pool.submit(_digest, tensors, shards[i], written) for i in largest_first}
        return [found[i].result() for i in range(len(shards))]


def anchor_digest(shard_digests: Sequence[str]) -> str:
    """Digest of a whole anchor from those of its shards: no process needs to hold all of it."""
    return hashlib.sha256("/".join(shard_digests).encode()).hexdigest()


def _written(tensors: Mapping[str, Tensor]) -> torch.cuda.Event | None:
    """When all that was launched up to now is done; None without a GPU."""
    device = next(iter(tensors.values())).device
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _digest(tensors: Mapping[str, Tensor], names: Sequence[str], written: torch.cuda.Event | None) -> str:
    digest = hashlib.sha256()
    copy = _copier(tensors[names[0]].device, written) if written else None
    for name in names:
        tensor = tensors[name].detach()
        digest.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}\0".encode())
        for part in copy(tensor) if copy else (_bytes(tensor).numpy().data,):
            digest.update(part)  # without the GIL
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _copier(device: torch.device, written: torch.cuda.Event) -> Callable[[Tensor], Iterator[memoryview]]:
    """Brings a GPU's tensors to the host through one small pinned buffer, which each part overwrites.

    It has a stream of its own: it waits for what wrote the tensors, and not for what was launched since.
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
