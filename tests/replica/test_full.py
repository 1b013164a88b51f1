"""A full replica, alone and shared by processes: the simulator's numbers either way."""

import multiprocessing
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_stage import FP32, RECIPE, batches_of, relative, simulated, trained

from isthmus.config import parse_recipe
from isthmus.errors import ConfigError, RunError
from isthmus.replica.full import FullReplica, share_batches
from isthmus.replica.process_groups import open_store
from isthmus.runtime.addresses import free_port

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("grad_accum_steps", [1, 2])
@pytest.mark.parametrize(("settings", "precision"), [([], "fp64"), (FP32, "fp32")])
def test_a_full_replica_is_the_simulated_one(settings, precision, grad_accum_steps):
    recipe = parse_recipe(RECIPE, settings)
    member = recipe.fleet()[0]
    seen, weights = simulated(recipe, member, precision)
    replica = FullReplica(
        recipe, member, batches_of(recipe), precision=precision, grad_accum_steps=grad_accum_steps
    )
    ours, params = trained(recipe, replica, precision)
    tolerance = 1e-9 if precision == "fp64" else 1e-5
    assert relative(params, weights) < tolerance
    assert torch.allclose(ours, seen, rtol=tolerance)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_replica_is_the_same_one():
    recipe = parse_recipe(RECIPE, FP32)
    member = recipe.fleet()[0]
    plain, compiled = (
        trained(
            recipe, FullReplica(recipe, member, batches_of(recipe), precision="fp32", compiled=how), "fp32"
        )
        for how in (False, True)
    )
    assert torch.allclose(compiled[0], plain[0], rtol=1e-5)
    assert relative(compiled[1], plain[1]) < 1e-5


def test_a_restored_replica_goes_on_as_if_never_stopped():
    recipe = parse_recipe(RECIPE)
    member, batches = recipe.fleet()[0], batches_of(recipe)
    straight, again = (FullReplica(recipe, member, batches, precision="fp64") for _ in range(2))
    for step in range(4):
        if step == 2:
            again.begin_round(straight.named_parameters())
            again.restore(straight.state(), step)
        straight.inner_step(step)
    for step in (2, 3):
        again.inner_step(step)
    assert relative(again.named_parameters(), straight.named_parameters()) == 0


def test_a_batch_that_the_processes_do_not_divide_is_refused():
    class Three:
        def rank(self):
            return 0

        def size(self):
            return 3

    recipe = parse_recipe(RECIPE)
    with pytest.raises(ConfigError, match="3 processes in 1 accumulation steps do not"):
        FullReplica(recipe, recipe.fleet()[0], batches_of(recipe), process_group=Three())


def train_shared(rank, port, folder):
    """Two rounds, then a third in which process 1 dies."""
    torch.set_num_threads(1)
    recipe = parse_recipe(RECIPE)
    store = open_store(replica="rack", rank=rank, host="127.0.0.1", port=port)
    process_group = share_batches(store, rank, 2, "cpu", timeout_seconds=120)
    replica = FullReplica(
        recipe,
        recipe.fleet()[0],
        batches_of(recipe),
        precision="fp64",
        grad_accum_steps=2,
        process_group=process_group,
    )
    if rank:  # only process 0 is given the anchor
        given = replica.begin_round
        replica.begin_round = lambda anchor: given(None)
    seen, params = trained(recipe, replica)
    replica.restore(replica.state() if rank == 0 else None, 6)
    save_file({"seen": seen} | {f"params/{n}": t for n, t in params.items()}, folder / f"{rank}.safetensors")
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        replica.inner_step(6)
    except RunError as error:
        (folder / "fault").write_text(str(error))


def test_processes_that_share_a_batch_are_one_replica_and_a_death_is_named(tmp_path):
    port = free_port()
    processes = [SPAWN.Process(target=train_shared, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()
    recipe = parse_recipe(RECIPE)
    seen, weights = simulated(recipe, recipe.fleet()[0])
    files = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    for file in files:
        params = {n.removeprefix("params/"): t for n, t in file.items() if n.startswith("params/")}
        assert relative(params, weights) < 1e-9
        assert torch.allclose(file["seen"], seen, rtol=1e-9)
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    fault = (tmp_path / "fault").read_text()
    assert fault == "replica rack: process 0 lost the other processes of the replica"
