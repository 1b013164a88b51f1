"""Plan against actual: of fabricated rows, whose ratios are known, and of real runs."""

import json
from dataclasses import replace

import pytest
from fabricate import FULL, PIPELINED, make_run, recipe
from small_recipes import pipelined, recipe_text, replicas

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.page.actual import compare, compare_rows
from isthmus.page.report import write_report
from isthmus.page.source import RunSource
from isthmus.page.state import StateBuilder
from isthmus.planner.plan import predict
from isthmus.runlog import Row, RunDir

ABOUT = {"mode": "real processes", "device": "cpu", "precision": "fp32"}
RATED = (FULL + "tflops = 0.02\n", PIPELINED + "tflops = 0.01\n")


def as_predicted(recipe, rounds, slower=1.0):
    """Rows of a fleet that does what its plan says, every step and transfer `slower` times as long."""
    plan, steps = predict(recipe), recipe.outer.inner_steps
    rows = [Row(round=0)]
    for number in range(1, rounds + 1):
        measured = {}
        for kind in plan.kinds:
            per_round = {purpose: total // recipe.outer.rounds for purpose, total in kind.bytes.items()}
            facts = {
                "replicas": kind.count,
                "bytes": per_round,
                "seconds": slower * steps * kind.step.seconds,
            }
            facts["compute_seconds"] = [slower * steps * s for s in kind.compute.stage_seconds_per_step]
            facts["up_seconds"] = [slower * kind.exchange.up_seconds] * kind.stages
            facts["down_seconds"] = [slower * kind.exchange.down_seconds] * kind.stages
            facts["peak_bytes"] = [memory["total"] for memory in kind.memory]
            if kind.link:
                each = steps * kind.count * kind.step.micro_batches
                there, back = (
                    kind.link.forward_bytes_per_micro_batch,
                    kind.link.backward_bytes_per_micro_batch,
                )
                facts["forth_bytes"], facts["back_bytes"] = [each * there, 0], [0, each * back]
                trip = there + back
                facts["trip_seconds"] = trip * 8 / (kind.link.mbps * 1e6) + 2 * kind.link.latency_ms / 1e3
            measured[kind.name] = facts
        rows.append(Row(round=number, seconds=slower * plan.round_seconds, measured=measured))
    return rows


def fleet(*parts):
    found = recipe("".join(parts))
    return replace(found, inner=replace(found.inner, precision="fp32"))


def test_a_run_that_does_what_its_plan_says_has_only_ratios_of_one():
    found = compare_rows(fleet(*RATED), ABOUT, as_predicted(fleet(*RATED), 4))
    for line in found.lines:
        assert line.ratio == pytest.approx(1), line
    units = {(line.kind, line.where, line.unit) for line in found.lines}
    for where in ("stage 0 to 1", "stage 1 to 0", "to the bucket", "from the bucket"):
        assert ("edge", where, "bytes") in units
    assert {("rack", "", "share"), ("edge", "", "share"), ("rack", "to the bucket", "seconds")} <= units
    assert ("edge", "stage 1 to 0", "share") in units


def test_machines_half_as_fast_show_in_the_rate_and_not_in_the_plan():
    rows = as_predicted(fleet(*RATED), 4, slower=2.0)
    lines = {(x.kind, x.where, x.what): x for x in compare_rows(fleet(*RATED), ABOUT, rows).lines}
    assert lines["rack", "", "training rate of a machine"].ratio == pytest.approx(0.5)
    assert lines["rack", "", "an inner step"].ratio == pytest.approx(1)
    assert lines["edge", "stage 0 to 1", "bytes"].ratio == pytest.approx(1)


def test_without_a_stated_rate_the_measured_one_is_taken_and_said(tmp_path):
    rows = as_predicted(fleet(*RATED), 4)
    found = compare_rows(fleet(FULL, PIPELINED), ABOUT, rows)
    assert found.rates == {"rack": "measured", "edge": "measured"}
    for line in found.lines:
        assert line.ratio == pytest.approx(1), line
    run = RunDir.create(tmp_path / "run", fleet(FULL, PIPELINED), ABOUT)
    for row in rows:
        run.append(row | {"tokens": 1, "bytes": {}})
    html = write_report(run.path).read_text(encoding="utf-8")
    assert "is the one measured in this run" in html
    assert "stage 1 to 0" in html


def test_the_first_round_pays_for_warming_up_and_is_left_out():
    rows = as_predicted(fleet(*RATED), 4)
    for row in rows[1:2]:
        row.seconds *= 10
        for kind in row.measured.values():
            kind["seconds"] *= 10
    found = compare_rows(fleet(*RATED), ABOUT, rows)
    assert all(
        x.ratio == pytest.approx(1) for x in found.lines if x.what in ("an inner step", "an outer round")
    )


@pytest.mark.parametrize("broken", [{}, {"rack": {}}, {"rack": {"seconds": None, "compute_seconds": []}}])
def test_figures_that_are_missing_are_left_open(broken):
    rows = as_predicted(fleet(*RATED), 2)
    rows[2].measured = broken
    assert compare_rows(fleet(*RATED), ABOUT, rows).lines
    rows[1].measured = broken
    for fleets in (RATED, (FULL, PIPELINED)):
        found = compare_rows(fleet(*fleets), ABOUT, rows)
        assert found is None or all(x.ratio is None for x in found.lines if x.what == "an inner step")


def test_a_run_without_figures_has_no_section(tmp_path):
    run = make_run(tmp_path / "run", recipe(), 2)
    assert compare(run.path) is None
    assert StateBuilder().build(RunSource(run).look())["plan"] is None


TINY = recipe_text(
    replicas("rack") + pipelined("edge", stages=2, compression="1/8", link={"mbps": 1000, "latency_ms": 0}),
    model={"width": 64, "layers": 2, "ffn": 128, "context": 32},
    inner={"micro_batches": 4},
    outer={"inner_steps": 3},
)


def test_a_simulated_run_compares_its_bytes_and_its_virtual_clock(tmp_path, capsys):
    (tmp_path / "tiny.toml").write_text(TINY)
    assert main(["simulate", str(tmp_path / "tiny.toml"), "--run", str(tmp_path / "run"), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plan_against_actual"]
    assert found["simulated"]
    sent = [line for line in found["lines"] if line["unit"] == "bytes" and line["what"] == "bytes"]
    assert {line["where"] for line in sent if line["kind"] == "edge"} == {
        "stage 0 to 1",
        "stage 1 to 0",
        "to the bucket",
        "from the bucket",
    }
    assert all(line["ratio"] == pytest.approx(1, abs=0.02) for line in sent)
    (clock,) = [line for line in found["lines"] if line["what"] == "an outer round"]
    assert clock["source"] == "virtual clock"
    # Its closing, half a second and more, is the plan's alone.
    assert 0 < clock["measured"] < clock["predicted"]


@pytest.mark.soak
def test_real_processes_tell_every_link_and_the_plan_knows_their_bytes(tmp_path, capsys):
    from isthmus.runtime.train import train

    tiny = parse_recipe(TINY)
    rows = train(tiny, tmp_path / "run", device="cpu", quiet=True).rows
    found = compare(tmp_path / "run")
    assert not found.simulated
    lines = {(line.kind, line.where, line.what): line for line in found.lines}
    for kind, where in (
        ("edge", "stage 0 to 1"),
        ("edge", "stage 1 to 0"),
        ("edge", "to the bucket"),
        ("edge", "from the bucket"),
        ("rack", "to the bucket"),
        ("rack", "from the bucket"),
    ):
        assert lines[kind, where, "bytes"].ratio == pytest.approx(1, abs=0.02), (kind, where)
    # The rate came from these very seconds, so a full replica's step is as predicted.
    step = lines["rack", "", "an inner step"]
    assert step.ratio == pytest.approx(1, rel=0.5)
    spent = rows[-1]["measured"]["edge"]["compute_seconds"]
    assert len(spent) == 2
    assert 0 < max(spent) <= rows[-1]["measured"]["edge"]["seconds"]
    assert 0 < lines["edge", "", "utilisation"].measured < 1
    assert lines["edge", "slowest link", "a micro-batch there and back"].measured > 0
    assert lines["edge", "from the bucket", "in a round"].measured > 0
    for where in ("stage 0", "stage 1"):
        assert lines["edge", where, "peak memory"].ratio == pytest.approx(1, abs=0.15)
    assert lines["rack", "", "peak memory"].ratio == pytest.approx(1, abs=0.15)
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "stage 0 to 1" in html
    # Of a run that was joined there is only the bucket: it says the same.
    assert main(["report", str(tmp_path / "run" / "bucket"), "--to", str(tmp_path / "joined"), "--json"]) == 0
    joined = compare(tmp_path / "joined")
    assert [
        (x.kind, x.where, x.measured) for x in joined.lines if x.unit == "bytes" and x.what == "bytes"
    ] == [(x.kind, x.where, x.measured) for x in found.lines if x.unit == "bytes" and x.what == "bytes"]
    assert main(["report", str(tmp_path / "run" / "bucket")]) == 2
    assert "give --to a new folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "run"), "--to", str(tmp_path / "x")]) == 2
