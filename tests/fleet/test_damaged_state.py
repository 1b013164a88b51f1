"""A disk that changes a bit: it is found when the file is read, and what is damaged is not trained on."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from returning import Seat, seat, small
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from isthmus.errors import ConfigError
from isthmus.model import checkpoint
from isthmus.protocol import closer
from isthmus.runtime.trainer import Trainer


@pytest.fixture(autouse=True)
def _no_turns(monkeypatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def without_hash(path: Path) -> None:
    """The file as 0.2 wrote it."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(tensors, path)


TENSORS = {
    "weight": torch.randn(3, 4),
    "half": torch.randn(5).bfloat16(),
    "count": torch.tensor(7),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "flag": torch.tensor([True]),
    "empty": torch.zeros(0),
}


def test_one_flipped_bit_anywhere_in_a_saved_file_is_found(tmp_path):
    """In the length, the header, the hash and every tensor."""
    whole, flipped = tmp_path / "whole", tmp_path / "flipped"
    checkpoint.save_tensors(whole, TENSORS)
    data = whole.read_bytes()
    for place in range(8 * len(data)):
        bad = bytearray(data)
        bad[place // 8] ^= 1 << place % 8
        flipped.write_bytes(bad)
        with pytest.raises(ConfigError, match=str(flipped)):
            checkpoint.load_tensors(flipped)


def test_a_file_with_its_hash_is_read_as_it_was_written_by_us_and_by_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 16)  # in several pieces
    checkpoint.save_tensors(tmp_path / "file", TENSORS)
    unchecked: list[Path] = []
    for read in (checkpoint.load_tensors(tmp_path / "file", unchecked.append), load_file(tmp_path / "file")):
        assert read.keys() == TENSORS.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    with safe_open(tmp_path / "file", "pt") as file:
        assert re.fullmatch("[0-9a-f]{8}", file.metadata()["crc32"])
    assert unchecked == []


def test_a_file_without_a_hash_is_read_and_named(tmp_path):
    checkpoint.save_tensors(tmp_path / "file", TENSORS)
    without_hash(tmp_path / "file")
    unchecked: list[Path] = []
    read = checkpoint.load_tensors(tmp_path / "file", unchecked.append)
    assert unchecked == [tmp_path / "file"]
    assert torch.equal(read["weight"], TENSORS["weight"])


def test_the_simulators_state_is_checked_too(tmp_path):
    checkpoint.save(tmp_path, 3, {"anchor": TENSORS})
    assert checkpoint.load(tmp_path)[0] == 3
    flip(tmp_path / "round-000003" / "anchor.safetensors", -1)
    with pytest.raises(ConfigError, match=r"anchor\.safetensors is damaged.*start a new run"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("text", ['{"folder":"round-000003","round":2}', "{", "", '{"round":"x"}', "7"])
def test_a_damaged_pointer_hides_no_state(tmp_path, text):
    for number in (2, 3):
        checkpoint.save(tmp_path, number, {"anchor": TENSORS}, keep=2)
    (tmp_path / checkpoint.POINTER).write_text(text)
    assert checkpoint.saved_rounds(tmp_path) == [2, 3]


# A replica that comes back

ROUNDS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A replica with checkpoints in round 3, after its second inner step and its last, and what it went on to
    without damage."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closer, "STEP_IN_SECONDS", 0.0)
        alone = seat(small(rounds=9, full=1), folder)

        def save_two(fleet: Trainer) -> None:
            places = [(ROUNDS, 2), (ROUNDS, 3)]
            fleet.checkpoint.is_due = lambda edge: (fleet.session.round, len(fleet.losses)) in places

        alone.run(ROUNDS, save_two)
        shutil.copytree(folder, folder / "later")
        later = Seat(alone.recipe, folder / "later", "rack")
        later.run(ROUNDS + 1)
    (folder / "anchors.json").write_text(json.dumps({t: list(d) for t, d in later.anchors().items()}))
    return folder


@pytest.fixture
def alone(trained, tmp_path) -> Seat:
    shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("later"))
    return Seat(small(rounds=9, full=1), tmp_path / "copy", "rack")


