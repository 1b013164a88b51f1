"""A fleet that grows while it trains, as an operator types it; needs root, for network namespaces.

Three replicas are started by `init` and `join`. Then two friends come by invitation: a full replica, and one
of two stages on two machines that cannot reach each other and meet through `isthmus relay`. The first of them
replaces its key, the second is revoked. It prints when each of them counted, and checks that all ended with
one digest and that `ledger verify` passes. docs/operate.md has the same commands in the same order.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import netns

from isthmus.protocol.access import open_ledger

RECIPE = """
name = "growing"
[model]
preset = "nano"
[inner]
batch = 8
micro_batches = 4
lr = 3e-3
warmup_steps = 20
[outer]
inner_steps = {steps}
rounds = {rounds}
keep = 128
values = "2bit"
[[replicas]]
name = "rack"
count = 2
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 2
compression = "1/4"
wire = "int5"
"""
SCENARIO = """
isthmus init growing.toml {bucket}
isthmus join {bucket} --replica rack-0
isthmus join {bucket} --replica rack-1
isthmus join {bucket} --replica edge
isthmus invite {bucket} --replica friend --like rack
isthmus join {bucket} --token {friend}
isthmus invite {bucket} --replica attic --stages 2 --compression 1/4 --wire int4 --mbps 100 --latency-ms 1
isthmus relay
isthmus join {bucket} --token {attic} --stage 0 --relay {relay}
isthmus join {bucket} --token {attic} --stage 1 --relay {relay}
isthmus members {bucket}
isthmus rotate {bucket} friend
isthmus revoke {bucket} attic
isthmus members {bucket}
isthmus ledger verify {bucket}
"""
LIMIT_SECONDS = 900.0


class Fleet:
    """Every machine has a work folder of its own; the bucket is a folder that all of them see, and so, for
    short, is that of the keys."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bucket = folder, folder / "bucket"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.began = time.monotonic()
        self.commands = iter(SCENARIO.strip().splitlines())

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def next(self, verb: str, **values: str) -> list[str]:
        """The words of the scenario's next command, which must be the one that is meant."""
        line = next(self.commands)
        words = shlex.split(line.format(bucket=self.bucket, **values))
        assert verb in words, f"{line!r} is due, not {verb}"
        self.say("$ " + line.format(bucket="bucket", **{name: value[:24] for name, value in values.items()}))
        return netns.isthmus(*words[1:])

    def type(self, verb: str) -> str:
        """The next command, of the owner's; what it prints."""
        done = subprocess.run(self.next(verb), cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"status {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout.strip()

    def start(self, name: str, words: list[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                words, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def join(self, name: str, network: netns.Network | None = None, **values: str) -> None:
        command = [
            *self.next("join", **values),
            "--work",
            f"{name}.work",
            "--device",
            "cpu",
            "--threads",
            "1",
        ]
        self.start(name, network.command(name, command) if network else command)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def until(self, done: Callable[[], object], what: str) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not done():
            if time.monotonic() > end:
                raise SystemExit(f"no {what}:\n" + "\n".join(self.log(n)[-1500:] for n in self.running))
            time.sleep(0.1)

    def newest(self) -> int:
        found = [int(re.sub(r"\D", "", path.name)) for path in self.bucket.glob("manifests/*.json")]
        return max(found, default=0)

    def members(self) -> dict[str, dict]:
        done = subprocess.run(
            netns.isthmus("members", self.bucket, "--json"), capture_output=True, text=True, check=True
        )
        return {member["replica"]: member for member in json.loads(done.stdout)["members"]}

    def tell_first_rounds(self, replica: str) -> None:
        """In which rounds its update first came, and first counted."""
        self.until(lambda: self.members().get(replica, {}).get("given", 0), f"update of {replica}")
        since = self.members()[replica]["since_round"]
        ledger = open_ledger(str(self.bucket))
        manifests = list(ledger.between(1, ledger.last_round()))
        counted = [m.round for m in manifests if replica in [entry.replica for entry in m.entries]]
        came = [m.round for m in manifests if m.round in counted or replica in dict(m.refused)]
        first, counts = came[0] - since + 1, counted[0] - since + 1  # of its rounds as a member
        self.say(
            f"{replica}: a member since round {since}; first update in round {came[0]}, its {first}.; first "
            f"counted in round {counted[0]}, its {counts}."
        )


def grow(fleet: Fleet, network: netns.Network) -> None:
    fleet.type("init")
    for name in ("rack-0", "rack-1", "edge"):
        fleet.join(name)
    fleet.until(lambda: fleet.newest() >= 2, "second round")
    fleet.say("round 2 is settled by rack-0, rack-1 and edge")

    fleet.join("friend", friend=fleet.type("invite"))
    attic = fleet.type("invite")
    for name in ("attic0", "middle", "attic1"):  # no forwarding: attic0 and attic1 cannot reach each other
        network.machine(name)
    cables = [network.cable("attic0", "middle", 100), network.cable("attic1", "middle", 100)]
    fleet.start("middle", network.command("middle", fleet.next("relay")))
    key = fleet.folder / "keys" / "growing" / "attic.key"
    for stage, cable in enumerate(cables):
        relay = f"{cable.addresses[1]}:29520"
        fleet.join(f"attic{stage}", network, attic=attic, relay=relay)
        fleet.until(key.exists, "key of attic")  # stage 0 makes it; the second machine has a copy
    for name in ("friend", "attic"):
        fleet.tell_first_rounds(name)
    fleet.until(lambda: fleet.members()["attic"]["given"] >= 3, "three updates of attic")
    crossed = [network.counted(cable) for cable in cables]
    fleet.say(f"through the relay so far: {crossed[0] / 1e6:.1f} and {crossed[1] / 1e6:.1f} MB")
    print(fleet.type("members"))

    fleet.type("rotate")
    pattern = r"round (\d+): from here on we sign with our new key"
    fleet.until(lambda: re.search(pattern, fleet.log("friend")), "new key of friend")
    fleet.say(f"friend signs with a new key from round {re.findall(pattern, fleet.log('friend'))[-1]} on")
    fleet.type("revoke")
    fleet.until(lambda: fleet.running["attic0"].poll() is not None, "end of attic")
    said = re.search(r"isthmus: (replica attic was revoked.*)", fleet.log("attic0"))
    fleet.say(f"attic ended with status {fleet.running['attic0'].poll()}: {said[1] if said else '?'}")

    stay = ("rack-0", "rack-1", "edge", "friend")
    fleet.until(lambda: all(fleet.running[name].poll() is not None for name in stay), "end of the run")
    fleet.say(f"status of the others: {[fleet.running[name].poll() for name in stay]}")
    digests: dict[int, set[str]] = {}
    for name in (*stay, "attic0", "attic1"):
        for t, digest in re.findall(r"round (\d+): anchor (\w+)", fleet.log(name)):
            digests.setdefault(int(t), set()).add(digest)
    odd = [t for t, found in digests.items() if len(found) != 1]
    fleet.say(f"{len(digests)} rounds, rounds with more than one digest: {odd or 'none'}")
    print(fleet.type("members"))
    print(fleet.type("verify").splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--keep", action="store_true", help="leave the folder with logs and bucket")
    args = parser.parse_args()
    if reason := netns.reason_to_skip():
        raise SystemExit(reason)
    folder = Path(tempfile.mkdtemp(prefix="isthmus-growing-"))
    (folder / "growing.toml").write_text(RECIPE.format(steps=args.inner_steps, rounds=args.rounds))
    fleet = Fleet(folder)
    try:
        with netns.Network() as network:
            grow(fleet, network)
    finally:
        for process in fleet.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        if args.keep:
            print(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
