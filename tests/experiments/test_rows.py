"""rows.toml: rows are the recorded ones, and few bits send no more than the bf16 that they replace."""

from pathlib import Path

import pytest

from experiments.lines import append, digest, read, wire_version
from experiments.rows import pick, rows, scales
from isthmus.errors import ConfigError
from isthmus.layout.traffic import inner_step_bytes
from isthmus.layout.wire import INT_BITS

RESULTS = Path(__file__).parents[2] / "results"


def sends(recipe):
    return max(sum(inner_step_bytes(recipe, member).values()) for member in recipe.fleet())


def few_bits(row):
    return any(replica.wire in INT_BITS for replica in row.recipe(0).replicas)


def test_every_row_that_is_recorded_has_the_digest_of_its_lines():
    """Rows of few bits are recorded with the wire that was not causal, until they are run again."""
    digests = {(line["scale"], line["digest"]) for line in read(RESULTS)}
    waiting = {
        "muon-anchors",
        "muon-anchors-even",
        *(row.name for row in rows() if row.scale in ("24m-20", "toy")),
    }
    for row in rows():
        if row.name not in waiting and not few_bits(row):
            assert (row.scale, digest(row.recipe(0))) in digests, row.name


def test_an_old_line_of_few_bits_is_known_as_one():
    lines = read(RESULTS)
    assert {wire_version(line) for line in lines if line["row"] == "muon-pp-8-bf16"} == {0}
    first = next(line for line in lines if line["row"] == "pp-8-int5" and line["commit"])
    assert wire_version(first) in (1, 2)
    causal = first | {"digest": digest(pick(["pp-8-int5"], "12m")[0].recipe(0))}
    causal["recipe"] = first["recipe"].replace("151/384", "19/48")
    assert wire_version(causal) == 2


@pytest.mark.parametrize("factor", [2, 4, 8, 16, 24, 48, 96, 192])
def test_rows_of_few_bits_send_no_more_than_bf16_in_k_of_d(factor):
    by_name = {row.name: row for row in rows() if row.scale == "12m"}
    paper = by_name["pp-8" if factor == 8 else f"pp-{factor}"].recipe(0)
    found = [
        row for name, row in by_name.items() if name.startswith((f"pp-{factor}-int", f"muon-pp-{factor}-int"))
    ]
    assert found
    for row in found:
        assert sends(row.recipe(0)) <= sends(paper), row.name


def test_h_changes_the_rounds_and_not_the_tokens():
    for row in rows():
        recipe, scale = row.recipe(0), scales()[row.scale]
        steps = recipe.outer.inner_steps * recipe.outer.rounds
        if not row.name.endswith("-more"):
            assert 0 <= steps - scale["inner_steps"] * scale["rounds"] < recipe.outer.inner_steps, row.name


def test_a_name_that_is_no_row_is_one_line():
    with pytest.raises(ConfigError, match='no row and no file "het-9"'):
        pick(["het-9"])
    with pytest.raises(ConfigError, match=r"rows.toml has 12m"):
        pick([], "huge")


def test_a_line_that_a_kill_cut_short_is_left_out_and_replaced(tmp_path):
    line = next(iter(read(RESULTS)))
    append(tmp_path / "1.jsonl", line)
    with (tmp_path / "1.jsonl").open("ab") as file:
        file.write(b'{"row": "de')
    assert read(tmp_path) == [line]
    append(tmp_path / "1.jsonl", line | {"seed": 7})
    assert [found["seed"] for found in read(tmp_path)] == [line["seed"], 7]
    (tmp_path / "2.jsonl").write_text('{"row": "dense"}\n')
    with pytest.raises(ConfigError, match=r"2.jsonl, line 1 has no"):
        read(tmp_path)
