"""`isthmus plan`: the forecast of a recipe, its table and its JSON."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.cli import plan as command
from isthmus.cli.main import Parser
from isthmus.config import load_recipe
from isthmus.errors import ConfigError
from isthmus.layout.requests import READ_AT_ONCE
from isthmus.layout.traffic import machine_shards, round_bytes, shard_bytes
from isthmus.planner.cost import inner_step_seconds
from isthmus.planner.memory import process_memory
from isthmus.planner.plan import Prices, predict
from isthmus.planner.rate import TrainingRate
from isthmus.replica import speed
from isthmus.store.together import AT_ONCE

ROOT = Path(__file__).parents[2]
DEMO, MIXED = "demo", "512m-het-half-k192"
RATES = ["replicas.rack.tflops=0.2", "replicas.edge.tflops=0.05"]  # which the demo leaves to be measured
STATED = [f"--set={rate}" for rate in RATES]


def run(capsys, *arguments):
    parser = Parser(prog="isthmus")
    command.register(parser.add_subparsers())
    args = parser.parse_args(["plan", *map(str, arguments)])
    assert args.run(args) == 0
    return capsys.readouterr().out


def kind(forecast, name):
    return next(kind for kind in forecast.kinds if kind.name == name)


@pytest.mark.parametrize("path", [DEMO, MIXED])
def test_bytes_of_the_run_are_those_of_traffic(path):
    recipe = load_recipe(path)
    forecast = predict(recipe, tflops=100)
    for purpose, number in round_bytes(recipe).items():
        assert forecast.bytes[purpose] == recipe.outer.rounds * number, purpose


@pytest.mark.parametrize("how", ["open", "full"])
def test_finishing_rounds_carry_whole_streams_and_take_longer(capsys, how):
    settings = ["outer.rounds=10", "finish.rounds=3", f"finish.how={how}"]
    recipe, usual = load_recipe(MIXED, settings), load_recipe(MIXED, settings[:1])
    forecast, without = predict(recipe, tflops=100), predict(usual, tflops=100)
    rounds = [round_bytes(recipe, t) for t in range(1, 11)]
    for purpose in rounds[0]:
        assert forecast.bytes[purpose] == sum(sent[purpose] for sent in rounds), purpose
    edge = next(r for r in recipe.replicas if r.compressed)
    whole = recipe.model.width / edge.subspace_dim(recipe.model.width)
    assert rounds[9]["activations"] == whole * rounds[0]["activations"]
    assert rounds[9]["payload_down"] == rounds[0]["payload_down"]
    opened = load_recipe(MIXED, [*settings[:1], "replicas.edge.compression=1"])
    assert forecast.finish.round_seconds == predict(opened, tflops=100).round_seconds > forecast.round_seconds
    seconds = 7 * without.round_seconds + 3 * forecast.finish.round_seconds
    assert forecast.hours * 3600 == pytest.approx(seconds)
    assert forecast.tokens_per_second == pytest.approx(forecast.tokens / seconds)
    assert forecast.utilisation < without.utilisation
    said = run(capsys, MIXED, "--tflops", 100, *(f"--set={text}" for text in settings))
    assert "the last 3 rounds of" in said
    assert "finish" not in run(capsys, MIXED, "--tflops", 100)


def closed_seconds(recipe, forecast):
    """The ceiling of any schedule with a flush, at the forecast's rate."""
    edge = kind(forecast, "edge")
    member = next(m for m in recipe.fleet() if m.config.name == "edge")
    member = replace(member, config=replace(member.config, tflops=edge.compute.tflops))
    return inner_step_seconds(recipe, member, 0.0)


def test_no_simulated_step_beats_the_ceiling_of_the_closed_formula():
    recipe = load_recipe(DEMO, RATES)
    forecast = predict(recipe)
    edge = kind(forecast, "edge")
    assert edge.step.seconds >= closed_seconds(recipe, forecast)
    assert edge.step.seconds >= edge.step.linkless_seconds >= edge.compute.seconds_per_step


def test_equal_stages_and_an_open_link_reach_the_ceiling_exactly():
    recipe = load_recipe(
        MIXED,
        ["replicas.edge.stages=2", "model.layers=2", "model.vocab=64", "replicas.edge.link.mbps=100000"],
    )
    forecast = predict(recipe, 100)
    edge = kind(forecast, "edge")
    uneven = max(edge.compute.stage_seconds_per_step) / edge.compute.seconds_per_step
    assert uneven < 1.002
    assert edge.step.seconds == pytest.approx(closed_seconds(recipe, forecast), rel=0.005)


