"""Pipelines of real processes, over loopback: the simulator's weights, the predicted bytes, named faults."""

import multiprocessing
import os
import signal
import time
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_stage import FP32, RECIPE, batches_of, relative, simulated, trained

from isthmus.config import parse_recipe
from isthmus.errors import RunError
from isthmus.layout.traffic import inner_step_bytes
from isthmus.layout.wire import INT_BITS, frame_sizes
from isthmus.replica.pipelined import FIRST_LOOK, LOOK_EVERY, PipelinedReplica
from isthmus.replica.process_groups import connect, open_store
from isthmus.replica.stage import Stage
from isthmus.runtime.addresses import LOOPBACK, free_port

SPAWN = multiprocessing.get_context("spawn")
CASES = {  # settings and precision
    "4 stages, 1/4": ([], "fp64"),
    "4 stages, open": (["replicas.edge.compression=none"], "fp64"),
    "4 stages, 1/8, fp32": ([*FP32, "replicas.edge.compression=1/8"], "fp32"),
    "4 stages, 1/4, split": (["inner.backward=split"], "fp64"),
    "4 stages, 1/4, finishing": (["finish.rounds=2"], "fp64"),
    "2 stages, 1/8": (["replicas.edge.stages=2", "replicas.edge.compression=1/8"], "fp64"),
    "2 stages, open, fp32": ([*FP32, "replicas.edge.stages=2", "replicas.edge.compression=none"], "fp32"),
}
LIMIT = 6  # micro-batches in flight
COUNTED = ("activations", "gradients", "tokens", "control")


def start(recipe, stage, port, precision="fp64", **settings):
    """One process's part of the replica."""
    member = recipe.fleet()[1]
    name, num_stages = member.name, member.config.stages
    store = open_store(replica=name, rank=stage, host=LOOPBACK, port=port, session=recipe.name)
    links = connect(
        replica=name, stage=stage, num_stages=num_stages, store=store, address=LOOPBACK, **settings
    )
    batches = batches_of(recipe) if stage == 0 else None
    own = Stage(recipe, member, stage, precision=precision)
    return PipelinedReplica(recipe, member, [own], [links], batches)


