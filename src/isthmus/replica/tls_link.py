"""A link between machines, over TLS: two connections, one for each direction, each with a thread at each end.

One connection would not do: OpenSSL lets one thread at a time use a connection, and a stage sends while it
receives. A frame has a header, its number and its size, and both are known beforehand: anything else is
refused by name. That nobody on the way changes or repeats a byte is TLS's promise; who the neighbour is was
proved before a link is made of the connections (`runtime.channels`).
"""

import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from isthmus.errors import RunError
from isthmus.replica.links import LINK_PURPOSES, Departure, Frame, HostCopies, LinkPeers, say_goodbye

HEADER = struct.Struct(">QQ")  # the frame's number, from 0; its bytes. 16 bytes: what follows is aligned
CLOSE_SECONDS = 5.0  # for the threads to end
MOST_BYTES_OF_A_KEY = 2**38  # 2^24 full records: AES-GCM is safe for some more (RFC 8446, 5.5)


class Channels(Protocol):
    """Where the connections of a link come from."""

    def open(self, outward: bool) -> ssl.SSLSocket:
        """A new connection to the neighbour, proved, for the one direction or the other."""
        ...

    def close(self) -> None: ...


class TlsLink:
    """A StageEnd between machines."""

    def __init__(
        self,
        channels: Channels,
        peers: LinkPeers,
        device: torch.device,
        timeout_seconds: float,
        bytes_of_a_key: int = MOST_BYTES_OF_A_KEY,
    ) -> None:
        self.channels, self.peers, self.timeout_seconds = channels, peers, timeout_seconds
        self.bytes_of_a_key = bytes_of_a_key
        self.copies = HostCopies(device)
        self.device = device
        self.counts: dict[str, int] = dict.fromkeys(LINK_PURPOSES, 0)
        self.expected: deque[Frame] = deque()
        # Tensors are freed by the thread that calls us: freed in another one while Python ends, a tensor
        # would abort the process.
        self.posted: deque[tuple[Tensor, Frame]] = deque()  # what the receiving thread fills, in this order
        self.num_arrived = 0  # of those posted
        self.outbox: deque[tuple[Tensor, Callable[[], None] | None, Departure]] = deque()
        self.num_gone = 0  # of those in the outbox
        self.ahead, self.closed = 1, False
        self.fault: RunError | None = None
        self.changed = threading.Condition()
        self.links: dict[bool, ssl.SSLSocket] = {}
        for outward in (True, False):
            self.links[outward] = channels.open(outward)
        self.threads = [
            threading.Thread(target=self._run, args=(outward, frames), daemon=True, name="tls")
            for outward, frames in ((True, self._send_frames), (False, self._receive_frames))
        ]
        for thread in self.threads:
            thread.start()

    def expect(self, frames: Sequence[Frame], ahead: int) -> None:
        self.expected.extend(frames)
        self.ahead = max(1, ahead)
        self._post()

    def _post(self) -> None:
        while self.expected and len(self.posted) < self.ahead:
            frame = self.expected.popleft()
            buffer = self.copies.buffer(HEADER.size + sum(spec.num_bytes for spec in frame))
            with self.changed:
                self.posted.append((buffer, frame))
                self.changed.notify_all()

    def send(self, frame: Mapping[str, Tensor]) -> Departure:
        late = self.peers.stuck(self.timeout_seconds)
        self._wait(lambda: not self.fault and self.num_waiting < self.ahead, self.timeout_seconds, late)
        sizes = {purpose: tensor.numel() * tensor.element_size() for purpose, tensor in frame.items()}
        buffer, departure = self.copies.buffer(HEADER.size + sum(sizes.values())), Departure()
        copied = self.copies.out(frame, buffer[HEADER.size :])
        if copied is None:
            departure.now()
        with self.changed:
            while self.num_gone:
                self.outbox.popleft()
                self.num_gone -= 1
            self.outbox.append((buffer, copied, departure))
            self.changed.notify_all()
        for purpose, size in sizes.items():
            self.counts[purpose] += size
        return departure

    @property
    def num_waiting(self) -> int:
        """Frames that are not sent yet."""
        return len(self.outbox) - self.num_gone

    def receive(self, timeout_seconds: float | None = None) -> tuple[Tensor, ...]:
        seconds = timeout_seconds or self.timeout_seconds
        self._wait(lambda: self.num_arrived, seconds, self.peers.silent(seconds))
        with self.changed:
            buffer, frame = self.posted.popleft()
            self.num_arrived -= 1
        self._post()
        return self.copies.into(buffer[HEADER.size :], frame)

    def _wait(self, happened: Callable[[], object], seconds: float, late: str) -> None:
        """What has arrived is handed out before a fault is told."""
        with self.changed:
            if not self.changed.wait_for(lambda: happened() or self.fault, seconds):
                self.fault = RunError(late)
            if not happened():
                assert self.fault
                raise RunError(str(self.fault))

    def ready(self) -> bool:
        return True

    @property
    def broken(self) -> bool:
        return self.fault is not None

    def close(self) -> None:
        """A link that is closed in the middle of a step is dropped: the neighbour sees that it is closed."""
        with suppress(RunError):
            if not self.broken and not self.posted:
                say_goodbye(self, self.device)
                late = self.peers.stuck(self.timeout_seconds)
                self._wait(lambda: not self.num_waiting, self.timeout_seconds, late)
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for link in self.links.values():
            cut(link)
        self.channels.close()
        for thread in self.threads:
            thread.join(CLOSE_SECONDS)

    # The two threads. Each is the only one that uses its connection.

    def _run(self, outward: bool, frames: Callable[[], None]) -> None:
        try:
            frames()
        except (OSError, RunError) as error:
            why = str(error) if isinstance(error, RunError) else self.peers.lost(reason(error))
            with self.changed:
                self.fault = self.fault or RunError(why)
                self.changed.notify_all()
        finally:
            self.links[outward].close()

    def _send_frames(self) -> None:
        number = sent = 0
        while self._next(lambda: self.num_waiting):
            sent = self._renewed(True, sent + self._send_frame(number))
            number += 1
            with self.changed:
                self.num_gone += 1
                self.changed.notify_all()

    def _send_frame(self, number: int) -> int:
        with self.changed:
            buffer, copied, departure = self.outbox[self.num_gone]
        if copied:
            copied()
            departure.now()
        data = bytes_of(buffer)
        HEADER.pack_into(data, 0, number, len(data) - HEADER.size)
        self.links[True].sendall(data)
        return len(data)

    def _receive_frames(self) -> None:
        number = came = 0
        while self._next(lambda: len(self.posted) > self.num_arrived):
            came = self._renewed(False, came + self._receive_frame(number))
            number += 1
            with self.changed:
                self.num_arrived += 1
                self.changed.notify_all()

    def _receive_frame(self, number: int) -> int:
        with self.changed:
            buffer, _ = self.posted[self.num_arrived]
        data, at = bytes_of(buffer), 0
        while at < len(data):
            got = self.links[False].recv_into(data[at:])
            if not got:
                raise ConnectionResetError("closed")
            if at < HEADER.size <= at + got:
                self._check(HEADER.unpack_from(data), (number, len(data) - HEADER.size))
            at += got
        return at

    def _next(self, happened: Callable[[], object]) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: happened() or self.closed)
            return not self.closed

    def _check(self, came: tuple[int, ...], due: tuple[int, int]) -> None:
        if came != due:
            peers = self.peers
            raise RunError(
                f"replica {peers.replica}: {peers.them} sent stage {peers.stage} frame {came[0]} of "
                f"{came[1]} bytes, and frame {due[0]} of {due[1]} bytes was due; do both run one version of "
                "Isthmus?"
            )

    def _renewed(self, outward: bool, num_bytes: int) -> int:
        """Both ends count the same bytes, so both come to the end of a key after the same frame."""
        if num_bytes < self.bytes_of_a_key:
            return num_bytes
        old, self.links[outward] = self.links[outward], self.channels.open(outward)
        old.close()
        return 0


def bytes_of(buffer: Tensor) -> memoryview:
    array: Any = buffer.numpy()  # whose stubs do not say that it is a buffer
    return memoryview(array)


def cut(link: ssl.SSLSocket) -> None:
    """Wakes the thread that uses it, which closes it."""
    with suppress(OSError):
        socket.socket.shutdown(link, socket.SHUT_RDWR)


def reason(error: OSError) -> str:
    """Words for what happened to a connection."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError | ValueError):
        return "the connection was closed"
    if isinstance(error, ssl.SSLError):
        return f"what came was changed on its way, or is not of this link ({error.reason or 'TLS'})"
    return error.strerror or str(error)
