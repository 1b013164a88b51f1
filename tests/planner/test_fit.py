"""Whether a replica fits the memory that its table states, and what is chosen or said where it does not."""

import json
from dataclasses import replace

import pytest

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.layout.traffic import shards
from isthmus.planner.auto import resolve
from isthmus.planner.fit import cures, needed, usable
from isthmus.planner.memory import process_memory, recomputing, replica_memory
from isthmus.planner.plan import predict
from isthmus.planner.step import compute_of, recomputed_share

TEXT = """
name = "fit"
[model]
preset = "1b"
[[replicas]]
name = "node"
processes = 4
tflops = 500.0
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 2
compression = "1/8"
tflops = 60.0
link = { mbps = 200.0 }
"""


def fleet(*settings):
    return parse_recipe(TEXT, settings)


def node(*settings):
    recipe = fleet(*settings)
    return recipe, recipe.replicas[0]


def test_a_shard_holds_its_share_of_everything_that_grows_with_the_model():
    recipe, whole = node()
    cut = replace(whole, sharding="full")
    one, parts = process_memory(recipe, whole, 0, 1), replica_memory(recipe, cut)
    assert len(parts) == 4
    for name in ("weights", "moments", "gradients"):
        assert {getattr(part, name) for part in parts} == {-(-getattr(one, name) // 4)}
    for name in ("anchor", "feedback"):  # whole tensors, each with one process that answers for it
        assert sum(getattr(part, name) for part in parts) == getattr(one, name)
    assert {part.activations for part in parts} == {one.activations}  # of its rows of the batch, either way
    assert all(0 < part.gathered < 0.2 * one.total for part in parts)


def test_processes_that_share_a_batch_keep_activations_of_their_rows_only():
    recipe, shared = node()
    alone = replace(shared, processes=1)
    four, one = (process_memory(recipe, replica, 0, 1) for replica in (shared, alone))
    assert 4 * four.activations == one.activations
    assert four.weights == one.weights


def test_recomputed_layers_keep_one_stream_each_and_one_layers_inside():
    recipe, edge = fleet(), fleet().replicas[1]
    model, tokens = recipe.model, recipe.inner.batch // recipe.inner.micro_batches * recipe.model.context
    stream = 2 * model.width * tokens  # bf16
    layers = 8
    (kept, _), (again, _) = (
        replica_memory(*recomputing(recipe, edge, yes), in_flight=(3, 1)) for yes in (False, True)
    )
    inside = kept.activations // (3 * layers)
    assert again.activations == 3 * layers * stream + inside
    assert kept.total - again.total > 0.8 * (kept.activations - again.activations)
    assert [p.weights for p in (kept, again)] == [kept.weights] * 2


def test_the_copy_that_is_written_is_on_the_host():
    recipe, whole = node("inner.precision=fp32")
    on_gpu, on_cpu = (process_memory(recipe, whole, 0, 1, gpu) for gpu in (True, False))
    # The anchor, two moments, the feedback and the weights, in fp32.
    assert on_gpu.host_copy == 20 * recipe.model.num_parameters
    assert on_cpu.host_copy == on_gpu.host_copy == replace(on_gpu, on_gpu=False).total - on_gpu.total
    assert on_gpu.activations < 0.6 * on_cpu.activations  # compiled, which is the default there
    assert process_memory(*node(), 0, 1).on_gpu  # "auto" is counted as on CUDA


# From none to all that helps, as the memory shrinks.
CHOICES = [("none", "no"), ("full", "no"), ("full", "yes")]


def test_sharding_and_recomputation_are_chosen_by_memory_in_that_order():
    recipe, replica = node()
    trials = [replace(replica, sharding=sharding, recompute=again) for sharding, again in CHOICES]
    needs = [needed(recipe, trial) for trial in trials]
    assert needs == sorted(needs, reverse=True)
    for need, choice in zip(needs, CHOICES, strict=True):
        settings = [f"replicas.node.memory_gb={1.001 * need / usable(1.0)}", "replicas.node.micro_batches=1"]
        resolved, picks = resolve(fleet(*settings))
        chosen = resolved.replicas[0]
        assert (chosen.sharding, chosen.recompute) == choice
        assert len(picks) == 1
        assert "which fits" in picks[0].reason
        assert (len(shards(resolved)) > 3) == chosen.sharded  # known before the run is made
        assert resolve(resolved) == (resolved, ())  # whoever joins finds it settled
    assert resolve(fleet()) == (fleet(), ())  # nothing is chosen for a memory that nobody stated


def test_a_batch_is_cut_before_anything_is_recomputed():
    recipe, replica = node("replicas.node.processes=1")
    needs = {
        parts: needed(recipe, replace(replica, micro_batches=parts, recompute="no"))
        for parts in (1, 2, 4, 8, 16, 32)
    }
    assert list(needs.values()) == sorted(needs.values(), reverse=True)
    for parts, need in needs.items():
        room = f"replicas.node.memory_gb={1.001 * need / usable(1.0)}"
        resolved, (pick,) = resolve(fleet(room, "replicas.node.processes=1"))
        chosen = resolved.replicas[0]
        assert (recipe.micro_batches_of(chosen), chosen.recompute) == (parts, "no")
        assert (f"micro_batches = {parts}" in pick.reason) == (parts > 1)
        assert resolve(resolved) == (resolved, ())
    less = f"replicas.node.memory_gb={0.99 * needs[32] / usable(1.0)}"
    assert resolve(fleet(less, "replicas.node.processes=1"))[0].replicas[0].recompute == "yes"


def test_what_the_recipe_says_is_not_chosen_otherwise():
    tight = "replicas.node.memory_gb=1"
    stated = ["replicas.node.sharding=none", "replicas.node.recompute=no"]
    assert resolve(fleet(tight, *stated))[1] == ()
    kept = resolve(fleet(tight, stated[0]))[0].replicas[0]
    assert (kept.sharding, kept.recompute) == ("none", "yes")
    everywhere = resolve(fleet(tight, "inner.recompute=true"))[0]
    assert everywhere.recomputes(everywhere.replicas[0])


def test_a_plan_says_what_does_not_fit_and_what_would():
    plan = predict(fleet("replicas.edge.memory_gb=16", "replicas.edge.recompute=no"))
    rack, edge = plan.kinds
    assert rack.fits is None
    assert edge.fits is False
    assert max(edge.memory_plain) > max(edge.memory_recomputed)
    assert edge.cures
    for words in edge.cures:  # each of them is true
        settings = [f"replicas.edge.{each.replace(' ', '')}" for each in words.split(" (")[0].split(" and ")]
        again = predict(fleet("replicas.edge.memory_gb=16", "replicas.edge.recompute=no", *settings))
        assert again.kinds[1].fits, words
    full = cures(*node("replicas.node.memory_gb=24", "replicas.node.processes=1"))
    assert any('kind = "pipelined"' in words for words in full)


def test_the_processes_of_a_sharded_replica_share_one_link_to_the_bucket():
    plain, cut = (
        predict(fleet(f"replicas.node.sharding={how}")).kinds[0].exchange for how in ("none", "full")
    )
    assert cut.up_bytes == pytest.approx(plain.up_bytes, rel=0.01)
    for way in ("up", "down"):
        seconds = getattr(cut, f"{way}_bytes") * 8 / (cut.mbps * 1e6)
        assert getattr(cut, f"{way}_seconds") == pytest.approx(seconds)


def test_recomputation_costs_a_layers_forward_once_more():
    recipe, replica = node()
    again = fleet("inner.recompute=true")
    share = recomputed_share(again, replica)
    assert recomputed_share(recipe, replica) == 1
    assert 1.25 < share < 4 / 3  # the head runs once
    plain, slower = (compute_of(each, replica, 100.0).seconds_per_step for each in (recipe, again))
    assert slower == pytest.approx(share * plain)


def test_the_table_states_memory_both_ways_and_what_fits(tmp_path, capsys):
    path = tmp_path / "fit.toml"
    path.write_text(TEXT)
    assert main(["plan", str(path), "--device", "node=rtx-4090", "--set", "replicas.edge.memory_gb=8"]) == 0
    shown = capsys.readouterr().out
    assert 'replica node: "auto" is sharding: a process needs' in shown
    assert "by shard;" in shown
    assert "activations are recomputed; without recomputation it would be" in shown
    assert "fits              yes:" in shown
    assert "fits              NO:" in shown
    assert "the copy of the state that is being written" in shown
    assert main(["plan", str(path), "--json"]) == 0
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    assert [len(kind["memory_recomputed"]) for kind in kinds] == [1, 2]
    assert all(a < b for k in kinds for a, b in zip(k["memory_recomputed"], k["memory_plain"], strict=True))
