"""Whom a round refuses because its signs are against the others': never a majority, and of two nobody."""

import random
from pathlib import Path

import pytest
import torch
from little import RECIPE, Little, Replica
from little import hasty as hasty
from torch import Tensor

from isthmus.config import Recipe, parse_recipe
from isthmus.protocol.signs import SignReader, compare_signs
from isthmus.sparse import TopK

pytestmark = pytest.mark.usefixtures("hasty")
FOUR = RECIPE.replace("keep = 8", "keep = 512") + '[[replicas]]\nname = "d"\n'
PLACES = 4000


def update(chance: random.Random, truth: list[int], number: int, right: float) -> Tensor:
    """`number` entries anywhere, of which this share has the true sign."""
    places = chance.sample(range(PLACES), number)
    signs = [truth[at] if chance.random() < right else 1 - truth[at] for at in places]
    return torch.tensor([2 * at + sign for at, sign in zip(places, signs, strict=True)])


def slow_votes(signs: dict[str, Tensor], name: str, agreement: float) -> int:
    """How many are against it, entry by entry."""
    own, votes = {int(key) // 2: int(key) % 2 for key in signs[name]}, 0
    for other, keys in signs.items():
        both = [own[int(key) // 2] == int(key) % 2 for key in keys if int(key) // 2 in own]
        same, shared = sum(both), len(both)
        clear = shared - 2 * same > 3 * shared**0.5
        votes += other != name and shared >= 64 and same < agreement * shared and clear
    return votes


def test_whoever_is_refused_has_more_than_half_against_it():
    chance, met = random.Random(0), 0
    for _ in range(100):
        truth = [chance.randint(0, 1) for _ in range(PLACES)]
        shares = [chance.choice([0.9, 0.9, 0.6, 0.5, 0.1]) for _ in range(chance.randint(2, 7))]
        signs = {f"r{i}": update(chance, truth, 900, share) for i, share in enumerate(shares)}
        refused = compare_signs(signs, 0.4)
        assert set(refused) == {n for n in signs if 2 * slow_votes(signs, n, 0.4) > len(signs)}
        met += len(refused)
    assert met > 10


@pytest.mark.parametrize("number", [3, 4, 7])
def test_a_turned_sign_is_refused_by_a_majority_and_nobody_else_is(number: int):
    chance = random.Random(number)
    truth = [chance.randint(0, 1) for _ in range(PLACES)]
    signs = {f"r{i}": update(chance, truth, 900, 0.9) for i in range(number)}
    signs["r0"] = signs["r0"] ^ 1
    assert set(compare_signs(signs, 0.4)) == {"r0"}
    assert not compare_signs(signs, 0.0)


@pytest.mark.parametrize("number", [2, 4])
def test_a_half_gets_nobody_refused(number: int):
    """Whatever it sends, also a victim's own entries with the signs turned."""
    chance = random.Random(number)
    truth = [chance.randint(0, 1) for _ in range(PLACES)]
    honest = {f"r{i}": update(chance, truth, 900, 0.9) for i in range(number // 2)}
    bad = {f"bad{i}": honest["r0"] ^ 1 for i in range(number // 2)}
    assert not compare_signs(honest | bad, 0.4)


def test_a_minority_that_copies_a_victims_entries_does_not_get_it_refused():
    chance = random.Random(5)
    truth = [chance.randint(0, 1) for _ in range(PLACES)]
    honest = {f"r{i}": update(chance, truth, 900, 0.9) for i in range(4)}
    bad = {f"bad{i}": honest["r0"] ^ 1 for i in range(3)}
    assert not compare_signs(honest | bad, 0.4).keys() & honest.keys()


def test_in_blocks_the_same_are_refused(monkeypatch: pytest.MonkeyPatch):
    chance = random.Random(7)
    truth = [chance.randint(0, 1) for _ in range(PLACES)]
    signs = {f"r{i}": update(chance, truth, 900, 0.1 if i == 2 else 0.9) for i in range(5)}
    monkeypatch.setattr("isthmus.protocol.signs.BLOCK_ENTRIES", 64)
    assert set(compare_signs(signs, 0.4)) == {"r2"}


def test_chance_and_few_shared_entries_refuse_nobody():
    chance = random.Random(6)
    for number in (20, 60, 900):
        truth = [chance.randint(0, 1) for _ in range(PLACES)]
        signs = {f"r{i}": update(chance, truth, number, 0.5) for i in range(6)}
        assert not compare_signs(signs, 0.4)


def recipe(**model: int) -> Recipe:
    sizes = [f"model.{key}={value}" for key, value in model.items()]
    return parse_recipe('name = "x"\n[model]\npreset = "nano"\n[[replicas]]\nname = "a"\ncount = 4\n', sizes)


def test_the_signs_of_an_update_name_each_entry_that_was_sent_once():
    small = recipe()
    shapes = small.model.shapes()
    sent = TopK().encode_many({name: torch.randn(shape) for name, shape in shapes.items()})
    keys = SignReader(small).read(sent)
    assert len(keys) == sum(int((p.values != 0).sum()) for p in sent.values())
    assert len((keys >> 1).unique()) == len(keys)
    assert int((keys & 1).sum()) == sum(int((p.values > 0).sum()) for p in sent.values())
    by_shard = [SignReader(small).read({name: sent[name]}) for name in shapes]
    assert torch.equal(torch.cat(by_shard).sort().values, keys.sort().values)


def test_of_a_large_model_a_share_of_the_chunks_is_compared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("isthmus.protocol.signs.MOST_ENTRIES", 2**11)
    monkeypatch.setattr("isthmus.protocol.signs.FEWEST_ENTRIES", 1)
    small = recipe()
    sent = TopK().encode_many({name: torch.randn(shape) for name, shape in small.model.shapes().items()})
    keys = SignReader(small).read(sent)
    assert 0 < 4 * len(keys) <= 1.2 * 2**11
    assert torch.equal(keys, SignReader(small).read(sent))


def alike(replicas: list[Replica], turned: set[str]) -> None:
    """Everyone delivers nearly the same update, some with its sign turned."""
    random_ = torch.Generator().manual_seed(0)
    downhill = {n: torch.randn(t.shape, generator=random_) for n, t in replicas[0].anchor.items()}
    for each in replicas:
        sign = -1 if each.name in turned else 1
        own = {n: 0.01 * sign * (g + 0.3 * torch.randn(g.shape)) for n, g in downhill.items()}
        params = {n: each.anchor[n] - own[n] for n in own}
        each.exchange.deliver(1, each.packed(each.outer.contribute(params, each.feedback)))


def test_one_of_four_with_its_sign_turned_is_refused_by_name(any_store_url: str, tmp_path: Path):
    replicas = Little(any_store_url, tmp_path, FOUR, closers=["a"]).replicas()
    alike(replicas, {"d"})
    closer = replicas[0]
    assert closer.exchange.closer.attempt(1, closer.exchange.anchor)
    manifest = closer.ledger.manifest(1)
    assert [entry.replica for entry in manifest.entries] == ["a", "b", "c"]
    assert dict(manifest.refused) == {"d": "it points against 3 of the other 3 updates"}


def test_two_of_four_with_their_signs_turned_get_nobody_refused(folder_url: str, tmp_path: Path):
    replicas = Little(folder_url, tmp_path, FOUR, closers=["a"]).replicas()
    alike(replicas, {"b", "d"})
    closer = replicas[0]
    assert closer.exchange.closer.attempt(1, closer.exchange.anchor)
    assert not closer.ledger.manifest(1).refused
