"""How the elastic agents of one replica's machines find each other, again after every restart.

torch's own elastic rendezvous keeps its state pickled in the store. This one keeps counters and flags:
nothing that came from a network is unpickled here. A generation begins when every machine has joined it. A
machine that comes back joins the next one; the others see it waiting, stop their workers and join too.
"""

import socket
import time
from datetime import timedelta

from torch.distributed import (  # public, but pyright does not see that
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

from isthmus.runtime.process import Log
from isthmus.runtime.waiting import WaitingNotes

POLL_SECONDS = 0.1
LOG_SECONDS = 15.0  # between log lines that say which machine is missing


class StageRendezvous(RendezvousHandler):
    """Machine `index` of `num_machines`; machine 0 keeps the store at host:port."""

    def __init__(
        self,
        name: str,
        index: int,
        num_machines: int,
        host: str,
        port: int,
        join_seconds: float = 600.0,
        log: Log = lambda text: None,
        waiting: WaitingNotes | None = None,
    ) -> None:
        self.name, self.index, self.num_machines = name, index, num_machines
        self.host, self.port, self.join_seconds = host, port, join_seconds
        self.log, self.waiting = log, waiting
        self.generation = 0
        self.store: Store | None = None
        self.stopped = False

    def get_backend(self) -> str:
        return "isthmus"

    def _connect(self) -> Store:
        if self.store is None:
            try:
                fd = None
                if self.index == 0:
                    listener = socket.create_server((self.host, self.port), family=family_of(self.host))
                    self.port = listener.getsockname()[1]
                    fd = listener.detach()
                elif self.waiting:
                    self.waiting.wait_for(f"stage 0 at {self.host}:{self.port}: no answer")
                self.store = TCPStore(
                    self.host,
                    self.port,
                    None,
                    self.index == 0,
                    timedelta(seconds=self.join_seconds),
                    wait_for_workers=False,
                    master_listen_fd=fd,
                )
            except (RuntimeError, OSError) as error:
                raise RendezvousConnectionError(str(error).splitlines()[0]) from None
        return self.store

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next generation and wait until every machine has joined it."""
        store = self._connect()
        deadline, log_at = time.monotonic() + self.join_seconds, time.monotonic() + LOG_SECONDS
        said: list[int] = []
        try:
            self.generation = self._current(store) + 1
            here = [f"{self.generation}/here/{index}" for index in range(self.num_machines)]
            store.set(here[self.index], "1")
            while not store.check(here):
                if self.stopped:
                    raise RendezvousClosedError(f"{self.name} is leaving")
                missing = [index for index, key in enumerate(here) if not store.check([key])]
                if missing and self.waiting and missing != said:
                    said = missing
                    self.waiting.wait_for(f"stage {missing[0]}: no answer; start `isthmus join` there")
                if missing and time.monotonic() > log_at:
                    self.log(f"waiting for the machine of stage {missing[0]}; start `isthmus join` there")
                    log_at = time.monotonic() + LOG_SECONDS
                if missing and time.monotonic() > deadline:
                    raise RendezvousConnectionError(
                        f"replica {self.name}: stage {missing[0]} did not come within {self.join_seconds:g} s"
                    )
                time.sleep(POLL_SECONDS)
            inside = PrefixStore(f"{self.generation}/agents", store)
            if self.index == 0:
                store.set(f"{self.generation}/port", str(free_port(self.host)))
                store.set("generation", str(self.generation))
            port = int(store.get(f"{self.generation}/port"))
            if self.waiting and (said or self.index):
                self.waiting.over()
        except RuntimeError as error:
            raise self._lost(error) from None
        return RendezvousInfo(inside, self.index, self.num_machines, RendezvousStoreInfo(self.host, port))

    def _current(self, store: Store) -> int:
        return int(store.get("generation")) if store.check(["generation"]) else 0

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
        address, why = f"{self.host}:{self.port}", str(error).splitlines()[0]
        return RendezvousConnectionError(
            f"replica {self.name}: lost the launcher of stage 0 at {address} ({why})"
        )

    def is_closed(self) -> bool:
        return self.stopped

    def set_closed(self) -> None:
        self.stopped = True

    def get_run_id(self) -> str:
        return self.name

    def shutdown(self) -> bool:
        self.store = None
        return True

    @property
    def use_agent_store(self) -> bool:
        return False


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_port(host: str) -> int:
    with socket.create_server((host, 0), family=family_of(host)) as probe:
        return probe.getsockname()[1]
