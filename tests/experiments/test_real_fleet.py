"""Rows of the regime by real processes beside the simulator."""

import json

from regime_lines import regime_line

from experiments import checks
from experiments.estimates import Book
from experiments.lines import FIELDS
from experiments.real_fleet import alike, can_be_real, exact, read_twins, run_twins
from experiments.tables import REGIME, pick_scale
from isthmus.cli.main import main
from isthmus.config import parse_recipe

SMALL = """
name = "small"
[model]
preset = "nano"
[subspace]
decay_t_perp = false
[outer]
keep = 512
values = "2bit"
[[replicas]]
name = "rack"
kind = "full"
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 2
compression = "1/8"
"""


def test_real_processes_compute_a_row_as_the_simulator_does(tmp_path):
    said = []
    row, wrong = ({"row": name, "digest": name, "recipe": SMALL} for name in ("row", "wrong"))
    wrong["recipe"] = SMALL.replace("keep = 512", 'method = "adamw"')
    (fault,) = run_twins([row, wrong], "builtin:sample", tmp_path, "c0ffee", said.append)
    assert fault.startswith("wrong: train: ")  # averaging at every step is no fleet's
    assert len(said) == 2
    assert "by both" in said[0]
    (found,) = read_twins(tmp_path).values()
    assert all(name in found for name in FIELDS)
    assert (found["of"], found["commit"], found["precision"]) == ("row", "c0ffee", "fp64")
    assert len(found["curve"]) == 7
    assert found["curve"][0] != found["curve"][-1]
    assert all(found["bytes"].values())
    assert alike(found)
    assert not alike(found | {"fleet_curve": found["curve"][:-1]})
    assert not alike(found | {"fleet_bytes": found["bytes"] | {"payload_up": 1}})


def test_an_exact_recipe_keeps_the_rows_wire_values_and_fleet():
    line = regime_line("recommended", 0, 3.0)
    whole, short = parse_recipe(line["recipe"]), exact(line, "builtin:sample", 512)
    assert short.replicas == whole.replicas
    assert (short.outer.values, short.outer.keep) == (whole.outer.values, whole.outer.keep)
    assert (short.inner.optimizer, short.inner.precision) == (whole.inner.optimizer, "fp64")


def test_the_page_counts_the_rows_that_are_alike_and_names_those_that_are_not():
    lines = [regime_line(row, 0, 3.0) for row in ("dense", "adamw", "het-8", "pp-8")]
    assert [can_be_real(line) for line in lines] == [True, False, True, True]
    book = Book(lines, pick_scale(REGIME))
    assert checks.by_fleet(book) == "0 of the 3 rows that a fleet can run"
    twin = {
        "curve": [[0, 1.0]],
        "fleet_curve": [[0, 1.0]],
        "bytes": {"payload_up": 1},
        "fleet_bytes": {"payload_up": 1},
    }
    book.twins = {lines[0]["digest"]: twin, lines[2]["digest"]: twin | {"fleet_curve": [[0, 1.1]]}}
    assert checks.by_fleet(book) == "1 of the 3 rows that a fleet can run; not equal: `regime-het-8`"


def test_bad_input_is_one_line(tmp_path, capsys):
    (tmp_path / "regime.jsonl").write_text(json.dumps(regime_line("dense", 0, 3.0)) + "\n")
    for words, says in (
        (["--jobs", "2"], "one by one"),
        (["--only", "regime-adamw"], "fleet has regime-dense"),
        ([], "--corpus is missing"),
    ):
        assert main(["reproduce", "fleet", "--results", str(tmp_path), *words]) == 2
        (told,) = capsys.readouterr().err.strip().splitlines()
        assert says in told
    assert main(["reproduce", "fleet", "--results", str(tmp_path), "--dry-run"]) == 0
    assert "1 of 1 rows are missing" in capsys.readouterr().out
