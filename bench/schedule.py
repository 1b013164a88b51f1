"""How much of the compute a slow link leaves: our schedule, torch's stock ones, the ceiling, the prediction.

    python bench/schedule.py [--ratios 0.2 0.6 0.9] [--micro-batches 16 32] [--latency-ms 20] [--json]
    python bench/schedule.py --ours isthmus gloo --stock --mbps 100 --stages 2

Four machines in a row, as network namespaces, with rate-limited cables between neighbours, and on each one
stage whose compute is a fixed wait: nothing else is simulated. Isthmus' stages run `PipelinedReplica` over
`SocketLink`, and `gloo` over those of --trust-network; torch's run `PipelineStage` with `Schedule1F1B` and
`ScheduleGPipe` over gloo, in the same processes, on the same cables, with activations of the same size. r is
the time of a micro-batch on a link, one way and headers included, over its time t on a stage, forward and
backward. Frames are small and links slow; with --mbps the links have that rate, and micro-batches as many
sequences as make up r.

    ceiling    m / (m + (S-1)(1 + 2(r + latency/t))), which no flush with whole backwards beats
    isthmus    m t / the median inner step, once the depths are chosen from measured times
    split      the same with inner.backward = "split": its backwards are not whole, the ceiling not its own
    gloo       as isthmus, in the clear
    predicted  the event simulation of the schedule that was executed, in seconds

Needs root and iproute2; with a latency also /dev/net/tun. Exit status 1 where isthmus stays below its share
of the ceiling (0.95 up to r = 0.6, 0.90 above; 0.85 with a latency) or the prediction is more than 10 % off.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import netns
import tunlink

RECIPE = """
name = "schedule"
[model]
preset = "nano"
[inner]
batch = {batch}
micro_batches = {m}
precision = "fp32"
backward = "{backward}"
[[replicas]]
name = "edge"
kind = "pipelined"
stages = {stages}
link = {{ mbps = {mbps}, latency_ms = {latency_ms} }}
"""
ROWS = 2  # sequences of a micro-batch
BURST_BYTES = 3100  # two packets: what a link may send faster than its rate after a pause; a frame has 66,000
BURST_SECONDS = 5e-4  # of a fast link: the kernel's timers are not finer
FORWARD = 1 / 3  # share of t
WARM_UP = 4  # inner steps; the depths are chosen after the third
OURS = {
    "isthmus": ("whole", "socket"),
    "split": ("split", "socket"),
    "gloo": ("whole", "gloo"),
}
STOCK = ("1f1b", "gpipe")
OFF = 0.10


def main() -> int:
    args = parse()
    if args.worker:
        return work(json.loads(args.worker))
    reason = netns.reason_to_skip() or (args.latency_ms and tunlink.reason_to_skip())
    if reason:
        print(f"schedule: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces go away with the `with` block
    try:
        points = measure(args)
    except KeyboardInterrupt:
        print("schedule: interrupted; the namespaces are removed", file=sys.stderr)
        return 130
    except RuntimeError as error:  # what the kernel would not do for us
        print(f"schedule: {error}", file=sys.stderr)
        return 2
    print(json.dumps(points, indent=2) if args.json else table(points))
    short = [line for point in points for line in shortcomings(point)]
    for line in short:
        print(f"schedule: {line}", file=sys.stderr)
    return 1 if short else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.6, 0.9], help="link over compute")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--compute-ms", type=float, default=80.0, help="t: one micro-batch on one stage")
    parser.add_argument("--mbps", type=float, default=0.0, help="of the links; 0: as slow as r makes them")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="one way, on every cable")
    parser.add_argument("--steps", type=int, default=5, help="inner steps measured, after the warm-up")
    parser.add_argument("--ours", nargs="+", choices=list(OURS), default=["isthmus", "split"])
    parser.add_argument("--stock", nargs="*", choices=STOCK, default=list(STOCK), help="torch's, beside ours")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    t = args.compute_ms / 1e3
    names = [f"m{stage}" for stage in range(args.stages)]
    points = []
    with tempfile.TemporaryDirectory() as folder, netns.Network() as network:
        cables = network.line(names, latency_ms=args.latency_ms)
        for name in names:
            network.set(name, "net.ipv4.tcp_slow_start_after_idle", 0)  # as docs/operate.md recommends
        for ratio in args.ratios:
            rows = ROWS
            if args.mbps:
                rows = max(1, round(ratio * t * args.mbps * 1e6 / 8 / (frame_bytes(args.stages) / ROWS)))
            mbps = frame_bytes(args.stages, rows) * 8 / (ratio * t) / 1e6
            for cable in cables:
                burst = max(BURST_BYTES, round(mbps * 1e6 / 8 * BURST_SECONDS))
                network.limit(cable, mbps * cable.overhead, burst)
            job = {
                "num_stages": args.stages,
                "master": cables[0].addresses[0],
                "t": t,
                "mbps": mbps,
                "rows": rows,
                "latency_ms": args.latency_ms,
                "micro_batches": args.micro_batches,
                "ours": args.ours,
                "stock": args.stock,
                "steps": args.steps,
            }
            for result in results(network, names, job, Path(folder)):
                point = {"r": ratio, "latency_ms": args.latency_ms, "mbps": mbps} | result
                points.append(judged(point, args.stages, t))
                say(points[-1])
    return points


def results(network: netns.Network, names: list[str], job: dict[str, Any], folder: Path) -> Any:
    """What stage 0 says, line by line, of processes that stay for all the points at this rate."""
    processes = []
    for stage, name in enumerate(names):
        face = network.cables[max(0, stage - 1)].interfaces[int(stage > 0)]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": face, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", json.dumps(job | {"stage": stage})]
        with open(folder / f"{name}.log", "wb") as log:
            processes.append(
                subprocess.Popen(
                    network.command(name, command), stdout=subprocess.PIPE, stderr=log, text=True, env=env
                )
            )
    for line in processes[0].stdout:
        yield json.loads(line)
    if any(process.wait(30) for process in processes):
        raise SystemExit("".join((folder / f"{name}.log").read_text()[-2000:] for name in names))


def judged(point: dict[str, Any], num_stages: int, t: float) -> dict[str, Any]:
    m, ratio, latency = point["micro_batches"], point["r"], point["latency_ms"] / 1e3
    ceiling = m / (m + (num_stages - 1) * (1 + 2 * (ratio + latency / t)))
    used = {name: m * t / seconds for name, seconds in point["step_seconds"].items()}
    shares = {name: value / ceiling for name, value in used.items()}
    off = {name: s / point["step_seconds"][name] for name, s in point["predicted_seconds"].items()}
    judgement = {"ceiling": ceiling, "utilisation": used, "share_of_ceiling": shares}
    return point | judgement | {"predicted_over_measured": off}


def shortcomings(point: dict[str, Any]) -> list[str]:
    least = 0.85 if point["latency_ms"] else 0.95 if point["r"] <= 0.6 else 0.90
    found = []
    for name, ratio in point["predicted_over_measured"].items():
        share, where = (
            point["share_of_ceiling"][name],
            f"r = {point['r']:g}, m = {point['micro_batches']}, {name}",
        )
        if share < least:
            found.append(f"{where}: {share:.3f} of the ceiling, which should be at least {least}")
        if abs(ratio - 1) > OFF:
            found.append(f"{where}: the event simulation gave {ratio:.2f} of the measured step")
    return found


def table(points: list[dict[str, Any]]) -> str:
    lines = [f"{'r':>4} {'m':>3} {'ceiling':>8}"]
    for name in points[0]["utilisation"]:
        if name in OURS:
            head = f" | {name:>8} {'share':>6} {'step s':>7} {'predicted':>9} {'ratio':>6} {'in flight':<12}"
        else:
            head = f" | {f'torch {name}':>11} {'share':>6}"
        lines[0] += head
    for p in points:
        line = f"{p['r']:4g} {p['micro_batches']:3d} {p['ceiling']:8.1%}"
        for name, used in p["utilisation"].items():
            share = p["share_of_ceiling"][name]
            if name in OURS:
                seconds, predicted = p["step_seconds"][name], p["predicted_seconds"][name]
                line += f" | {used:8.1%} {share:6.3f} {seconds:7.3f} {predicted:9.3f} "
                line += (
                    f"{p['predicted_over_measured'][name]:6.3f} {','.join(map(str, p['depths'][name])):<12}"
                )
            else:
                line += f" | {used:11.1%} {share:6.3f}"
        lines.append(line)
    return "\n".join(lines)


def say(point: dict[str, Any]) -> None:
    shares = ", ".join(f"{name} {share:.3f}" for name, share in point["share_of_ceiling"].items())
    print(
        f"r = {point['r']:g}, m = {point['micro_batches']}: share of the ceiling: {shares}",
        file=sys.stderr,
        flush=True,
    )


def recipe_of(
    num_stages: int,
    m: int,
    backward: str = "whole",
    mbps: float = 1.0,
    latency_ms: float = 0.0,
    rows: int = ROWS,
) -> Any:
    from isthmus.config import parse_recipe

    link = {"mbps": mbps, "latency_ms": latency_ms}
    return parse_recipe(RECIPE.format(batch=rows * m, m=m, stages=num_stages, backward=backward, **link))


def frame_bytes(num_stages: int, rows: int = ROWS) -> int:
    """One micro-batch forward, as it crosses a link."""
    from isthmus.layout.traffic import inner_step_bytes

    recipe = recipe_of(num_stages, 1, rows=rows)
    crossing = inner_step_bytes(recipe, recipe.fleet()[0])
    return (crossing["activations"] + crossing["tokens"]) // (num_stages - 1)


# From here on: what runs inside a namespace, one process for each stage.

STORES: list[Any] = []


def work(job: dict[str, Any]) -> int:
    import torch

    torch.set_num_threads(1)
    port = 29500
    stock = Stock(job) if job["stock"] else None
    for m in job["micro_batches"]:
        line: dict[str, Any] = {"micro_batches": m, "step_seconds": {}, "predicted_seconds": {}, "depths": {}}
        for name in job["ours"]:
            port += 1
            for what, value in isthmus(job, m, port, *OURS[name]).items():
                line[what][name] = value
        for name in job["stock"]:
            line["step_seconds"][name] = stock.seconds(name, m)
        if job["stage"] == 0:
            print(json.dumps(line), flush=True)
    return 0


def isthmus(job: dict[str, Any], m: int, port: int, backward: str, transport: str) -> dict[str, Any]:
    """Median seconds of an inner step as stage 0 sees it, from its first forward to its last backward and
    the agreement on the norm; what the event simulation says of the schedule; the most in flight."""
    import torch

    from isthmus.layout.schedule import WEIGHT_SHARE, simulate_schedule
    from isthmus.replica.pipelined import PipelinedReplica
    from isthmus.replica.stage import Stage

    t, back = job["t"], (1 - FORWARD) * job["t"]

    class Waiting(Stage):
        """A stage with a wait in place of its layers."""

        def forward(self, micro_batch: int, tokens: torch.Tensor, z_in: torch.Tensor | None = None):
            time.sleep(FORWARD * t)
            part = self.frames()[0][0]
            out = z_in if z_in is not None else torch.ones(part.shape, dtype=part.dtype)
            self.activations[micro_batch] = (None, out)
            return out.double().mean() / m if self.last else out

        def backward(self, micro_batch: int, grad: torch.Tensor | None = None, seconds: float = back):
            time.sleep(seconds)
            _, out = self.activations.pop(micro_batch)
            return None if self.first else out if grad is None else grad

        def backward_input(self, micro_batch: int, grad: torch.Tensor | None = None):
            return self.backward(micro_batch, grad, (1 - WEIGHT_SHARE) * back)

        def backward_weight(self, micro_batch: int) -> None:
            time.sleep(WEIGHT_SHARE * back)

        def squared_norm(self) -> torch.Tensor:
            return torch.zeros(())

        def step(self, squared_norm: float, inner_step: int) -> None:
            pass

    class Tokens:
        def at(self, replica: int, inner_step: int) -> torch.Tensor:
            return torch.zeros(recipe.inner.batch, recipe.model.context + 1, dtype=torch.long)

    recipe = recipe_of(job["num_stages"], m, backward, job["mbps"], job["latency_ms"], job["rows"])
    member = recipe.fleet()[0]
    links = connected(job, port, transport)
    tokens = Tokens() if job["stage"] == 0 else None
    replica = PipelinedReplica(recipe, member, [Waiting(recipe, member, job["stage"])], [links], tokens)
    seconds = []
    for inner_step in range(WARM_UP + job["steps"]):
        started = time.perf_counter()
        loss = replica.inner_step(inner_step).item()
        seconds.append(time.perf_counter() - started)
        if abs(loss - 1) > 1e-6:
            raise RuntimeError(f"stage {job['stage']}: the activations came as {loss}, not as 1")
    replica.close()
    link = frame_bytes(job["num_stages"], job["rows"]) * 8 / (job["mbps"] * 1e6)
    latency = job["latency_ms"] / 1e3
    return {
        "step_seconds": statistics.median(seconds[WARM_UP:]),
        "predicted_seconds": simulate_schedule(replica.schedule, FORWARD * t, back, link, latency),
        "depths": list(replica.depths),
    }


def connected(job: dict[str, Any], port: int, transport: str) -> Any:
    """This stage's links to the one before it and the one after it."""
    from isthmus.replica.process_groups import connect, open_store, own_address

    stage, host = job["stage"], job["master"]
    store, address = open_store(replica="edge", rank=stage, host=host, port=port), own_address(host, port)
    if transport == "socket":
        return socket_links(job, store, address)
    return connect(replica="edge", address=address, stage=stage, num_stages=job["num_stages"], store=store)


