"""The two ends of a stage link, as training makes it between machines (`runtime.stage_links`), and its rates.

Each end is a process of its own, `python -m isthmus.doctor.stage_link`: whatever strangers do to it, the
listener and the rest of the survey go on.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from isthmus.doctor.checks import LinkRate, mbps, ramp
from isthmus.errors import ConfigError, RunError
from isthmus.protocol.trust import Signer
from isthmus.replica.links import Frame, LinkPeers, StageEnd, TensorSpec
from isthmus.replica.tls_link import Channels, TlsLink
from isthmus.runtime.addresses import Address
from isthmus.runtime.arrivals import OwnGate
from isthmus.runtime.channels import GateChannels, GuestChannels
from isthmus.runtime.gate import Gate
from isthmus.runtime.handshake import Credentials

JOIN_SECONDS = 30.0
SILENCE_SECONDS = 10.0
MOST_BYTES = 1 << 30  # of one transfer, each way
FIRST_BYTES = 1 << 16
FRAME_BYTES = 1 << 20
AHEAD = 16  # frames under way: a link that is far and fast needs as many
PINGS = 11
MEMORY_BYTES = 4 << 30  # strangers cannot make a process take more
NAME = "doctor"  # of the replica
EVERYBODY = Credentials(NAME, Signer(NAME, bytes(32)))  # the key is no secret: noise is all that is sent
SESSION = 0
CONTROL: Frame = (TensorSpec("control", (2,), torch.int64),)  # bytes up, bytes down; -1: the end


def measure(
    move: Callable[[int, int], None], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> LinkRate:
    """`move(up, down)` carries that many bytes each way at once and returns when all have arrived.

    Latency first, then each way on its own, then both at once, for about `seconds` each.
    """
    trips = []
    for _ in range(PINGS):
        began = clock()
        move(0, 0)
        trips.append(clock() - began)
    trip = statistics.median(trips)
    up, down, both = (
        mbps(*ramp(lambda n, u=u, d=d: move(u * n, d * n), seconds, FIRST_BYTES, MOST_BYTES, clock), trip)
        for u, d in ((1, 0), (0, 1), (1, 1))
    )
    return LinkRate(up_mbps=up, down_mbps=down, round_trip_ms=trip * 1e3, both_ways_mbps=both)


def frame_sizes(num_bytes: int) -> list[int]:
    """At least 16 frames where there are enough bytes, so that no single one takes long on a thin link."""
    each = max(FIRST_BYTES, min(FRAME_BYTES, num_bytes // 16))
    return [min(each, num_bytes - at) for at in range(0, num_bytes, each)]


class End:
    """One end of the link, and the few messages that its other end understands."""

    def __init__(self, link: StageEnd) -> None:
        self.link = link
        # No tunnel can make random bytes smaller.
        self.noise = torch.frombuffer(bytearray(os.urandom(FRAME_BYTES)), dtype=torch.uint8)

    def expect(self, num_bytes: int) -> None:
        """Bulk bytes, and then a control frame."""
        bulk = [(TensorSpec("activations", (size,), torch.uint8),) for size in frame_sizes(num_bytes)]
        self.link.expect([*bulk, CONTROL], AHEAD)

    def control(self, up: int, down: int) -> None:
        self.link.send({"control": torch.tensor([up, down])})

    def transfer(self, send_bytes: int, receive_bytes: int) -> None:
        out, into = frame_sizes(send_bytes), frame_sizes(receive_bytes)
        for i in range(max(len(out), len(into))):
            if i < len(out):
                self.link.send({"activations": self.noise[: out[i]]})
            if i < len(into):
                self.link.receive()

    def ask(self, seconds: float) -> LinkRate:
        def move(up: int, down: int) -> None:
            self.expect(down)
            self.control(up, down)
            self.transfer(up, down)
            self.link.receive()  # the other end has all of it

        rate = measure(move, seconds)
        self.control(-1, -1)
        return rate

    def answer(self) -> int:
        """Do what the other end asks for until it has enough; the bytes that were moved."""
        moved = 0
        self.expect(0)
        while True:
            up, down = (int(count) for count in self.link.receive()[0])
            if up == down == -1:
                return moved
            if not (0 <= up <= MOST_BYTES and 0 <= down <= MOST_BYTES):
                raise RunError(f"it asked for {up} bytes up and {down} down")
            self.expect(up)
            self.transfer(down, up)
            self.control(0, 0)
            moved += up + down


def main(role: str, host: str, seconds: float) -> None:
    """`serve` on this address, or `ask` the one that serves there at the port that comes on stdin.

    Every result is a line of JSON.
    """
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        link = serve(host, seconds) if role == "serve" else ask(host, int(sys.stdin.readline()), seconds)
        facts = asdict(End(link).ask(seconds)) if role == "ask" else {"moved": End(link).answer()}
        link.close()
        _tell(facts)
    except (ConfigError, RunError) as error:
        _tell({"fault": str(error).removeprefix(f"replica {NAME}: ")})


def serve(host: str, seconds: float) -> TlsLink:
    try:
        arrivals = OwnGate(Gate(Address(host, 0), EVERYBODY), SESSION)
    except OSError as error:
        raise RunError(f"cannot listen on {host}: {error.strerror}") from None
    _tell({"port": int(arrivals.address.rpartition(":")[2])})
    peers = LinkPeers(NAME, 0, 1, "the other machine")
    return _link(GateChannels(arrivals, EVERYBODY, peers, JOIN_SECONDS), peers, seconds)


def ask(host: str, port: int, seconds: float) -> TlsLink:
    gate, peers = Address(host, port), LinkPeers(NAME, 1, 0, host)
    return _link(GuestChannels(gate, SESSION, EVERYBODY, peers, JOIN_SECONDS), peers, seconds)


def _link(channels: Channels, peers: LinkPeers, seconds: float) -> TlsLink:
    silence = SILENCE_SECONDS + 2 * seconds  # everything under way may have to arrive first
    return TlsLink(channels, peers, torch.device("cpu"), silence)


def _tell(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
