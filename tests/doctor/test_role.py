"""What the machine tells of itself, and the role that the planner's memory model gives it."""

import os
import shutil
from collections import namedtuple

import pytest

from isthmus.config import PRESETS, parse_recipe
from isthmus.doctor import machine
from isthmus.doctor.role import fits, least_bytes, role
from isthmus.errors import ConfigError
from isthmus.memory import Memory, machine_memory
from isthmus.planner.cost import step_flops
from isthmus.planner.devices import DEVICES, assume, device_tflops
from isthmus.planner.plan import predict
from isthmus.planner.rate import usable_cores

RECIPE = """
name = "r"
[model]
preset = "{preset}"
[inner]
batch = {batch}
precision = "{precision}"
[outer]
rounds = 1
[[replicas]]
name = "rack"
tflops = 2.0
"""


@pytest.mark.parametrize("available", [1e9, 8e9, 24e9, 80e9])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_full_replica_fits_exactly_where_the_plan_says_so(available, precision):
    for fit in fits(int(available), precision, 2.0):
        for batch in (1, 2, 4, 8, 16, 32):
            text = RECIPE.format(preset=fit.preset, batch=batch, precision=precision)
            (process,) = predict(parse_recipe(text)).kinds[0].memory
            assert (process["total"] <= available) == (batch <= fit.full_batch), (fit.preset, batch)
        recipe = parse_recipe(RECIPE.format(preset=fit.preset, batch=32, precision=precision))
        assert fit.round_seconds == pytest.approx(50 * step_flops(recipe, recipe.replicas[0]) / 2e12)


def test_more_memory_never_means_more_stages_and_a_stage_fits_where_it_is_said():
    before = {}
    for available in (2e9, 6e9, 12e9, 24e9, 48e9):
        for fit in fits(int(available), "bf16", None):
            assert fit.stages <= before.get(fit.preset, 99) or before[fit.preset] == 0
            assert (fit.stage_bytes <= available) == (fit.stages > 0)
            before[fit.preset] = fit.stages
    assert all(before.values())


def test_the_role_follows_memory_and_speed():
    large = fits(int(100e9), "bf16", 300.0)
    assert set(PRESETS) == {fit.preset for fit in large}
    assert [PRESETS[fit.preset].num_parameters for fit in large] == sorted(
        p.num_parameters for p in PRESETS.values()
    )
    assert "of llama3.2-1b" in role(large, trains=True)
    assert "torch" in role(large, trains=False)
    slow = role(fits(int(100e9), "fp32", 0.01), trains=True)
    assert "1b" not in slow  # days a round
    assert "a full replica of 20m" in slow
    assert role(fits(10**8, "fp32", 1.0), trains=True).startswith("none")


def test_memory_is_the_containers_where_that_is_less(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 800000 kB\n")
    free = Memory(total_bytes=1024 * 10**6, available_bytes=1024 * 800_000)
    assert machine_memory(tmp_path, tmp_path) == free
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_memory(tmp_path, tmp_path) == free
    (tmp_path / "memory.max").write_text("300000000\n")
    (tmp_path / "memory.current").write_text("100000000\n")
    limited = machine_memory(tmp_path, tmp_path)
    assert limited == Memory(total_bytes=300_000_000, available_bytes=200_000_000)
    check = machine.check_memory(limited, least_bytes())
    assert not check.ok
    assert "container's limit" in check.cure


def test_this_machines_memory_and_cores_are_those_of_the_system():
    found = machine_memory()
    assert 0 < found.available_bytes <= found.total_bytes
    assert found.total_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.cpu().cores == usable_cores()


def test_a_disk_that_is_full_or_read_only_says_what_to_do(tmp_path, monkeypatch):
    assert machine.check_disk(tmp_path).ok
    check = machine.check_disk(tmp_path / "nowhere")
    assert not check.ok
    assert "that it may write to" in check.cure
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12, 10**6))
    check = machine.check_disk(tmp_path)
    assert not check.ok
    assert "free at least" in check.cure
    assert list(tmp_path.iterdir()) == []


def test_a_devices_rate_is_a_share_of_its_stated_peak():
    assert device_tflops("H100") == device_tflops("nvidia h100") == pytest.approx(0.4 * 989)
    rest, rest_gb, settings, words = assume(["h100", "edge=rtx-4090"])
    assert (rest, rest_gb) == (pytest.approx(395.6), 80)
    assert settings == ["replicas.edge.tflops=66.08", "replicas.edge.memory_gb=24"]
    assert all("40 %" in line and "isthmus doctor" in line for line in words)
    with pytest.raises(ConfigError, match='did you mean "h100"'):
        device_tflops("h1000")
    with pytest.raises(ConfigError, match="the table has b200"):
        device_tflops("abacus")
    with pytest.raises(ConfigError, match="twice"):
        assume(["h100", "a100"])
    assert all(1 < device.peak < 5000 and 4 < device.memory_gb < 500 for device in DEVICES.values())