def train_cases(stage, ports, folder):
    torch.set_num_threads(1)
    for (name, (settings, precision)), port in zip(CASES.items(), ports, strict=True):
        recipe = parse_recipe(RECIPE, [*settings, f"inner.in_flight={LIMIT}"])
        if stage >= recipe.fleet()[1].config.stages:
            continue
        replica = start(recipe, stage, port, precision)
        chosen = [torch.tensor(replica.depths)]
        seen, params = trained(recipe, replica, precision)
        chosen.append(torch.tensor(replica.depths))
        counts = replica.pop_counts()
        replica.close()
        about = {
            "seen": seen,
            "counts": torch.tensor([counts[c] for c in COUNTED]),
            "depths": torch.stack(chosen),
        }
        tensors = about | {f"params/{n}": t for n, t in params.items()}
        save_file(tensors, folder / f"{name.replace('/', '-')}-{stage}.safetensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every case, by four processes that stay for all of them."""
    folder = tmp_path_factory.mktemp("stages")
    ports = [free_port() for _ in CASES]
    processes = [SPAWN.Process(target=train_cases, args=(s, ports, folder)) for s in range(4)]
    finish(processes, 80)
    assert [p.exitcode for p in processes] == [0] * 4
    return folder


def finish(processes, seconds):
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@pytest.mark.parametrize("case", CASES)
def test_processes_and_simulator_end_at_the_same_weights(results, case):
    settings, precision = CASES[case]
    recipe = parse_recipe(RECIPE, settings)
    member = recipe.fleet()[1]
    seen, weights = simulated(recipe, member, precision)
    files = [
        load_file(results / f"{case.replace('/', '-')}-{s}.safetensors") for s in range(member.config.stages)
    ]
    params = {n.removeprefix("params/"): t for f in files for n, t in f.items() if n.startswith("params/")}
    assert params.keys() == weights.keys()
    tolerance = 1e-9 if precision == "fp64" else 1e-5
    assert relative(params, weights) < tolerance
    for file in files:
        assert torch.allclose(file["seen"], seen, rtol=tolerance)
        assert torch.equal(file["seen"], files[0]["seen"])  # loss and norm: the same bits at every stage
        assert torch.equal(file["depths"], files[0]["depths"])  # and the same schedule
    for depths in files[0]["depths"].tolist():
        assert all(LIMIT >= a >= b >= 1 for a, b in pairwise(depths))
    totals = dict(zip(COUNTED, sum(file["counts"] for file in files).tolist(), strict=True))
    steps, links = len(seen), member.config.stages - 1
    assert totals.pop("control") == 2 * links * steps * 48
    rounds = [recipe.in_round(t) for t in (1, 2)]
    expected = [inner_step_bytes(one, one.fleet()[1]) for one in rounds]
    assert totals == {
        purpose: steps // 2 * (expected[0][purpose] + expected[1][purpose]) for purpose in totals
    }


def train_until(stage, port, folder, fault):
    torch.set_num_threads(1)
    recipe = parse_recipe(RECIPE, ["replicas.edge.stages=3"])
    replica = start(recipe, stage, port, timeout_seconds=4)
    for step in range(4):
        if (stage, step) == (1, 2):
            os.kill(os.getpid(), fault)
        try:
            replica.inner_step(step)
        except RunError as error:
            (folder / f"{stage}").write_text(str(error))
            replica.close()
            return


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_dies_or_stalls_is_named_by_its_neighbours(tmp_path, fault):
    port = free_port()
    processes = [SPAWN.Process(target=train_until, args=(s, port, tmp_path, fault)) for s in range(3)]
    for process in processes:
        process.start()
    for stage in (0, 2):
        processes[stage].join(300)
    processes[1].kill()
    processes[1].join()
    assert [p.exitcode for p in processes] == [0, -signal.SIGKILL, 0]
    for stage in (0, 2):
        message = (tmp_path / f"{stage}").read_text()
        if fault == signal.SIGKILL:
            end = "lost its link to stage 1 at 127.0.0.1: the connection was closed"
        else:
            end = "heard nothing from stage 1 at 127.0.0.1 for 4 s"
        assert message == f"replica edge: stage {stage} {end}"


def test_depths_follow_measured_times_and_the_limit():
    recipe = parse_recipe(RECIPE, ["inner.micro_batches=8"])
    replica = PipelinedReplica.in_one_process(recipe, recipe.fleet()[1], batches_of(recipe))
    replica.automatic, replica.limit = True, 0
    for _ in range(3):
        replica._choose_depths(1.0, 0.1)
    assert replica.depths == (7, 5, 3, 1)  # ceil(2 (t_link + latency) / t) = 1
    replica.limit = 4
    for trip, expected in ((0.15, (7, 5, 3, 1)), (2.5, (4, 4, 4, 1))):  # only a real change is followed
        for _ in range(20):
            replica._choose_depths(1.0, trip)
        assert replica.depths == expected


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "gpipe"])
@pytest.mark.parametrize("backward", ["whole", "split"])
@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_no_stage_holds_more_than_in_flight_and_the_weights_do_not_depend_on_it(
    monkeypatch, schedule, limit, backward
):
    settings = [f"inner.in_flight={limit}", "inner.micro_batches=8", f"inner.backward={backward}"]
    recipe = parse_recipe(RECIPE, settings)
    member = recipe.fleet()[1]
    most, forward = [0] * member.config.stages, Stage.forward

    def counted(stage, *inputs):
        out = forward(stage, *inputs)
        most[stage.index] = max(most[stage.index], stage.num_in_flight)
        return out

    monkeypatch.setattr(Stage, "forward", counted)
    replica = PipelinedReplica.in_one_process(
        recipe, member, batches_of(recipe), precision="fp64", schedule=schedule
    )
    seen, params = trained(recipe, replica)
    assert max(most) <= limit
    if schedule == "gpipe":
        assert most == [limit] * member.config.stages
    expected, weights = simulated(recipe, member)
    assert torch.allclose(seen, expected, rtol=1e-9)
    assert relative(params, weights) < 1e-9


def test_times_that_drift_change_the_depths_of_the_next_inner_step_and_not_the_weights(monkeypatch):
    recipe = parse_recipe(RECIPE, ["inner.micro_batches=8", "outer.inner_steps=12"])
    member = recipe.fleet()[1]
    replica = PipelinedReplica.in_one_process(
        recipe, member, batches_of(recipe), precision="fp64", schedule="auto"
    )
    in_flight, forward, agree = [], Stage.forward, PipelinedReplica._agree
    trips = iter([0.1] * FIRST_LOOK + [0.15] * LOOK_EVERY + [2.5] * 99)

    def counted(stage, *inputs):
        out = forward(stage, *inputs)
        in_flight[-1][stage.index] = max(in_flight[-1][stage.index], len(stage.activations))
        return out

    def timed(replica, runs):
        """As measured, but for the times: one second of compute, and a link that becomes slow."""
        totals = agree(replica, runs)
        totals[2], totals[3] = 1.0, next(trips)
        return totals

    monkeypatch.setattr(Stage, "forward", counted)
    monkeypatch.setattr(PipelinedReplica, "_agree", timed)
    expected, weights = simulated(recipe, member, steps=25)
    step = replica.inner_step
    monkeypatch.setattr(replica, "inner_step", lambda i: (in_flight.append([0] * 4), step(i))[1])
    seen, params = trained(recipe, replica, steps=25)
    first, second = FIRST_LOOK, FIRST_LOOK + LOOK_EVERY
    assert in_flight[first] == in_flight[second] == [7, 5, 3, 1]  # 0.15 s after 0.1 s is a small change
    assert in_flight[second + LOOK_EVERY - 1] == [7, 5, 3, 1]
    assert in_flight[second + LOOK_EVERY] == [8, 8, 5, 1]  # 2.5 s is followed at once
    assert torch.allclose(seen, expected, rtol=1e-9)
    assert relative(params, weights) < 1e-9


