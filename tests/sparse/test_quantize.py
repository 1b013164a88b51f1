"""Q of eq. 2 of arXiv 2601.02360: two bits per kept value."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from isthmus.sparse import TopK, from_chunks, pack, unpack
from isthmus.sparse.quantize import _tables, two_levels


def chunks_of(kind: str, count: int = 1024) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(count, 4096, generator=generator)
    if kind == "lognormal":
        return normal * torch.exp(0.5 * torch.randn(count, 1, generator=generator))
    if kind == "student":
        squares = torch.randn(count, 4096, 4, generator=generator).square().sum(2)
        return normal / (squares / 4).sqrt()
    return normal


@pytest.mark.parametrize(("kind", "bound"), [("gaussian", 0.06), ("lognormal", 0.06), ("student", 0.25)])
def test_error_on_kept_values_is_within_a_few_percent_of_two_ideal_levels(kind, bound):
    chunks = chunks_of(kind)
    dense = from_chunks(chunks, (2048, 2048), 64)
    exact, coded = TopK(values="fp32").encode(dense), TopK(values="2bit").encode(dense)
    assert torch.equal(exact.index, coded.index)
    error = (exact.values - coded.values).norm() / exact.values.norm()
    size = exact.values.abs().double().sort(1, descending=True).values
    low, high, _ = (level[:, None] for level in two_levels(size))
    ideal = torch.minimum((size - low).square(), (size - high).square()).sum().sqrt() / size.norm()
    assert error <= bound
    assert error <= 1.03 * ideal


def test_levels_are_the_best_of_all_cuts():
    # Not below 1/512: the code's ratio of levels ends at 1,024.
    size = torch.rand(40, 7, dtype=torch.float64).clamp(min=1 / 512).sort(1, descending=True).values
    low, high, _ = two_levels(size)
    for row, a, b in zip(size.tolist(), low.tolist(), high.tolist(), strict=True):
        error = sum(min((x - a) ** 2, (x - b) ** 2) for x in row)
        for mask in itertools.product([0, 1], repeat=7):
            parts = [[x for x, m in zip(row, mask, strict=True) if m == side] for side in (0, 1)]
            best = sum(sum((x - sum(p) / len(p)) ** 2 for x in p) for p in parts if p)
            assert error <= best + 1e-12


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=16, max_size=16),
    st.lists(st.integers(-140, 120), min_size=4, max_size=4),
)
@settings(deadline=None, max_examples=300)
def test_a_sign_is_never_lost_and_a_zero_stays_zero(numbers, octaves):
    dense = torch.tensor(numbers).view(4, 4)
    dense = torch.stack([dense, torch.randn(4, 4), torch.full((4, 4), 1e-42), torch.zeros(4, 4)])
    dense = (
        (dense.double() * 2.0 ** torch.tensor(octaves).view(4, 1, 1)).clamp(-3e38, 3e38).float().view(16, 4)
    )
    exact = TopK(4, 5, "fp32").encode(dense).values
    payload = TopK(4, 5, "2bit").encode(dense)
    assert torch.equal(payload.values.sign(), exact.sign())
    assert payload.values.isfinite().all()
    assert torch.equal(unpack(pack(payload)).values, payload.values)


def test_signs_hold_for_float64_far_outside_float32():
    dense = torch.tensor([[1e-300, -1e300], [3.0, -1e-200]], dtype=torch.float64)
    values = TopK(2, 4, "2bit").encode(dense).values
    assert torch.equal(values.double().sign(), dense.flatten()[None].sign())
    assert values.isfinite().all()


def test_a_chunk_with_few_entries_keeps_their_size():
    dense = torch.zeros(64, 64)
    dense[3, :5] = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    dense[5, 5] = 0
    codec = TopK(values="2bit")
    assert_close(codec.decode(codec.encode(dense)), dense)


def test_zeros_encode_to_zeros():
    codec = TopK(values="2bit")
    payload = codec.encode(torch.zeros(128, 64))
    assert not payload.scale.any()
    assert not codec.decode(unpack(pack(payload))).any()


def test_tables_are_constants():
    level, low, high = _tables(torch.device("cpu"))
    assert level[0] == 0
    assert level[1] == 2.0**-32
    assert level[-1] == 1
    assert (level[2:] > level[1:-1]).all()
    assert high[0] == 1
    assert high[62] == 1024
    assert low[:63].eq(1).all()