def socket_links(job: dict[str, Any], store: Any, address: str) -> Any:
    import socket

    import torch

    from isthmus.protocol.trust import Signer
    from isthmus.replica.links import LinkPeers
    from isthmus.replica.socket_link import SocketLink
    from isthmus.runtime.addresses import Address
    from isthmus.runtime.certificates import contexts
    from isthmus.runtime.peer import Endpoint, StageStart

    stage, links = job["stage"], []
    keys, me = contexts(Signer("edge", bytes(32))), StageStart("bench", "edge", stage, 1)
    endpoint = Endpoint(me, socket.create_server((address, 0)), keys)
    store.set(f"socket/{stage}", str(Address(address, endpoint.port)))
    for neighbour in (stage - 1, stage + 1):
        if not 0 <= neighbour < job["num_stages"]:
            links.append(None)
            continue
        there = Address.parse(store.get(f"socket/{neighbour}").decode(), "address")
        peers, find = LinkPeers("edge", stage, neighbour, str(there)), lambda there=there: ([there], 1)
        meeting = endpoint.meet(neighbour, peers, find if neighbour < stage else None)
        links.append(SocketLink(meeting, peers, torch.device("cpu"), 60.0))
    STORES.append(store)
    return tuple(links)


class Stock:
    """torch.distributed.pipelining over gloo, with the same waits and activations of the same size."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch.distributed as dist

        self.job = job
        rank = {"rank": job["stage"], "world_size": job["num_stages"]}
        dist.init_process_group("gloo", init_method=f"tcp://{job['master']}:29500", **rank)

    def seconds(self, name: str, m: int) -> float:
        import torch
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        job, t = self.job, self.job["t"]

        class Wait(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                time.sleep(FORWARD * t)
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                time.sleep((1 - FORWARD) * t)
                return grad, torch.zeros(1)

        class Layers(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return Wait.apply(x, self.weight)

        elements = frame_bytes(job["num_stages"], job["rows"]) // 2  # the ids travel with them
        first, last = job["stage"] == 0, job["stage"] == job["num_stages"] - 1
        came, goes = (
            torch.ones(1, elements, dtype=torch.bfloat16, requires_grad=grad) for grad in (not first, True)
        )
        stage = PipelineStage(
            Layers(),
            job["stage"],
            job["num_stages"],
            torch.device("cpu"),
            input_args=(came,),
            output_args=(goes,),
        )
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[name]
        schedule = kind(stage, m, loss_fn=lambda out, target: out.float().mean())
        inputs = [torch.ones(m, elements, dtype=torch.bfloat16)] if first else []
        seconds = []
        for _ in range(1 + max(2, job["steps"] // 2)):
            dist.barrier()
            started = time.perf_counter()
            schedule.step(*inputs, **({"target": torch.zeros(m)} if last else {}))
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])


if __name__ == "__main__":
    sys.exit(main())
