"""Digests of weights: equal digests mean equal bits."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

THREAD_BYTES = 16 << 20  # with less than this, starting threads takes longer than hashing
STAGING_BYTES = 32 << 20  # of pinned memory, through which the bytes of a GPU's tensors pass
MAX_THREADS = 8


def shard_digest(tensors: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """Digest of one shard of an anchor: names, types and bits. Any thread may call."""
    digest = hashlib.sha256()
    for name in names:
        tensor = tensors[name].detach()
        digest.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}\0".encode())
        for part in _host_bytes(tensor.contiguous().flatten().view(torch.uint8)):
            digest.update(part)  # without the GIL
    return digest.hexdigest()


def shard_digests(tensors: Mapping[str, Tensor], shards: Sequence[Sequence[str]]) -> list[str]:
    """Digests of all shards, in threads where there is much to hash. A shard is one stream of SHA-256: cut
    further, it would have another digest."""
    sizes = [sum(tensors[name].nbytes for name in names) for names in shards]
    threads = min(len(shards), os.cpu_count() or 1, MAX_THREADS)
    if threads < 2 or sum(sizes) < THREAD_BYTES:
        return [shard_digest(tensors, names) for names in shards]
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        largest_first = sorted(range(len(shards)), key=lambda i: -sizes[i])
        found = {i: pool.submit(shard_digest, tensors, shards[i]) for i in largest_first}
        return [found[i].result() for i in range(len(shards))]


def anchor_digest(shard_digests: Sequence[str]) -> str:
    """Digest of a whole anchor from those of its shards: no process needs to hold all of it."""
    return hashlib.sha256("/".join(shard_digests).encode()).hexdigest()


def _host_bytes(flat: Tensor) -> Iterator[memoryview]:
    """The bytes of a flat uint8 tensor; a GPU's come through one small pinned buffer, which each part
    overwrites."""
    if not flat.is_cuda:
        yield flat.numpy().data
        return
    # A stream of its own: the copy waits for what was launched before it, and not for what comes after.
    stream = torch.cuda.Stream(flat.device)
    stream.wait_stream(torch.cuda.current_stream(flat.device))
    staging = torch.empty(min(STAGING_BYTES, len(flat)), dtype=torch.uint8, pin_memory=True)
    for part in flat.split(STAGING_BYTES):
        with torch.cuda.stream(stream):
            staging[: len(part)].copy_(part, non_blocking=True)
        stream.synchronize()
        yield staging[: len(part)].numpy().data
