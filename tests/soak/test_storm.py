"""Three minutes of bench/storm.py: kills, stops, clock jumps, bad disks and store outages."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.soak
BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(BENCH))
    spec = importlib.util.spec_from_file_location("storm", BENCH / "storm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["storm"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("store", ["folder", "seaweed"])
def test_a_fleet_outlives_a_storm_with_its_history_whole(bench, store: str, tmp_path: Path):
    one = bench.storm(tmp_path, minutes=3, seed=0, store=store)
    print(one.summary())
    assert one.problems == []
    assert one.faults.total() > 20
    assert one.faults["kill"]
    assert len(one.seen) > 5