def saved(alone: Seat, kind: str) -> Path:
    """The checkpoint "inside" round 3, or the one at its "edge"."""
    (folder,) = (alone.folder / "work" / "rack" / "state" / kind).glob("round-*")
    return folder


def undisturbed(alone: Seat) -> str:
    return json.loads((alone.folder / "anchors.json").read_text())[str(ROUNDS + 1)][0]


def places(path: Path) -> dict[str, int]:
    """Where a bit is flipped: in the length, a tensor's name, the hash, and in the last tensor."""
    data = path.read_bytes()
    return {"length": 0, "name": data.index(b'"dtype"') - 6, "hash": data.index(b"crc32") + 10, "tensor": -1}


@pytest.mark.parametrize("place", ["length", "name", "hash", "tensor"])
@pytest.mark.parametrize("file", ["anchor", "optimiser", "feedback", "place"])
def test_a_flipped_bit_costs_one_line_and_the_checkpoint_before_is_taken(alone, file, place):
    path = saved(alone, "edge") / f"{file}.safetensors"
    flip(path, places(path)[place], bit=6 if place == "tensor" else 0)
    fleet = alone.run(ROUNDS + 1)
    (lost,) = [line for line in alone.said if "is lost" in line]
    assert f"{file}.safetensors" in lost
    assert f"back in round {ROUNDS}, after 2 of its inner steps" in alone.said
    assert fleet.step_count == 3 * (ROUNDS + 1)
    assert alone.anchors()[ROUNDS + 1] == {undisturbed(alone)}


def test_with_no_whole_checkpoint_the_anchor_in_the_bucket_is_taken(alone):
    """What its starts have sent is not in the feedback that begins here."""
    for kind in ("edge", "inside"):
        flip(saved(alone, kind) / "feedback.safetensors", -1)
    fleet = alone.run(ROUNDS + 1)
    assert len([line for line in alone.said if "is lost" in line]) == 2
    assert any("with a fresh optimiser" in line for line in alone.said)
    assert fleet.step_count == 3
    assert len(fleet.checkpoint.starts()) == 1


@pytest.mark.parametrize("harm", ["no counts", "another type", "elsewhere", "gone"])
def test_odd_files_without_a_hash_never_crash_a_replica(alone, harm):
    path = saved(alone, "edge") / "place.safetensors"
    named = {name: tensor.clone() for name, tensor in load_file(path).items()}
    if harm == "no counts":
        del named["counts"]
    elif harm == "another type":
        named["counts"] = torch.zeros(2, 2)
    elif harm == "elsewhere":
        named["counts"][0] += 1
    path.unlink()
    if harm != "gone":
        save_file(named, path)
    fleet = alone.run(ROUNDS + 1)
    assert fleet.step_count == 3 * (ROUNDS + 1)
    assert alone.anchors()[ROUNDS + 1] == {undisturbed(alone)}


def test_a_tensor_of_another_shape_without_a_hash_never_crashes_a_replica(alone):
    path = saved(alone, "edge") / "optimiser.safetensors"
    named = {name: tensor.clone() for name, tensor in load_file(path).items()}
    first = min(named)
    named[first] = torch.zeros(1, 2, 3)
    path.unlink()
    save_file(named, path)
    alone.run(ROUNDS + 1)
    assert any(f"does not hold {first}" in line for line in alone.said)
    assert alone.anchors()[ROUNDS + 1] == {undisturbed(alone)}


def test_a_spoilt_optimiser_on_disk_is_not_rolled_back_to(alone):
    flip(saved(alone, "edge") / "optimiser.safetensors", -1)
    assert alone.come().checkpoint.last_edge() is None
