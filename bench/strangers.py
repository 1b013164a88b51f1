"""What strangers at the stage port cost: rounds of a replica on two machines, with and without them.

    python bench/strangers.py [--rounds 24] [--inner-steps 20]

Needs root and iproute2. Machines are network namespaces: two stages over TLS, and a third one that, in some
of the rounds, does to stage 0's port all that it can: a thousand connections at a time, silent, with junk,
with half a hello, with the hello of a stage, and with a key that is not this replica's. It runs at the lowest
priority, so that what is measured is the port and not the cores. The table has the seconds of rounds with and
without strangers, as the replica reported them. Exit status 1 where the median round with them is more than a
second longer, or where somebody got in.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import netns

from isthmus.protocol.access import open_ledger

LOWEST = 19  # priority
RECIPE = """
name = "strangers"
[model]
preset = "nano"
[data]
eval_batches = 1
[inner]
batch = 8
micro_batches = 4
precision = "fp32"
[outer]
inner_steps = {steps}
rounds = {rounds}
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 2
compression = "1/4"
"""


def measure(rounds: int, steps: int) -> tuple[list[float], list[float], int, int]:
    """Seconds of rounds without and with strangers, floods, and how often one got in."""
    with tempfile.TemporaryDirectory() as name, netns.Network() as network:
        folder = Path(name)
        (folder / "recipe.toml").write_text(RECIPE.format(rounds=rounds, steps=steps))
        cables = network.line(["s", "m0", "m1"])
        url, keys = str(folder / "bucket"), folder / "keys" / "strangers"
        words = ["init", folder / "recipe.toml", url, "--keys", keys]
        network.run("m0", netns.isthmus(*words))
        started = netns.join_by_stages(network, cables[1], url, "edge", folder)
        ledger = open_ledger(url)
        run_id, log = ledger.run.run_id, folder / "stranger.log"
        place = [cables[1].addresses[0], "29500", run_id]
        command = [sys.executable, str(Path(netns.__file__).with_name("stranger.py")), *place, str(LOWEST)]
        flooded: set[int] = set()
        floods = inside = 0
        third = max(2, rounds // 6)
        stranger: subprocess.Popen[bytes] | None = None
        while any(each.poll() is None for each in started):
            settled = len(list(Path(url).glob("manifests/*.json")))
            wanted = settled // third % 2 == 1
            if wanted and stranger is None:
                stranger = network.start("s", command, log)
            elif stranger and not wanted:
                stranger.kill()
                stranger.wait()
                stranger = None
            if stranger and "turned away" in (folder / "m0.log").read_text():
                flooded.add(settled + 1)
            time.sleep(0.05)
        if stranger:
            stranger.kill()
            stranger.wait()
        if any(each.returncode for each in started):
            raise SystemExit("".join(path.read_text()[-1500:] for path in folder.glob("*.log")))
        for line in log.read_text().splitlines():
            times, got_in = map(int, line.split())
            floods, inside = floods + (times > 0), max(inside, got_in)
        seconds = {}
        for number in range(3, ledger.last_round() + 1):  # the first ones warm up
            (entry,) = ledger.manifest(number).entries
            seconds[number] = entry.facts.seconds
    alone = [each for number, each in seconds.items() if number not in flooded and number - 1 not in flooded]
    return alone, [seconds[n] for n in sorted(flooded & set(seconds))], floods, inside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--inner-steps", type=int, default=20)
    args = parser.parse_args()
    if reason := netns.reason_to_skip():
        print(f"strangers: {reason}", file=sys.stderr)
        return 2
    alone, flooded, floods, inside = measure(args.rounds, args.inner_steps)
    print(f"{'rounds':<18} {'number':>6} {'median s':>9} {'longest s':>10}")
    for name, seconds in (("alone", alone), ("with strangers", flooded)):
        print(f"{name:<18} {len(seconds):6} {statistics.median(seconds):9.2f} {max(seconds):10.2f}")
    more = statistics.median(flooded) - statistics.median(alone)
    print(f"{floods} floods of 1,000 connections, {inside} got in; a round is {more:+.2f} s longer")
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return int(more > 1.0 or inside > 0)


if __name__ == "__main__":
    sys.exit(main())
