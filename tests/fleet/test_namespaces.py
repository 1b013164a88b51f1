"""Two pipelined replicas on four machines (network namespaces), a bucket on a fifth, one cable for each link.

`open` sends all dimensions between its stages, `edge` one in eight. One run serves all the tests: what
crossed each cable, and what we say crossed it. How long steps take over thin cables is measured by
bench/schedule.py.
"""

import json
import os
import re
import sys
import time
from dataclasses import dataclass

import netns
import pytest

from isthmus.config import parse_recipe
from isthmus.layout.traffic import inner_step_bytes, outer_bytes

pytestmark = pytest.mark.soak

RECIPE = """
name = "cables"
[model]
preset = "nano"
width = 256
ffn = 16
heads = 1
layers = 2
context = 64
[inner]
batch = 16
micro_batches = 4
lr = 1e-3
warmup_steps = 4
precision = "fp32"
[outer]
inner_steps = 8
rounds = 3
keep = 1024
[bucket]
quorum = 2
deadline_seconds = 3600
[[replicas]]
name = "open"
kind = "pipelined"
stages = 2
wire = "fp32"
link = { mbps = 100 }
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 2
compression = "1/8"
wire = "fp32"
link = { mbps = 100 }
"""
RATE = 100.0  # Mb/s between stages: a cable with a rate carries packets of 1500 bytes, as a wire does
OVERHEAD = 0.08
IDLE_BYTES_PER_SECOND = 50_000  # the agents' polls, heartbeats and HTTP's headers, on each cable
STAGES, BUCKET = ("activations", "gradients", "tokens"), ("payload_up", "payload_down", "control")
SERVE = """
import time
from urllib.request import Request, urlopen
for _ in range(300):
    try:
        urlopen(Request("http://127.0.0.1:5000/runs", method="PUT"), timeout=5).close()
        break
    except OSError:
        time.sleep(0.1)
"""
TELL = """
import json, sys
from msgspec import to_builtins
from isthmus.protocol.access import open_ledger
ledger = open_ledger(sys.argv[1])
rounds = [ledger.manifest(t) for t in range(1, ledger.last_round() + 1)]
facts = {e.replica: [] for e in rounds[0].entries}
for manifest in rounds:
    for entry in manifest.entries:
        facts[entry.replica].append(entry.facts.to_dict())
farewells = {name: to_builtins(ledger.heartbeat(name)[0]) for name in facts}
print(json.dumps({"facts": facts, "farewells": farewells}))
"""


