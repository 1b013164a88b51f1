"""Batches are a pure function of (seed, replica, inner step): no repeat, no gap, no cursor."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.data.corpus import TokenView, open_corpus
from isthmus.data.order import Permutation
from isthmus.data.tokens import Batches, validation_batches
from isthmus.errors import ConfigError


def counting_view(num_tokens: int, num_shards: int = 1) -> TokenView:
    """Token i is i, so a window shows where it came from."""
    return TokenView("train", np.array_split(np.arange(num_tokens, dtype=np.uint32), num_shards))


@given(size=st.integers(1, 5000), seed=st.integers(-5, 2**40), number=st.integers(0, 2**40))
def test_permutation_is_a_bijection(size, seed, number):
    image = Permutation(size, seed, number)(np.arange(size))
    assert sorted(image) == list(range(size))


@given(size=st.integers(2**33, 2**45), seed=st.integers(0, 100))
def test_permutation_of_a_huge_range_stays_inside_and_does_not_collide(size, seed):
    places = np.unique(np.linspace(0, size - 1, 500, dtype=np.int64))
    image = Permutation(size, seed, 0)(places)
    assert image.min() >= 0
    assert image.max() < size
    assert np.unique(image).size == places.size


def test_permutation_looks_random_and_differs_by_seed_and_pass():
    size = 20_000
    base = Permutation(size, 0, 0)(np.arange(size))
    for other in (Permutation(size, 1, 0), Permutation(size, 0, 1)):
        assert (other(np.arange(size)) == base).mean() < 0.001
    assert abs(np.corrcoef(np.arange(size), base)[0, 1]) < 0.03
    assert abs(np.corrcoef(base[:-1], base[1:])[0, 1]) < 0.03
    # A random order has steps of +1 about once; a weak network shows runs.
    assert (np.diff(base) == 1).sum() < 10


@given(
    num_replicas=st.integers(1, 5),
    batch=st.integers(1, 5),
    context=st.integers(1, 9),
    num_sequences=st.integers(5, 70),
    spare=st.integers(0, 8),
    num_shards=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_each_pass_reads_every_sequence_exactly_once(
    num_replicas, batch, context, num_sequences, spare, num_shards, seed
):
    view = counting_view(num_sequences * context + 1 + spare % context, num_shards)
    batches = Batches(view, seed, num_replicas, batch, context)
    assert batches.num_sequences == num_sequences
    num_steps = -(-3 * num_sequences // (num_replicas * batch))
    read = torch.cat([batches.at(m, step) for step in range(num_steps) for m in range(num_replicas)])
    assert torch.equal(read, read[:, :1] + torch.arange(context + 1))  # whole windows, shard edges or not
    starts = read[:, 0].tolist()
    for number in range(3):
        one_pass = starts[number * num_sequences : (number + 1) * num_sequences]
        assert sorted(one_pass) == [index * context for index in range(num_sequences)]


@given(num_replicas=st.integers(1, 4), batch=st.integers(1, 4), step=st.integers(0, 10**9))
def test_any_step_is_reached_at_once_and_stacked_equals_one_by_one(num_replicas, batch, step):
    view = counting_view(1000, 3)
    stacked = Batches(view, 7, num_replicas, batch, 16).stacked(step)
    assert stacked.dtype == torch.int64
    assert stacked.shape == (num_replicas, batch, 17)
    for replica in range(num_replicas):
        # A fresh object per call: nothing that was asked before matters.
        assert torch.equal(Batches(view, 7, num_replicas, batch, 16).at(replica, step), stacked[replica])


def test_fewer_tokens_than_one_batch_are_refused():
    with pytest.raises(ConfigError, match="it needs 41"):
        Batches(counting_view(40), seed=0, num_replicas=1, batch=4, context=10)
    Batches(counting_view(41), seed=0, num_replicas=1, batch=4, context=10)


def test_places_outside_the_run_are_refused():
    batches = Batches(counting_view(41), seed=0, num_replicas=2, batch=2, context=10)
    for replica, step in ((2, 0), (-1, 5), (0, -1)):
        with pytest.raises(IndexError):
            batches.at(replica, step)


@given(st.data())
def test_windows_equal_plain_slices_of_the_joined_shards(data):
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    whole = np.random.default_rng(sum(sizes)).integers(0, 60_000, sum(sizes)).astype(np.uint16)
    view = TokenView("train", np.split(whole, np.cumsum(sizes)[:-1]))
    length = data.draw(st.integers(1, len(whole)))
    starts = np.array(data.draw(st.lists(st.integers(0, len(whole) - length), max_size=6)), dtype=np.int64)
    expected = [whole[start : start + length] for start in starts]
    assert np.array_equal(view.windows(starts, length), np.reshape(expected, (len(starts), length)))


def test_validation_windows_are_fixed_distinct_and_spread_over_the_split():
    corpus = open_corpus("builtin:sample")
    batches = validation_batches(corpus, batch=8, context=64, num_batches=6)
    again = validation_batches(corpus, batch=8, context=64, num_batches=6)
    assert torch.equal(torch.stack(batches), torch.stack(again))
    assert [tuple(batch.shape) for batch in batches] == [(8, 65)] * 6
    num_sequences = (len(corpus.validation) - 1) // 64
    rows = torch.cat(batches)
    for place, row in enumerate(rows):
        start = place * num_sequences // 48 * 64
        assert row.tolist() == corpus.validation.slice(start, start + 65).tolist()
    assert start > 0.9 * len(corpus.validation)


def test_a_small_validation_split_gives_fewer_windows_and_at_least_one():
    corpus = open_corpus("builtin:sample")
    available = (len(corpus.validation) - 1) // 4000
    assert [len(batch) for batch in validation_batches(corpus, 4, 4000, 100)] == [4] * (available // 4)
    assert [len(batch) for batch in validation_batches(corpus, 50, 4000, 3)] == [available]
    with pytest.raises(ConfigError, match="validation part has"):
        validation_batches(corpus, 1, 10**6, 1)
