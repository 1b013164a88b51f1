"""Payload <-> bytes: nothing lost, nothing believed."""

import random
import struct
import tracemalloc
import zlib
from dataclasses import replace
from math import comb, log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.layout.chunks import KINDS, index_code
from isthmus.sparse import (
    SparseChunks,
    TopK,
    pack,
    pack_many,
    packed_bytes,
    packed_many_bytes,
    unpack,
    unpack_many,
)
from isthmus.sparse.topk import in_padding


def seal(data: bytes) -> bytes:
    return data + struct.pack("<I", zlib.crc32(data))


def assert_same(one: SparseChunks, other: SparseChunks) -> None:
    for field in ("values", "index", "scale", "base"):
        a, b = getattr(one, field), getattr(other, field)
        assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b)), field
    assert (one.shape, one.side, one.keep, one.kind) == (other.shape, other.side, other.keep, other.kind)


def assert_sound(payload: SparseChunks) -> None:
    """All that a payload promises."""
    layout = payload.layout
    assert payload.values.shape == payload.index.shape == (layout.chunks, layout.kept)
    assert payload.index.dtype == torch.int16
    assert payload.values.isfinite().all()
    assert (payload.index[:, 1:] > payload.index[:, :-1]).all()
    assert ((payload.index >= 0) & (payload.index < layout.entries)).all()
    assert not in_padding(payload.index, layout).any()
    again = unpack(pack(payload))
    assert torch.equal(again.index, payload.index)
    assert torch.equal(again.values, payload.values)
    TopK(payload.side, payload.keep, payload.kind).decode(payload)


shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 300)),
    st.tuples(st.integers(0, 150), st.integers(1, 150)),
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 9)),
    st.sampled_from([(67, 131), (64, 131), (128, 64), (127,), (131, 1)]),
)


@given(shapes, st.integers(1, 70), st.data(), st.sampled_from(KINDS), st.integers(0, 2**31))
@settings(deadline=None, max_examples=300)
def test_round_trip_is_lossless_and_as_long_as_predicted(shape, side, data, kind, seed):
    keep = data.draw(st.one_of(st.integers(1, side**2), st.just(side**2)))
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(shape, generator=generator, dtype=torch.float64) ** 3
    dense = dense if kind == "fp64" else dense.float()
    codec = TopK(side, keep, kind)
    payload = codec.encode(dense)
    packed = pack(payload)
    assert len(packed) == packed_bytes(shape, side, keep, kind)
    again = unpack(packed)
    assert_same(again, payload)
    assert torch.equal(codec.decode(again), codec.decode(payload))
    assert pack(again) == packed


@given(st.dictionaries(st.text(max_size=8), shapes, min_size=1, max_size=7), st.sampled_from(KINDS))
@settings(deadline=None, max_examples=60)
def test_shards_round_trip_with_their_names_in_order(named, kind):
    codec = TopK(16, 9, kind)
    payloads = codec.encode_many({name: torch.randn(shape) for name, shape in named.items()})
    data = pack_many(payloads)
    assert len(data) == packed_many_bytes(named, 16, 9, kind)
    again = unpack_many(data)
    assert list(again) == list(named)
    for name, payload in payloads.items():
        assert_same(again[name], payload)
        assert_same(unpack(pack(payload)), payload)


def test_bits_per_kept_value_at_32_of_4096():
    dense = torch.randn(1024, 1024)
    num_kept = 256 * 32
    whole = 8 * len(pack(TopK(values="fp32").encode(dense))) / num_kept
    assert whole - 32 <= 9.05
    assert 8 * len(pack(TopK(values="2bit").encode(dense))) / num_kept <= 11.6
    assert log2(comb(4096, 32)) / 32 <= index_code(4096, 32).bits(32) / 32 <= 9.0


@given(st.integers(1, 5000), st.data())
def test_index_code_is_never_longer_than_a_bitmap(entries, data):
    count = data.draw(st.integers(1, entries))
    assert index_code(entries, count).bits(count) <= entries


def small_payloads() -> list[bytes]:
    torch.manual_seed(0)
    made = [
        pack(TopK(16, keep, kind).encode(torch.randn(shape)))
        for kind in KINDS
        for keep, shape in ((9, (32, 16)), (9, (17, 19)), (256, (5,)), (100, (16, 37)))
    ]
    codec = TopK(16, 9, "2bit")
    named = {
        "layers.0.wq": torch.randn(16, 32),
        "layers.0.norm": torch.randn(37),
        "head": torch.randn(19, 19),
    }
    return [*made, pack_many(codec.encode_many(named))]


