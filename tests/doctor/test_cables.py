"""Two machines on a cable with a known rate and latency, in network namespaces: what doctor finds there."""

import json
import sys
import time

import netns
import pytest

pytestmark = pytest.mark.soak

ASK = """
import json, sys
from isthmus.doctor.link_test import check_link
from isthmus.runtime.addresses import Address
checks, rate = check_link(Address(sys.argv[1], 29510), None, float(sys.argv[2]), lambda words: None)
found = rate and [rate.up_mbps, rate.down_mbps, rate.both_ways_mbps, rate.latency_ms]
print(json.dumps([checks[0].words, found]))
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    if reason := netns.reason_to_skip():
        pytest.skip(reason)


@pytest.mark.parametrize(("mbps", "latency_ms"), [(20, 0), (100, 0), (20, 20)])
def test_rate_and_latency_are_those_of_the_cable(mbps, latency_ms, tmp_path):
    with netns.Network() as network:
        for name in ("near", "far"):
            network.machine(name)
        cable = network.cable("near", "far", mbps, latency_ms)
        log = tmp_path / "log"
        listen = [sys.executable, "-m", "isthmus.cli.main", "doctor", "--listen", cable.addresses[1]]
        network.start("far", listen, log)
        deadline = time.monotonic() + 300
        while "listening" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        said = network.run("near", [sys.executable, "-c", ASK, cable.addresses[1], "2"])
        words, found = json.loads(said)
        assert found, words
        up, down, both, latency = found
    carried = mbps / cable.overhead  # of what TCP carries; headers take the rest
    print(f"{mbps} Mb/s, {latency_ms} ms: {words}")
    # Nothing is faster than its cable; how much slower depends on what else the machine does.
    assert max(up, down, both) < 1.1 * carried
    assert min(up, down, both) > 0.3 * carried
    assert latency >= latency_ms
