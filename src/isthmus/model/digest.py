"""Digests of weights: equal digests mean equal bits."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def shard_digest(tensors: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """Digest of one shard of an anchor: names, types and bits."""
    digest = hashlib.sha256()
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}/{tensor.dtype}/{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def anchor_digest(shard_digests: Sequence[str]) -> str:
    """Digest of a whole anchor from those of its shards: no process needs to hold all of it."""
    return hashlib.sha256("/".join(shard_digests).encode()).hexdigest()
