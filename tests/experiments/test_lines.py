"""Lines are appended whole, by several processes at once, and read back with their faults named."""

import json
import subprocess
import sys

import pytest
from result_lines import line

from experiments.lines import append, read, tuned_lrs
from experiments.tables import pick_scale
from experiments.work import all_runs, missing, pick_tables
from isthmus.errors import ConfigError

SCALE = pick_scale("12m")

WRITER = """
import sys
from pathlib import Path
from experiments.lines import append
for i in range(50):
    append(Path(sys.argv[1]), {"who": int(sys.argv[2]), "i": i, "long": "x" * 20000})
"""


def test_lines_of_processes_that_write_at_once_are_whole(tmp_path):
    path = tmp_path / "t.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, str(n)]) for n in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    found = [json.loads(text) for text in path.read_text().splitlines()]
    for n in range(4):
        assert [entry["i"] for entry in found if entry["who"] == n] == list(range(50))


def test_a_line_cut_short_by_a_kill_is_not_read_and_goes_with_the_next(tmp_path):
    path = tmp_path / "1.jsonl"
    append(path, line(SCALE, "dense", 0, 4.0))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert len(read(tmp_path, SCALE)) == 1
    append(path, line(SCALE, "dense", 1, 4.1))
    assert [entry["seed"] for entry in read(tmp_path, SCALE)] == [0, 1]


@pytest.mark.parametrize("lost", ["recipe", "seed", "commit", "device", "loss_full", "curve"])
def test_a_line_that_does_not_say_where_it_comes_from_is_refused(tmp_path, lost):
    entry = line(SCALE, "dense", 0, 4.0)
    del entry[lost]
    append(tmp_path / "1.jsonl", entry)
    with pytest.raises(ConfigError, match=f'1.jsonl, line 1 has no "{lost}"'):
        read(tmp_path, SCALE)


def test_what_is_there_is_not_run_again_unless_recipe_or_text_changed(tmp_path):
    runs = all_runs(pick_tables(["1"], SCALE), SCALE, "corpus/", [], [0], ["dense", "het-8"])
    lines = [line(SCALE, "dense", 0, 4.0)]
    assert [run.row.name for run in missing(runs, lines, "0123456789ab")] == ["het-8"]
    assert len(missing(runs, lines, "another text")) == 2
    assert len(missing(runs, [line(SCALE, "dense", 0, 4.0, lrs={"sparseloco": 0.1})], "0123456789ab")) == 2


def test_each_method_takes_its_best_learning_rate_once_all_were_tried():
    tried = SCALE.lrs["sparseloco"]
    lines = [line(SCALE, f"sparseloco-lr-{lr:g}", 0, 4.0 + i) for i, lr in enumerate(reversed(tried))]
    assert tuned_lrs(SCALE, lines[:-1]) == SCALE.lr
    assert tuned_lrs(SCALE, lines) == SCALE.lr | {"sparseloco": tried[-1]}
    lines[0] |= {"failed": "the loss is nan", "loss_full": None}
    assert tuned_lrs(SCALE, lines)["sparseloco"] == tried[-2]
