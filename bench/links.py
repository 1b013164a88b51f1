"""Inner steps of a pipelined replica over a thin cable: what k/d buys, and whether `isthmus plan` foresaw it.

    python bench/links.py [--mbps 20 100 1000] [--ratios none 1/2 1/8 1/32] [--wire bf16] [--json]
    python bench/links.py --auto [--mbps 20]

Needs root and iproute2: the two stages are on two machines, which are network namespaces, joined by a veth
pair with a token bucket. Every line of the table is a run of its own, by `isthmus init` and two times
`isthmus join`; the bucket is a folder. The link time is that of one direction, as both go at once. Other work
on this computer makes the short steps longer and the ratios smaller. Exit status 1 where a step is shorter
than its link time (something went around the cable), or where k/d = 1/8 makes a step at 20 Mb/s or less not
even four times as short.

The prediction is `isthmus plan`'s, by its event simulation, links at their stated rate, headers not counted.
It needs the rate of the machines (tflops): the operations of an inner step over the seconds that the stages
say they computed, not over what the step took. "beforehand" takes it from one more run, over a cable without
a rate; "predicted" from the stages of the same run, because two processes on a busy computer compute now
faster and now slower. Bytes are those of the whole run between stages, as the processes counted them.

--auto plans with `compression = "auto"`, and runs what it picked and the next milder k/d, each with m and
with 2 m micro-batches of the same size: the difference is the pipeline when it is full. Busy is what stage
0's interface sent, headers and acknowledgements and all, over what the cable's rate allows in that time;
compute is the slower stage's share of the same time.
"""

import argparse
import json
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import netns

from isthmus.config import Recipe, parse_recipe
from isthmus.layout.traffic import inner_step_bytes
from isthmus.planner.auto import resolve
from isthmus.planner.cost import step_flops
from isthmus.planner.plan import predict
from isthmus.protocol.access import open_ledger

RECIPE = """
name = "links"
[model]
preset = "nano"
width = 256
ffn = {ffn}
heads = 1
layers = 2
context = 64
[inner]
batch = {batch}
micro_batches = {m}
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
tflops = {tflops}
"""
PURPOSES = ("activations", "gradients", "tokens")
BUSY = 0.95


@dataclass
class Measured:
    """One run: what its processes reported with their commits."""

    step_seconds: float  # an inner step in the faster of the rounds
    stage_seconds: list[float]  # of them, what each stage computed
    wire_bytes: float  # of an inner step, from stage 0 to stage 1, as the interface counted them
    run_bytes: int  # between the stages, over the whole run


def measure(text: str, mbps: float, seconds: float = 300.0) -> Measured:
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
        sent, _ = network.sent_and_received(cable)
        ledger = open_ledger(str(folder / "bucket"))
        steps = ledger.run.recipe.outer.inner_steps
        facts = [ledger.manifest(t).entries[0].facts for t in range(1, ledger.last_round() + 1)]
    fastest = min(facts, key=lambda round_: round_.seconds)
    return Measured(
        step_seconds=fastest.seconds / steps,
        stage_seconds=[each / steps for each in fastest.measured["compute_seconds"]],
        wire_bytes=sent / steps / len(facts),
        run_bytes=sum(round_.bytes[purpose] for round_ in facts for purpose in PURPOSES),
    )


def calibrate(args: argparse.Namespace) -> float:
    """The training rate of one machine, in TFLOP/s: see above."""
    text = recipe_text(args, mbps=1e5, ratio=args.ratios[-1])
    run = measure(text, 0.0)
    rate = rate_of(parse_recipe(text), run)
    stages = ", ".join(f"{each:.3f}" for each in run.stage_seconds)
    say(f"without a rate: {run.step_seconds:.3f} s a step, stages compute {stages} s: {rate:.4f} TFLOP/s")
    return rate


def rate_of(recipe: Recipe, measured: Measured) -> float:
    return step_flops(recipe, recipe.replicas[0]) / sum(measured.stage_seconds) / 1e12


def recipe_text(
    args: argparse.Namespace, *, mbps: float, ratio: str, tflops: float = 0.0, twice: int = 1
) -> str:
    return RECIPE.format(
        ffn=args.ffn,
        batch=args.batch * twice,
        m=8 * twice,
        steps=args.steps,
        ratio=ratio,
        wire=args.wire,
        mbps=mbps,
        tflops=tflops,
    )


def link_seconds(recipe: Recipe, mbps: float) -> float:
    """Of one inner step, forward."""
    crossing = inner_step_bytes(recipe, recipe.fleet()[0])
    return 8 * (crossing["activations"] + crossing["tokens"]) / (mbps * 1e6)


def by_ratio(args: argparse.Namespace, tflops: float) -> list[dict[str, Any]]:
    """Predicted and measured, for every rate and k/d."""
    rows = []
    for mbps in args.mbps:
        for ratio in args.ratios:
            text = recipe_text(args, mbps=mbps, ratio=ratio)
            recipe = parse_recipe(text)
            run = measure(text, mbps)
            (before,), (kind,) = predict(recipe, tflops).kinds, predict(recipe, rate_of(recipe, run)).kinds
            rows.append(
                {
                    "mbps": mbps,
                    "ratio": ratio,
                    "link_seconds": link_seconds(recipe, mbps),
                    "beforehand_seconds": before.step.seconds,
                    "predicted_seconds": kind.step.seconds,
                    "predicted_bytes": sum(kind.bytes[purpose] for purpose in PURPOSES),
                }
                | asdict(run)
            )
            say(f"{mbps:g} Mb/s, k/d {ratio}: {run.step_seconds:.3f} s, {kind.step.seconds:.3f} predicted")
    return rows


