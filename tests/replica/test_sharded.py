"""A full replica cut between four processes by FSDP: one process's numbers, a quarter of its memory."""

import multiprocessing
import os
import signal
import socket

import torch
from safetensors.torch import load_file, save_file
from small_recipes import recipe_text, replicas
from test_stage import batches_of, relative, trained

from isthmus.config import parse_recipe
from isthmus.errors import RunError
from isthmus.replica.full import FullReplica
from isthmus.replica.process_groups import open_store
from isthmus.replica.sharded import ShardedReplica, shard_mesh

SPAWN = multiprocessing.get_context("spawn")
NUM = 4
RECIPE = recipe_text(
    replicas("rack", processes=NUM),
    inner={"batch": 8, "precision": "fp64"},
    outer={"inner_steps": 3, "rounds": 3, "values": "fp64"},
)
CASES = {
    "plain": [],
    "rows that four do not divide": ["model.ffn=66"],  # 17, 17, 17, 15
    "a process without rows": ["model.width=6", "model.heads=1", "model.ffn=10"],  # 2, 2, 2, 0
    "recomputed": ["inner.recompute=true"],
    "clipped": ["inner.clip=0.1"],
}


def train_sharded(rank, port, folder):
    """Two rounds of every case; then process 1 dies in the middle of an inner step."""
    torch.set_num_threads(1)
    store, _ = open_store(replica="rack", stage=rank, master=f"127.0.0.1:{port}")
    mesh = shard_mesh(store, rank, NUM, "cpu", timeout_seconds=60)
    for case, settings in CASES.items():
        recipe = parse_recipe(RECIPE, settings)
        replica = ShardedReplica(recipe, recipe.fleet()[0], batches_of(recipe), mesh, precision="fp64")
        seen, params = trained(recipe, replica)
        named = {f"params/{name}": tensor.contiguous() for name, tensor in params.items()}
        save_file({"seen": seen} | named, folder / f"{case}-{rank}.safetensors")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        replica.inner_step(6)
    except RunError as error:
        (folder / f"fault-{rank}").write_text(str(error))


def run_processes(target, *args):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = [SPAWN.Process(target=target, args=(rank, port, *args)) for rank in range(NUM)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()


def test_four_processes_are_one_replica_and_a_death_is_named(tmp_path):
    run_processes(train_sharded, tmp_path)
    for case, settings in CASES.items():
        recipe = parse_recipe(RECIPE, settings)
        seen, weights = trained(
            recipe, FullReplica(recipe, recipe.fleet()[0], batches_of(recipe), precision="fp64")
        )
        files = [load_file(tmp_path / f"{case}-{rank}.safetensors") for rank in range(NUM)]
        found = {n.removeprefix("params/"): t for file in files for n, t in file.items() if n != "seen"}
        assert found.keys() == weights.keys()
        assert sum(len(file) - 1 for file in files) == len(weights)  # each has one process that answers
        assert relative(found, weights) < 1e-12, case
        assert all(torch.equal(file["seen"], files[0]["seen"]) for file in files)
        assert torch.allclose(files[0]["seen"], seen, rtol=1e-12)
    for rank in (0, 2, 3):
        fault = (tmp_path / f"fault-{rank}").read_text()
        assert fault == f"replica rack: process {rank} lost the other processes of the replica"
