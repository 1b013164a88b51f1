"""Frames on one connection of a link: a header before each chunk, and the socket settings."""

import socket
import ssl
import struct
from contextlib import suppress
from typing import Any

from torch import Tensor

HEADER = struct.Struct(
    ">B3xIQQ"
)  # channel or signal; bytes of this chunk; its frame's number, its frame's bytes
CONTROL, EXCHANGE, BULK = CHANNELS = range(3)  # the most urgent first
BEAT, RENEW, END = range(253, 256)  # signals: a header without data
CHUNK_BYTES, SLOW_CHUNK_BYTES = 2**18, 2**16
SLOW_BYTES_PER_SECOND = 5e6  # below this a large chunk would delay a control frame by 50 ms
RECORD_BYTES = 2**14  # in TLS
UNSENT_BYTES = 2**17  # per connection in the kernel, which would buffer megabytes that nothing can overtake


class OtherFrame(Exception):
    """A header that does not belong to the expected frame; the text says what it announced."""


def send_signal(link: socket.socket, signal: int) -> None:
    link.sendall(HEADER.pack(signal, 0, 0, 0))


def send_chunk(link: socket.socket, channel: int, chunk: memoryview, number: int, total: int) -> None:
    first = RECORD_BYTES - HEADER.size  # fills one record together with the header
    link.sendall(HEADER.pack(channel, len(chunk), number, total) + chunk[:first])
    if len(chunk) > first:
        link.sendall(chunk[first:])


def receive_header(link: socket.socket) -> tuple[int, int, int, int]:
    data = bytearray(HEADER.size)
    receive_into(link, memoryview(data))
    return HEADER.unpack(data)


def receive_into(link: socket.socket, view: memoryview) -> None:
    """Fill the view; TimeoutError or BlockingIOError if no data came for as long as `prepare` allowed."""
    wait_for_all = 0 if isinstance(link, ssl.SSLSocket) else socket.MSG_WAITALL
    while view:
        got = link.recv_into(view, 0, wait_for_all)
        if not got:
            raise ConnectionResetError("closed")
        view = view[got:]


def prepare(link: socket.socket, silence_seconds: float) -> None:
    """Set the options of a connection that carries chunks."""
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    if isinstance(link, ssl.SSLSocket):
        link.settimeout(silence_seconds)
        return
    # A socket with Python's own timeout does not block, and MSG_WAITALL needs a blocking one.
    link.settimeout(None)
    limit = struct.pack("ll", int(silence_seconds), int(silence_seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(socket.SOL_SOCKET, option, limit)


def bytes_of(buffer: Tensor) -> memoryview:
    array: Any = buffer.numpy()  # its stubs do not say that it is a buffer
    return memoryview(array)


def cut(link: socket.socket) -> None:
    """Wake the thread that uses the connection; each end sees it closed."""
    with suppress(OSError):
        socket.socket.shutdown(link, socket.SHUT_RDWR)  # SSLSocket.shutdown would touch the SSL object


def reason(error: OSError) -> str:
    """Describe a connection's error in words."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError | ValueError):
        return "the connection was closed"
    if isinstance(error, ssl.SSLError):
        return f"what came was changed on its way, or is not of this link ({error.reason or 'TLS'})"
    return error.strerror or str(error)
