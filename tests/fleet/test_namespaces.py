"""Two pipelined replicas on four machines (network namespaces), a bucket on a fifth, one cable for each link.

`open` sends all dimensions between its stages, `edge` one in eight, both over 20 Mb/s. One run serves all the
tests: what crossed each cable, what we say crossed it, and how long the inner steps took.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import netns
import pytest

from isthmus.config import parse_recipe
from isthmus.layout.traffic import inner_step_bytes, outer_bytes

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
inner_steps = 12
rounds = 3
keep = 1024
[bucket]
quorum = 2
deadline_seconds = 600
[[replicas]]
name = "open"
kind = "pipelined"
stages = 2
wire = "fp32"
link = { mbps = 20 }
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 2
compression = "1/8"
wire = "fp32"
link = { mbps = 20 }
"""
RATE = 20.0  # Mb/s between stages
OVERHEAD = 0.08
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
from isthmus.protocol.access import open_ledger
ledger = open_ledger(sys.argv[1])
rounds = [ledger.manifest(t) for t in range(1, ledger.last_round() + 1)]
facts = {e.replica: [] for e in rounds[0].entries}
for manifest in rounds:
    for entry in manifest.entries:
        facts[entry.replica].append(entry.facts.to_dict())
farewells = {name: ledger.heartbeat(name)[0].to_dict() for name in facts}
print(json.dumps({"facts": facts, "farewells": farewells}))
"""


@dataclass
class WorkerStatus:
    """The run as its bucket and its cables tell it."""

    facts: dict[str, list[dict]]  # replica -> what it said with each commit
    farewells: dict[str, dict]  # replica -> its last heartbeat
    on_stage_cable: dict[str, int]  # replica -> bytes that the interfaces counted
    on_bucket_cables: dict[str, int]
    logs: dict[str, str]

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

    def step_seconds(self, replica: str) -> float:
        """Of the fastest round: what else this machine was busy with only makes it longer."""
        return min(facts["seconds"] for facts in self.facts[replica]) / recipe().outer.inner_steps


def recipe():
    return parse_recipe(RECIPE)


def environment(host: str) -> dict[str, str]:
    names = {"AWS_ENDPOINT_URL": f"http://{host}:5000", "AWS_REGION": "us-east-1", "NO_PROXY": "*"}
    return names | {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> WorkerStatus:
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
        processes: list[subprocess.Popen[bytes]] = []
        environments = {name: environment(cable.addresses[1]) for name, cable in to_hub.items()}
        for replica, cable in stage_cables.items():
            processes += netns.join_by_stages(network, cable, url, replica, folder, **environments)
        statuses = netns.wait_for(processes, 150)
        logs = {path.stem: path.read_text() for path in folder.glob("*.log")}
        assert statuses == [0, 0, 0, 0], "\n".join(logs[name][-1500:] for name in to_hub)
        story = json.loads(network.run("hub", [sys.executable, "-c", TELL, url], env=here))
        sent = {replica: network.counted(cable) for replica, cable in stage_cables.items()}
        hub = {name: network.counted(cable) for name, cable in to_hub.items()}
        by_replica = {"open": hub["o0"] + hub["o1"], "edge": hub["e0"] + hub["e1"]}
        return WorkerStatus(story["facts"], story["farewells"], sent, by_replica, logs)


def test_join_on_both_sides_of_a_thin_link_trains(told):
    for replica in ("open", "edge"):
        losses = [facts["loss"] for facts in told.facts[replica]]
        assert len(losses) == recipe().outer.rounds
        assert losses[-1] < losses[0] - 0.1
    said = {machine: re.findall(r"anchor ([0-9a-f]{16})", log) for machine, log in told.logs.items()}
    assert said["o0"] == said["o1"] == said["e0"] == said["e1"]
    assert len(said["o0"]) == 1 + recipe().outer.rounds
    for log in told.logs.values():
        assert "trying again" not in log


def test_our_counters_are_what_traffic_predicts(told):
    run = recipe()
    for member in run.fleet():
        counted, rounds = told.counted(member.name), run.outer.rounds
        for purpose, count in inner_step_bytes(run, member).items():
            assert counted[purpose] == rounds * run.outer.inner_steps * count
        up, down = outer_bytes(run, member)
        assert (counted["payload_up"], counted["payload_down"]) == (rounds * up, rounds * down)


def test_the_interfaces_count_what_we_count_and_headers(told):
    """Ethernet, IP and TCP headers are 66 bytes on every 1448 and on every acknowledgement: 7 % between
    stages, 1 % where a cable without a rate carries larger packets. The rest is HTTP's headers and the
    agents' looks at each other, some 10 KB a second, which cost the same however little is sent."""
    sums = told.sums()
    for where, (ours, interfaces) in sums.items():
        print(f"{where}: we counted {ours}, the interfaces {interfaces} ({interfaces / ours - 1:+.1%})")
        assert ours < interfaces < 1.2 * ours
    ours, interfaces = (sum(column) for column in zip(*sums.values(), strict=True))
    print(f"all: we counted {ours}, the interfaces {interfaces} ({interfaces / ours - 1:+.1%})")
    assert interfaces < (1 + OVERHEAD) * ours


def test_an_inner_step_in_an_eighth_of_the_dimensions_is_at_least_four_times_shorter(told):
    open_seconds, edge_seconds = told.step_seconds("open"), told.step_seconds("edge")
    print(f"open {open_seconds:.3f} s, edge {edge_seconds:.3f} s")
    bits = 8 * sum(inner_step_bytes(recipe(), recipe().fleet()[0])[p] for p in ("activations", "tokens"))
    assert open_seconds > bits / (RATE * 1e6)  # nothing went around the cable
    assert open_seconds >= 4 * edge_seconds


def scheduled(*words: str) -> dict:
    """One point of bench/schedule.py: r = 0.6, m = 16, four stages that wait in place of computing."""
    script = os.path.join(os.path.dirname(__file__), "..", "..", "bench", "schedule.py")
    point = ["--ratios", "0.6", "--micro-batches", "16", "--steps", "3", "--compute-ms", "60"]
    done = subprocess.run(
        [sys.executable, script, *point, "--ours", "isthmus", "--stock", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.stdout, done.stderr
    (found,) = json.loads(done.stdout)
    print(f"share of the ceiling {found['share_of_ceiling']['isthmus']:.3f}, in flight {found['depths']}, ")
    print(f"predicted over measured {found['predicted_over_measured']['isthmus']:.3f}")
    return found


def test_four_stages_on_slow_links_come_near_the_ceiling_and_take_the_simulated_time():
    found = scheduled()
    assert found["share_of_ceiling"]["isthmus"] >= 0.90
    assert abs(found["predicted_over_measured"]["isthmus"] - 1) <= 0.15


def test_latency_between_the_stages_costs_little_more_than_the_ceiling_says():
    found = scheduled("--latency-ms", "20")
    assert found["share_of_ceiling"]["isthmus"] >= 0.85
    assert abs(found["predicted_over_measured"]["isthmus"] - 1) <= 0.15
