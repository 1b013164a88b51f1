"""A full replica cut between four processes by FSDP: one process's numbers, a quarter of its memory."""

import gc
import json
import multiprocessing
import os
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_recipes import recipe_text, replicas
from test_stage import batches_of, relative, trained

from isthmus.config import parse_recipe
from isthmus.errors import ConfigError, RunError
from isthmus.layout.stages import stage_names
from isthmus.layout.traffic import shards
from isthmus.model.llama import init_params
from isthmus.outer import outer_method
from isthmus.replica.full import FullReplica
from isthmus.replica.process_groups import open_store
from isthmus.replica.sharded import ShardedReplica, shard_mesh
from isthmus.runtime.addresses import free_port

SPAWN = multiprocessing.get_context("spawn")
NUM = 4
# bf16 values: the order in which gradients are summed changes the last bits of a float64, and no payload.
RECIPE = recipe_text(
    replicas("rack", processes=NUM, sharding="full"),
    inner={"batch": 8, "precision": "fp64"},
    outer={"inner_steps": 3, "rounds": 3, "values": "bf16"},
)
CASES = {
    "plain": [],
    "rows that four do not divide": ["model.ffn=66"],  # 17, 17, 17, 15
    "a process without rows": ["model.width=6", "model.heads=1", "model.ffn=10"],  # 2, 2, 2, 0
    "recomputed": ["inner.recompute=true"],
    "clipped": ["inner.clip=0.1"],
    "one table, shared heads": ["model.tie_embeddings=true", "model.kv_heads=1", "model.qk_norm=true"],
    "Muon": ["inner.optimizer=muon"],
    "Muon, matrices that four do not divide": ["inner.optimizer=muon", "model.ffn=66", "model.layers=5"],
    "Muon, a process without rows": [
        "inner.optimizer=muon",
        "model.width=6",
        "model.heads=1",
        "model.ffn=10",
    ],
    "parts of a batch": ["replicas.rack.batch=16", "replicas.rack.micro_batches=2"],
}
# Layers that weigh more than the table: what a process answers for is then near a quarter as well.
LARGER = ["model.width=64", "model.ffn=512"]


def payloads(recipe, params):
    """The packed update of a round from the first weights, by shard, and what an outer step holds."""
    drawn = init_params(recipe.model, recipe.seed)
    anchor = {name: drawn[name].double() for name in params}
    feedback = {name: torch.zeros_like(tensor) for name, tensor in anchor.items()}
    outer = outer_method(recipe.outer, anchor)
    sent = outer.contribute(params, feedback)
    mine = [(i, names) for i, names in enumerate(shards(recipe)) if params.keys() >= set(names)]
    return {i: outer.codec.pack_many(sent.part(names)) for i, names in mine}, (anchor, feedback)


def train_sharded(rank, port, folder):
    torch.set_num_threads(1)
    store = open_store(replica="rack", rank=rank, host="127.0.0.1", port=port)
    mesh = shard_mesh(store, rank, NUM, "cpu", timeout_seconds=60)

    def replica_of(recipe, precision="fp64"):
        return ShardedReplica(recipe, recipe.fleet()[0], batches_of(recipe), mesh, precision=precision)

    for case, settings in CASES.items():
        recipe = parse_recipe(RECIPE, settings)
        seen, params = trained(recipe, replica_of(recipe))
        named = {f"params/{name}": tensor.contiguous() for name, tensor in params.items()}
        save_file({"seen": seen} | named, folder / f"{case}-{rank}.safetensors")
    one_round(rank, replica_of, folder)
    notes = {
        "restored": restored(replica_of),
        "bytes": held_bytes(replica_of),
        "bf16": [float(loss) for loss in bf16_losses(replica_of)],
    }
    (folder / f"notes-{rank}").write_text(json.dumps(notes))
    replica = replica_of(parse_recipe(RECIPE))
    if rank == 1:  # it dies, and the others are in an inner step
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        replica.inner_step(0)
    except RunError as error:
        (folder / f"fault-{rank}").write_text(str(error))


def one_round(rank, replica_of, folder):
    replica = replica_of(parse_recipe(RECIPE))
    for step in range(3):
        replica.inner_step(step)
    for i, data in payloads(replica.recipe, replica.named_parameters())[0].items():
        (folder / f"payload-{i}").write_bytes(data)


def restored(replica_of):
    """Does a replica that takes up another's weights and moments go on in the same bits?"""
    straight, again = (replica_of(parse_recipe(RECIPE)) for _ in range(2))
    for step in range(4):
        if step == 2:
            again.begin_round(straight.named_parameters())
            again.restore(straight.state(), step)
        straight.inner_step(step)
    for step in (2, 3):
        again.inner_step(step)
    return all(torch.equal(rows, again.local[name]) for name, rows in straight.local.items())


def held_bytes(replica_of):
    """Of tensors that are alive when gradients are: weights, moments, gradients, anchor and feedback."""
    recipe, most = parse_recipe(RECIPE, LARGER), []
    gc.collect()
    before = alive_bytes()
    replica = replica_of(recipe)
    _, held = payloads(recipe, replica.named_parameters())
    advance = replica.opt.advance

    def measured(step):
        most.append(alive_bytes())
        advance(step)

    replica.opt.advance = measured
    replica.inner_step(0)
    assert all(held)
    return most[0] - before


