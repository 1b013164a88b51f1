"""A link between neighbouring stages: two connections, one each way, whose frames carry a channel number.

Activations, control and the round's exchange share the link. A connection has one thread at each end, so
neither direction blocks the other and no two threads share an SSL object. The sending thread cuts frames into
chunks and picks the most urgent channel after each: a control frame waits for one chunk, not for the
megabytes behind it. A broken link is not repaired: it raises RunError, and the generation ends.
"""

import atexit
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from isthmus.errors import RunError
from isthmus.replica.framing import (
    BEAT,
    BULK,
    CHANNELS,
    CHUNK_BYTES,
    CONTROL,
    END,
    EXCHANGE,
    RENEW,
    SLOW_BYTES_PER_SECOND,
    SLOW_CHUNK_BYTES,
    OtherFrame,
    bytes_of,
    cut,
    prepare,
    reason,
    receive_header,
    receive_into,
    send_chunk,
    send_signal,
)
from isthmus.replica.links import LINK_PURPOSES, Departure, Frame, HostCopies, LinkPeers

SILENCE_SECONDS, BEAT_SECONDS = 30.0, 1.0  # loading CUDA or compiling can hold the GIL for seconds
MOST_BYTES_HELD = 2**30  # of unread frames: a neighbour may be some frames ahead of us
MOST_BYTES_OF_A_KEY = 2**38  # 2^24 full records: AES-GCM is safe for a few more (RFC 8446, 5.5)
SWITCH_SECONDS = 2e-4  # every TLS record takes the GIL: with Python's 5 ms a busy main thread leaves 6 MB/s
CLOSE_SECONDS = 5.0  # for the threads to end


class Connections(Protocol):
    """The source of a link's two connections."""

    def open(self, outward: bool) -> socket.socket:
        """Open a new authenticated connection to the neighbour for one direction."""
        ...

    def close(self) -> None: ...


UNDROPPED: "WeakSet[SocketLink]" = WeakSet()


@atexit.register
def drop_links() -> None:
    """A thread inside torch while Python ends would abort the process, and its exit status would be lost."""
    for link in list(UNDROPPED):
        link.drop()


@dataclass(eq=False, slots=True)
class Outgoing:
    buffer: Tensor
    copied: Callable[[], None] | None  # waits until a GPU has filled the buffer
    departure: Departure


@dataclass(eq=False, slots=True)
class Channel:
    """One stream of frames each way.

    Only the thread that calls the link frees tensors: a daemon thread that frees one while Python ends aborts
    the process. So the link's threads only count the frames that they have finished.
    """

    outbox: deque[Outgoing] = field(default_factory=deque)
    num_gone: int = 0  # sent frames in the outbox
    num_sent: int = 0  # frames since the start
    bytes_sent: int = 0  # of the current outgoing frame
    inbox: deque[Tensor] = field(default_factory=deque)
    num_arrived: int = 0  # complete frames in the inbox; the next one is arriving
    num_received: int = 0  # frames since the start
    bytes_received: int = 0  # of the current incoming frame

    @property
    def num_waiting(self) -> int:
        """Frames that are not sent yet."""
        return len(self.outbox) - self.num_gone


