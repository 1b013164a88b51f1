"""What other programs read: /metrics for Prometheus, event files for TensorBoard."""

import itertools
import json
import re
import struct

import pytest
from made import MARKUP, hostile, simulated

from isthmus.page.metrics import exposition
from isthmus.page.source import open_source
from isthmus.page.state import Teller
from isthmus.page.tensorboard import EventWriter, crc32c

SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\} (-?[0-9.e+-]+|NaN|[+-]Inf)'
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return simulated(tmp_path_factory.mktemp("outside") / "run")


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
    state = Teller().tell(open_source(str(run.path)).look())
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
    share = last["bias"]["edge"]["outside"][0]
    assert found["isthmus_outside_energy_ratio", 'run="small",kind="edge",boundary="0"'] == share


def test_labels_of_a_hostile_run_are_escaped(tmp_path):
    state = Teller().tell(open_source(str(hostile(tmp_path / "run"))).look())
    state["rounds"]["rows"][0]["replica"] = 'a"b\\c\nd'
    found = samples(exposition(state, now=0.0))
    assert any(MARKUP in labels for _, labels in found)
    assert any(labels.endswith('replica="a\\"b\\\\c\\nd"') for _, labels in found)


def records(path):
    """TFRecords, both checksums checked."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        for start, length in ((at, 8), (at + 12, size)):
            (stored,) = struct.unpack_from("<I", data, start + length)
            rotated = (stored - 0xA282EAD8) & 0xFFFFFFFF
            assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == crc32c(data[start : start + length])
        yield data[at + 12 : at + 12 + size]
        at += 16 + size


def fields(data):
    """(number, value) of a protobuf message: varints, 64- and 32-bit numbers, bytes."""

    def varint(at):
        value = shift = 0
        while True:
            byte = data[at]
            value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
            if byte < 0x80:
                return value, at

    at, found = 0, []
    while at < len(data):
        key, at = varint(at)
        kind = key & 7
        if kind == 0:
            value, at = varint(at)
        elif kind == 1:
            (value,), at = struct.unpack_from("<d", data, at), at + 8
        elif kind == 5:
            (value,), at = struct.unpack_from("<f", data, at), at + 4
        else:
            size, at = varint(at)
            value, at = data[at : at + size], at + size
        found.append((key >> 3, value))
    return found


def test_the_checksum_is_castagnolis():
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720, B.4 uses the same polynomial
    assert crc32c(b"\0" * 32) == 0x8A9136AA


def test_event_files_hold_every_round_once_and_read_back(run, tmp_path):
    raw = open_source(str(run.path)).look()
    writer = EventWriter(tmp_path / "tb", raw.about["started"])
    writer.add(raw.rows[:3])
    writer.add(raw.rows)
    writer.add(raw.rows)
    first, *events = [dict(fields(record)) for record in records(writer.path)]
    assert first[3] == b"brain.Event:2"
    assert [event[2] for event in events] == [0, 1, 2, 3, 4]
    assert all(a[1] <= b[1] for a, b in itertools.pairwise(events))
    for event, row in zip(events, run.rows(), strict=True):
        told = {dict(fields(v))[1].decode(): dict(fields(v))[2] for _, v in fields(event[5])}
        assert told["held-out/mixed"] == pytest.approx(row["loss_mixed"], rel=1e-6)
        if row["round"]:
            assert told["train/edge"] == pytest.approx(row["train_by_kind"]["edge"], rel=1e-6)
            assert told["bias/edge/boundary 0"] == pytest.approx(row["bias"]["edge"]["outside"][0], rel=1e-6)
    assert ".tfevents." in writer.path.name
    assert json.loads((run.path / "about.json").read_text())["status"] == "finished"