def mutate(data: bytes, rng: random.Random) -> bytes:
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        action = rng.randrange(5)
        at = rng.randrange(min(len(data), 40) if rng.random() < 0.5 else len(data)) if data else 0
        if action == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif action == 1 and data:
            data[at] = rng.choice((0, 255, 127, 128, rng.randrange(256)))
        elif action == 2:
            del data[at:]
        elif action == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            del data[at : at + rng.randrange(1, 9)]
    return bytes(data)


def test_ten_thousand_damaged_payloads_are_refused_with_a_value_error():
    rng = random.Random(0)
    originals = small_payloads()
    for _ in range(10_000):
        original = rng.choice(originals)
        damaged = mutate(original, rng)
        if damaged == original:
            continue
        with pytest.raises(ValueError):  # noqa: PT011 any message will do
            unpack_many(damaged)


def test_a_forged_checksum_gains_nothing():
    rng = random.Random(1)
    originals = small_payloads()
    accepted = 0
    for _ in range(5_000):
        forged = seal(mutate(rng.choice(originals)[:-4], rng))
        try:
            payloads = unpack_many(forged)
        except ValueError:
            continue
        accepted += 1
        for payload in payloads.values():
            assert_sound(payload)
        assert list(unpack_many(pack_many(payloads))) == list(payloads)
    assert accepted > 100  # a changed value or position may well be a payload


@pytest.mark.parametrize("wrong", [b"", b"ISP", None, 3, "text", b"\0" * 64, [1, 2]])
def test_what_is_no_payload_is_a_value_error(wrong):
    with pytest.raises(ValueError):  # noqa: PT011
        unpack(wrong)


def header(
    dims: list[int], side: int = 64, keep: int = 1, kind: int = 0, count: int = 1, name: bytes = b""
) -> bytes:
    head = struct.pack("<3sBBBHI", b"ISP", 1, kind, side, keep, count)
    return head + struct.pack("<H", len(name)) + name + struct.pack(f"<B{len(dims)}I", len(dims), *dims)


@pytest.mark.parametrize(
    "head",
    [
        header([2**32 - 1, 2**32 - 1]),
        header([2**20, 2**20]),
        header([2**32 - 1]),
        header([0] + [2**32 - 1] * 7),
        header([1] * 9),
        header([4], count=2**32 - 1),
        header([4], count=0),
        header([4], side=0),
        header([4], side=255),
        header([4], keep=0),
        header([4], kind=4),
        header([4], name=b"\xff\xfe"),
        header([4], name=b"n" * 600),
        header([]),
    ],
)
def test_a_header_that_claims_the_world_allocates_nothing(head):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):  # noqa: PT011
            unpack_many(seal(head + bytes(8)))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_two_tensors_of_one_name_are_refused():
    entry = header([1], side=1)[12:]
    body = struct.pack("<ff", 1.0, 2.0)
    head = struct.pack("<3sBBBHI", b"ISP", 1, 0, 1, 1, 2)
    with pytest.raises(ValueError, match="two tensors"):
        unpack_many(seal(head + entry + entry + body))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value):
    data = bytearray(pack(TopK(8, 4).encode(torch.randn(8, 8))))
    data[-8:-4] = struct.pack("<f", value)
    with pytest.raises(ValueError, match="not finite"):
        unpack(seal(bytes(data[:-4])))


def test_positions_in_padding_are_refused():
    payload = TopK(8, 4).encode(torch.randn(13))
    assert payload.layout.padded
    last = payload.index.clone()
    last[-1] = payload.layout.width - 1
    with pytest.raises(ValueError, match="positions"):
        unpack(pack(replace(payload, index=last)))


def test_payloads_that_cannot_stand_together_are_not_packed():
    dense = torch.randn(64, 64)
    with pytest.raises(ValueError, match="alike"):
        pack_many({"a": TopK(values="fp32").encode(dense), "b": TopK(values="bf16").encode(dense)})
    with pytest.raises(ValueError, match="fit"):
        pack(replace(TopK().encode(dense), shape=torch.Size((64, 128))))
    with pytest.raises(ValueError, match="nothing"):
        pack_many({})


def test_bf16_is_rounded_once_and_never_to_infinity():
    dense = torch.tensor([[3.4e38, -3.4e38], [1.00390625, 1e-30]])
    payload = TopK(2, 4, "bf16").encode(dense)
    assert payload.values.isfinite().all()
    assert_same(unpack(pack(payload)), payload)