@dataclass
class CabledRun:
    """The run as its bucket and its cables show it."""

    facts: dict[str, list[dict]]  # replica -> what it said with each commit
    farewells: dict[str, dict]  # replica -> its last heartbeat
    on_stage_cable: dict[str, int]  # replica -> bytes that the interfaces counted
    on_bucket_cables: dict[str, int]
    logs: dict[str, str]
    seconds: float  # from the first start to the last exit

    def counted(self, replica: str) -> dict[str, int]:
        """Our own counters over the whole run, by purpose."""
        total = dict(self.farewells[replica]["farewell"]["bytes"])
        for facts in self.facts[replica]:
            for purpose, count in facts["bytes"].items():
                total[purpose] = total.get(purpose, 0) + count
        return total

    def sums(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(replica, where) -> (bytes that we counted, bytes that the interfaces counted)."""
        found = {}
        for replica in self.facts:
            counted = self.counted(replica)
            ours = [sum(counted[purpose] for purpose in purposes) for purposes in (STAGES, BUCKET)]
            found[replica, "stages"] = ours[0], self.on_stage_cable[replica]
            found[replica, "bucket"] = ours[1], self.on_bucket_cables[replica]
        return found


def recipe():
    return parse_recipe(RECIPE)


def environment(host: str) -> dict[str, str]:
    names = {"AWS_ENDPOINT_URL": f"http://{host}:5000", "AWS_REGION": "us-east-1", "NO_PROXY": "*"}
    return names | {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}


@pytest.fixture(scope="module")
def cabled(tmp_path_factory: pytest.TempPathFactory) -> CabledRun:
    if reason := netns.reason_to_skip():
        pytest.skip(reason)
    pytest.importorskip("moto.server", reason="moto is not installed")
    folder, url = tmp_path_factory.mktemp("cables"), "s3://runs/cables"
    (folder / "recipe.toml").write_text(RECIPE)
    with netns.Network() as network:
        for name in ("hub", "o0", "o1", "e0", "e1"):
            network.machine(name)
        stage_cables = {
            "open": network.cable("o0", "o1", RATE),
            "edge": network.cable("e0", "e1", RATE),
        }
        to_hub = {name: network.cable(name, "hub") for name in ("o0", "o1", "e0", "e1")}
        server = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"]
        network.start("hub", server, folder / "hub.log")
        network.run("hub", [sys.executable, "-c", SERVE])
        here = {**os.environ, **environment("127.0.0.1")}
        init = netns.isthmus("init", folder / "recipe.toml", url, "--keys", folder / "keys" / "cables")
        network.run("hub", init, env=here)
        started, processes = time.monotonic(), []
        environments = {name: environment(cable.addresses[1]) for name, cable in to_hub.items()}
        for replica, cable in stage_cables.items():
            processes += netns.join_by_stages(network, cable, url, replica, folder, **environments)
        statuses = netns.wait_for(processes, 400)
        seconds = time.monotonic() - started
        logs = {path.stem: path.read_text() for path in folder.glob("*.log")}
        assert statuses == [0, 0, 0, 0], "\n".join(logs[name][-1500:] for name in to_hub)
        story = json.loads(network.run("hub", [sys.executable, "-c", TELL, url], env=here))
        sent = {replica: network.counted(cable) for replica, cable in stage_cables.items()}
        hub = {name: network.counted(cable) for name, cable in to_hub.items()}
        by_replica = {"open": hub["o0"] + hub["o1"], "edge": hub["e0"] + hub["e1"]}
        return CabledRun(story["facts"], story["farewells"], sent, by_replica, logs, seconds)


def test_join_on_both_sides_of_a_cable_trains(cabled):
    for replica in ("open", "edge"):
        losses = [facts["loss"] for facts in cabled.facts[replica]]
        assert len(losses) == recipe().outer.rounds
        assert losses[-1] < losses[0] - 0.1
    said = {machine: re.findall(r"anchor ([0-9a-f]{16})", log) for machine, log in cabled.logs.items()}
    assert said["o0"] == said["o1"] == said["e0"] == said["e1"]
    assert len(said["o0"]) == 1 + recipe().outer.rounds
    for log in cabled.logs.values():
        assert "trying again" not in log


def test_our_counters_are_what_traffic_predicts(cabled):
    run = recipe()
    for member in run.fleet():
        counted, rounds = cabled.counted(member.name), run.outer.rounds
        for purpose, count in inner_step_bytes(run, member).items():
            assert counted[purpose] == rounds * run.outer.inner_steps * count
        up, down = outer_bytes(run, member)
        assert (counted["payload_up"], counted["payload_down"]) == (rounds * up, rounds * down)


def test_the_interfaces_count_what_we_count_and_headers(cabled):
    """Ethernet, IP and TCP headers are 66 bytes on every 1448 and on every acknowledgement: 7 % between
    stages, 1 % where a cable without a rate carries larger packets. The rest costs the same for each second,
    however little is sent."""
    for where, (ours, interfaces) in cabled.sums().items():
        print(f"{where}: we counted {ours}, the interfaces {interfaces} ({interfaces / ours - 1:+.1%})")
        assert ours < interfaces < (1 + OVERHEAD) * ours + IDLE_BYTES_PER_SECOND * cabled.seconds
