"""Chunks and selection: TOP-kappa of eq. 2 of arXiv 2601.02360."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.layout.chunks import layout
from isthmus.sparse import TopK, chunk_shape, from_chunks, kept, to_chunks
from isthmus.sparse import topk as topk_module
from isthmus.sparse.topk import in_padding, largest

AWKWARD = [
    (),
    (1,),
    (7,),
    (64,),
    (131,),
    (6, 10),
    (67, 131),
    (64, 131),
    (97, 64),
    (130, 5),
    (3, 5, 7),
    (2, 67, 2),
]


def slow_chunks(dense: torch.Tensor, side: int) -> list[list[tuple[int, float]]]:
    """Every chunk as (flat position or -1, value), by loops."""
    grid = layout(tuple(dense.shape), side, keep=0)
    flat = dense.reshape(grid.rows, grid.cols)

    def starts(count: int, whole: int, size: int) -> list[tuple[int, int]]:
        found, at = [], 0
        for i in range(count):
            length = size if i < whole else size - 1
            found.append((at, length))
            at += length
        return found

    chunks = []
    for top, tall in starts(grid.down, grid.whole_down, grid.height):
        for left, broad in starts(grid.across, grid.whole_across, grid.width):
            chunk = []
            for r in range(grid.height):
                for c in range(grid.width):
                    real = r < tall and c < broad
                    row, col = top + r, left + c
                    chunk.append((row * grid.cols + col, flat[row, col].item()) if real else (-1, 0.0))
            chunks.append(chunk)
    return chunks


@pytest.mark.parametrize("shape", AWKWARD)
@pytest.mark.parametrize("side", [1, 3, 8, 64])
def test_chunks_are_a_permutation_that_a_loop_agrees_with(shape, side):
    dense = torch.randn(shape, dtype=torch.float64)
    chunks = to_chunks(dense, side)
    slow = slow_chunks(dense, side)
    assert chunks.tolist() == [[value for _, value in chunk] for chunk in slow]
    positions = sorted(position for chunk in slow for position, _ in chunk if position >= 0)
    assert positions == list(range(dense.numel()))
    assert torch.equal(from_chunks(chunks, dense.shape, side), dense)


def test_multiples_of_64_give_blocks_in_order_y_x_h_w():
    dense = torch.arange(128 * 192).view(128, 192)
    assert chunk_shape((128, 192), 64) == (64, 64)
    expected = torch.stack(
        [dense[64 * y : 64 * y + 64, 64 * x : 64 * x + 64].flatten() for y in (0, 1) for x in (0, 1, 2)]
    )
    assert torch.equal(to_chunks(dense, 64), expected)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((96, 100), (48, 50)),
        ((2688, 5440), (64, 64)),
        ((48,), (1, 48)),
        ((96,), (1, 48)),
        ((), (1, 1)),
        ((4, 6, 16), (4, 48)),
    ],
)
def test_divisors_decide_where_they_are_large_enough(shape, expected):
    assert chunk_shape(shape, 64) == expected


@given(st.integers(1, 3000), st.integers(2, 90))
@settings(deadline=None, max_examples=200)
def test_no_dimension_degenerates(length, side):
    _, width = chunk_shape((length,), side)
    assert width <= side
    assert 2 * width >= min(length, side)


def test_kept_scales_with_the_chunk():
    assert kept(4096, 32, 64) == 32
    assert kept(64, 32, 64) == 1
    assert kept(2048, 64, 64) == 32
    assert kept(1, 4096, 64) == 1
    assert kept(777, 4096, 64) == 777


@pytest.mark.parametrize(("count", "entries"), [(32, 4096), (1, 64), (5, 1156), (200, 4096), (3, 4)])
def test_largest_agrees_with_a_full_sort(count, entries):
    magnitude = torch.rand(50, entries, dtype=torch.float64)
    values, index = largest(magnitude, count)
    assert torch.equal(values, magnitude.sort(1, descending=True).values[:, :count])
    assert torch.equal(magnitude.gather(1, index), values)


def test_largest_is_exact_among_ties_and_puts_nan_first():
    magnitude = torch.randint(0, 3, (200, 4096)).double()
    magnitude[7, 4000] = torch.nan
    values, index = largest(magnitude, 32)
    assert torch.equal(values.nan_to_num(9), magnitude.nan_to_num(9).sort(1, descending=True).values[:, :32])
    assert all(len(set(row)) == 32 for row in index.tolist())


@pytest.mark.parametrize("shape", AWKWARD)
@pytest.mark.parametrize("keep", [1, 32, 900, 4095, 4096])
def test_the_largest_of_each_chunk_are_kept_and_padding_never_is(shape, keep):
    dense = torch.randn(shape, dtype=torch.float64)
    codec = TopK(keep=keep, values="fp64")
    payload = codec.encode(dense)
    grid = payload.layout
    assert not in_padding(payload.index, grid).any()
    assert (payload.index[:, 1:] > payload.index[:, :-1]).all()
    decoded = codec.decode(payload)
    assert torch.equal(decoded[decoded != 0], dense[decoded != 0])
    assert (decoded != 0).sum() == grid.chunks * grid.kept
    if keep == 4096:
        assert torch.equal(decoded, dense)
    else:
        expected = torch.zeros(dense.numel(), dtype=torch.float64)
        for chunk in slow_chunks(dense, 64):
            for at, value in sorted(chunk, key=lambda entry: -abs(entry[1]))[: grid.kept]:
                expected[at] = value
        assert torch.equal(decoded.flatten(), expected)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "2bit", "fp64"])
def test_whole_model_equals_tensor_by_tensor_bit_for_bit(kind, monkeypatch):
    monkeypatch.setattr(topk_module, "ENTRIES_PER_THREAD", 3 * 2048)  # cut tensors and join them
    shapes = {
        "a": (128, 192),
        "b": (192,),
        "c": (67, 131),
        "d": (256, 64),
        "e": (),
        "f": (64, 320),
        "g": (131, 67),
    }
    dense = {name: torch.randn(shape) * 10.0 ** torch.randint(-3, 3, ()) for name, shape in shapes.items()}
    dense["f"][:, 64:] = 0
    codec = TopK(values=kind)
    for name, payload in codec.encode_many(dense).items():
        alone = codec.encode(dense[name])
        for field in ("values", "index", "scale", "base"):
            one, other = getattr(payload, field), getattr(alone, field)
            assert (one is None and other is None) or torch.equal(one, other)
        assert payload.shape == alone.shape == torch.Size(shapes[name])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "2bit"])
def test_an_entry_that_is_not_finite_is_refused_by_name(bad, kind):
    dense = {"fine": torch.randn(64, 64), "layers.3.wq": torch.randn(128, 64)}
    dense["layers.3.wq"][100, 3] = bad
    with pytest.raises(ValueError, match=r"layers\.3\.wq"):
        TopK(values=kind).encode_many(dense)


@pytest.mark.parametrize(
    "bad", [{"keep": 0}, {"keep": 4097}, {"values": "3bit"}, {"side": 0}, {"side": 182, "keep": 1}]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        TopK(**bad)


def test_transposed_bf16_and_graph_tensors_are_encoded():
    dense = torch.randn(64, 128, requires_grad=True)
    codec = TopK()
    assert torch.equal(
        codec.decode(codec.encode(dense.T)), codec.decode(codec.encode(dense.detach().T.contiguous()))
    )
    half = dense.detach().bfloat16()
    assert torch.equal(codec.decode(codec.encode(half)), codec.decode(codec.encode(half.float())))


def test_sizes_need_no_torch():
    code = "import sys, isthmus.layout.chunks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
