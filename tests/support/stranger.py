"""Somebody who is not of a replica, at the port of one of its stages: `python stranger.py HOST PORT [NICE]`.

Again and again a thousand connections at a time: silent, with junk, with the beginning of a TLS handshake,
and with whole ones by a key that is not the replica's. Each time it prints how often it did so, and how often
it got in.
"""

import contextlib
import os
import socket
import sys

from isthmus.protocol.trust import Signer
from isthmus.runtime.certificates import contexts

CONNECTIONS, HANDSHAKES = 1000, 3


def flood(host: str, port: int) -> int:
    """How often it got in."""
    inside, (_, context) = 0, contexts(Signer("edge", os.urandom(32)))
    with contextlib.ExitStack() as held:
        for number in range(CONNECTIONS):
            with contextlib.suppress(OSError):
                link = held.enter_context(socket.create_connection((host, port), 1.0))
                words = (b"", b"GET / HTTP/1.1", bytes(64), b"\x16\x03\x01" + os.urandom(123))
                link.sendall(words[number % 4])
        for _ in range(HANDSHAKES):
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, port), 5.0) as link,
                context.wrap_socket(link) as secured,
            ):
                secured.sendall(bytes(200))
                inside += bool(secured.recv(1))
    return inside


def main(host: str, port: str, nice: str = "0") -> None:
    os.nice(int(nice))
    times = inside = 0
    while True:
        inside += flood(host, int(port))
        times += 1
        print(times, inside, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