def test_the_work_of_all_stages_is_that_of_the_replica():
    edge = kind(predict(load_recipe(MIXED), 160), "edge")
    assert sum(edge.compute.stage_seconds_per_step) == pytest.approx(4 * edge.compute.seconds_per_step)
    assert edge.compute.seconds_per_step == pytest.approx(6 * 512_398_848 * 65_536 / 4 / 160e12)


def test_a_slower_link_makes_deeper_warm_up_and_in_the_end_the_bottleneck():
    fast = kind(predict(load_recipe(MIXED, ["inner.micro_batches=32"]), 20), "edge")
    slow = kind(
        predict(load_recipe(MIXED, ["inner.micro_batches=32", "replicas.edge.link.mbps=20"]), 20), "edge"
    )
    assert fast.step.depths[0] < slow.step.depths[0]
    assert fast.bottleneck != "link"
    assert slow.bottleneck == "link"
    assert slow.link.forward_seconds_per_micro_batch == pytest.approx(
        50 * fast.link.forward_seconds_per_micro_batch
    )


def test_a_round_is_h_steps_and_the_exchange_of_the_slowest():
    forecast = predict(load_recipe(DEMO, RATES))
    edge = kind(forecast, "edge")
    ends = edge.exchange.up_seconds + edge.exchange.down_seconds + forecast.closing.seconds
    assert forecast.slowest == "edge"
    assert forecast.round_seconds == pytest.approx(15 * edge.step.seconds + ends)
    assert forecast.hours * 3600 == pytest.approx(forecast.rounds * forecast.round_seconds)
    assert forecast.tokens_per_second * forecast.round_seconds == pytest.approx(4 * 15 * 8 * 128)
    assert kind(forecast, "rack").wait_seconds > 0


