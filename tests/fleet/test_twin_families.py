"""The twin of a model with shared key heads in a mixed fleet, and fleets that keep one table."""

import os
import signal
from pathlib import Path

import pytest
import torch
from faults import kills
from small_recipes import pipelined, recipe_text, replicas
from test_twin import EXACT, FP64, ROUNDS, SMALL, Twins, ledger_of, run_both

from isthmus import simulate, train
from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.layout.traffic import round_bytes
from isthmus.protocol.ledger import read_run
from isthmus.protocol.replay import Replay
from isthmus.runlog import RunDir, totals
from isthmus.store.objects import open_store

QWEN3 = [
    "model.heads=4", "model.kv_heads=2", "model.head_dim=32", "model.tie_embeddings=true",
    "model.qk_norm=true",
    "model.rope_scaling.type=llama3", "model.rope_scaling.original_max_position_embeddings=64",
    "model.stage_cut=flops",
]  # fmt: skip
TIED = ["model.tie_embeddings=true", "model.heads=4", "model.kv_heads=1", "model.attention_bias=true"]
RACK = replicas("rack")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return run_both(tmp_path_factory.mktemp("families"), [*FP64[:3], *QWEN3], SMALL)


def test_weights_after_every_round_are_the_simulators_in_float64(both):
    assert len(both.real) == len(both.simulated) == ROUNDS
    assert max(both.gaps()) < 1e-9
    shapes = {name: tuple(tensor.shape) for name, tensor in both.real[-1].items()}
    assert shapes["layers.0.attention.wk.weight"] == (64, 64)
    assert shapes["layers.0.attention.wo.weight"] == (64, 128)
    assert shapes["layers.0.attention.q_norm.weight"] == (32,)


def test_bytes_that_the_processes_counted_are_those_predicted(both):
    recipe, counted = RunDir.open(both.run_dir).recipe, totals(both.real_rows)["bytes"]
    rounds = [round_bytes(recipe, t) for t in range(1, ROUNDS + 1)]
    assert {p: counted[p] for p in EXACT} == {p: sum(sent[p] for sent in rounds) for p in EXACT}


def test_the_mixed_fleet_unties_and_says_so_in_one_line(both):
    run = RunDir.open(both.run_dir)
    assert both.recipe.model.tie_embeddings
    assert not run.recipe.model.tie_embeddings
    assert "output.weight" in both.real[-1]
    (line,) = run.about["auto"]
    assert line.startswith("embedding and head are untied, 65,536 parameters more")


def test_with_every_worker_killed_and_resumed_it_ends_in_the_same_bits(both, tmp_path):
    run, killed = tmp_path / "run", []

    def kill(row) -> None:
        if row.round == 1:
            killed.extend(p for p in kills.processes(run) if p.role != "supervisor")
            for process in killed:
                os.kill(process.pid, signal.SIGKILL)

    threads = torch.get_num_threads()
    train(both.recipe, run, device="cpu", quiet=True, on_round=kill)
    torch.set_num_threads(threads)
    assert sorted(process.name for process in killed) == ["edge stage 0", "edge stage 1", "rack"]
    replay, digests = Replay(ledger_of(run)), []
    while replay.step() is not None:
        digests.append(replay.digest())
    assert digests == both.digests


@pytest.mark.parametrize("settings", [QWEN3, TIED])
def test_stacked_replicas_end_as_in_turns(settings, tmp_path):
    fleet = replicas("rack", count=2) + pipelined("edge", count=2, stages=2, compression="1/4", wire="fp64")
    text = recipe_text(fleet, inner={"precision": "fp64"}, outer={"values": "fp64", "keep": 512})
    ends = []
    for mode in ("stacked", "turns"):
        results = simulate(parse_recipe(text, settings), tmp_path / mode, mode=mode, device="cpu", quiet=True)
        ends.append(results.rows[-1]["loss_mixed"])
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)


def run_of(folder: Path, capsys, *more: str) -> list[str]:
    """`init` of a tied recipe; what it said on stderr."""
    (folder / "tied.toml").write_text(recipe_text(RACK, model={"tie_embeddings": True}))
    words = ["init", str(folder / "tied.toml"), str(folder / "bucket"), "--keys", str(folder / "keys"), *more]
    assert main(words) == 0
    return capsys.readouterr().err.splitlines()


def invited(folder: Path, *more: str) -> int:
    key = str(folder / "keys" / "run.owner.key")
    return main(["invite", str(folder / "bucket"), "new", "--key", key, *more])


def test_a_tied_run_refuses_a_pipelined_replica_and_takes_a_full_one(tmp_path, capsys):
    assert not any("untied" in line for line in run_of(tmp_path, capsys))
    assert read_run(open_store(str(tmp_path / "bucket"))).recipe.model.tie_embeddings
    assert invited(tmp_path, "--stages", "2") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "embedding and head of this run are one table" in said
    assert invited(tmp_path) == 0


def test_room_for_stages_unties_from_the_start(tmp_path, capsys):
    said = run_of(tmp_path, capsys, "--room", "2")
    assert sum("untied, 32,768 parameters more" in line for line in said) == 1
    assert not read_run(open_store(str(tmp_path / "bucket"))).recipe.model.tie_embeddings
    assert invited(tmp_path, "--stages", "2") == 0


def test_full_replicas_keep_one_table_of_which_autograd_sums_both_uses(tmp_path):
    recipe = parse_recipe(recipe_text(RACK, inner={"precision": "fp64"}, outer={"values": "fp64"}), TIED)
    simulated, real = tmp_path / "simulated", tmp_path / "real"
    one = simulate(recipe, simulated, device="cpu", quiet=True).rows[-1]
    threads = torch.get_num_threads()
    two = train(recipe, real, device="cpu", quiet=True).rows[-1]
    torch.set_num_threads(threads)
    assert one["loss_full"] == pytest.approx(two["loss_full"], rel=1e-9)
    names = RunDir.open(simulated).recipe.model.shapes()
    assert "output.weight" not in names
    assert RunDir.open(simulated).about["parameters"] == RunDir.open(real).about["parameters"]
    assert "auto" not in RunDir.open(real).about or not RunDir.open(real).about["auto"]
