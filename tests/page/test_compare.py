import argparse
import json
from pathlib import Path

import pytest
from fabricate import FULL, PIPELINED, make_run, recipe

from isthmus.cli import compare as compare_command
from isthmus.cli import report as report_command
from isthmus.errors import ConfigError
from isthmus.page.compare import differences

MIXED = FULL + PIPELINED


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    compare_command.register(commands)
    report_command.register(commands)
    args = parser.parse_args(argv)
    return args.run(args)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/wide"), recipe(MIXED), 20)
    make_run(
        Path("runs/narrow"), recipe(MIXED, "outer.keep=8", "replicas.edge.compression=1/32"), 14, eval_every=4
    )
    return ["runs/wide", "runs/narrow"]


def test_the_table_has_the_keys_that_differ_and_the_results(runs: list[str], capsys):
    assert call("compare", *runs) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 runs; their recipes differ in outer.keep, replicas.edge.compression."
    assert lines[1].startswith("In common: nano (1.1 M parameters), method sparseloco, H 15, values fp32")
    assert lines[3].split("  ")[0] == "run"
    heads = "run keep edge k/d rounds tokens mixed full pipelined stages replicas control tok/s"
    assert " ".join(lines[3].split()) == heads
    assert lines[4].split()[:6] == ["wide", "32", "1/8", "20", "1.2", "M"]
    assert lines[5].split()[:4] == ["narrow", "8", "1/32", "14"]
    assert len(lines[3]) == len(lines[4]) == len(lines[5])
    assert lines[-1] == "Plot of loss_mixed: compare.png"
    assert Path("compare.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_every_result_and_plots_only_on_demand(runs: list[str], capsys):
    call("compare", *runs, "--json")
    table = json.loads(capsys.readouterr().out)
    assert table["differ"] == ["outer.keep", "replicas.edge.compression"]
    assert table["runs"][1]["settings"] == {"outer.keep": "8", "replicas.edge.compression": "1/32"}
    assert table["runs"][0]["rounds"] == 20
    assert not Path("compare.png").exists()
    call("compare", *runs, "--json", "--plot", "both.svg")
    assert json.loads(capsys.readouterr().out)["plot"] == "both.svg"
    assert "<svg" in Path("both.svg").read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["runs/wide", "nowhere"], "nowhere does not exist"),
        (["runs/wide", "runs/empty"], "runs/empty has no rounds yet"),
        (["runs/wide", "wires://my-runs/first"], "wires://my-runs/first"),
        (["runs/wide", "--metric", "los_mixed"], 'did you mean "loss_mixed"'),
        (["runs/wide", "--plot", "x.gif"], "must end in .png or .svg"),
        (["runs/wide", "--plot", "gone/x.png"], "no folder gone"),
        (["runs/full", "--metric", "loss_pipelined"], "none of these runs has measured loss_pipelined"),
    ],
)
def test_what_cannot_be_compared_is_one_line(runs: list[str], argv: list[str], words: str):
    make_run(Path("runs/empty"), recipe(), 0)
    make_run(Path("runs/full"), recipe(FULL), 3)
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")) as caught:
        call("compare", *argv)
    assert "\n" not in str(caught.value)
    assert not list(Path.cwd().glob("*.png"))


def test_runs_of_one_recipe_and_fleets_with_other_names():
    assert differences([recipe(MIXED), recipe(MIXED)]) == {}
    barn = recipe(PIPELINED.replace("edge", "barn"))
    assert differences([recipe(FULL), barn]) == {"fleet": ["2 full", "2 of 2 stages 1/8"]}
    preset = recipe(FULL, "model.preset=10m")
    assert differences([recipe(FULL), preset]) == {"model.preset": ["nano", "10m"]}


def test_bytes_of_a_bucket_stand_apart_and_say_why_a_simulation_has_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, control in (("simulated", 0), ("trained", 5_000_000)):
        run = make_run(Path(name), recipe(MIXED), 2)
        rows = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
        for row in rows:
            row["bytes"]["control"] = control
        run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert call("compare", "simulated", "trained") == 0
    out = capsys.readouterr().out
    assert "control: snapshots, manifests and heartbeats in the bucket. A simulation has no bucket" in out
    call("compare", "simulated", "trained", "--json")
    ours, real = json.loads(capsys.readouterr().out)["runs"]
    assert ours["replica_bytes"] == real["replica_bytes"] > 0
    assert (ours["control_bytes"], real["control_bytes"] > 0) == (0, True)