@pytest.mark.parametrize(("racks", "waits"), [(2, 1), (18, 4)])
def test_requests_that_are_made_together_wait_together(racks, waits):
    near, far = (
        predict(
            load_recipe(DEMO, [*RATES, f"replicas.rack.count={racks}", f"replicas.rack.link.latency_ms={ms}"])
        )
        for ms in (5, 105)
    )
    late = kind(far, "rack").exchange.down_seconds - kind(near, "rack").exchange.down_seconds
    assert READ_AT_ONCE == AT_ONCE == 16
    assert waits == -(-3 * (racks + 1) // 16)  # of the others, 3 shards each
    assert late == pytest.approx(waits * 2 * 0.100)  # there and back


@pytest.mark.parametrize("path", [DEMO, MIXED])
def test_the_machines_of_a_replica_read_together_what_traffic_counts(path):
    recipe = load_recipe(path, ["outer.values=2bit"])
    sizes = shard_bytes(recipe)
    for replica, forecast in zip(recipe.replicas, predict(recipe, 100).kinds, strict=True):
        others, total = recipe.num_replicas - 1, 0
        for writes, reads in machine_shards(recipe, replica):
            total += sum(sizes[i] * (others + (i not in writes)) for i in reads)
        assert total == forecast.exchange.down_bytes


def test_with_keep_rounds_a_bucket_does_not_grow_with_the_run(capsys):
    long = ["outer.rounds=10000", "bucket.keep_rounds=50"]
    short, kept, all_stay = (
        predict(load_recipe(DEMO, [*RATES, *more]))
        for more in (["outer.rounds=70"], long, ["outer.rounds=10000"])
    )
    assert kept.stored_bytes_most == short.stored_bytes_most + short.snapshot_bytes  # of the newest anchor
    assert all_stay.stored_bytes_most > 100 * kept.stored_bytes_most
    assert "at most, with bucket.keep_rounds = 50" in run(
        capsys, DEMO, *STATED, "--set", "bucket.keep_rounds=50"
    )


def test_one_replica_alone_exchanges_and_pays_nothing_to_the_bucket():
    recipe = load_recipe("178m-dense")
    alone = replace(recipe, replicas=(replace(recipe.replicas[0], count=1),))
    forecast = predict(alone, 100)
    assert forecast.closing is None
    assert forecast.link_bytes["to_bucket"] == forecast.link_bytes["from_bucket"] == 0
    assert forecast.requests == {"get": 0, "put": 0, "payload_get": 0}


@pytest.mark.parametrize("method", ["sparseloco", "diloco", "adamw"])
def test_every_method_has_a_plan(method, capsys):
    text = run(capsys, MIXED, "--tflops", 160, "--set", f"outer.method={method}")
    assert "bottleneck" in text


def test_memory_of_a_stage_has_the_embedding_copy_and_the_depth():
    recipe = load_recipe(MIXED)
    edge = next(r for r in recipe.replicas if r.name == "edge")
    table = 32_000 * 1536 * 4
    open_stage = process_memory(recipe, replace(edge, compression="none"), 1, 4)
    stage = process_memory(recipe, edge, 1, 4)
    assert stage.embedding_copy == table
    assert stage.anchor - open_stage.anchor == table
    assert open_stage.embedding_copy == 0
    assert process_memory(recipe, edge, 1, 8).activations == 2 * stage.activations
    full = process_memory(recipe, recipe.replicas[0], 0, 1)
    assert full.weights == 4 * recipe.model.num_parameters
    assert sum(process_memory(recipe, edge, s, 1).weights for s in range(4)) == full.weights
    assert full.total > sum((full.weights, full.moments, full.gradients, full.feedback, full.anchor))


def test_an_unknown_rate_is_asked_for_in_one_line():
    with pytest.raises(ConfigError, match=r"replica rack: .*isthmus doctor.*--tflops") as error:
        predict(load_recipe(MIXED))
    assert "\n" not in str(error.value)


def test_a_small_model_without_a_rate_is_measured_here_and_planned_for_this_machine(capsys, monkeypatch):
    rate = TrainingRate(
        device="cpu",
        precision="fp32",
        preset="nano",
        sequences=8,
        steps=9,
        step_seconds=0.1,
        fastest_seconds=0.09,
        slowest_seconds=0.12,
        tflops=0.06,
        tokens_per_second=1.0,
    )
    monkeypatch.setattr(speed, "training_rate", lambda *given: rate)
    monkeypatch.setattr(speed, "usable_cores", lambda: 2)
    body = json.loads(run(capsys, DEMO, "--json"))
    # Two cores: half of one for a full replica, a third for each of four stages.
    assert [kind["compute"]["tflops"] for kind in body["kinds"]] == [0.03, 0.02]
    assert "Measured: 0.06 TFLOP/s of one process alone, 9 inner steps" in run(capsys, DEMO)

    def never(*given):
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(speed, "training_rate", never)
    run(capsys, DEMO, "--tflops", 1)
    run(capsys, DEMO, "--device", "l4")
    for some in ([MIXED], [DEMO, "--set", RATES[0]]):  # too large; a fleet of which some rates are known
        with pytest.raises(ConfigError, match="the training rate of its machines is not known"):
            run(capsys, *some)


def test_money_is_hours_machines_and_egress():
    forecast = predict(load_recipe(DEMO, RATES), prices=Prices(per_hour={"edge": 0.3}, egress_per_gb=0.09))
    machines = forecast.hours * 0.3 * 2 * 2
    egress = forecast.link_bytes["from_bucket"] / 1e9 * 0.09
    assert forecast.money["machines.edge"] == pytest.approx(machines)
    assert forecast.money["total"] == pytest.approx(machines + egress)


def test_json_has_stable_keys(capsys):
    body = json.loads(run(capsys, DEMO, *STATED, "--json"))
    assert {"hours", "tokens_per_second", "utilisation", "bytes", "link_bytes", "requests", "kinds"} <= set(
        body
    )
    edge = body["kinds"][1]
    assert {"compute", "link", "step", "exchange", "memory", "bottleneck", "bytes"} <= set(edge)
    assert {"depths", "seconds", "bubble"} <= set(edge["step"])
    assert len(edge["memory"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([DEMO, "--to", "x.toml"], "--to goes with --suggest; a plan makes no use of it"),
        (["--suggest", "x.toml", "--device", "h100"], "--device goes with a recipe; --suggest makes no use"),
        (["--suggest", "x.toml", "--egress-per-gb", "0"], "--egress-per-gb goes with a recipe"),
        ([DEMO, *STATED, "--tflops", "5"], "every replica of demo states its own rate"),
        ([DEMO, "--tflops", "nan"], "it is above 0"),
        ([DEMO, "--egress-per-gb", "nan"], "it is 0 or more"),
        ([DEMO, "--put-per-million", "inf"], "it is 0 or more"),
        ([DEMO, "--price-per-hour", "nobody=2"], "no such replica; there is rack, edge"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr("isthmus.cli.plan.measured_if_small", pytest.fail)  # nothing is measured before
    with pytest.raises(ConfigError, match=words):
        run(capsys, *arguments)


def test_a_plan_loads_neither_torch_nor_numpy_nor_matplotlib():
    code = (
        "import sys; from isthmus.cli.main import Parser; from isthmus.cli import plan\n"
        "parser = Parser(); plan.register(parser.add_subparsers())\n"
        f"for extra in ([], ['--json']):\n"
        f"    args = parser.parse_args(['plan', {DEMO!r}, *{STATED!r}, *extra]); args.run(args)\n"
        "print([m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_a_thousand_replicas_are_planned_at_once():
    recipe = load_recipe(MIXED, ["replicas.rack.count=500", "replicas.edge.count=500"])
    started = time.process_time()
    forecast = predict(recipe, 160)
    assert time.process_time() - started < 0.5
    assert forecast.num_replicas == 1000
