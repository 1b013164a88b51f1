"""One faulty replica of two, or one alone: `outer.clip` goes by what each replica sent before."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file
from small_recipes import recipe_text, replicas
from torch import Tensor
from torch.testing import assert_close

import isthmus
from isthmus.config import parse_recipe
from isthmus.model.llama import init_params
from isthmus.outer.exchange import Contribution
from isthmus.simulator import run as simulation
from isthmus.simulator.exchange import LocalExchange
from isthmus.sparse import pack_many, unpack_many
from isthmus.sparse.topk import decode

Fault = Callable[[str, int], float]  # replica, round -> what its update is multiplied by
ROUNDS, STEPS, LR = 12, 5, 0.8


class Run:
    """A simulated run in which updates arrive multiplied as `fault` says; `sent` has them by round."""

    def __init__(self, names: str, folder: Path, fault: Fault, rounds: int = ROUNDS, **outer: object) -> None:
        self.fault, self.sent = fault, []
        fleet = "".join(replicas(name) for name in names)
        settings = {"rounds": rounds, "inner_steps": STEPS, "lr": LR} | outer
        inner = {"lr": 1e-2, "warmup_steps": 2 * STEPS}
        self.recipe = parse_recipe(recipe_text(fleet, outer=settings, inner=inner))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(simulation, "LocalExchange", lambda recipe: FaultyExchange(recipe, self))
            found = isthmus.simulate(self.recipe, folder, device="cpu", quiet=True)
        self.losses = [row.loss_full for row in found.rows]
        self.weights = load_file(folder / "model.safetensors")
        self.gain = self.losses[0] - self.losses[-1]


class FaultyExchange(LocalExchange):
    def __init__(self, recipe: isthmus.Recipe, run: Run) -> None:
        super().__init__(recipe)
        self.run = run

    def close(self, round_number: int, own: Sequence[Contribution]) -> Sequence[Contribution]:
        sent = [
            Contribution(
                one.replica,
                {i: times(data, self.run.fault(one.replica, round_number)) for i, data in one.shards.items()},
            )
            for one in own
        ]
        self.run.sent.append(
            [
                {n: decode(p) for data in one.shards.values() for n, p in unpack_many(data).items()}
                for one in sent
            ]
        )
        return super().close(round_number, sent)


def times(data: bytes, factor: float) -> bytes:
    return pack_many({n: replace(p, values=p.values * factor) for n, p in unpack_many(data).items()})


def honest(name: str, t: int) -> float:
    return 1.0


def norm(update: dict[str, Tensor]) -> float:
    return float(torch.cat([tensor.flatten() for tensor in update.values()]).double().norm())


def test_a_tiny_update_of_one_of_two_does_not_shrink_the_others(tmp_path: Path):
    alone = Run("a", tmp_path / "alone", honest)
    pair = Run("ab", tmp_path / "pair", lambda name, t: 1e-4 if name == "b" else 1.0)
    assert alone.gain > 0.2
    assert pair.gain > 0.7 * alone.gain


def test_one_of_two_that_becomes_too_large_counts_as_three_times_its_usual_norm(tmp_path: Path):
    """Against a plain reference: loops over rounds and replicas, dense tensors."""
    run = Run("ab", tmp_path / "run", lambda name, t: 1e3 if name == "b" and t > 5 else 1.0)
    theta = init_params(run.recipe.model, run.recipe.seed)
    norms: list[list[float]] = [[], []]
    for t, updates in enumerate(run.sent, 1):
        counted = []
        for update, own in zip(updates, norms, strict=True):
            most = 3 * median(own[-5:]) if len(own) > 1 else float("inf")
            factor = min(1.0, most / norm(update))
            if factor == 1.0:
                own.append(norm(update))
            counted.append({name: tensor * factor for name, tensor in update.items()})
        assert norm(counted[1]) < 20 * norm(counted[0])
        assert (norm(updates[1]) > 100 * norm(updates[0])) == (t > 5)
        for name, tensor in theta.items():
            a, b = counted[0][name], counted[1][name]
            tensor -= LR * (a + b) / ((a != 0).float() + (b != 0).float()).clamp(min=1)
    assert_close(run.weights, theta, rtol=1e-4, atol=1e-6)
    assert run.losses[-1] < run.losses[5] + 0.1


def test_a_spike_of_one_replica_alone_is_bounded(tmp_path: Path):
    spike = Run("a", tmp_path / "spike", lambda name, t: 1e3 if t == 6 else 1.0)
    usual = Run("a", tmp_path / "usual", honest)
    assert abs(spike.losses[-1] - usual.losses[-1]) < 0.2 * usual.gain


@pytest.mark.parametrize("names", ["a", "ab"])
def test_honest_replicas_that_warm_up_are_not_clipped(tmp_path: Path, names: str):
    clipped = Run(names, tmp_path / "median", honest)
    plain = Run(names, tmp_path / "none", honest, clip="none")
    first = [norm(update) for update in (updates[0] for updates in clipped.sent)]
    assert max(first) > 3 * first[0]  # updates do grow in the warm-up
    for name in plain.weights:
        assert torch.equal(clipped.weights[name], plain.weights[name])


def test_without_a_clip_nothing_is_compared_with_earlier_rounds(tmp_path: Path):
    run = Run("a", tmp_path / "run", lambda name, t: 100.0 if t == 4 else 1.0, rounds=4, clip="none")
    theta = init_params(run.recipe.model, run.recipe.seed)
    for [update] in run.sent:
        for name, tensor in theta.items():
            tensor -= LR * update[name]
    assert_close(run.weights, theta, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_remembers_what_was_sent(tmp_path: Path):
    """Stopped after round 5, the spike of round 6 is clipped as without the stop."""

    def fault(name: str, t: int) -> float:
        return 1e3 if name == "b" and t == 6 else 1.0

    straight = Run("ab", tmp_path / "straight", fault, rounds=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "LocalExchange", lambda recipe: FaultyExchange(recipe, straight))
        stop = lambda row: False if row.round == 5 else None  # noqa: E731
        isthmus.simulate(straight.recipe, tmp_path / "again", device="cpu", quiet=True, on_round=stop)
        simulation.resume(tmp_path / "again", device="cpu", quiet=True)
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name in again:
        assert torch.equal(again[name], straight.weights[name])
