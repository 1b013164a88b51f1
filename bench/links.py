"""Inner steps of one pipelined replica whose two stages are joined by a thin cable: what k/d buys.

    python bench/links.py [--mbps 20 100] [--ratios none 1/2 1/8 1/32] [--wire bf16]

Needs root and iproute2: the two machines are network namespaces, the cable a veth pair with a token bucket,
and every line of the table is a run of its own, by `isthmus init` and two times `isthmus join`. The bucket is
a folder. The link time is that of one direction, as both go at once. Other work on this computer makes the
short steps longer and the ratios smaller.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fleet"))

import netns

from isthmus.config import parse_recipe
from isthmus.engine.fleet import open_ledger
from isthmus.traffic import inner_step_bytes

RECIPE = """
name = "links"
[model]
preset = "nano"
width = 256
ffn = 16
heads = 1
layers = 2
context = 64
[inner]
batch = {batch}
micro_batches = 8
lr = 1e-3
precision = "fp32"
[outer]
inner_steps = {steps}
rounds = 2
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 2
compression = "{ratio}"
wire = "{wire}"
link = {{ mbps = {mbps} }}
"""


def measure(text: str, mbps: float, seconds: float = 300.0) -> float:
    """Seconds of an inner step in the faster of the rounds."""
    with tempfile.TemporaryDirectory() as name, netns.Network() as network:
        folder = Path(name)
        (folder / "recipe.toml").write_text(text)
        for machine in ("m0", "m1"):
            network.machine(machine)
        cable = network.cable("m0", "m1", mbps)
        init = netns.isthmus(
            "init", folder / "recipe.toml", folder / "bucket", "--keys", folder / "keys/links"
        )
        network.run("m0", init)
        started = netns.join_by_stages(network, cable, str(folder / "bucket"), "edge", folder)
        if any(netns.wait_for(started, seconds)):
            raise SystemExit("".join(path.read_text()[-800:] for path in folder.glob("*.log")))
        ledger = open_ledger(str(folder / "bucket"))
        steps = ledger.run.recipe.outer.inner_steps
        rounds = range(1, ledger.last_round() + 1)
        return min(ledger.manifest(t).entries[0].facts["seconds"] for t in rounds) / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbps", type=float, nargs="+", default=[20.0, 100.0])
    parser.add_argument("--ratios", nargs="+", default=["none", "1/2", "1/8", "1/32"])
    parser.add_argument("--wire", default="bf16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12, help="inner steps of a round")
    args = parser.parse_args()
    if reason := netns.reason_to_skip():
        print(f"links: {reason}", file=sys.stderr)
        return 2
    print(f"{'Mb/s':>6} {'k/d':>6} {'link s':>8} {'step s':>8} {'shorter':>8}")
    for mbps in args.mbps:
        first = 0.0
        for ratio in args.ratios:
            text = RECIPE.format(ratio=ratio, mbps=mbps, wire=args.wire, batch=args.batch, steps=args.steps)
            recipe = parse_recipe(text)
            crossing = inner_step_bytes(recipe, recipe.fleet()[0])
            link = 8 * (crossing["activations"] + crossing["tokens"]) / (mbps * 1e6)
            step = measure(text, mbps)
            first = first or step
            print(f"{mbps:6g} {ratio:>6} {link:8.3f} {step:8.3f} {first / step:7.1f}x", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
