"""`isthmus doctor` as a user meets it, and whether a plan with its numbers comes true."""

import json
import re
import subprocess
import sys

import pytest

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.doctor.seat import check_seat
from isthmus.planner.plan import predict
from isthmus.runtime.addresses import free_port

QUICK = ["--preset", "nano", "--seconds", "0.3"]
RECIPE = """
name = "alone"
[model]
preset = "nano"
[data]
eval_batches = 1
[inner]
batch = 16
[outer]
inner_steps = 10
rounds = 2
[[replicas]]
name = "rack"
"""


def run(capsys, *arguments):
    code = main(["doctor", *arguments])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--seconds", "0"], "between 0.1 and 60"),
        (["--seconds", "nan"], "between 0.1 and 60"),
        (["--preset", "10g"], 'did you mean "10m"?'),
        (["ftp://host/x"], "is not a store"),
        (["s3://b cket/x"], "names the bucket"),
        (["host:99999"], "neither a bucket nor a machine"),
        (["--relay", "10.0.0.2"], "write HOST:PORT"),
        (["--listen", "host:0", "./b"], "give it no target"),
        (["--listen", "s3://x"], "neither a bucket nor a machine"),
        (["--listen", "192.0.2.1"], "cannot listen on"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_tried(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_it_ends_with_a_role_and_lines_that_a_recipe_takes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "./bucket", *QUICK)
    assert code == 0, out
    assert "training nano on cpu in fp32" in err
    assert re.search(r"^Role: up to .*(replica|stages) of \w+", out, re.MULTILINE)
    pasted = out.split("in a recipe:\n")[1]
    recipe = parse_recipe(RECIPE + pasted)
    assert recipe.replicas[0].tflops > 0
    assert recipe.replicas[0].outer_link.mbps > 1
    assert list((tmp_path / "bucket").iterdir()) == []


def test_what_fails_is_named_with_its_cure_and_the_rest_is_still_checked(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = free_port()
    code, out, _ = run(capsys, f"127.0.0.1:{port}", "/proc/nowhere/x", "./bucket", *QUICK)
    assert code == 1
    assert f"FAIL  127.0.0.1:{port}: cannot reach" in out
    assert "FAIL  /proc/nowhere/x: cannot write" in out
    assert out.count("        do: ") == 2
    assert "ok    bucket link" in out
    assert "2 checks failed" in out


def test_json_has_everything(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "./bucket", "--json", *QUICK)
    found = json.loads(out)
    assert (code, found["ok"]) == (0, True)
    (fp32, *_) = [rate for rate in found["rates"] if rate["device"] == "cpu"]
    assert fp32["precision"] == "fp32"
    tokens = fp32["sequences"] * 128
    assert fp32["tflops"] == pytest.approx(6 * 1_115_264 * tokens / fp32["step_seconds"] / 1e12)
    assert {check["name"] for check in found["checks"]} >= {"memory", "disk", "training", "clock"}
    assert found["links"][0]["key"] == "bucket_link"
    assert found["presets"][0]["preset"] == "nano"


def test_without_torch_the_rest_is_said_and_the_cure_too(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None; from isthmus.cli.main import main; "
        "sys.exit(main(['doctor', '--seconds', '0.1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "FAIL  training: torch cannot be loaded" in done.stdout
    assert "pip install" in done.stdout
    assert "ok    memory" in done.stdout
    assert "Role: none before torch works here" in done.stdout
    assert "tflops =" not in done.stdout


def test_a_plan_with_the_measured_rate_takes_the_measured_time_for_a_step():
    from isthmus.doctor.compute import training_rate

    recipe = parse_recipe(RECIPE)
    rate = training_rate("cpu", "fp32", "nano", 0.3, 10**10)
    planned = predict(recipe, rate.tflops).kinds[0].step.seconds
    assert planned == pytest.approx(rate.step_seconds * recipe.inner.batch / rate.sequences)


def test_a_replicas_file_is_answered_first(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE)
    assert main(["init", "r.toml", "bucket", "--keys", "keys"]) == 0
    capsys.readouterr()
    code, out, _ = run(capsys, "keys/rack.isthmus.toml", *QUICK)
    assert code == 0, out
    first = out.splitlines()[0]
    assert first.startswith('Yes: this machine can be rack, a full replica of the run "alone": it needs')
    assert "a round of 10 inner steps takes about" in first
    _, out, _ = run(capsys, "keys/rack.isthmus.toml", *QUICK, "--json")
    place = json.loads(out)["checks"][0]
    assert (place["name"], place["ok"]) == ("place", True)
    assert place["facts"]["round_seconds"] > 0


def test_a_place_that_needs_more_memory_says_so_with_a_cure():
    recipe = parse_recipe(RECIPE)
    found = check_seat(recipe, "rack", 1 << 20, "fp32", 1.0, None)
    assert not found.ok
    assert "this machine cannot be rack" in found.words
    assert "more stages" in found.cure
    found = check_seat(recipe, "rack", 1 << 40, "fp32", 0.5, 7.0)
    again = check_seat(recipe, "rack", 1 << 40, "fp32", 1.0, 7.0)
    assert "the run's last took 7.0 s" in found.words
    assert found.facts["round_seconds"] == pytest.approx(2 * again.facts["round_seconds"], rel=0.2)
    assert check_seat(recipe, "rack", 1 << 40, "fp32", None, None).facts["round_seconds"] is None