class SocketLink:
    """A StageEnd over sockets: TLS between machines, Unix sockets on one."""

    def __init__(
        self,
        connections: Connections,
        peers: LinkPeers,
        device: torch.device,
        timeout_seconds: float,
        *,
        silence_seconds: float = SILENCE_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        bytes_of_a_key: int = MOST_BYTES_OF_A_KEY,
    ) -> None:
        """A live neighbour may keep us waiting for timeout_seconds. One that sends or accepts no byte for
        silence_seconds is lost: its link sends heartbeats even while it computes."""
        self.connections, self.peers, self.device = connections, peers, device
        self.timeout_seconds, self.silence_seconds = timeout_seconds, silence_seconds
        self.beat_seconds, self.bytes_of_a_key = beat_seconds, bytes_of_a_key
        self.copies = HostCopies(device)
        self.counts: dict[str, int] = dict.fromkeys(LINK_PURPOSES, 0)
        self.channels = tuple(Channel() for _ in CHANNELS)
        self.expected: deque[Frame] = deque()
        self.ahead, self.chunk_bytes, self.bytes_held = 1, SLOW_CHUNK_BYTES, 0
        self.closing = self.closed = False  # closing once all is sent; closed now
        self.told_end = self.heard_end = False
        self.fault: RunError | None = None
        self.changed = threading.Condition()
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self.sockets: dict[bool, socket.socket] = {}
        for outward in (True, False):
            self._open(outward)
        self.threads = [
            threading.Thread(target=self._run, args=(outward, work), daemon=True, name="link")
            for outward, work in ((True, self._send_all), (False, self._receive_all))
        ]
        for thread in self.threads:
            thread.start()
        UNDROPPED.add(self)

    def _open(self, outward: bool) -> None:
        link = self.connections.open(outward)
        prepare(link, self.silence_seconds)
        with self.changed:
            self.sockets[outward] = link
            if self.closed or self.fault:
                cut(link)

    # What the stage calls

    def expect(self, frames: Sequence[Frame], ahead: int) -> None:
        """Announce the next frames that `receive` will return; at most `ahead` of ours wait to be sent."""
        self.ahead = max(1, ahead)
        self.expected.extend(frames)

    def send(self, frame: Mapping[str, Tensor]) -> Departure:
        """Send a frame. Control frames overtake those of activations and gradients."""
        departure = self._send(CONTROL if "control" in frame else BULK, frame)
        for purpose, tensor in frame.items():
            self.counts[purpose] += tensor.numel() * tensor.element_size()
        return departure

    def receive(self, timeout_seconds: float | None = None) -> tuple[Tensor, ...]:
        frame = self.expected[0]
        due = sum(spec.num_bytes for spec in frame)
        number = CONTROL if any(spec.purpose == "control" for spec in frame) else BULK
        buffer = self._receive(number, timeout_seconds)
        self.expected.popleft()
        if len(buffer) != due:
            self._break(self._other(f"a frame of {len(buffer)} bytes where {due} were due"))
            raise RunError(str(self.fault))
        return self.copies.into(buffer, frame)

    def send_message(self, data: bytes) -> None:
        """Send bytes of any length; they overtake activations, and control overtakes them."""
        # One more byte, because torch has no empty buffer.
        self._send(EXCHANGE, {"message": torch.frombuffer(bytearray(data + b"\0"), dtype=torch.uint8)})

    def receive_message(self, timeout_seconds: float | None = None) -> bytes:
        return self._receive(EXCHANGE, timeout_seconds).numpy().tobytes()[:-1]

    def _send(self, number: int, frame: Mapping[str, Tensor]) -> Departure:
        channel = self.channels[number]
        with self.changed:
            self._wait(
                lambda: not self.fault and channel.num_waiting < self.ahead,
                self.timeout_seconds,
                self.peers.stuck,
            )
            while channel.num_gone:
                channel.outbox.popleft()
                channel.num_gone -= 1
        size, departure = sum(each.numel() * each.element_size() for each in frame.values()), Departure()
        buffer = self.copies.buffer(size)
        copied = self.copies.out(frame, buffer)
        if copied is None:
            departure.now()
        with self.changed:
            channel.outbox.append(Outgoing(buffer, copied, departure))
            self.changed.notify_all()
        return departure

    def _receive(self, number: int, timeout_seconds: float | None) -> Tensor:
        channel = self.channels[number]
        with self.changed:
            self._wait(
                lambda: channel.num_arrived, timeout_seconds or self.timeout_seconds, self.peers.silent
            )
            channel.num_arrived -= 1
            buffer = channel.inbox.popleft()
            self.bytes_held -= len(buffer)
            self.changed.notify_all()
        return buffer

    def _wait(self, happened: Callable[[], object], seconds: float, late: Callable[[float], str]) -> None:
        """Wait, holding `changed`. Frames that arrived are returned before a fault is raised."""
        if not self.changed.wait_for(lambda: happened() or self.fault or self.heard_end, seconds):
            self._fail(late(seconds))
        if not happened():
            raise RunError(str(self.fault or self.peers.lost("it has closed the link")))

    def ready(self) -> bool:
        return True

    @property
    def broken(self) -> bool:
        return self.fault is not None

    def drop(self) -> None:
        """End both threads without a word to the neighbour."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            for link in self.sockets.values():
                cut(link)
        self.connections.close()
        for thread in self.threads:
            thread.join(CLOSE_SECONDS)

    def close(self) -> None:
        """Send the remaining frames and an end frame, and wait for the neighbour's.

        Inside a step the link is dropped instead, and the neighbour notices at once.
        """
        with self.changed:
            self.closing = not self.expected
            self.changed.notify_all()
            if self.closing:
                ended = lambda: self.fault or (self.told_end and self.heard_end)  # noqa: E731
                self.changed.wait_for(ended, self.timeout_seconds)
        self.drop()
        for link in self.sockets.values():
            link.close()

    # The two threads. Each is the only user of its connection.

    def _run(self, outward: bool, work: Callable[[], None]) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # pinned memory belongs to a device, and a thread starts on 0
        try:
            work()
        except (TimeoutError, BlockingIOError):  # from TLS; from a socket with SO_RCVTIMEO or SO_SNDTIMEO
            self._break((self.peers.stuck if outward else self.peers.silent)(self.silence_seconds))
        except OtherFrame as error:
            self._break(self._other(str(error)))
        except RunError as error:
            self._break(str(error))
        except OSError as error:
            self._break(self.peers.lost(reason(error)))

    def _other(self, what: str) -> str:
        peers = self.peers
        return (
            f"replica {peers.replica}: {peers.them} sent stage {peers.stage} {what}; do both run one version "
            "of Isthmus?"
        )

    def _break(self, why: str) -> None:
        """Drop both directions: half a link is useless."""
        with self.changed:
            self._fail(why)
            for link in self.sockets.values():
                cut(link)

    def _fail(self, why: str) -> None:
        self.fault = self.fault or RunError(why)
        self.changed.notify_all()

    def _renew(self, outward: bool) -> None:
        """Replace a connection to get new keys; OpenSSL would use the old ones for ever."""
        self.sockets[outward].close()
        self._open(outward)

    def _send_all(self) -> None:
        key_bytes = 0
        while (number := self._next()) is not None:
            if number not in CHANNELS:
                send_signal(self.sockets[True], number)
            else:
                key_bytes += self._send_chunk(number)
            if key_bytes >= self.bytes_of_a_key:
                send_signal(self.sockets[True], RENEW)
                self._renew(True)
                key_bytes = 0
            if number == END:
                with self.changed:
                    self.told_end = True
                    self.changed.notify_all()
                return

    def _next(self) -> int | None:
        """The most urgent channel with a waiting frame, or a signal; None if the link is dropped."""
        with self.changed:

            def waiting() -> list[int]:
                return [number for number in CHANNELS if self.channels[number].num_waiting]

            due = lambda: waiting() or self.closing or self.closed or self.fault  # noqa: E731
            if not self.changed.wait_for(due, self.beat_seconds):
                return BEAT
            if self.closed or self.fault:
                return None
            return min(waiting(), default=END)

    def _send_chunk(self, number: int) -> int:
        """Send the channel's next chunk; return its size."""
        channel = self.channels[number]
        with self.changed:
            out = channel.outbox[channel.num_gone]
        if out.copied and not channel.bytes_sent:
            out.copied()
            out.departure.now()
        data = bytes_of(out.buffer)
        total, chunk = len(data), data[channel.bytes_sent : channel.bytes_sent + self.chunk_bytes]
        size, started = len(chunk), time.perf_counter()
        send_chunk(self.sockets[True], number, chunk, channel.num_sent, total)
        if size >= SLOW_CHUNK_BYTES:
            slow = size < SLOW_BYTES_PER_SECOND * (time.perf_counter() - started)
            self.chunk_bytes = SLOW_CHUNK_BYTES if slow else CHUNK_BYTES
        del data, chunk, out  # before the thread that frees them sees that they are done
        channel.bytes_sent += size
        if channel.bytes_sent == total:
            with self.changed:
                channel.bytes_sent, channel.num_sent = 0, channel.num_sent + 1
                channel.num_gone += 1
                self.changed.notify_all()
        return size

    def _receive_all(self) -> None:
        while True:
            number, size, frame, total = receive_header(self.sockets[False])
            if number == RENEW:
                self._renew(False)
            elif number == END:
                with self.changed:
                    self.heard_end = True
                    self.changed.notify_all()
                return
            elif number != BEAT:
                self._receive_chunk(number, size, frame, total)

    def _receive_chunk(self, number: int, size: int, frame: int, total: int) -> None:
        if number not in CHANNELS:
            raise OtherFrame(f"a frame on channel {number}, which there is not")
        channel = self.channels[number]
        if frame != channel.num_received:
            raise OtherFrame(f"frame {frame} where {channel.num_received} was due")
        if not channel.bytes_received:
            self._make_room(channel, total)
        with self.changed:
            buffer = channel.inbox[channel.num_arrived]
        if total != len(buffer) or not 0 < size <= min(CHUNK_BYTES, total - channel.bytes_received):
            raise OtherFrame(f"a chunk of {size} bytes that does not fit its frame of {total}")
        view = bytes_of(buffer)[channel.bytes_received : channel.bytes_received + size]
        receive_into(self.sockets[False], view)
        del buffer, view  # before the thread that frees them sees that they are done
        channel.bytes_received += size
        if channel.bytes_received == total:
            with self.changed:
                channel.bytes_received, channel.num_received = 0, channel.num_received + 1
                channel.num_arrived += 1
                self.changed.notify_all()

    def _make_room(self, channel: Channel, total: int) -> None:
        if not 0 < total <= MOST_BYTES_HELD:
            raise OtherFrame(f"a frame of {total} bytes; {MOST_BYTES_HELD} at most are taken")
        with self.changed:
            self.changed.wait_for(
                lambda: self.bytes_held + total <= MOST_BYTES_HELD or self.closed or self.fault
            )
        buffer = self.copies.buffer(total)
        with self.changed:
            channel.inbox.append(buffer)
            self.bytes_held += total