@pytest.mark.parametrize(
    ("purpose", "says"), [("activations", "stage 0 sent stage 1"), ("gradients", "2 sent stage 1")]
)
def test_a_frame_that_no_stage_sends_stops_the_step_and_names_its_sender(monkeypatch, purpose, says):
    recipe = parse_recipe(RECIPE, [*FP32, "replicas.edge.wire=int4"])
    replica = PipelinedReplica.in_one_process(recipe, recipe.fleet()[1], batches_of(recipe))
    replica.inner_step(0)
    end = replica.links[1][0 if purpose == "activations" else 1]
    receive = end.receive

    def damaged(timeout_seconds=None):
        first, *rest = receive(timeout_seconds)
        return (torch.full_like(first, 255), *rest) if first.dtype == torch.uint8 else (first, *rest)

    monkeypatch.setattr(end, "receive", damaged)
    with pytest.raises(RunError, match=f"replica edge: .*{says} a frame that is none of this run"):
        replica.inner_step(1)


@pytest.mark.parametrize("wire", INT_BITS)
@pytest.mark.parametrize("purpose", ["activations", "gradients"])
def test_a_byte_changed_in_any_part_of_a_frame_is_a_number_or_names_its_sender(monkeypatch, wire, purpose):
    """Whatever it is changed to: the step ends, or with one line that says who sent what no stage sends."""
    recipe = parse_recipe(RECIPE, [*FP32, f"replicas.edge.wire={wire}", "replicas.edge.compression=5/32"])
    replica = PipelinedReplica.in_one_process(recipe, recipe.fleet()[1], batches_of(recipe))
    forward = purpose == "activations"
    sender, generator = 0 if forward else 2, torch.Generator().manual_seed(0)
    end = replica.links[1][0 if forward else 1]
    receive, spoil = end.receive, []
    sizes = frame_sizes(INT_BITS[wire], 2, 16, 5)

    def damaged(timeout_seconds=None):
        first, *rest = receive(timeout_seconds)
        if spoil and first.dtype == torch.uint8:
            assert len(first) == sum(sizes)
            first = first.clone()
            at, byte = spoil.pop()
            first[at] = byte
        return (first, *rest)

    monkeypatch.setattr(end, "receive", damaged)
    said = set()
    for part, size in enumerate(sizes):
        for byte in (0, 127, 128, 255) if size else ():
            at = sum(sizes[:part]) + int(torch.randint(size, (1,), generator=generator))
            spoil.append((at, byte))
            for end_of_link in (end_ for ends in replica.links for end_ in ends if end_):
                end_of_link.expected.clear()
                end_of_link.into.clear()
            try:
                replica.inner_step(0)
            except RunError as error:
                said.add(str(error))
            assert not spoil
    assert said == {
        f"replica edge: stage {sender} sent stage 1 a frame that is none of this run: a number that is not "
        "finite, or a code outside the wire's"
    }


@pytest.mark.parametrize("wire", ["int5", "bf16"])
@pytest.mark.parametrize(("side", "number"), [("before", 0), ("after", 2)])
def test_a_frame_of_another_size_or_type_names_its_sender(wire, side, number):
    recipe = parse_recipe(RECIPE, [*FP32, f"replicas.edge.wire={wire}"])
    stage = Stage(recipe, recipe.fleet()[1], 1)
    tokens = torch.zeros(2, 17, dtype=torch.long)
    (forward, _), (back,) = stage.frames()
    fine, grad = (torch.zeros(spec.shape, dtype=spec.dtype) for spec in (forward, back))

    def receive(frame):
        stage.begin_step()
        stage.forward(0, tokens, frame if side == "before" else fine)
        stage.backward(0, grad if side == "before" else frame)

    data = fine if side == "before" else grad
    receive(data)
    for bad in (data[1:], data[:0], torch.cat([data, data]), data.double()):
        with pytest.raises(
            RunError, match=f"replica edge: stage {number} sent stage 1 .* it has [0-9,]+ bytes"
        ):
            receive(bad)
