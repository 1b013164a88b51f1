"""Test the link between two machines: a real stage link, as `join` makes it, directly or through a relay.

One end waits (`isthmus doctor --listen`) as stage 0 of a replica "doctor"; the other asks, as stage 1. Its
key is public, so it authenticates nobody: the ends send only noise, in bounded amounts, one measurement at a
time.
"""

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, astuple

import torch

from isthmus.doctor.checks import WRONG_CLOCK_SECONDS, Check, LinkRate, Say, failed, mbps, passed, ramp
from isthmus.errors import RunError
from isthmus.protocol.trust import Signer
from isthmus.replica.links import Frame, LinkPeers, TensorSpec
from isthmus.replica.socket_link import SocketLink
from isthmus.runtime.addresses import Address, listen
from isthmus.runtime.certificates import contexts
from isthmus.runtime.peer import HANDSHAKE_SECONDS, Endpoint, Find, Listener, StageStart
from isthmus.runtime.relay_place import RelayListener, RelayPlace

JOIN_SECONDS = 30.0  # for the other end to answer
TURN_SECONDS = 3600.0  # how long a listener waits for a peer before it starts over
SILENCE_SECONDS = 10.0
SESSION_SECONDS = 300.0  # the listener ends every measurement after this
MOST_BYTES = 1 << 30  # per transfer, each way
FIRST_BYTES = 1 << 16
FRAME_BYTES = 1 << 20
AHEAD = 16  # frames in flight: a distant, fast link needs as many
PINGS = 11
NAME = "doctor"  # of the replica and of its run
EVERYBODY = Signer(NAME, bytes(32))
WAITS = StageStart(NAME, NAME, 0, 1)
CONTROL: Frame = (TensorSpec("control", (2,), torch.int64),)  # bytes up, bytes down; -1: the end
CPU = torch.device("cpu")


