"""The mean over replicas in eq. 2 of arXiv 2601.02360."""

import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from isthmus.outer import aggregate, aggregate_many
from isthmus.sparse import TopK

SHAPES = {"wq": (128, 192), "norm": (192,), "odd": (67, 131), "tall": (256, 64), "scalar": ()}


def replicas(num: int, kind: str = "2bit", keep: int = 200) -> list[dict]:
    codec = TopK(keep=keep, values=kind)
    return [
        codec.encode_many({name: torch.randn(shape) * (m + 1) for name, shape in SHAPES.items()})
        for m in range(num)
    ]


def slow_mean(items: list[torch.Tensor], how: str, clip: bool, weights: Sequence[int] = ()) -> torch.Tensor:
    """Entry by entry, in Python floats: sum of w f x over the sum of w of those that count."""
    weights = weights or [1] * len(items)
    factors = [1.0] * len(items)
    if clip:
        norms = [sum(x * x for x in item.flatten().tolist()) ** 0.5 for item in items]
        median = sorted(norms)[(len(norms) - 1) // 2]
        factors = [min(1.0, median / (norm + 1e-8)) for norm in norms]
    rows = zip(*(item.double().flatten().tolist() for item in items), strict=True)
    means = []
    for row in rows:
        number = sum(w for w, x in zip(weights, row, strict=True) if x != 0 or how == "all")
        means.append(sum(w * f * x for w, f, x in zip(weights, factors, row, strict=True)) / max(1, number))
    return torch.tensor(means, dtype=torch.float64).view(items[0].shape)


def plain_mean(items: list[torch.Tensor], how: str, weights: Sequence[int] | None = None) -> torch.Tensor:
    """Tensor by tensor in the order given, as RunningMean promises to do it for chunks."""
    total, count = torch.zeros_like(items[0]), torch.zeros_like(items[0])
    for item, weight in zip(items, weights or [1] * len(items), strict=True):
        total += item * weight
        count += (item != 0) * weight if how == "contributors" else weight
    return total / count.clamp(min=1)


@pytest.mark.parametrize("how", ["contributors", "all"])
@pytest.mark.parametrize("clip", [None, "median"])
@pytest.mark.parametrize("num", [1, 4, 5])
def test_mean_agrees_with_plain_arithmetic(how, clip, num):
    codec = TopK(keep=700, values="fp64")
    dense = [torch.randn(67, 70, dtype=torch.float64) * (m + 1) for m in range(num)]
    payloads = [codec.encode(item) for item in dense]
    decoded = [codec.decode(payload) for payload in payloads]
    expected = slow_mean(decoded, how, clip == "median")
    assert_close(aggregate(payloads, how, clip), expected)


@given(
    weights=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=6),
    how=st.sampled_from(["contributors", "all"]),
    clip=st.sampled_from([None, "median"]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=30)
def test_a_weighted_mean_agrees_with_plain_arithmetic(weights, how, clip, seed):
    random, codec = torch.Generator().manual_seed(seed), TopK(side=8, keep=9, values="fp64")
    draws = (torch.randn(16, 11, dtype=torch.float64, generator=random) for _ in weights)
    dense = [draw * (m + 1) for m, draw in enumerate(draws)]
    payloads = [codec.encode(item) for item in dense]
    decoded = [codec.decode(payload) for payload in payloads]
    expected = slow_mean(decoded, how, clip == "median", weights)
    assert_close(aggregate(payloads, how, clip, weights), expected)


@given(weight=st.integers(1, 1 << 20), how=st.sampled_from(["contributors", "all"]))
@settings(deadline=None, max_examples=10)
def test_equal_weights_are_the_plain_mean_to_the_bit(weight, how):
    for sent in (replicas(3), replicas(1)):
        for clip in (None, "median"):
            plain, weighed = (aggregate_many(sent, how, clip, w) for w in (None, [weight] * len(sent)))
            assert all(torch.equal(plain[name], weighed[name]) for name in SHAPES)


def test_a_replica_of_twice_the_batch_counts_as_two():
    one, two = replicas(2)
    for how in ("contributors", "all"):
        twice, weighed = aggregate_many([one, two, two], how), aggregate_many([one, two], how, None, [1, 2])
        for name in SHAPES:
            assert_close(twice[name], weighed[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("how", ["contributors", "all"])
def test_payloads_and_what_they_decode_to_give_the_same_bits(how):
    codec = TopK(keep=400, values="2bit")
    dense = [torch.randn(128, 67) for _ in range(5)]
    dense[2][:64] = 0  # zeros that are kept do not count as sent
    payloads = [codec.encode(item) for item in dense]
    assert torch.equal(aggregate(payloads, how), plain_mean([codec.decode(one) for one in payloads], how))


@pytest.mark.parametrize("how", ["contributors", "all"])
@pytest.mark.parametrize("weights", [None, [3, 1, 2]])
def test_replicas_that_send_every_entry_have_the_mean_of_their_tensors_to_the_bit(how, weights):  # DiLoCo
    dense = [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(3)]
    dense[1]["wq"][:70] = 0  # zeros do not count as sent
    codec = TopK(keep=64 * 64, values="fp32")
    means = aggregate_many([codec.encode_many(own) for own in dense], how, weights=weights)
    for name, mean in means.items():
        assert torch.equal(mean, plain_mean([own[name] for own in dense], how, weights))


@pytest.mark.parametrize("how", ["contributors", "all"])
@pytest.mark.parametrize("clip", [None, "median"])
def test_whole_model_equals_parameter_by_parameter_bit_for_bit(how, clip):
    sent = replicas(4)
    together = aggregate_many(sent, how, clip)
    assert list(together) == list(SHAPES)
    for name, mean in together.items():
        assert torch.equal(mean, aggregate([payloads[name] for payloads in sent], how, clip))
        assert mean.dtype == torch.float32


@pytest.mark.parametrize("num", [1, 3, 8])
def test_identical_replicas_average_alike_either_way(num):
    (payloads,) = replicas(1)
    one = aggregate_many([payloads] * num, "contributors")
    other = aggregate_many([payloads] * num, "all")
    for name in SHAPES:
        assert torch.equal(one[name], other[name])
    codec = TopK(keep=200, values="2bit")
    assert_close(one["wq"], codec.decode(payloads["wq"]))


def test_sums_run_in_the_order_given():
    items = [TopK(1, 1, "fp32").encode(torch.tensor([x])) for x in (1e8, 1.0, -1e8, 1.0)]
    assert aggregate(items, "all").item() == 0.25
    assert aggregate([items[0], items[2], items[1], items[3]], "all").item() == 0.5


@pytest.mark.parametrize("kind", ["fp32", "2bit", "fp64"])
def test_a_clipped_tensor_has_the_same_bits_alone_and_among_others(kind):
    """A stage that holds some tensors, and a full replica that holds all, reach the same anchor."""
    sent = replicas(5, kind)
    whole = aggregate_many(sent, clip="median")
    for names in (["wq"], ["odd", "norm"], ["tall", "scalar", "wq"]):
        part = aggregate_many([{name: payloads[name] for name in names} for payloads in sent], clip="median")
        assert all(torch.equal(part[name], whole[name]) for name in names)


def test_one_replica_alone_is_not_clipped():
    for keep in (200, 4096):
        sent = replicas(1, keep=keep)
        clipped, plain = (aggregate_many(sent, clip=clip) for clip in ("median", None))
        for name in SHAPES:
            assert_close(clipped[name], plain[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("num", [2, 4])
def test_half_of_the_replicas_cannot_make_a_step_larger(num):
    codec = TopK(keep=4096, values="fp64")
    honest = [torch.randn(64, 64, dtype=torch.float64) for _ in range(num // 2)]
    items = [codec.encode(item) for item in [*honest, *(-1e9 * item for item in honest)]]
    assert aggregate(items, clip="median").norm() <= max(item.norm() for item in honest)


def test_large_groups_are_squared_in_blocks_with_the_same_bits(monkeypatch):
    sent = replicas(3)
    whole = aggregate_many(sent, clip="median")
    monkeypatch.setattr(sys.modules["isthmus.outer.aggregate"], "NORM_ENTRIES", 1)
    for name, mean in aggregate_many(sent, clip="median").items():
        assert torch.equal(mean, whole[name])


def test_a_generator_is_taken_one_replica_at_a_time():
    sent = replicas(3)
    assert torch.equal(aggregate_many(iter(sent))["wq"], aggregate_many(sent)["wq"])


def test_what_cannot_be_averaged_is_refused():
    sent = replicas(2)
    few = {name: sent[1][name] for name in ("wq", "norm")}
    for items, how, clip, words in (
        ([], "all", None, "nothing"),
        (sent, "most", None, "aggregation"),
        (sent, "all", "mean", "clip"),
        ([sent[0], few], "all", None, "different"),
        ([sent[0], replicas(1, keep=100)[0]], "all", None, "different"),
    ):
        with pytest.raises(ValueError, match=words):
            aggregate_many(items, how, clip)
