"""One replica of two stages on two machines, over TLS: directly, with a stranger at its port, and through a
relay where neither reaches the other. However it goes, it ends at the simulator's weights.

The machines are network namespaces. Every process is started as an operator starts it.
"""

import sys
from collections.abc import Iterator

import netns
import pytest
import stranger
from apart import Fleet, simulated_rounds
from small_recipes import pipelined, recipe_text
from torch import Tensor

pytestmark = pytest.mark.soak

EXACT = {"inner": {"precision": "fp64"}, "outer": {"inner_steps": 4, "rounds": 5, "values": "fp64"}}
RECIPE = recipe_text(pipelined("edge", stages=2, compression="1/4", wire="fp64"), **EXACT)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    return simulated_rounds(RECIPE, tmp_path_factory.mktemp("simulated"))


@pytest.fixture
def network() -> Iterator[netns.Network]:
    if reason := netns.reason_to_skip():
        pytest.skip(reason)
    with netns.Network() as network:
        yield network


def test_a_stranger_at_the_port_of_a_stage_changes_nothing(network, tmp_path, simulated):
    """Junk, silence, a thousand connections at a time and another key, from before stage 1 comes."""
    cables = network.line(["s", "m0", "m1"])
    fleet = Fleet(RECIPE, tmp_path, network, ("m0", "m1"))
    host = cables[1].addresses[0]
    fleet.join(0, "--advertise", f"{host}:29500")
    fleet.until(lambda: (fleet.bucket / "members" / "edge" / "stage-0.json").exists())
    fleet.start("stranger", "s", sys.executable, stranger.__file__, host, 29500)
    fleet.until(lambda: "turned away" in fleet.log("stage-0"))
    fleet.join(1)
    fleet.check(simulated)
    times, inside = map(int, fleet.log("stranger").split()[-2:])
    assert (times > 0, inside) == (True, 0)
    assert "trying again" not in fleet.log()
    assert "starting it again" not in fleet.log()


def test_a_stage_that_is_killed_meets_its_neighbour_again(network, tmp_path, simulated):
    for name in ("m0", "m1"):
        network.machine(name)
    network.cable("m0", "m1")
    fleet = Fleet(RECIPE, tmp_path, network, ("m0", "m1"))
    for stage in (0, 1):
        fleet.join(stage)
    fleet.until(lambda: fleet.rounds() >= 1)
    fleet.kill_worker(1)  # its launcher starts the next one
    fleet.until(lambda: fleet.rounds() >= 2)
    fleet.kill("stage-1")  # the whole machine
    fleet.join(1)
    fleet.until(lambda: fleet.rounds() >= 3)
    fleet.kill("stage-0")
    fleet.join(0)
    fleet.check(simulated)


def test_stages_that_cannot_reach_each_other_train_through_a_relay(network, tmp_path, simulated):
    """The relay is killed and started again on the way, and a worker is killed."""
    for name in ("m0", "hub", "m1"):
        network.machine(name)
    cables = network.cable("m0", "hub"), network.cable("m1", "hub")  # and hub forwards nothing
    with pytest.raises(RuntimeError, match="nreachable"):
        network.run("m1", [sys.executable, "-c", CALL, cables[0].addresses[0]])
    fleet = Fleet(RECIPE, tmp_path, network, ("m0", "m1"))
    fleet.start("relay", "hub", *netns.isthmus("relay"))
    for stage, cable in enumerate(cables):
        fleet.join(stage, "--relay", f"{cable.addresses[1]}:29520")
    fleet.until(lambda: fleet.rounds() >= 1)
    fleet.kill("relay")
    fleet.start("relay", "hub", *netns.isthmus("relay"))
    fleet.until(lambda: fleet.rounds() >= 3)
    fleet.kill_worker(0)
    fleet.check(simulated)


CALL = """
import socket, sys
socket.create_connection((sys.argv[1], 1), 5)
"""
