"""What version 0.1 wrote is read, and gone on with, by this one; v0.1/README.md says how it was made."""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isthmus.cli.main import build_parser
from isthmus.config import dump_recipe, parse_recipe
from isthmus.runlog import RunDir
from isthmus.runlog.words import summary
from isthmus.sparse import TopK, pack_many, unpack_many

HERE = Path(__file__).parent / "v0.1"
LAST_DIGEST = "d0fe864634cd057d2e70da2e00e9fba1a757d2c39750627c726d583f3e570208"
# Another CPU or torch may round differently. A run that lost its moments or feedback ends 0.07 or more away.
LOSS_TOLERANCE = 0.02


def unpacked(folder: Path, *names: str) -> Path:
    for name in names:
        with tarfile.open(HERE / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder, also the working directory, with the runs `train` and `simulate` and their corpus."""
    monkeypatch.chdir(unpacked(tmp_path, "corpus", "train", "simulate"))
    return tmp_path


def ended(name):
    return json.loads((HERE / "ended.json").read_text(encoding="utf-8"))[name]


def as_ended(row, name):
    """Whether the last row is the one with which version 0.1 ended the same run."""
    losses = {key: value for key, value in ended(name).items() if key.startswith("loss_")}
    assert {key: row[key] for key in losses} == pytest.approx(losses, abs=LOSS_TOLERANCE)
    exact = ended(name).keys() - losses.keys()
    assert {key: row[key] for key in exact} == pytest.approx({key: ended(name)[key] for key in exact})


@pytest.mark.parametrize(("name", "rounds"), [("train", 2), ("simulate", 2)])
def test_a_run_directory_is_read(runs, isthmus, name, rounds):
    run = RunDir.open(name)
    assert [row["round"] for row in map(as_dict, run.rows())] == list(range(rounds + 1))
    stored = [json.loads(line) for line in run.metrics_path.read_text(encoding="utf-8").splitlines()]
    assert [as_dict(row) for row in run.rows()] == stored
    words = "\n".join(summary(run))
    assert f"for {rounds} rounds" in words
    assert "interrupted" in words

    status, shown, _ = isthmus("report", name)
    assert status == 0
    assert words.splitlines()[0] in shown
    assert "<html" in run.report_path.read_text(encoding="utf-8")


def as_dict(row):
    return row if isinstance(row, dict) else row.to_dict()


def test_two_run_directories_are_compared(runs, isthmus):
    status, shown, _ = isthmus("compare", "train", "simulate")
    assert status == 0
    assert "simulate" in shown


@pytest.mark.parametrize("url", ["train", "train/bucket"])
def test_the_status_of_a_bucket_is_told(runs, isthmus, url):
    status, shown, _ = isthmus("status", url, "--json")
    told = json.loads(shown)
    assert status == 0
    assert (told["run"], told["round"], told["rounds"]) == ("before", 2, 6)
    assert [(one["replica"], one["state"], one["inner_step"]) for one in told["members"]] == [
        ("rack", "left", 40),
        ("edge", "left", 40),
    ]


def test_a_run_directory_is_written_from_a_bucket_alone(runs, isthmus):
    status, _, _ = isthmus("report", "train/bucket", "--to", "again")
    assert status == 0
    kept, again = ([as_dict(row) for row in RunDir.open(path).rows()] for path in ("train", "again"))
    for one, other in zip(kept[1:], again[1:], strict=True):
        for field in ("round", "tokens", "lr", "contributors", "train_by_kind", "bytes", "measured"):
            assert other[field] == one[field], field


def test_text_is_generated_from_a_run(runs, isthmus):
    first, again = (
        isthmus("generate", "train", "It was", "--temperature", 0, "--max-tokens", 4) for _ in range(2)
    )
    assert first[:2] == again[:2]
    assert first[0] == 0


def test_a_ledger_verifies_and_rebuilds_the_weights_that_its_rows_and_manifests_state(runs, isthmus):
    status, shown, _ = isthmus("ledger", "verify", "train/bucket", "--json")
    assert status == 0
    facts = json.loads(shown)
    known = {"from": 0, "to": 2, "digest": LAST_DIGEST, "anchors": [2]}
    assert {name: facts[name] for name in known} == known
    assert (facts["commits"], facts["without_commit"]) == (4, [])
    assert "payloads/" in facts["commits_are"]

    status, shown, _ = isthmus("ledger", "rebuild", "train/bucket", "--to", "model.safetensors", "--json")
    assert status == 0
    assert json.loads(shown)["digest"] == LAST_DIGEST
    kept, rebuilt = load_file("train/model.safetensors"), load_file("model.safetensors")
    assert kept.keys() == rebuilt.keys()
    assert all(torch.equal(kept[name], rebuilt[name]) for name in kept)

    manifest = json.loads(Path("train/bucket/manifests/000002.json").read_text(encoding="utf-8"))
    status, shown, _ = isthmus(
        "ledger", "rebuild", "train/bucket", "--round", 1, "--to", "first.safetensors", "--json"
    )
    assert status == 0
    assert json.loads(shown)["digest"] == manifest["body"]["anchor"]


def test_a_model_is_exported_and_scores_as_its_row_says(runs, isthmus):
    last = as_dict(RunDir.open("train").rows()[-1])
    status, shown, _ = isthmus("export", "train", "--to", "hf", "folder", "--json")
    assert status == 0
    exported = json.loads(shown)
    assert exported["round"] == 2
    assert exported["loss_full"] == pytest.approx(last["loss_full"], abs=1e-4)
    assert exported["loss_pipelined"] == pytest.approx(last["loss_pipelined"], abs=1e-4)
    assert Path("folder/model.safetensors").exists()


def test_a_simulation_is_gone_on_with(runs, isthmus):
    status, shown, _ = isthmus("simulate", "--resume", "simulate", "--device", "cpu", "--json")
    assert status == 0
    as_ended(json.loads(shown)["last"], "simulate")
    assert [as_dict(row)["round"] for row in RunDir.open("simulate").rows()] == list(range(11))


def test_a_fleet_is_gone_on_with_as_real_processes(runs, isthmus):
    done = subprocess.run(
        [sys.executable, "-m", "isthmus", "train", "--resume", "train", "--device", "cpu", "--json"],
        capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [as_dict(row) for row in RunDir.open("train").rows()]
    assert json.loads(done.stdout)["last"] == rows[-1]
    assert [row["round"] for row in rows] == list(range(7))
    if all(row["contributors"] == ["rack", "edge"] for row in rows[1:]):
        as_ended(
            rows[-1], "train"
        )  # a machine that is starved of time may settle a round without one of them
    # Rounds of both versions are one chain of manifests and one history of weights.
    status, shown, _ = isthmus("ledger", "verify", "train/bucket", "--json")
    assert status == 0
    known = {"from": 0, "to": 6, "digest": rows[-1]["anchor"], "anchors": [2, 4, 6]}
    assert json.loads(shown) | known == json.loads(shown)
    assert rows[2]["anchor"] == LAST_DIGEST


@pytest.fixture(scope="module")
def payloads(tmp_path_factory):
    return unpacked(tmp_path_factory.mktemp("v01"), "payloads") / "payloads"


@pytest.mark.parametrize("kind", ["fp32", "bf16", "2bit", "fp64", "dense"])
def test_a_payload_decodes_to_the_same_bits(payloads, kind):
    codec = TopK(side=32, keep=1024 if kind == "dense" else 32, values="fp32" if kind == "dense" else kind)
    decoded = {
        name: codec.decode(payload)
        for name, payload in unpack_many((payloads / f"{kind}.bin").read_bytes()).items()
    }
    stated = load_file(payloads / f"{kind}.safetensors")
    assert decoded.keys() == stated.keys()
    for name, tensor in stated.items():
        assert decoded[name].dtype == tensor.dtype
        assert torch.equal(decoded[name], tensor), name


@pytest.mark.parametrize(("kind", "dtype"), [("fp32", torch.float32), ("bf16", torch.float32),
                                             ("fp64", torch.float64)])  # fmt: skip
def test_the_same_tensors_pack_into_the_same_bytes(payloads, kind, dtype):
    codec = TopK(side=32, keep=32, values=kind)
    source = load_file(payloads / "source.safetensors")
    data = (payloads / f"{kind}.bin").read_bytes()
    in_order = {name: codec.encode(source[name].to(dtype)) for name in unpack_many(data)}
    assert pack_many(in_order) == data


def test_every_key_of_a_recipe_is_still_one_and_keeps_its_value():
    text = (HERE / "everything.toml").read_text(encoding="utf-8")
    stated, resolved = tomllib.loads(text), tomllib.loads(dump_recipe(parse_recipe(text)))
    for section, keys in stated.items():
        if section == "replicas":
            for before, now in zip(keys, resolved["replicas"], strict=True):
                assert before.items() <= now.items()
        elif isinstance(keys, dict):
            assert keys.items() <= resolved[section].items(), section
        else:
            assert resolved[section] == keys


def parsers(parser, name=""):
    """(command, its parser) for every command, also those within `ledger` and `data`."""
    within = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not within:
        yield name, parser
    for action in within:
        for word, inner in action.choices.items():
            yield from parsers(inner, f"{name} {word}".strip())


def test_every_command_and_option_is_still_taken():
    now = {
        name: {word for action in parser._actions for word in action.option_strings or [action.dest]}
        for name, parser in parsers(build_parser())
    }
    for command, options in json.loads((HERE / "commands.json").read_text(encoding="utf-8")).items():
        assert set(options) <= now[command], command


def test_the_names_that_other_programs_rely_on_are_where_they_were():
    import isthmus
    from isthmus.config import load_recipe
    from isthmus.model import Llama, presets
    from isthmus.outer import aggregate
    from isthmus.sparse import pack, unpack
    from isthmus.subspace import SubspaceBoundary, random_basis, reproject, split

    assert {"178m", "512m", "1b", "20m", "10m", "nano"} <= presets.keys()
    assert all(map(callable, (load_recipe, Llama, isthmus.simulate, isthmus.train)))

    table, basis = torch.randn(50, 16), random_basis(width=16, dim=4, seed=0).float()
    t_s, t_perp = reproject(*split(table, basis), basis)
    assert torch.allclose(t_s + t_perp, table, atol=1e-6)
    boundary, tokens = SubspaceBoundary(basis, t_perp), torch.arange(6).reshape(2, 3)
    assert boundary.expand(boundary.compress(table[tokens], tokens), tokens).shape == (2, 3, 16)

    codec = TopK(side=64, keep=32, values="2bit")
    payload = unpack(pack(codec.encode(table)))
    mean = aggregate([payload, payload], how="contributors")
    assert torch.equal(mean, codec.decode(payload))
    assert torch.equal(aggregate([codec.decode(payload)], how="all"), mean)
    with pytest.raises(ValueError, match="payload"):
        unpack(b"nothing")
