"""What other programs read: /metrics for Prometheus, event files for TensorBoard."""

import itertools
import json
import re
import struct
from dataclasses import replace

import pytest
from made import MARKUP, hostile

from isthmus.errors import ConfigError
from isthmus.page.prometheus import exposition
from isthmus.page.source import open_source
from isthmus.page.state import StateBuilder
from isthmus.page.tensorboard import EventWriter

SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\} (-?[0-9.e+-]+|NaN|[+-]Inf)'
)


def samples(text):
    """Every sample, as strictly as the format is written down: each family once, with its type before it."""
    assert text.endswith("\n")
    found, types, family = {}, {}, None
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family not in types
            types[family] = kind
        elif not line.startswith("# HELP "):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            assert name == family
            assert (name, labels) not in found
            found[name, labels] = float(value)
    for name, kind in types.items():
        assert kind in ("counter", "gauge")
        assert name.endswith("_total") is (kind == "counter")
    return found


def test_metrics_are_the_runs_last_figures(run):
    state = StateBuilder().build(open_source(str(run.path)).look())
    found = samples(exposition(state, now=state["heard_unix"] + 5))
    last = run.rows()[-1]
    assert found["isthmus_round", 'run="small"'] == 4
    for forward in ("full", "pipelined", "mixed"):
        assert found["isthmus_loss", f'run="small",forward="{forward}"'] == last[f"loss_{forward}"]
    assert found["isthmus_last_sign_age_seconds", 'run="small"'] == 5
    sent = sum(row["bytes"]["activations"] for row in run.rows())
    assert found["isthmus_bytes_total", 'run="small",purpose="activations"'] == sent
    both = 'run="small",kind="edge",link="stage 0 to 1",what="activations, token ids"'
    assert found["isthmus_link_bytes_total", both] == sent + sum(row["bytes"]["tokens"] for row in run.rows())


def test_labels_of_a_hostile_run_are_escaped(tmp_path):
    state = StateBuilder().build(open_source(str(hostile(tmp_path / "run"))).look())
    state["rounds"]["rows"][0]["replica"] = 'a"b\\c\nd'
    found = samples(exposition(state, now=0.0))
    assert any(MARKUP in labels for _, labels in found)
    assert any(labels.endswith('replica="a\\"b\\\\c\\nd"') for _, labels in found)


def test_event_files_hold_every_round_once_and_read_back(run, tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    raw = open_source(str(run.path)).look()
    writer = EventWriter(tmp_path / "tb", raw.about["started"])
    writer.add(raw.rows[:3])
    writer.add(raw.rows)
    writer.add(raw.rows)
    (path,) = (tmp_path / "tb").iterdir()
    assert ".tfevents." in path.name
    first, *events = [Event.FromString(record) for record in records(path)]
    assert first.file_version == "brain.Event:2"
    assert [event.step for event in events] == [0, 1, 2, 3, 4]
    assert all(a.wall_time <= b.wall_time for a, b in itertools.pairwise(events))
    for event, row in zip(events, run.rows(), strict=True):
        found = {value.tag: value.simple_value for value in event.summary.value}
        assert found["held-out/mixed"] == pytest.approx(row.loss_mixed, rel=1e-6)
        if row.round:
            assert found["train/edge"] == pytest.approx(row.train_by_kind["edge"], rel=1e-6)
            assert found["held-out by kind/edge"] == pytest.approx(row.loss_by_kind["edge"], rel=1e-6)
    assert json.loads((run.path / "about.json").read_text())["status"] == "finished"


def test_losses_that_come_later_are_a_second_event_of_their_round(run, tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    rows = run.rows()
    nothing = {"loss_full": None, "loss_pipelined": None, "loss_mixed": None, "loss_by_kind": {}}
    writer = EventWriter(tmp_path / "tb")
    writer.add([*rows[:2], replace(rows[2], **nothing), replace(rows[3], **nothing)])
    writer.add([*rows[:3], replace(rows[3], **nothing), rows[4]])
    writer.add(rows)
    writer.add(rows)
    (path,) = (tmp_path / "tb").iterdir()
    events = [Event.FromString(record) for record in records(path)][1:]
    assert [event.step for event in events] == [0, 1, 2, 3, 2, 4, 3]
    found = [{value.tag: value.simple_value for value in event.summary.value} for event in events]
    assert found[2].keys() & found[4].keys() == set()
    whole = found[1].keys()
    assert found[2].keys() | found[4].keys() == found[3].keys() | found[6].keys() == whole
    assert found[4]["held-out/full"] == pytest.approx(rows[2].loss_full, rel=1e-6)


def records(path):
    """TFRecords, without their checksums."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + size]
        at += 16 + size


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot write TensorBoard files"):
        EventWriter(tmp_path / "file" / "tb")
