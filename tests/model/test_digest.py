"""Digests of weights: what they are, whoever makes them and in however many threads."""

import hashlib

import pytest
import torch

from isthmus.model import digest
from isthmus.model.digest import anchor_digest, shard_digest, shard_digests

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(6, dtype=torch.float64).reshape(3, 2).mT,  # not contiguous
    "c": torch.ones(5, dtype=torch.bfloat16),
    "d": torch.zeros(0),
}
DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
SHARDS = (("a", "c"), ("b",), ("d",))


def plain(names) -> str:
    """As buckets hold it since 0.3: it may never change."""
    hashes = []
    for name in names:
        tensor = TENSORS[name].contiguous()
        head = f"{name}/{DTYPES[tensor.dtype]}/{tuple(tensor.shape)}\0".encode()
        hashes.append(hashlib.sha256(head + bytes(tensor.flatten().view(torch.uint8).tolist())).hexdigest())
    return hashlib.sha256("/".join(hashes).encode()).hexdigest()


def test_a_shards_digest_combines_a_hash_of_name_type_and_bits_for_each_tensor():
    assert [shard_digest(TENSORS, names) for names in SHARDS] == [plain(names) for names in SHARDS]
    changed = TENSORS | {"a": TENSORS["a"] + torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1e-6]])}
    assert shard_digest(changed, ("a",)) != shard_digest(TENSORS, ("a",))


@pytest.mark.parametrize("thread_bytes", [0, 1 << 40])
def test_threads_do_not_change_it(monkeypatch, thread_bytes):
    monkeypatch.setattr(digest, "THREAD_BYTES", thread_bytes)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    found = shard_digests(TENSORS, SHARDS)
    assert found == [plain(names) for names in SHARDS]
    assert anchor_digest(found) == hashlib.sha256("/".join(found).encode()).hexdigest()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_the_same(monkeypatch):
    monkeypatch.setattr(digest, "STAGING_BYTES", 16)  # in parts
    there = {name: tensor.cuda() for name, tensor in TENSORS.items()}
    assert shard_digests(there, SHARDS) == [plain(names) for names in SHARDS]
