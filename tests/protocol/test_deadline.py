"""How long a round is given: enough for whoever trains, and no more for who comes at the last moment."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from little import RECIPE

from isthmus.config import Recipe, parse_recipe
from isthmus.protocol.ledger import Entry, Manifest
from isthmus.protocol.members import GROWTH, Members, opening_seconds

ROUNDS = 300
LONG = RECIPE.replace("rounds = 6", f"rounds = {ROUNDS}")
Times = Callable[[int, float], Mapping[str, float]]  # (round, deadline) -> when each delivers


def run(times: Times, recipe: Recipe | None = None, last: int = ROUNDS) -> list[tuple[float, set[str]]]:
    """(deadline, who counted) of each round. All live; a round ends at its deadline, not before two came."""
    recipe = recipe or parse_recipe(LONG)
    names, manifests = [member.name for member in recipe.fleet()], dict[int, Manifest]()
    ledger: Any = SimpleNamespace(run=SimpleNamespace(recipe=recipe), known=manifests.get)
    ledger.settled = manifests.__getitem__
    ledger.committed = lambda t: set(names)
    members, rounds = Members(ledger), []
    for t in range(1, last + 1):
        members.begin(recipe)
        deadline = members.deadline(manifests.get(t - 1))
        at = times(t, deadline)
        ends = max(deadline, sorted(at.values())[1])
        came = {name: seconds for name, seconds in at.items() if seconds <= ends}
        late = [name for name in members.awaited(t) if name not in came]
        seconds = ends if late else max(came.values())
        usual = sorted(came.values())[(len(came) - 1) // 2]
        manifests[t] = Manifest(
            round=t,
            anchor="",
            entries=tuple(Entry(name, ()) for name in came),
            members=tuple(names),
            dealt_in=tuple(names),
            deadline_seconds=members.next_deadline(t, None if late else seconds, usual),
            seconds=seconds,
        )
        rounds.append((deadline, set(came)))
    return rounds


def everybody_counts(rounds: list[tuple[float, set[str]]]) -> bool:
    return all(came == {"a", "b", "c"} for _, came in rounds)


@pytest.mark.parametrize("first", [20.0, 60.0, 500.0])
@pytest.mark.parametrize("usual", [1.0, 20.0, 60.0, 3600.0])
def test_a_warm_up_costs_nobody_its_update(first: float, usual: float):
    """Kernels compile in round 1; or rounds grow to their usual length within the first hundred."""

    def compiling(t: int, deadline: float) -> dict[str, float]:
        return dict.fromkeys("abc", first if t == 1 else min(usual, 4 * first))

    def growing(t: int, deadline: float) -> dict[str, float]:
        return dict.fromkeys("abc", min(usual, 500.0 * 1.05**t))

    assert everybody_counts(run(compiling))
    assert everybody_counts(run(growing))


@pytest.mark.parametrize("seconds", [0.5, 10.0, 150.0])
def test_one_replica_three_times_slower_than_the_rest_counts_in_every_round(seconds: float):
    assert everybody_counts(run(lambda t, deadline: {"a": seconds, "b": seconds, "c": 3 * seconds}))


@pytest.mark.parametrize("mbps", [0.01, 0.001, 0.0001])
def test_in_a_finish_everybody_counts(mbps: float):
    slow = f'compression = "1/8"\nlink = {{ mbps = {mbps} }}\n'  # c, which is pipelined
    recipe = parse_recipe(f"{LONG}{slow}[finish]\nrounds = 30\n")
    more = opening_seconds(recipe)
    assert more > 1

    def times(t: int, deadline: float) -> dict[str, float]:
        opened = recipe.opening(t) is not None
        return {"a": 1.0, "b": 1.0, "c": 1.0 + (more if opened else 0.0)}

    rounds = run(times, recipe)
    assert everybody_counts(rounds)
    assert recipe.opening(ROUNDS) is not None


@pytest.mark.parametrize("seconds", [1.0, 20.0])
def test_a_member_that_always_comes_at_the_last_moment_does_not_stretch_the_rounds(seconds: float):
    rounds = run(lambda t, deadline: {"a": seconds, "b": seconds, "c": deadline - 0.01 if t > 1 else seconds})
    limits = [deadline for deadline, _ in rounds[1:]]
    assert max(limits) <= max(25.0, 10 * seconds + 10)
    assert everybody_counts(rounds)


def test_a_deadline_grows_by_a_tenth_a_round_at_most():
    rounds = run(lambda t, deadline: dict.fromkeys("abc", deadline - 0.01 if t > 20 else 2.0), last=60)
    limits = [deadline for deadline, _ in rounds]
    assert all(after <= GROWTH * before + 0.001 for before, after in pairwise(limits))
    assert limits[-1] > 5 * limits[19], "all of them are slower now"
