"""Whom a round refuses by comparison: never a majority, and of two nobody."""

import random
from pathlib import Path

import pytest
from little import RECIPE, Little, Replica
from little import hasty as hasty

from isthmus.protocol.norms import EMPTY_NORM, compare_norms

pytestmark = pytest.mark.usefixtures("hasty")


def named(*norms: float) -> dict[str, float]:
    return {f"r{i}": norm for i, norm in enumerate(norms)}


def drawn(chance: random.Random) -> tuple[dict[str, float], dict[str, float], float]:
    """A round of up to nine replicas, of which any may be missing, and the one before it."""
    limit, scale = chance.uniform(1.1, 20), 10 ** chance.uniform(3, 6)
    norms = [scale * limit ** chance.choice([0, 0, 0.5, 0.9, chance.uniform(-5, 5)]) for _ in range(9)]
    names = [f"r{i}" for i in range(chance.randint(1, 9))]
    now = {name: norm for name, norm in zip(names, norms, strict=False) if chance.random() < 0.8}
    before = {name: chance.choice(norms) for name in names if chance.random() < 0.5}
    return now, before, limit


def test_nobody_in_a_majority_within_the_limit_of_one_another_is_refused():
    chance, met = random.Random(0), 0
    for _ in range(20_000):
        now, before, limit = drawn(chance)
        votes = {**before, **now}
        refused = compare_norms(now, before, limit).refused
        for smallest in votes.values():  # every set of norms within the limit starts at one of them
            alike = {n for n, norm in votes.items() if smallest <= norm <= limit * smallest}
            if 2 * len(alike) > len(votes):
                met += len(alike) < len(votes)
                assert not alike & refused.keys()
    assert met > 1000


def test_a_minority_that_is_too_large_is_refused_whatever_its_size():
    for number in range(3, 12):
        for bad in range(1, (number - 1) // 2 + 1):
            norms = named(*[1.0] * (number - bad), *[3.1] * bad)
            assert set(compare_norms(norms, {}, 3).refused) == set(list(norms)[-bad:])


@pytest.mark.parametrize("norms", [(1.0, 1e9), (1e-3, 1.0), (1e-3, 1e-3, 1.0, 1.0), (1.0, 1.0, 1e9, 1e9)])
def test_a_half_refuses_nobody_and_the_note_says_so(norms: tuple[float, ...]):
    compared = compare_norms(named(*norms), {}, 3)
    assert not compared.refused
    assert "nobody is refused by comparison alone" in compared.note


@pytest.mark.parametrize("norms", [(1e-8, 1.0), (1e-8, 1e-8, 1.0, 1.0), (0.0, 0.0, 0.0, 1.0)])
def test_an_empty_update_is_refused_and_nobody_for_being_larger(norms: tuple[float, ...]):
    assert set(compare_norms(named(*norms), {}, 3).refused) == {
        f"r{i}" for i, norm in enumerate(norms) if norm < EMPTY_NORM
    }


def test_empty_updates_do_not_open_the_door_to_the_huge():
    assert set(compare_norms(named(0.0, 1.0, 1e3), {}, 3).refused) == {"r0", "r2"}


def test_where_all_are_empty_nobody_is_refused():
    assert not compare_norms(named(0.0, 1e-9, 0.0), {}, 3).refused


def test_one_who_is_late_votes_by_its_norm_of_the_round_before():
    late = {"late": 1.0, "honest": 1.0, "evil": 1.0}
    assert set(compare_norms({"honest": 1.0, "evil": 1e3}, late, 3).refused) == {"evil"}
    assert not compare_norms({"honest": 1.0, "evil": 1e3}, {}, 3).refused


def test_those_who_are_left_alone_are_not_refused_by_those_who_left():
    compared = compare_norms({"a": 5.0}, named(1.0, 1.0, 1.0), 3)
    assert not compared.refused
    assert "only they delivered" in compared.note


def test_who_leaves_all_others_out_cannot_send_anything_it_likes():
    assert set(compare_norms({"evil": 21.0}, {"a": 1.0, "b": 0.5, "evil": 1.0}, 3).refused) == {"evil"}
    assert not compare_norms({"late": 19.0}, {"a": 1.0, "b": 0.5}, 3).refused


def close(replicas: list[Replica], scales: dict[str, float]) -> dict[str, str]:
    """Everyone delivers a round of its scale, the first closes it: who was refused, and why."""
    for each in replicas:
        each.exchange.deliver(1, each.update(scale=scales.get(each.name, 0.01)))
    first = replicas[0]
    assert first.exchange.closer.attempt(1, first.exchange.anchor)
    return dict(first.ledger.manifest(1).refused)


def test_one_of_two_with_a_norm_of_nothing_does_not_get_the_other_refused(folder_url: str, tmp_path: Path):
    two = RECIPE[: RECIPE.index('[[replicas]]\nname = "b"')] + '[[replicas]]\nname = "b"\n'
    replicas = Little(folder_url, tmp_path, two, closers=["a"]).replicas()
    assert set(close(replicas, {"b": 1e-10})) == {"b"}


def test_of_two_that_differ_nobody_is_refused_and_the_log_says_so(any_store_url: str, tmp_path: Path):
    two = RECIPE[: RECIPE.index('[[replicas]]\nname = "b"')] + '[[replicas]]\nname = "b"\n'
    replicas = Little(any_store_url, tmp_path, two, closers=["a"]).replicas()
    assert close(replicas, {"b": 1e-5}) == {}
    (said,) = replicas[0].said
    assert "the norm of a is over" in said
    assert "nobody is refused by comparison alone" in said
