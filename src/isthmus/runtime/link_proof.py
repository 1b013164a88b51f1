"""The neighbours on a stage link prove to each other that they hold the replica's key (`runtime.handshake`).

The store told each where the other listens, and only holders of the key enter the store; but gloo takes
whoever is first at its port. So the first frames on a link are the handshake. The earlier stage is the gate.
"""

import torch

from isthmus.errors import RunError
from isthmus.replica.links import TensorSpec
from isthmus.replica.process_link import ProcessLink
from isthmus.runtime.handshake import (
    ANSWER_BYTES,
    HELLO,
    LINK,
    SIGNATURE_BYTES,
    Credentials,
    Guest,
    Host,
    Purpose,
    Stranger,
)


def prove_link(link: ProcessLink, credentials: Credentials) -> None:
    """RunError that names the link, where the other end of it is not the neighbour."""
    peers, counts = link.peers, dict(link.counts)
    try:
        if peers.neighbour < peers.stage:
            guest = Guest(credentials, Purpose(LINK, peers.stage))
            _send(link, guest.hello)
            _send(link, guest.prove(_receive(link, ANSWER_BYTES)))
        else:
            host = Host(credentials, _receive(link, HELLO.size))
            _send(link, host.answer())
            if host.check(_receive(link, SIGNATURE_BYTES)) != Purpose(LINK, peers.neighbour):
                raise Stranger("it came for something else")
    except Stranger as error:
        link.broken = True
        raise RunError(peers.lost(f"{error}; somebody else answers at its port")) from None
    link.counts = counts  # of training, not of this


def _send(link: ProcessLink, message: bytes) -> None:
    data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    link.send({"control": data.to(link.device)})


def _receive(link: ProcessLink, num_bytes: int) -> bytes:
    link.expect([(TensorSpec("control", (num_bytes,), torch.uint8),)], 1)
    return link.receive()[0].cpu().numpy().tobytes()