def frame_sizes(num_bytes: int) -> list[int]:
    """Split bytes into at least 16 frames, if there are enough, so that none takes long on a thin link."""
    each = max(FIRST_BYTES, min(FRAME_BYTES, num_bytes // 16))
    return [min(each, num_bytes - at) for at in range(0, num_bytes, each)]


def measure(
    move: Callable[[int, int], None],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    beside: Callable[[], float] = lambda: 0.0,
) -> LinkRate:
    """Measure latency, then each way alone, then both at once. `move(up, down)` carries that many bytes each
    way at once and returns when all have arrived; `beside` returns a control frame's time meanwhile."""
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
    waits = max(0.0, beside() - trip) * 1e3
    return LinkRate(
        up_mbps=up, down_mbps=down, round_trip_ms=trip * 1e3, both_ways_mbps=both, control_wait_ms=waits
    )


class End:
    """One end of the link, and the few messages that both ends understand."""

    def __init__(self, link: SocketLink) -> None:
        self.link, self.ahead_seconds = link, 0.0
        # Random bytes, because no tunnel can compress them.
        self.noise = torch.frombuffer(bytearray(os.urandom(FRAME_BYTES)), dtype=torch.uint8)

    def expect(self, num_bytes: int) -> None:
        """Expect bulk bytes, and then a control frame."""
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
        pings: list[float] = []
        loaded, over = threading.Event(), threading.Event()

        def move(up: int, down: int) -> None:
            began = time.time()
            self.expect(down)
            self.control(up, down)
            if up and down:
                loaded.set()
            self.transfer(up, down)
            loaded.clear()
            there, _ = self.link.receive()[0]  # the other end has received everything, and sends its clock
            if not up and not down:
                self.ahead_seconds = int(there) / 1e6 - (began + time.time()) / 2

        def ping() -> None:
            """Send control frames while bulk fills the link both ways."""
            with suppress(RunError):
                while loaded.wait(2 * SILENCE_SECONDS + 3 * seconds) and not over.is_set():
                    began = time.perf_counter()
                    self.link.send_message(b"")
                    self.link.receive_message(SILENCE_SECONDS + 2 * seconds)
                    pings.append(time.perf_counter() - began)
                    time.sleep(0.02)

        pinger = threading.Thread(target=ping, daemon=True)
        pinger.start()
        rate = measure(move, seconds, beside=lambda: statistics.median(pings) if pings else 0.0)
        over.set()
        loaded.set()
        pinger.join()
        self.control(-1, -1)
        return rate

    def answer(self) -> int:
        """Serve the other end's requests until it is done; return the bytes moved."""
        threading.Thread(target=self._echo, daemon=True).start()
        moved, until = 0, time.monotonic() + SESSION_SECONDS
        self.expect(0)
        while time.monotonic() < until:
            up, down = (int(count) for count in self.link.receive()[0])
            if up == down == -1:
                return moved
            if not (0 <= up <= MOST_BYTES and 0 <= down <= MOST_BYTES):
                raise RunError(f"it asked for {up} bytes up and {down} down")
            self.expect(up)
            self.transfer(down, up)
            self.control(int(time.time() * 1e6), 0)
            moved += up + down
        raise RunError("its time is over")

    def _echo(self) -> None:
        with suppress(RunError):
            while True:
                self.link.send_message(self.link.receive_message(SESSION_SECONDS))


def check_link(
    target: Address, relay: Address | None, seconds: float, say: Say
) -> tuple[list[Check], LinkRate | None]:
    """Measure the link to a listening machine: at its address, or through the relay that both use."""
    where = f"relay {relay}" if relay else str(target)
    say(f"measuring the link {'through' if relay else 'to'} {where}")
    there = (
        f"start `isthmus doctor --listen --relay {relay}` on the other machine"
        if relay
        else f"start `isthmus doctor --listen` there, and let TCP port {target.port} through its firewall"
    )
    try:
        _reach(relay or target)  # fails at once if it cannot be reached at all
    except OSError as error:
        why = (error.strerror or str(error) or "no answer").lower()
        cure = f"start `isthmus relay` at {relay}" if relay else there
        return [failed(where, f"cannot reach {relay or target}: {why}", cure)], None
    place = RelayPlace(relay, EVERYBODY, astuple(WAITS)) if relay else target
    try:
        rate, ahead = _ask(where, lambda: ([place], 0), seconds)
    except RunError as error:
        words = f"no stage link through it: {str(error).removeprefix(f'replica {NAME}: ')}"
        return [failed(where, words, there)], None
    checks = [passed(where, rate.describe(), clock_ahead_seconds=ahead, **asdict(rate))]
    if abs(ahead) > WRONG_CLOCK_SECONDS:
        words = f"the clocks of the other machine and of this one differ by {abs(ahead):.0f} s"
        cure = "set both by NTP; a bucket refuses requests of a machine that is some minutes off"
        checks.append(failed("clock", words, cure))
    return checks, rate


def _reach(address: Address) -> None:
    """Check that the address answers. A listener that just ended a measurement listens again soon."""
    for _ in range(10):
        with suppress(ConnectionRefusedError):
            address.dial(SILENCE_SECONDS).close()
            return
        time.sleep(0.3)
    address.dial(SILENCE_SECONDS).close()


def _ask(where: str, find: Find, seconds: float) -> tuple[LinkRate, float]:
    unused = socket.create_server(("127.0.0.1", 0))
    endpoint = Endpoint(StageStart(NAME, NAME, 1, time.time_ns() // 1000), unused, contexts(EVERYBODY))
    try:
        end = End(_link(endpoint, where, find, JOIN_SECONDS, SILENCE_SECONDS + 2 * seconds))
        rate = end.ask(seconds)
        end.link.close()
        return rate, end.ahead_seconds
    finally:
        endpoint.close()


def serve(address: Address, relay: Address | None, say: Say, begun: Callable[[], None]) -> None:
    """Serve machines one after another until interrupted. `begun` is called once, when the first may
    connect."""
    while True:
        endpoint = Endpoint(WAITS, _listener(address, relay), contexts(EVERYBODY))
        begun()
        begun = lambda: None  # noqa: E731
        try:
            link = _link(endpoint, "the other machine", None, TURN_SECONDS, SILENCE_SECONDS + 120.0)
            say("measuring with the machine that has come")
            moved = End(link).answer()
            link.close()
            say(f"done: {moved / 1e6:.1f} MB moved")
        except RunError as error:
            say(str(error).removeprefix(f"replica {NAME}: "))
        finally:
            endpoint.close()


def _listener(address: Address, relay: Address | None) -> Listener:
    if relay:
        return RelayListener(RelayPlace(relay, EVERYBODY, astuple(WAITS)), HANDSHAKE_SECONDS)
    return listen(address.host, address.port, "give --listen an address of this machine and a free port")


def _link(endpoint: Endpoint, where: str, find: Find | None, join: float, silence: float) -> SocketLink:
    peers = LinkPeers(NAME, endpoint.me.stage, 1 - endpoint.me.stage, where)
    return SocketLink(endpoint.meet(1 - endpoint.me.stage, peers, find, join), peers, CPU, silence)
