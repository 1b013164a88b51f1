"""Two stages, started apart, whose link breaks again and again: they end at the simulator's weights."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import netns
import pytest
from apart import Fleet, simulated_rounds
from small_recipes import pipelined, recipe_text
from torch import Tensor

from isthmus.runtime.addresses import free_port

pytestmark = pytest.mark.soak

NUM_CUTS, STOPPED_SECONDS = 6, 60.0  # the link's own patience is 30 s
EXACT = {
    "inner": {"precision": "fp64"},
    "outer": {"inner_steps": 3, "rounds": NUM_CUTS + 3, "values": "fp64"},
}
RECIPE = recipe_text(pipelined("edge", stages=2, compression="1/4", wire="fp64"), **EXACT)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    return simulated_rounds(RECIPE, tmp_path_factory.mktemp("simulated"))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(RECIPE, tmp_path)
    yield made
    made.close()


def test_a_link_that_is_cut_six_times_is_made_again_each_time(
    fleet: Fleet, simulated: list[dict[str, Tensor]]
):
    port = free_port()
    relay = netns.isthmus("relay", "--host", "127.0.0.1", "--port", port)
    fleet.start("relay", "", *relay)
    for stage in (0, 1):
        fleet.join(stage, "--relay", f"127.0.0.1:{port}")
    for cut in range(NUM_CUTS):
        fleet.until(lambda cut=cut: fleet.rounds() > cut)
        fleet.kill("relay")  # and both connections of the link with it
        fleet.start("relay", "", *relay)
    fleet.check(simulated)
    assert fleet.log().count("lost its link") >= NUM_CUTS


def test_a_stage_that_is_stopped_for_a_minute_meets_its_neighbour_again(
    fleet: Fleet, simulated: list[dict[str, Tensor]]
):
    for stage in (0, 1):
        fleet.join(stage)
    fleet.until(lambda: fleet.rounds() >= 1)
    stopped = [fleet.processes["stage-1"].pid, *fleet.workers(1)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_SECONDS)
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    fleet.check(simulated)
    assert "stage 0 heard nothing from stage 1 for 30 s" in fleet.log("stage-0")
