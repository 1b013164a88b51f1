"""What is refused before anything starts: a torch outside the range, a GPU that is too small."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_recipes import EDGE, RACK, recipe_text, replicas

from isthmus.config import parse_recipe
from isthmus.errors import ConfigError
from isthmus.planner.fit import in_flight_of
from isthmus.planner.memory import process_memory, replica_memory
from isthmus.replica.picks import as_picked, pick_precision, precision_note
from isthmus.runtime import versions
from isthmus.runtime.fits import SURE_SHARE, check_fits, cut_to_fit, resting_bytes, told_parts
from isthmus.runtime.preflight import check_device
from isthmus.runtime.process import JoinConfig
from isthmus.runtime.versions import check_torch

ROOT = Path(__file__).parents[2]


def test_the_range_is_that_of_pyproject_and_has_no_upper_bound():
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions.torch_range() in stated["dependencies"]
    assert not any("<" in range for range in (stated["requires-python"], *stated["dependencies"]))


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ("{0}.{1}.0", True),
        ("{0}.{1}.3+cu128", True),
        ("{0}.{1}.0a0+git1234", True),
        ("1.13.1", False),
        ("2.10.9", False),
        ("2.99.0", True),
        ("3.0", True),
        ("", False),
        ("odd", False),
    ],
)
def test_a_torch_outside_the_range_is_refused_in_one_line(monkeypatch, found, fits):
    found = found.format(*versions.TORCH_FROM)
    monkeypatch.setattr(versions, "torch_version", lambda: found)
    if fits:
        check_torch()
        return
    with pytest.raises(ConfigError) as error:
        check_torch()
    assert (found or "no torch") in str(error.value)
    assert f"pip install '{versions.torch_range()}'" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_torch_of_a_source_tree_is_asked_itself(monkeypatch):
    def none(name: str) -> str:
        raise versions.importlib.metadata.PackageNotFoundError(name)

    assert versions.torch_version() == torch.__version__
    monkeypatch.setattr(versions.importlib.metadata, "version", none)
    assert versions.torch_version() == torch.__version__


def test_a_device_that_cannot_hold_the_state_is_refused_and_a_tight_one_warned_of():
    recipe = parse_recipe(recipe_text(RACK + EDGE))
    rack, edge = recipe.fleet()
    needs = process_memory(recipe, rack.config, 0, 1, on_gpu=True)
    assert check_fits(recipe, [rack], needs.total, "a card") == ""
    assert "may need" in check_fits(recipe, [rack], needs.total - 1, "a card")
    least = resting_bytes(needs)
    assert least == needs.weights + needs.moments + needs.feedback + needs.anchor + needs.outer
    sure = least + int(SURE_SHARE * needs.activations)
    assert "may need" in check_fits(recipe, [rack], sure + 1, "a card")
    with pytest.raises(
        ConfigError, match=r"replica rack does not fit: about .* GB at the peak, and a card has"
    ):
        check_fits(recipe, [rack], sure - 1, "a card")
    with pytest.raises(ConfigError, match=r"replica rack: weights, .* take .* GB, a card has .* GB; "):
        check_fits(recipe, [rack], least - 1, "a card")
    held = [
        replica_memory(recipe, edge.config, in_flight_of(recipe, edge.config), on_gpu=True)[s] for s in (0, 1)
    ]
    stages = [resting_bytes(part) for part in held]
    with pytest.raises(ConfigError, match=r"replicas rack, edge: .*; give each replica and stage a device"):
        check_fits(recipe, [rack, edge], least + sum(stages) - 1, "a card")
    room = stages[1] + held[1].activations
    assert "stage 1 of replica edge may need" in check_fits(recipe, [edge], room, "a card", stage=1)
    with pytest.raises(ConfigError, match="stage 1 of replica edge: "):
        check_fits(recipe, [edge], stages[1] - 1, "a card", stage=1)


def test_the_processes_of_a_full_replica_have_a_device_each():
    whole, cut = (
        parse_recipe(recipe_text(replicas("rack", processes=2, sharding=sharding)))
        for sharding in ("none", "full")
    )
    needs = process_memory(whole, whole.replicas[0], 0, 1)
    room = resting_bytes(needs)
    assert "may need" in check_fits(whole, whole.fleet(), room + needs.activations, "a card")
    assert "may need" in check_fits(cut, cut.fleet(), int(0.75 * room) + needs.activations, "a card")
    with pytest.raises(ConfigError, match="replica rack: "):
        check_fits(whole, whole.fleet(), int(0.75 * room), "a card")


def test_a_card_too_small_for_a_batch_trains_it_in_the_fewest_parts_that_fit():
    recipe = parse_recipe('name = "x"\n[model]\npreset = "178m"\n[[replicas]]\nname = "rack"\n')
    (rack,) = recipe.fleet()
    assert cut_to_fit(recipe, rack, 80 * 10**9) is rack
    assert told_parts(recipe, rack, 80 * 10**9, "a card") == ""
    for gb in (24, 12, 8):
        cut = cut_to_fit(recipe, rack, gb * 10**9)
        parts = cut.config.micro_batches
        needs = [
            process_memory(recipe, replace(rack.config, micro_batches=n), 0, 1).total
            for n in (parts, parts // 2)
        ]
        assert needs[0] <= 0.9 * gb * 10**9 < needs[1]
        assert check_fits(recipe, [rack], gb * 10**9, "a card") == ""
        assert f"over {parts} parts" in told_parts(recipe, rack, gb * 10**9, "a card")
    stated = replace(rack, config=replace(rack.config, micro_batches=1))
    assert cut_to_fit(recipe, stated, 8 * 10**9) is stated
    with pytest.raises(ConfigError) as error:
        check_fits(recipe, [stated], 8 * 10**9, "a card of 8 GB")
    assert re.search(r"what would fit: micro_batches = \d+ \(.* GB\), or batch = \d+", str(error.value))


def test_the_line_says_what_would_fit():
    recipe = parse_recipe(
        recipe_text(RACK, model={"preset": "512m", "width": 1024, "ffn": 4096, "heads": 16})
    )
    with pytest.raises(ConfigError) as error:
        check_fits(recipe, recipe.fleet(), 4 * 10**9, "a card of 4 GB")
    found = re.search(r'what would fit: .*kind = "pipelined" and stages = (\d+)', str(error.value))
    config = replace(recipe.replicas[0], kind="pipelined", stages=int(found[1]), compression="1/8")
    assert (
        max(part.total for part in replica_memory(recipe, config, in_flight_of(recipe, config))) < 4 * 10**9
    )
    assert "\n" not in str(error.value)


# Precision

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("card", "capability", "auto"),
    [
        ("V100", (7, 0), "fp32"),
        ("T4", (7, 5), "fp32"),
        ("A100", (8, 0), "bf16"),
        ("RTX 4090", (8, 9), "bf16"),
        ("H200", (9, 0), "bf16"),
        ("B200", (10, 0), "bf16"),
    ],
)
def test_auto_is_what_the_card_computes_in_and_says_where_that_is_fp32(card, capability, auto):
    recipe = parse_recipe(recipe_text(RACK))
    assert recipe.inner.precision == "auto"
    assert pick_precision(recipe, CUDA, capability) == auto
    note = precision_note(recipe, CUDA, capability)
    assert ('inner.precision = "auto" is fp32 here' in note) == (auto == "fp32")
    assert precision_note(recipe, torch.device("cpu")) == ""
    for stated in ("bf16", "fp32"):  # what a recipe states is taken, on any card
        asked = parse_recipe(recipe_text(RACK, inner={"precision": stated}))
        assert pick_precision(asked, CUDA, capability) == stated
        assert precision_note(asked, CUDA, capability) == ""


def test_memory_is_counted_in_the_precision_that_the_card_has(monkeypatch):
    recipe = parse_recipe(recipe_text(RACK))
    totals = {}
    for name, capability in (("T4", (7, 5)), ("H200", (9, 0))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        counted = as_picked(recipe, CUDA)
        totals[name] = process_memory(counted, counted.replicas[0], 0, 1, on_gpu=True).activations
    as_planned = process_memory(recipe, recipe.replicas[0], 0, 1, on_gpu=True).activations
    assert totals["H200"] == as_planned < totals["T4"]


def test_an_old_card_is_told_to_whoever_joins_with_it(monkeypatch):
    recipe = parse_recipe(recipe_text(RACK))
    monkeypatch.setattr("isthmus.runtime.preflight.pick_device", lambda name: CUDA)
    monkeypatch.setattr("isthmus.runtime.preflight.device_memory", lambda device: (16 * 10**9, "Tesla T4"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = JoinConfig(url="", replica="rack-0", device="cuda", compiled=False)
    for capability, told in (((7, 5), "is fp32 here"), ((8, 0), "")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        warning = check_device(config, recipe, recipe.fleet()[0])
        assert (told in warning) if told else warning == ""
