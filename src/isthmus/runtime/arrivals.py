"""How connections get from a gate, which a launcher keeps, to the worker that makes a link of them.

A connection is handed over as it is: its file descriptor goes over a Unix socket in a folder that only its
owner may enter. So all of a machine's stages are met at one place, and no byte of a link passes through the
launcher.
"""

import os
import queue
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from isthmus.errors import RunError
from isthmus.runtime.gate import Gate
from isthmus.runtime.handshake import BACK, FORTH, Purpose
from isthmus.runtime.splice import shut

SESSION = struct.Struct(">Q")
ARRIVED = struct.Struct(">BH")  # what the guest comes for, its stage
MOST_ADDRESS_BYTES = 255
REGISTER_SECONDS = 10.0


def new_session() -> int:
    """Of one start of a worker: who knows it has read it in this start's store."""
    return int.from_bytes(os.urandom(7), "big")


class Arrivals(Protocol):
    """What a worker sees of its machine's gate."""

    session: int
    address: str  # where neighbours find the gate

    def next(self) -> tuple[socket.socket, Purpose]:
        """Waits for a guest who has proved that it holds the key; OSError when this is closed."""
        ...

    def close(self) -> None: ...


class OwnGate:
    """The gate is in this very process."""

    def __init__(self, gate: Gate, session: int | None = None) -> None:
        self.gate, self.address = gate, str(gate.place)
        self.session = new_session() if session is None else session
        self.guests: queue.Queue[tuple[socket.socket, Purpose] | None] = queue.Queue()
        gate.hand_over((FORTH, BACK), self._take, self.session)

    def _take(self, link: socket.socket, purpose: Purpose) -> None:
        self.guests.put((link.dup(), purpose))  # the gate closes its own

    def next(self) -> tuple[socket.socket, Purpose]:
        found = self.guests.get()
        if found is None:
            raise ConnectionAbortedError("closed here")
        return found

    def close(self) -> None:
        self.guests.put(None)
        self.gate.close()


class LaunchersGate:
    """The gate is in the launcher, which serves it in this folder (`Handover`)."""

    def __init__(self, folder: str) -> None:
        self.session = new_session()
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.link.settimeout(REGISTER_SECONDS)
            with _path_in(Path(folder)) as path:
                self.link.connect(path)
            self.link.sendall(SESSION.pack(self.session))
            self.address = self.link.recv(MOST_ADDRESS_BYTES).decode()
        except OSError as error:
            self.link.close()
            raise RunError(f"the launcher of this machine does not answer in {folder}: {error}") from None
        self.link.settimeout(None)

    def next(self) -> tuple[socket.socket, Purpose]:
        data, descriptors, _, _ = socket.recv_fds(self.link, ARRIVED.size, 1)
        if len(data) != ARRIVED.size or len(descriptors) != 1:
            raise ConnectionAbortedError("the launcher is gone")
        what, stage = ARRIVED.unpack(data)
        return socket.socket(fileno=descriptors[0]), Purpose(what, stage, self.session)

    def close(self) -> None:
        shut(self.link, socket.SHUT_RDWR)
        self.link.close()


class Handover:
    """The launcher's side: the worker that came last gets those who come for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)  # of a launcher that was killed
        folder.mkdir(mode=0o700, parents=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with _path_in(folder) as path:
            self.listener.bind(path)
        self.listener.listen()

    def serve(self, gate: Gate) -> None:
        threading.Thread(target=self._serve, args=(gate,), daemon=True, name="handover").start()

    def close(self) -> None:
        shut(self.listener, socket.SHUT_RDWR)
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _serve(self, gate: Gate) -> None:
        with suppress(OSError):
            while True:
                worker, _ = self.listener.accept()
                with suppress(OSError, struct.error):
                    worker.settimeout(REGISTER_SECONDS)
                    (session,) = SESSION.unpack(worker.recv(SESSION.size))
                    gate.hand_over((FORTH, BACK), _Worker(worker).take, session)
                    worker.sendall(str(gate.place).encode())


@contextmanager
def _path_in(folder: Path) -> Iterator[str]:
    """Of the socket there. The kernel takes 107 characters at most, and folders have longer names."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/gate"
    finally:
        os.close(descriptor)


class _Worker:
    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def take(self, link: socket.socket, purpose: Purpose) -> None:
        socket.send_fds(self.link, [ARRIVED.pack(purpose.what, purpose.stage)], [link.fileno()])
