"""How the elastic agents of one replica's machines find each other, again after every restart.

torch's own elastic rendezvous keeps its state pickled in the store. This one keeps counters and flags:
nothing that came from a network is unpickled here. A generation begins when every machine has joined it. A
machine that comes back joins the next one; the others see it waiting, stop their workers and join too.
"""

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from itertools import count

from torch.distributed import (  # public, but pyright does not see that
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

from isthmus.runtime.addresses import Address, Place
from isthmus.runtime.arrivals import Handover
from isthmus.runtime.gate import LOOPBACK, Gate, Way
from isthmus.runtime.handshake import LAUNCHERS, WORKERS, Credentials, Purpose
from isthmus.runtime.process import Log
from isthmus.runtime.waiting import WaitingNotes

POLL_SECONDS = 0.1
LOG_SECONDS = 15.0  # between log lines that say which machine is missing
MOST_DIGITS = 9  # of a generation's number
PORTS = range(20_000, 29_000)  # of meetings on this machine
_picked = count()


class StageRendezvous(RendezvousHandler):
    """Machine `index` of `num_machines`. Machine 0 keeps the store, on loopback, and a gate to it at `place`;
    the others reach it through that gate. One machine alone needs neither. Where links are made over TLS, the
    workers get theirs by `handover`, from this machine's gate; that of a later stage is at `own`."""

    def __init__(
        self,
        name: str,
        index: int,
        num_machines: int,
        place: Place | None = None,
        credentials: Credentials | None = None,
        join_seconds: float = 600.0,
        log: Log = lambda text: None,
        waiting: WaitingNotes | None = None,
        own: Place | None = None,
        handover: Handover | None = None,
    ) -> None:
        self.name, self.index, self.num_machines = name, index, num_machines
        self.place, self.own, self.handover, self.join_seconds = place, own, handover, join_seconds
        self.credentials, self.log, self.waiting = credentials, log, waiting
        self.generation = 0
        self.store: Store | None = None
        self.gate: Gate | None = None
        self.ways: dict[int, Way] = {}
        self.stopped = False

    def get_backend(self) -> str:
        return "isthmus"

    def _connect(self) -> Store:
        if self.store is None:
            try:
                self.store = self._serve() if self.index == 0 else self._reach()
            except (RuntimeError, OSError) as error:
                raise RendezvousConnectionError(str(error).splitlines()[0]) from None
        return self.store

    def _serve(self) -> Store:
        store = self._tcp_store(0, listener=socket.create_server((LOOPBACK, 0)))
        if self.num_machines > 1:
            assert self.place, "several machines meet somewhere"
            self._open_gate(self.place).lead(LAUNCHERS, store.port)
        return store

    def _open_gate(self, place: Place) -> Gate:
        assert self.credentials, "machines meet only by the replica's key"
        if self.gate is None:
            self.gate = Gate(place, self.credentials, self.log)
            if self.handover:
                self.handover.serve(self.gate)
        return self.gate

    def _reach(self) -> Store:
        if self.waiting:
            self.waiting.wait_for(f"stage 0 at {self.place}: no answer", missing=[0])
        if self.own:
            try:
                self._open_gate(self.own)
            except OSError:  # another process of this machine has the port
                if not isinstance(self.own, Address):
                    raise
                self._open_gate(Address(self.own.host, 0))
        return self._tcp_store(self._way(LAUNCHERS, 0))

    def _tcp_store(self, port: int, listener: socket.socket | None = None) -> TCPStore:
        """`listener`: with a socket of its own, the store would listen on every address of this machine."""
        if listener:
            port = listener.getsockname()[1]
        return TCPStore(
            LOOPBACK,
            port,
            None,
            listener is not None,
            timedelta(seconds=self.join_seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )

    def _way(self, what: int, generation: int) -> int:
        """A new port on loopback that leads to what stage 0's gate has for us."""
        assert self.place, "several machines meet somewhere"
        assert self.credentials, "machines meet only by the replica's key"
        if what in self.ways:
            self.ways.pop(what).close()
        purpose = Purpose(what, self.index, generation)
        self.ways[what] = Way(self.place, self.credentials, purpose, self.join_seconds, self.log)
        return self.ways[what].port

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next generation and wait until every machine has joined it."""
        store = self._connect()
        deadline, log_at = time.monotonic() + self.join_seconds, time.monotonic() + LOG_SECONDS
        said = ""
        try:
            self.generation = self._current(store) + 1
            here = [f"{self.generation}/here/{index}" for index in range(self.num_machines)]
            store.set(here[self.index], "1")
            while not store.check(here):
                if self.stopped:
                    raise RendezvousClosedError(f"{self.name} is leaving")
                missing = [index for index, key in enumerate(here) if not store.check([key])]
                trouble = self.gate.door.trouble if self.gate else ""
                words = trouble or f"stage {min(missing, default=0)}: no answer; start `isthmus join` there"
                if missing and self.waiting and words != said:
                    said = words
                    self.waiting.wait_for(words, missing=missing)
                if missing and time.monotonic() > log_at:
                    stays = f"waiting for the machine of stage {missing[0]}; start `isthmus join` there"
                    self.log(trouble or stays)
                    log_at = time.monotonic() + LOG_SECONDS
                if missing and time.monotonic() > deadline:
                    raise RendezvousConnectionError(
                        f"replica {self.name}: stage {missing[0]} did not come within {self.join_seconds:g} s"
                    )
                time.sleep(POLL_SECONDS)
            port = self._begin(store)
            if self.waiting and (said or self.index):
                self.waiting.over()
        except RuntimeError as error:
            raise self._lost(error) from None
        inside = PrefixStore(f"{self.generation}/agents", store)
        return RendezvousInfo(inside, self.index, self.num_machines, RendezvousStoreInfo(LOOPBACK, port))

    def _begin(self, store: Store) -> int:
        """The generation begins. The port on loopback where this machine's workers find stage 0's store."""
        begun = f"{self.generation}/begun"
        if self.index:
            store.wait([begun], timedelta(seconds=self.join_seconds))
            return self._way(WORKERS, self.generation)
        port = free_port(LOOPBACK)
        if self.gate:
            self.gate.lead(WORKERS, port, self.generation)
        store.set("generation", str(self.generation))
        store.set(begun, "1")
        return port

    def _current(self, store: Store) -> int:
        if not store.check(["generation"]):
            return 0
        found = store.get("generation")
        if not found.isdigit() or len(found) > MOST_DIGITS:
            raise RuntimeError(f"its store says that this is generation {found[:20]!r}")
        return int(found)

    def num_nodes_waiting(self) -> int:
        """Machines that have joined the generation after ours already."""
        store = self._connect()
        try:
            following = max(self._current(store), self.generation) + 1
            keys = [f"{following}/here/{index}" for index in range(self.num_machines)]
            waiting = sum(store.check([key]) for key in keys)
            return waiting or int(self._current(store) > self.generation)
        except RuntimeError as error:
            raise self._lost(error) from None

    def _lost(self, error: RuntimeError) -> RendezvousConnectionError:
        self.store = None
        why = str(error).splitlines()[0]
        return RendezvousConnectionError(
            f"replica {self.name}: lost the launcher of stage 0 at {self.place} ({why})"
        )

    def is_closed(self) -> bool:
        return self.stopped

    def set_closed(self) -> None:
        self.stopped = True

    def get_run_id(self) -> str:
        return self.name

    def shutdown(self) -> bool:
        """Free the port, whoever still holds the store."""
        self.store = None
        for way in self.ways.values():
            way.close()
        self.ways.clear()
        if self.handover:
            self.handover.close()
        if self.gate:
            self.gate.close()
            self.gate = None
        return True

    @property
    def use_agent_store(self) -> bool:
        return False


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_port(host: str) -> int:
    """A port for a process that starts later. Not one of those that the system gives to outgoing connections:
    one of these could take it meanwhile. Processes begin at different ports, and go on from there."""
    for _ in range(100):
        port = PORTS.start + (os.getpid() * 97 + next(_picked)) % len(PORTS)
        with suppress(OSError), socket.create_server((host, port), family=family_of(host)):
            return port
    with socket.create_server((host, 0), family=family_of(host)) as probe:
        return probe.getsockname()[1]
