"""A fleet of two clips by the norms that its manifests state: members, a joiner and an auditor alike."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from little import RECIPE, Little, Replica, close, closes, equal
from little import hasty as hasty

from isthmus.model.llama import init_params
from isthmus.outer.clip import history_factor, update_norm
from isthmus.outer.sparseloco import SparseLoCo
from isthmus.protocol.audit import audit
from isthmus.protocol.clipping import LOOK_BACK, clip_factors
from isthmus.protocol.replay import Replay
from isthmus.protocol.shards import unpack_shards

pytestmark = pytest.mark.usefixtures("hasty")
PAIR = (
    RECIPE[: RECIPE.index('[[replicas]]\nname = "b"')]
    + '[[replicas]]\nname = "c"\nkind = "pipelined"\nstages = 2\n'
)
PAIR = PAIR.replace("rounds = 6", "rounds = 60").replace("keep = 8", 'keep = 8\naggregation = "contributors"')
Scale = Callable[[str, int], float]


def play(replicas: list[Replica], numbers: range, scale: Scale) -> None:
    """Rounds in which every update has the size that `scale` says."""
    for t in numbers:
        for each in replicas:
            each.exchange.deliver(t, each.update(0.01 * scale(each.name, t)))
        close(t, replicas[0], replicas)
        for each in replicas:
            each.apply(t, each.exchange.closed(t))


def spike(name: str, t: int) -> float:
    return 1e3 if name == "c" and t == 6 else 1.0


def test_who_replays_a_run_of_two_clips_as_its_members_did(tmp_path: Path):
    little = Little(str(tmp_path / "bucket"), tmp_path, PAIR)
    a, c = little.replicas()
    play([a, c], range(1, 9), spike)
    factors = clip_factors(little.ledger(), 6, ["a", "c"])
    assert factors is not None
    assert factors[0] == 1
    assert 0 < factors[1] < 0.1
    assert equal(a.anchor, c.anchor)
    for start in (0, 6):  # theta^(0), and an anchor between the rounds that the norms come from
        replay = Replay(little.ledger(), start)
        assert replay.round == start
        while replay.step():
            pass
        assert equal(replay.anchor, a.anchor)
        assert audit(little.ledger()).digest == replay.digest()


def test_a_simulated_pair_has_the_factors_of_the_fleet(tmp_path: Path):
    """The simulator measures norms itself; the fleet reads them in manifests."""
    little = Little(str(tmp_path / "bucket"), tmp_path, PAIR)
    a, c = little.replicas()
    play([a, c], range(1, 9), spike)
    ledger, norms = little.ledger(), {"a": [], "c": []}
    theta = init_params(a.recipe.model, a.recipe.seed)
    outer = SparseLoCo(theta, a.recipe.outer)
    for manifest in ledger.between(1, 8):
        updates, factors = [], []
        for entry in manifest.entries:
            packed = {s.index: ledger.get_shard(entry.replica, manifest.round, s) for s in entry.shards}
            own = norms[entry.replica]
            norm = update_norm([unpack_shards(ledger, {i: data}) for i, data in packed.items()])
            factors.append(history_factor(norm, own[-5:]))
            if factors[-1] == 1.0:
                own.append(norm)
            updates.append(unpack_shards(ledger, packed))
        assert factors == clip_factors(ledger, manifest.round, norms)
        outer.apply(updates, None, factors)
    assert equal(theta, a.anchor)


def test_a_tiny_update_of_one_of_two_leaves_the_others_its_size(tmp_path: Path):
    little = Little(str(tmp_path / "bucket"), tmp_path, PAIR)
    a, c = little.replicas()
    play([a, c], range(1, 4), lambda name, t: 1e-3 if name == "c" else 1.0)
    before = {name: tensor.clone() for name, tensor in a.anchor.items()}
    play([a, c], range(4, 5), lambda name, t: 1e-3 if name == "c" else 1.0)
    moved = torch.cat([(a.anchor[name] - before[name]).flatten() for name in before]).double().norm()
    assert moved > 0.3 * a.recipe.outer.step_size * little.manifest(4).entry("a").norm


@pytest.mark.parametrize(("rounds_away", "clipped"), [(4, True), (LOOK_BACK, False)])
def test_a_replica_that_comes_back_is_compared_with_what_it_sent_lately(
    tmp_path: Path, rounds_away: int, clipped: bool
):
    little = Little(str(tmp_path / "bucket"), tmp_path, PAIR)
    a, c = little.replicas()
    play([a, c], range(1, 4), lambda name, t: 1.0)
    back = 4 + rounds_away
    for t in range(4, back):
        a.exchange.deliver(t, a.update())
        close(t, a, [a])
        for each in (a, c):
            each.apply(t, each.exchange.closed(t))
    play([a, c], range(back, back + 1), lambda name, t: 1e3 if name == "c" else 1.0)
    factors = clip_factors(little.ledger(), back, ["a", "c"])
    assert factors is not None
    assert [factor < 1 for factor in factors] == [False, clipped]


def test_a_replica_that_stays_too_large_never_becomes_its_own_measure(tmp_path: Path):
    little = Little(str(tmp_path / "bucket"), tmp_path, PAIR)
    a, c = little.replicas()
    play([a, c], range(1, 6), lambda name, t: 1.0)
    for t in range(6, 12):  # settled by a real closer
        for each in (a, c):
            each.exchange.deliver(t, each.update(10.0 if each is c else 0.01))
        assert closes(a, t)
        assert little.manifest(t).clipped == ("c",)
        for each in (a, c):
            each.apply(t, each.exchange.closed(t))
    factors = clip_factors(little.ledger(), 11, ["a", "c"])
    assert factors is not None
    assert factors[0] == 1
    assert factors[1] < 0.1
    assert equal(a.anchor, c.anchor)
