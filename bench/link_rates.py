"""One stage link over a cable of a given rate: throughput, trip, what control waits beside bulk, CPU a byte.

    python bench/link_rates.py [--links gloo tls] [--mbps 20 100 1000] [--seconds 10] [--json]

Two machines, as network namespaces, joined by a veth pair with a token bucket. On each a process that sends
frames of --frame-mb both ways at once, as fast as the link takes them. `gloo` is `ProcessLink`, in the clear,
`tls` is `SocketLink` between machines, and `unix` is `SocketLink` on one machine, for which no cable counts.

    MB/s     what arrived each way, the slower direction
    trip ms  a small frame and its answer, on a link that carries nothing else; median
    wait ms  a small frame that is sent while frames are queued, until it is received; median. gloo has no
             order but that of sending, so there it waits for all of them; --ahead says how many are queued
    ns/B     CPU seconds of both processes, threads and kernel included, for each byte that arrived

Links take turns at each rate. Needs root and iproute2.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import netns

LINKS = ("gloo", "tls", "unix")
PINGS = 21
PORT = 29500


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--mbps", type=float, nargs="+", default=[20.0, 100.0, 1000.0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of bulk, for each link and rate")
    parser.add_argument("--frame-mb", type=float, default=8.0)
    parser.add_argument("--ahead", type=int, default=2, help="frames that may wait to be sent")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(json.loads(args.worker))
    if reason := netns.reason_to_skip():
        print(f"link_rates: {reason}", file=sys.stderr)
        return 2
    rows = []
    with tempfile.TemporaryDirectory() as folder, netns.Network() as network:
        for name in ("m0", "m1"):
            network.machine(name)
        cable = network.cable("m0", "m1", args.mbps[0])
        for mbps in args.mbps:
            network.limit(cable, mbps, max(2**14, round(mbps * 1e6 / 8 * 5e-4)))
            for link in args.links:
                job = {
                    "link": link,
                    "mbps_now": mbps,
                    "host": cable.addresses[0],
                    "folder": folder,
                    **vars(args),
                }
                names = ("m0", "m0") if link == "unix" else ("m0", "m1")
                rows.append({"mbps": mbps, "link": link} | measure(network, names, job, cable))
                print(line(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(rows, indent=2) if args.json else "\n".join([HEAD, *map(line, rows)]))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    return 0


HEAD = f"{'Mb/s':>6} {'link':>5} {'MB/s':>8} {'trip ms':>8} {'wait ms':>8} {'ns/B':>6}"


def line(row: dict[str, Any]) -> str:
    figures = f"{row['rate'] / 1e6:8.2f} {row['trip'] * 1e3:8.2f} {row['wait'] * 1e3:8.1f}"
    return f"{row['mbps']:6g} {row['link']:>5} {figures} {row['cpu'] * 1e9:6.2f}"


def measure(network: Any, names: tuple[str, str], job: dict[str, Any], cable: Any) -> dict[str, float]:
    ends = []
    for stage, name in enumerate(names):
        env = {**os.environ, "GLOO_SOCKET_IFNAME": cable.interfaces[stage], "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker", json.dumps(job | {"stage": stage})]
        ends.append(subprocess.Popen(network.command(name, command), stdout=subprocess.PIPE, env=env))
    found = [json.loads(end.communicate()[0] or "{}") for end in ends]
    if any(end.returncode for end in ends):
        raise SystemExit(f"link_rates: an end of the {job['link']} link failed")
    carried = sum(each["bytes"] for each in found)
    return {
        "rate": min(each["bytes"] / each["seconds"] for each in found),
        "trip": found[0]["trip"],
        "wait": statistics.median(found[0]["waits"] + found[1]["waits"]),
        "cpu": sum(each["cpu"] for each in found) / carried,
    }


# From here on: what runs inside a namespace, one process for each stage.


def work(job: dict[str, Any]) -> int:
    import torch

    from isthmus.replica.links import TensorSpec

    torch.set_num_threads(1)
    link = connected(job)
    small, size = (TensorSpec("activations", (1,), torch.float64),), int(job["frame_mb"] * 1e6)
    bulk, data = (TensorSpec("activations", (size,), torch.uint8),), torch.zeros(size, dtype=torch.uint8)
    in_order = job["link"] == "gloo"

    def send_time() -> None:
        link.send({"activations": torch.tensor([time.monotonic()], dtype=torch.float64)})

    trips = []
    link.expect([small] * PINGS, 1)
    for _ in range(PINGS):
        if job["stage"] == 0:
            began = time.monotonic()
            send_time()
            link.receive()
            trips.append(time.monotonic() - began)
        else:
            link.receive()
            send_time()
    carries = job["mbps_now"] * 1e6 / 8 if job["link"] != "unix" else 1e9
    num_frames = max(4, round(job["seconds"] * carries / size))
    waits: list[float] = []
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    link.expect(([bulk, small] if in_order else [bulk]) * num_frames, job["ahead"])

    def send() -> None:
        for _ in range(num_frames):
            link.send({"activations": data})
            if in_order:
                send_time()
            else:
                link.send_message(str(time.monotonic()).encode())

    def hear() -> None:
        for _ in range(0 if in_order else num_frames):
            waits.append(-float(link.receive_message()) + time.monotonic())

    threads = [threading.Thread(target=send), threading.Thread(target=hear)]
    for thread in threads:
        thread.start()
    for _ in range(num_frames):
        link.receive()
        if in_order:
            waits.append(time.monotonic() - link.receive()[0].item())
    seconds = time.monotonic() - began
    for thread in threads:
        thread.join()
    after = resource.getrusage(resource.RUSAGE_SELF)
    link.close()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    trip = statistics.median(trips or [0.0])
    print(
        json.dumps({"bytes": num_frames * size, "seconds": seconds, "trip": trip, "waits": waits, "cpu": cpu})
    )
    return 0


def connected(job: dict[str, Any]) -> Any:
    import torch

    from isthmus.protocol.trust import Signer
    from isthmus.replica.links import LinkPeers
    from isthmus.replica.process_groups import connect, open_store, own_address
    from isthmus.replica.socket_link import SocketLink
    from isthmus.runtime.addresses import Address, UnixPlace
    from isthmus.runtime.certificates import contexts
    from isthmus.runtime.peer import Endpoint, StageStart

    stage, host = job["stage"], job["host"]
    if job["link"] == "gloo":
        store = open_store(replica="edge", rank=stage, host=host, port=PORT)
        own = own_address(host, PORT)
        links = connect(replica="edge", stage=stage, num_stages=2, store=store, address=own)
        return links[1 - stage]
    me, peers = StageStart("bench", "edge", stage, 1), LinkPeers("edge", stage, 1 - stage, "the other")
    if job["link"] == "unix":
        place, keys = UnixPlace(Path(job["folder"]) / "links", 0), None
        listener = UnixPlace(Path(job["folder"]) / "links", stage).listen()
    else:
        import socket

        place, keys = Address(host, PORT + 1), contexts(Signer("edge", bytes(32)))
        listener = socket.create_server(("0.0.0.0" if stage else host, 0 if stage else PORT + 1))
    endpoint = Endpoint(me, listener, keys)
    meeting = endpoint.meet(1 - stage, peers, (lambda: ([place], 0)) if stage else None)
    return SocketLink(meeting, peers, torch.device("cpu"), 120.0)


if __name__ == "__main__":
    sys.exit(main())