def alive_bytes():
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif hasattr(type(thing), "to_local"):  # a DTensor
            local = thing.to_local().untyped_storage()
            storages[local.data_ptr()] = local.nbytes()
    return sum(storages.values())


def bf16_losses(replica_of):
    replica = replica_of(parse_recipe(RECIPE, ["inner.precision=bf16"]), "bf16")
    return [replica.inner_step(step) for step in range(3)]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """What four processes wrote."""
    folder = tmp_path_factory.mktemp("sharded")
    port = free_port()
    processes = [SPAWN.Process(target=train_sharded, args=(rank, port, folder)) for rank in range(NUM)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()
    return folder


def notes(done):
    return [json.loads((done / f"notes-{rank}").read_text()) for rank in range(NUM)]


def whole_replica(recipe, precision="fp64"):
    return FullReplica(recipe, recipe.fleet()[0], batches_of(recipe), precision=precision)


@pytest.mark.parametrize("case", CASES)
def test_four_processes_are_one_replica(case, done):
    recipe = parse_recipe(RECIPE, CASES[case])
    seen, weights = trained(recipe, whole_replica(recipe))
    files = [load_file(done / f"{case}-{rank}.safetensors") for rank in range(NUM)]
    found = [{n.removeprefix("params/"): t for n, t in file.items() if n != "seen"} for file in files]
    assert [set(own) for own in found] == [set(names) for names in stage_names(recipe.model, NUM)]
    assert relative({name: t for own in found for name, t in own.items()}, weights) < 1e-12
    assert all(torch.equal(file["seen"], files[0]["seen"]) for file in files)
    assert torch.allclose(files[0]["seen"], seen, rtol=1e-12)


def test_the_payload_is_encoded_shard_by_shard_and_byte_for_byte_that_of_one_process(done):
    recipe = parse_recipe(RECIPE)
    replica = whole_replica(recipe)
    for step in range(3):
        replica.inner_step(step)
    whole, _ = payloads(recipe, replica.named_parameters())
    assert whole.keys() == set(range(len(shards(recipe)))) == set(range(5))
    assert {i: (done / f"payload-{i}").read_bytes() for i in whole} == whole


def test_each_process_holds_about_a_quarter(done):
    recipe = parse_recipe(RECIPE, LARGER)
    copies = 6  # weights, two moments, gradients, anchor, feedback
    whole = copies * 8 * recipe.model.num_parameters
    for note in notes(done):
        assert 0.2 * whole < note["bytes"] < 0.3 * whole


def test_a_restored_replica_goes_on_in_the_same_bits(done):
    assert all(note["restored"] for note in notes(done))


def test_in_bf16_weights_travel_in_half_and_losses_stay(done):
    replica = whole_replica(parse_recipe(RECIPE, ["inner.precision=bf16"]), "bf16")
    ours = [float(replica.inner_step(step)) for step in range(3)]
    for note in notes(done):
        assert note["bf16"] == pytest.approx(ours, rel=2e-3)


def test_the_death_of_a_process_is_named(done):
    for rank in (0, 2, 3):
        fault = (done / f"fault-{rank}").read_text()
        assert fault == f"replica rack: process {rank} lost the other processes of the replica"


def on_a_gpu(port, compiled, path):
    """One process on NCCL: a GPU cannot be two of its ranks."""
    store = open_store(replica="rack", rank=0, host="127.0.0.1", port=port)
    mesh = shard_mesh(store, 0, 1, "cuda:0", timeout_seconds=60)
    recipe = parse_recipe(RECIPE, ["inner.precision=bf16", "inner.recompute=true"])
    how = {"device": "cuda:0", "precision": "bf16", "compiled": compiled}
    replica = ShardedReplica(recipe, recipe.fleet()[0], batches_of(recipe), mesh, **how)
    replica.begin_round(replica.named_parameters())
    path.write_text(json.dumps([float(replica.inner_step(step)) for step in range(3)]))
    replica.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_a_shard_is_the_same_replica(compiled, tmp_path):
    port = free_port()
    process = SPAWN.Process(target=on_a_gpu, args=(port, compiled, tmp_path / "losses"))
    process.start()
    process.join(240)
    recipe = parse_recipe(RECIPE, ["inner.precision=bf16"])
    whole = FullReplica(recipe, recipe.fleet()[0], batches_of(recipe), device="cuda:0", precision="bf16")
    ours = [float(whole.inner_step(step)) for step in range(3)]
    assert json.loads((tmp_path / "losses").read_text()) == pytest.approx(ours, rel=2e-3)


def test_a_batch_that_the_processes_do_not_divide_is_refused():
    class Three:
        def get_local_rank(self):
            return 0

        def size(self):
            return 3

    recipe = parse_recipe(RECIPE)
    with pytest.raises(ConfigError, match="3 processes do not divide"):
        ShardedReplica(recipe, recipe.fleet()[0], batches_of(recipe), Three())
