"""One stage link, as fast as it goes: TLS, TLS through a relay, and gloo in the clear; Gb/s and CPU seconds.

    python bench/link_rates.py [--links gloo tls relay] [--mb 1000] [--frame-kb 1024] [--repeats 3]

Two processes on this machine, joined over loopback by the code that trains, and for `relay` a third one in
between. "one way" is stage 0 to stage 1, "both" is both directions at once, each of that many bytes. The CPU
seconds are those of all processes, threads included, for each GB that was carried. Links take turns within a
repeat, so other work on this machine meets them alike: the ratios to gloo are the medians of the repeats.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

LINKS = ("gloo", "tls", "relay")
WAYS = {"one way": (1, 0), "both": (1, 1)}
AHEAD = 8
SECONDS = 60.0


def main() -> int:
    args = parse()
    if args.worker:
        return work(json.loads(args.worker))
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    rows: list[dict[str, Any]] = []
    for _ in range(args.repeats):
        for link in args.links:
            rows += measure(link, args.mb, args.frame_kb)
    print(json.dumps(rows, indent=2) if args.json else table(rows, args.links))
    print(
        f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores, frames of "
        f"{args.frame_kb} KiB",
        file=sys.stderr,
    )
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--mb", type=int, default=1000, help="MB each way")
    parser.add_argument("--frame-kb", type=int, default=1024, help="KiB of a frame")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, default=0, help="keep all processes to so many; 0: any")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(link: str, mb: int, frame_kb: int) -> list[dict[str, Any]]:
    """Both ways over one link; the relay's CPU time is added."""
    from isthmus.runtime.rendezvous import free_port

    relay, at = None, 0
    if link == "relay":
        words = ["relay", "--host", "127.0.0.1", "--port", "0"]
        command = [sys.executable, "-c", RELAY, *words]
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        assert relay.stdout
        at = int(relay.stdout.readline().rpartition(":")[2])
    frame_bytes = frame_kb * 1024
    job = {"link": link, "port": free_port("127.0.0.1"), "relay": at, "frame_bytes": frame_bytes}
    job |= {"num_frames": max(AHEAD, mb * 10**6 // frame_bytes)}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ends = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(job | {"stage": stage})],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for stage in (0, 1)
    ]
    said = [[json.loads(line) for line in end.communicate()[0].splitlines()] for end in ends]
    if any(end.returncode for end in ends):
        raise SystemExit(f"link_rates: {link}: an end of the link failed")
    relayed = 0.0
    if relay:
        relay.terminate()
        relayed = float(relay.communicate()[0].split()[-1])
    carried = sum(row["gb"] for row in said[0])
    rows = []
    for here, there in zip(*said, strict=True):
        cpu = here["cpu_seconds"] + there["cpu_seconds"] + relayed * here["gb"] / carried
        gbps = here["gb"] * 8 / here["seconds"] / (1 + (here["way"] == "both"))
        rows.append({"link": link, "way": here["way"], "gbps": gbps, "cpu_per_gb": cpu / here["gb"]})
    return rows


RELAY = """
import resource, signal, sys
from isthmus.cli.main import main
def end(*_):
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
main(sys.argv[1:])
"""


def table(rows: list[dict[str, Any]], links: list[str]) -> str:
    lines = [f"{'link':>6} {'':>8} {'Gb/s':>7} {'of gloo':>8} {'CPU s/GB':>9} {'of gloo':>8}"]
    for way in WAYS:
        by_link = {link: [r for r in rows if r["link"] == link and r["way"] == way] for link in links}
        for link, own in by_link.items():
            line = f"{link:>6} {way:>8}"
            for what, width in (("gbps", 7), ("cpu_per_gb", 9)):
                line += f" {statistics.median(row[what] for row in own):{width}.2f}"
                base = by_link.get("gloo", [])
                ratios = [row[what] / plain[what] for row, plain in zip(own, base, strict=False)]
                line += f" {statistics.median(ratios):8.2f}" if ratios else f" {'':8}"
            lines.append(line)
    return "\n".join(lines)


# From here on: one end of the link, a process of its own.


def work(job: dict[str, Any]) -> int:
    import torch

    from isthmus.replica.links import TensorSpec

    torch.set_num_threads(1)
    link, stage = open_link(job), job["stage"]
    frame, ack = (
        (TensorSpec("activations", (job["frame_bytes"],), torch.uint8),),
        (TensorSpec("control", (1,), torch.uint8),),
    )
    noise = torch.frombuffer(bytearray(os.urandom(job["frame_bytes"])), dtype=torch.uint8)
    for way, counts in WAYS.items():
        sends, receives = (counts[stage] * job["num_frames"], counts[1 - stage] * job["num_frames"])
        link.expect([ack], 1)
        link.send({"control": torch.zeros(1, dtype=torch.uint8)})
        link.receive()  # both are here
        began, cpu = time.perf_counter(), cpu_seconds()
        link.expect([frame] * receives + [ack], AHEAD)
        for i in range(max(sends, receives)):
            if i < sends:
                link.send({"activations": noise})
            if i < receives:
                link.receive()
        link.send({"control": torch.zeros(1, dtype=torch.uint8)})
        link.receive()  # the other end has all of it
        seconds = time.perf_counter() - began
        gb = sum(counts) * job["num_frames"] * job["frame_bytes"] / 1e9
        row = {"way": way, "seconds": seconds, "cpu_seconds": cpu_seconds() - cpu, "gb": gb}
        print(json.dumps(row), flush=True)
    link.close()
    return 0


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def open_link(job: dict[str, Any]) -> Any:
    stage, port = job["stage"], job["port"]
    return gloo_link(stage, port) if job["link"] == "gloo" else tls_link(stage, port, job["relay"])


def gloo_link(stage: int, port: int) -> Any:
    from isthmus.replica.process_groups import connect, open_store

    common: dict[str, Any] = {"replica": "edge", "stage": stage}
    store, address = open_store(**common, master=f"127.0.0.1:{port}")
    before, after = connect(**common, num_stages=2, store=store, address=address)
    return before or after


def tls_link(stage: int, port: int, relay: int) -> Any:
    import torch

    from isthmus.protocol.trust import Signer
    from isthmus.replica.links import LinkPeers
    from isthmus.replica.tls_link import TlsLink
    from isthmus.runtime.addresses import Address, Meeting
    from isthmus.runtime.arrivals import OwnGate
    from isthmus.runtime.channels import GateChannels, GuestChannels
    from isthmus.runtime.gate import Gate
    from isthmus.runtime.handshake import Credentials

    key = Credentials("bench", Signer("edge", bytes(32)))
    place = Meeting(Address("127.0.0.1", relay), key, 0) if relay else Address("127.0.0.1", port)
    peers = LinkPeers("edge", stage, 1 - stage, str(place))
    make: Callable[[], Any] = (
        (lambda: GateChannels(OwnGate(Gate(place, key), 0), key, peers, SECONDS))
        if stage == 0
        else (lambda: GuestChannels(place, 0, key, peers, SECONDS))
    )
    return TlsLink(make(), peers, torch.device("cpu"), SECONDS)


if __name__ == "__main__":
    sys.exit(main())
