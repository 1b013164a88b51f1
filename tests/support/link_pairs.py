"""Pairs of SocketLinks in one process, as stages 0 and 1 of replica edge-0 have them."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from isthmus.protocol.trust import Signer
from isthmus.replica.links import LinkPeers
from isthmus.replica.socket_link import SocketLink
from isthmus.runtime.addresses import Address, UnixPlace
from isthmus.runtime.certificates import contexts
from isthmus.runtime.peer import Endpoint, StageStart

RUN, REPLICA, HOST = "ab" * 16, "edge-0", "127.0.0.1"
SIGNER = Signer(REPLICA, bytes(range(32)))
EARLY, LATE = LinkPeers(REPLICA, 0, 1, "10.0.0.8"), LinkPeers(REPLICA, 1, 0, "10.0.0.7")


def start_of(stage, start=1, *, run_id=RUN, replica=REPLICA):
    return StageStart(run_id, replica, stage, start)


def tls_endpoint(stage, start=1, *, signer=SIGNER, run_id=RUN, log=lambda text: None, port=0):
    listener = socket.create_server((HOST, port), backlog=512)
    return Endpoint(start_of(stage, start, run_id=run_id), listener, contexts(signer), log)


def unix_endpoint(folder, stage, start=1):
    return Endpoint(start_of(stage, start), UnixPlace(folder, stage).listen(), None)


def at_port(port, start=0):
    """How a dialer finds an endpoint; with start 0 it does not know the number yet."""
    return lambda: ([Address(HOST, port)], start)


def in_folder(folder, stage):
    return lambda: ([UnixPlace(folder, stage)], 0)


def link_pair(
    early=None,
    late=None,
    find=None,
    *,
    early_find=None,
    wire=None,
    device="cpu",
    timeout_seconds=20.0,
    **options,
):
    """(the earlier stage's end, the later stage's); the later one dials, unless told otherwise."""
    early, late = early or tls_endpoint(0), late or tls_endpoint(1)
    if wire:
        wire.lead_to(early.port)
    find = find or at_port(wire.port if wire else early.port)
    there, here = early.meet(1, EARLY, early_find, 20.0), late.meet(0, LATE, find, 20.0)
    how = torch.device(device), timeout_seconds
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(SocketLink, there, EARLY, *how, **options)
        two = pool.submit(SocketLink, here, LATE, *how, **options)
        return one.result(), two.result()


def close(*links):
    """Both ends at once, as each waits for the other's end frame; and their endpoints."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda link: link.close(), links))
    for link in links:
        link.connections.endpoint.close()


class Wire:
    """A port that leads to another one, hears all that passes, and can change a bit of it."""

    def __init__(self):
        self.spoilt, self.heard = threading.Event(), []
        self.listener = socket.create_server((HOST, 0))
        self.port = self.listener.getsockname()[1]

    def lead_to(self, port):
        threading.Thread(target=self._listen, args=(port,), daemon=True).start()

    def _listen(self, port):
        while True:
            near, _ = self.listener.accept()
            far = socket.create_connection((HOST, port))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source, sink):
        with suppress(OSError):
            while data := bytearray(source.recv(2**16)):
                if self.spoilt.is_set() and len(data) > 100:  # no beat
                    data[len(data) // 2] ^= 1
                    self.spoilt.clear()
                self.heard.append(bytes(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
