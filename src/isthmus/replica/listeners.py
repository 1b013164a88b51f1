"""gloo's listeners stop listening once the links are made.

gloo keeps its listener open as long as the link lives, keeps every connection that a stranger makes to it,
and aborts the process when it has no file descriptor left. Its socket is not ours to close; but Linux lets us
attach a filter to it that drops every packet before gloo sees one. What is connected stays connected. Where
there is no /proc, or no such filter, nothing changes.
"""

import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SO_ATTACH_FILTER = 26  # of asm-generic/socket.h; Python has no name for it
RETURN_0 = struct.pack("HBBI", 0x06, 0, 0, 0)  # struct sock_filter: BPF_RET, keep 0 bytes of the packet

_one_at_a_time = threading.Lock()


@contextmanager
def new_listeners() -> Iterator[list[socket.socket]]:
    """The listening sockets that the block opens; copies of them, to be closed."""
    with _one_at_a_time:
        before, found = _listening(), []
        try:
            yield found
        finally:
            now = _listening()
            found += [now.pop(inode) for inode in now.keys() - before.keys()]
            for copy in (*before.values(), *now.values()):
                copy.close()


def _listening() -> dict[int, socket.socket]:
    """This process's listening sockets by inode; copies of them."""
    found = {}
    with suppress(OSError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # closed meanwhile
                at = os.fstat(fd)
                if not stat.S_ISSOCK(at.st_mode):
                    continue
                copy = socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM)
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[at.st_ino] = copy
                else:
                    copy.close()
    return found


def go_deaf(listener: socket.socket) -> None:
    """Nobody reaches this listener any more."""
    program = ctypes.create_string_buffer(RETURN_0, len(RETURN_0))
    with listener, suppress(OSError):
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
        )
