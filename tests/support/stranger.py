"""Somebody who is not of a replica, at the port of its stage 0: `python stranger.py HOST PORT RUN_ID [NICE]`.

Again and again a thousand connections at a time: silent, with junk, with half a hello, with a whole one; and
a key that is not the replica's. Each time it prints how often it did so, and how often it got in.
"""

import contextlib
import os
import socket
import sys

from isthmus.protocol.trust import Signer
from isthmus.runtime.addresses import Address
from isthmus.runtime.gate import NotYet, enter
from isthmus.runtime.handshake import FORTH, LAUNCHERS, WORKERS, Credentials, Guest, Purpose, Stranger

CONNECTIONS = 1000


def flood(gate: Address, other: Credentials) -> int:
    """How often it got in."""
    hello, inside = Guest(other, Purpose(LAUNCHERS, 1)).hello, 0
    with contextlib.ExitStack() as held:
        for number in range(CONNECTIONS):
            with contextlib.suppress(OSError):
                link = held.enter_context(socket.create_connection((gate.host, gate.port), 1.0))
                words = (b"", b"GET / HTTP/1.1", b"isthmus-stages/2", os.urandom(123), hello)
                link.sendall(words[number % 5])
        for what in (LAUNCHERS, WORKERS, FORTH):
            with contextlib.suppress(Stranger, NotYet, OSError):
                enter(gate, other, Purpose(what, 1, 1)).close()
                inside += 1
    return inside


def main(host: str, port: str, run_id: str, nice: str = "0") -> None:
    os.nice(int(nice))
    other = Credentials(run_id, Signer("edge", os.urandom(32)))
    times = inside = 0
    while True:
        inside += flood(Address(host, int(port)), other)
        times += 1
        print(times, inside, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
