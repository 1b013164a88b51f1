"""How the elastic agents of one replica's machines find each other, again and again.

torch's own elastic rendezvous keeps its state pickled in the store; this one keeps counters and flags, since
nothing that came over a network is unpickled here. A generation begins when every machine has called; one
that comes back calls for the next, the others see it waiting, stop their workers and call too.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

POLL_SECONDS = 0.1
TELL_SECONDS = 15.0  # between lines that say whom a machine waits for


class StageRendezvous(RendezvousHandler):
    """`place` of `num_machines`; machine 0 keeps the store at host:port."""

    def __init__(
        self,
        name: str,
        place: int,
        num_machines: int,
        host: str,
        port: int,
        join_seconds: float = 600.0,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name, self.place, self.num_machines = name, place, num_machines
        self.host, self.port, self.join_seconds = host, port, join_seconds
        self.log = log
        self.generation = 0
        self.store: Store | None = None
        self.stopped = False

    def get_backend(self) -> str:
        return "isthmus"

    def _connect(self) -> Store:
        patience = timedelta(seconds=self.join_seconds)
        if self.store is None:
            try:
                if self.place == 0:
                    family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
                    listener = socket.create_server((self.host, self.port), family=family)
                    self.port = listener.getsockname()[1]
                    fd = listener.detach()
                    self.store = TCPStore(
                        self.host,
                        self.port,
                        None,
                        True,
                        patience,
                        wait_for_workers=False,
                        master_listen_fd=fd,
                    )
                else:
                    self.store = TCPStore(self.host, self.port, None, False, patience, wait_for_workers=False)
            except (RuntimeError, OSError) as error:
                raise RendezvousConnectionError(str(error).splitlines()[0]) from None
        return self.store

    def next_rendezvous(self) -> RendezvousInfo:
        """Call for the next generation and wait until every machine has."""
        store = self._connect()
        deadline, tell = time.monotonic() + self.join_seconds, time.monotonic() + TELL_SECONDS
        try:
            self.generation = self._current(store) + 1
            here = [f"{self.generation}/here/{place}" for place in range(self.num_machines)]
            store.set(here[self.place], "1")
            while not store.check(here):
                if self.stopped:
                    raise RendezvousClosedError(f"{self.name} is leaving")
                missing = [p for p, key in enumerate(here) if not store.check([key])]
                if missing and time.monotonic() > tell:
                    self.log(f"waiting for the machine of stage {missing[0]}; start `isthmus join` there")
                    tell = time.monotonic() + TELL_SECONDS
                if missing and time.monotonic() > deadline:
                    raise RendezvousConnectionError(
                        f"replica {self.name}: stage {missing[0]} did not come within {self.join_seconds:g} s"
                    )
                time.sleep(POLL_SECONDS)
            inside = PrefixStore(f"{self.generation}/agents", store)
            if self.place == 0:
                store.set(f"{self.generation}/port", str(free_port(self.host)))
                store.set("generation", str(self.generation))
            port = int(store.get(f"{self.generation}/port"))
        except RuntimeError as error:
            raise self._lost(error) from None
        return RendezvousInfo(inside, self.place, self.num_machines, RendezvousStoreInfo(self.host, port))

    def _current(self, store: Store) -> int:
        return int(store.get("generation")) if store.check(["generation"]) else 0

    def num_nodes_waiting(self) -> int:
        """Machines that already call for the generation after ours."""
        store = self._connect()
        try:
            following = max(self._current(store), self.generation) + 1
            keys = [f"{following}/here/{place}" for place in range(self.num_machines)]
            waiting = sum(store.check([key]) for key in keys)
            return waiting or int(self._current(store) > self.generation)
        except RuntimeError as error:
            raise self._lost(error) from None

    def _lost(self, error: RuntimeError) -> RendezvousConnectionError:
        self.drop()
        where, why = f"{self.host}:{self.port}", str(error).splitlines()[0]
        return RendezvousConnectionError(
            f"replica {self.name}: lost the launcher of stage 0 at {where} ({why})"
        )

    def drop(self) -> None:
        self.store = None

    def is_closed(self) -> bool:
        return self.stopped

    def set_closed(self) -> None:
        self.stopped = True

    def get_run_id(self) -> str:
        return self.name

    def shutdown(self) -> bool:
        with suppress(Exception):
            self.drop()
        return True

    @property
    def use_agent_store(self) -> bool:
        return False


def free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return probe.getsockname()[1]