def shortcomings(rows: list[dict[str, Any]]) -> list[str]:
    open_seconds = {row["mbps"]: row["step_seconds"] for row in rows if row["ratio"] == "none"}
    found = []
    for row in rows:
        where = f"{row['mbps']:g} Mb/s, k/d {row['ratio']}"
        if row["step_seconds"] < row["link_seconds"]:
            found.append(f"{where}: a step took less than its link time")
        shorter = open_seconds.get(row["mbps"], float("inf")) / row["step_seconds"]
        if row["ratio"] == "1/8" and row["mbps"] <= 20 and shorter < 4:
            found.append(f"{where}: a step is {shorter:.1f} times as short, which should be at least 4")
    return found


def by_ratio_table(rows: list[dict[str, Any]]) -> str:
    columns = ("Mb/s", "k/d", "link s", "step s", "shorter", "predicted", "ratio", "beforehand", "ratio")
    columns += ("MB", "predicted", "ratio")
    lines = ["{:>6} {:>6} {:>8} {:>8} {:>8} {:>10} {:>6} {:>10} {:>6} {:>9} {:>10} {:>6}".format(*columns)]
    first = {row["mbps"]: row["step_seconds"] for row in reversed(rows)}
    for row in rows:
        step, predicted, before = (row[f"{of}_seconds"] for of in ("step", "predicted", "beforehand"))
        line = f"{row['mbps']:6g} {row['ratio']:>6} {row['link_seconds']:8.3f} {step:8.3f} "
        line += f"{first[row['mbps']] / step:7.1f}x {predicted:10.3f} {predicted / step:6.2f} "
        line += f"{before:10.3f} {before / step:6.2f} "
        counted, foreseen = row["run_bytes"], row["predicted_bytes"]
        lines.append(line + f"{counted / 1e6:9.3f} {foreseen / 1e6:10.3f} {foreseen / counted:6.3f}")
    return "\n".join(lines)


def by_auto(args: argparse.Namespace, tflops: float) -> list[dict[str, Any]]:
    """What "auto" picks at every rate, and how busy it and the next milder k/d leave the link."""
    rows = []
    for mbps in args.mbps:
        recipe = parse_recipe(recipe_text(args, mbps=mbps, ratio="auto", tflops=tflops))
        (pick,) = resolve(recipe)[1]
        say(pick.reason)
        for role, rung in (("pick", pick.rung), ("milder", pick.milder)):
            if rung is None:
                continue
            once, twice = (
                measure(recipe_text(args, mbps=mbps, ratio=rung.compression, tflops=tflops, twice=n), mbps)
                for n in (1, 2)
            )
            carries = mbps * 1e6 / 8
            row = {"mbps": mbps, "role": role, "ratio": rung.compression, "predicted_busy": rung.busy}
            row["busy"] = once.wire_bytes / carries / once.step_seconds
            more = twice.wire_bytes - once.wire_bytes
            row["full_busy"] = more / carries / (twice.step_seconds - once.step_seconds)
            row["full_compute"] = (max(twice.stage_seconds) - max(once.stage_seconds)) / (
                twice.step_seconds - once.step_seconds
            )
            rows.append(row | {"step_seconds": once.step_seconds, "twice_seconds": twice.step_seconds})
            where = f"{mbps:g} Mb/s, k/d {rung.compression}"
            say(f"{where}: {row['full_busy']:.1%} busy, {rung.busy:.1%} predicted")
    return rows


def by_auto_table(rows: list[dict[str, Any]]) -> str:
    columns = ("Mb/s", "", "k/d", "m: step s", "2 m", "busy", "when full", "predicted", "compute", "")
    form = "{:>6} {:>7} {:>6} {:>10} {:>8} {:>7} {:>10} {:>10} {:>8}  {}"
    lines = [form.format(*columns)]
    for row in rows:
        right = (row["full_busy"] < BUSY) == (row["role"] == "pick")
        lines.append(
            form.format(
                f"{row['mbps']:g}",
                row["role"],
                row["ratio"],
                f"{row['step_seconds']:.3f}",
                f"{row['twice_seconds']:.3f}",
                f"{row['busy']:.1%}",
                f"{row['full_busy']:.1%}",
                f"{row['predicted_busy']:.1%}",
                f"{row['full_compute']:.1%}",
                "as it should be"
                if right
                else f"should be {'under' if row['role'] == 'pick' else 'over'} 95 %",
            )
        )
    return "\n".join(lines)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbps", type=float, nargs="+", default=[20.0, 100.0, 1000.0])
    parser.add_argument("--ratios", nargs="+", default=["none", "1/2", "1/8", "1/32"])
    parser.add_argument("--wire", default="bf16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ffn", type=int, default=16, help="more of it, more compute over the same link")
    parser.add_argument("--steps", type=int, default=12, help="inner steps of a round")
    parser.add_argument("--tflops", type=float, default=0.0, help="of one machine; 0: measured first")
    parser.add_argument("--auto", action="store_true", help='hold compression = "auto" against the cable')
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if reason := netns.reason_to_skip():
        say(f"links: {reason}")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces go away with the `with` block
    try:
        tflops = args.tflops or calibrate(args)
        rows = (by_auto if args.auto else by_ratio)(args, tflops)
    except KeyboardInterrupt:
        say("links: interrupted; the namespaces are removed")
        return 130
    if args.json:
        print(json.dumps({"tflops": tflops, "rows": rows}, indent=2))
    else:
        print((by_auto_table if args.auto else by_ratio_table)(rows))
    short = [] if args.auto else shortcomings(rows)
    for line in short:
        say(f"links: {line}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
