"""A stage's links to its neighbours: Unix sockets on one machine, TLS between machines.

A recipe's `backend = "nccl"` and `--trust-network` select torch's process groups instead.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - it is public

from isthmus.errors import ConfigError
from isthmus.protocol.trust import Signer
from isthmus.replica.control_group import ControlGroup, LinkControlGroup, StageControlGroup
from isthmus.replica.links import LinkPeers, StageEnd
from isthmus.replica.process_groups import connect, open_store, own_address
from isthmus.replica.socket_link import SocketLink
from isthmus.runtime.addresses import Address, listen
from isthmus.runtime.certificates import contexts
from isthmus.runtime.leaving import LinkNote
from isthmus.runtime.peer import Endpoint, Find, Listener, StageStart
from isthmus.runtime.process import JoinConfig, Log
from isthmus.runtime.relay_place import RelayListener, RelayPlace
from isthmus.runtime.stage_documents import NOWHERE, StageDocuments, advertised, places_of
from isthmus.runtime.unix_place import UnixPlace

if TYPE_CHECKING:
    import torch

    from isthmus.config import Member
    from isthmus.protocol.ledger import Ledger

# Times a link's time-out: a stage may be uploading between inner steps, so the others wait longer.
CONTROL_TIMEOUT_FACTOR = 30
FOLDER = "links"  # in the work folder, for the sockets of stages on one machine
WAIT_SECONDS = 1e9  # for a neighbour, since there is nothing else to do
LOOK_SECONDS, LOG_SECONDS = 1.0, 15.0  # between checks for a neighbour; between log lines

Ends = tuple[StageEnd | None, StageEnd | None]


@dataclass(frozen=True, slots=True)
class StageLinks:
    """Makes the links of one stage, and the control group over them."""

    config: JoinConfig
    ledger: "Ledger"
    member: "Member"
    stage: int
    device: "torch.device"
    log: Log
    note: LinkNote
    last_error: str = ""  # why the previous start ended

    def make(self, master: Address, hosted: str = "") -> tuple[Ends, ControlGroup]:
        """`master`: where process groups on one machine meet; `hosted` as in open_store."""
        if self.member.config.backend == "nccl" or self.config.trust_network:
            return self._by_torch(master, hosted)
        return self._by_sockets()

    @property
    def signer(self) -> Signer:
        return self.ledger.signer

    @property
    def documents(self) -> StageDocuments:
        return StageDocuments(self.ledger.store, self.ledger.run.run_id, self.signer)

    @property
    def control_seconds(self) -> float:
        return CONTROL_TIMEOUT_FACTOR * self.config.link_timeout_seconds

    # Sockets

    def _by_sockets(self) -> tuple[Ends, ControlGroup]:
        endpoint, finder = self._here() if self.config.stage is None else self._apart()
        name, last = self.member.name, self.member.config.stages - 1
        neighbours = [n for n in (self.stage - 1, self.stage + 1) if 0 <= n <= last]
        where = "this machine" if self.config.stage is None else ""
        peers = {n: LinkPeers(name, self.stage, n, where) for n in neighbours}
        connections = {n: endpoint.meet(n, peers[n], finder(n), WAIT_SECONDS) for n in neighbours}
        links: dict[int, SocketLink] = {}
        watch = _Watch(endpoint, links, self.note, self.log)
        watch.start()
        try:
            for n in neighbours:
                seconds = self.config.link_timeout_seconds
                links[n] = SocketLink(connections[n], peers[n], self.device, seconds)
        finally:
            watch.end()
        before, after = links.get(self.stage - 1), links.get(self.stage + 1)
        stages = self.member.config.stages
        return (before, after), LinkControlGroup(
            name, self.stage, stages, before, after, self.control_seconds
        )

    def _start(self, start: int) -> StageStart:
        return StageStart(self.ledger.run.run_id, self.member.name, self.stage, start)

    def _here(self) -> tuple[Endpoint, Callable[[int], Find | None]]:
        """The endpoint and finder if all stages are on this machine: the later one dials."""
        folder = Path(self.config.work_dir) / FOLDER
        endpoint = Endpoint(
            self._start(time.time_ns() // 1000), UnixPlace(folder, self.stage).listen(), None, self.log
        )

        def finder(neighbour: int) -> Find | None:
            place = UnixPlace(folder, neighbour)
            return (lambda: ([place], 0)) if neighbour < self.stage else None

        return endpoint, finder

    def _apart(self) -> tuple[Endpoint, Callable[[int], Find | None]]:
        """The endpoint and finder if stages are on several machines: the bucket has their documents."""
        config, documents = self.config, self.documents
        relay = Address.parse(config.relay, "--relay", "192.0.2.10:29520") if config.relay else None
        listener: Listener
        if relay:
            own = documents.begin(self.stage, (), True, self.last_error)
            listener = RelayListener(RelayPlace(relay, self.signer, self._start(own.start)))
        else:
            listening = _listen(config)
            addresses = advertised(config.advertise, listening.getsockname()[1])
            own, listener = documents.begin(self.stage, addresses, True, self.last_error), listening
        endpoint = Endpoint(self._start(own.start), listener, contexts(self.signer), self.log)

        def finder(neighbour: int) -> Find | None:
            if relay:
                return self._at_relay(relay, neighbour) if neighbour < self.stage else None
            return documents.finder(own, neighbour)

        return endpoint, finder

    def _at_relay(self, relay: Address, neighbour: int) -> Find:
        find = self.documents.find(neighbour)

        def found() -> tuple[list[RelayPlace], int]:
            _, start = find()
            host = StageStart(self.ledger.run.run_id, self.member.name, neighbour, start)
            return [RelayPlace(relay, self.signer, host)], start

        return found

    # torch's process groups

    def _by_torch(self, master: Address, hosted: str) -> tuple[Ends, ControlGroup]:
        name, stages = self.member.name, self.member.config.stages
        session, listener, address = f"{self.ledger.run.run_id}/{name}", None, master.host
        if self.config.stage is not None:
            master, address, listener, start = self._trusted()
            hosted = ""
            session = f"{session}/{start}"
        store = open_store(
            replica=name,
            rank=self.stage,
            host=master.host,
            port=master.port,
            listener=listener,
            session=session,
            hosted=hosted,
        )
        before, after = connect(
            replica=name,
            backend=self.member.config.backend,
            stage=self.stage,
            num_stages=stages,
            store=PrefixStore("links", store),
            address=address,
            device=self.device,
            timeout_seconds=self.config.link_timeout_seconds,
        )
        control = StageControlGroup(
            name, self.stage, stages, PrefixStore("control", store), self.control_seconds
        )
        return (before, after), control

    def _trusted(self) -> "tuple[Address, str, socket.socket | None, int]":
        """(stage 0's address, this machine's address, stage 0's listener if it is here, its start number)."""
        documents = self.documents
        if self.stage == 0:
            listener = _listen(self.config)
            addresses = advertised(self.config.advertise, listener.getsockname()[1])
            own = documents.begin(0, addresses, False, self.last_error)
            at = places_of(own)[0]
            return at, at.host, listener, own.start
        documents.begin(self.stage, (), False, self.last_error)
        find, note = documents.find(0, secured=False), self.note
        said = float("-inf")
        while True:
            try:
                places, start = find()
                note.over()
                return places[0], own_address(places[0].host, places[0].port), None, start
            except ConnectionError as error:
                note.wait(0, str(error))
                if time.monotonic() - said > LOG_SECONDS:
                    self.log(f"waiting for stage 0: {error}")
                    said = time.monotonic()
            time.sleep(LOOK_SECONDS)


def _listen(config: JoinConfig) -> socket.socket:
    """Listen at the port in `--advertise`, or at any port."""
    port = 0
    if config.advertise not in ("", NOWHERE):
        port = Address.parse(config.advertise, "--advertise").port
    return listen("", port, "give --advertise a free port")


class _Watch(threading.Thread):
    """Reports the neighbour that a stage waits for. If an existing link breaks meanwhile, the wait ends: that
    neighbour restarts, and so do we."""

    def __init__(self, endpoint: Endpoint, links: Mapping[int, SocketLink], note: LinkNote, log: Log) -> None:
        super().__init__(daemon=True, name="link-watch")
        self.endpoint, self.links, self.note, self.log = endpoint, links, note, log
        self.linked = threading.Event()

    def run(self) -> None:
        said_at = time.monotonic()
        while not self.linked.wait(LOOK_SECONDS):
            missing = [each for each in self.endpoint.neighbours.values() if not each.linked]
            if not missing:
                continue
            if any(link.broken for link in tuple(self.links.values())):
                for each in missing:
                    each.close()
                return
            stage, why = missing[0].stage, missing[0].trouble
            self.note.wait(stage, why)
            if time.monotonic() - said_at > LOG_SECONDS:
                self.log(f"waiting for stage {stage}: {why}")
                said_at = time.monotonic()

    def end(self) -> None:
        self.linked.set()
        self.join()
        self.note.over()


def check_links(config: JoinConfig, member: "Member") -> None:
    """Check that the link options of `join` fit each other and the replica."""
    stages = member.config.stages
    if config.stage is None:
        if given := (config.relay and "--relay") or (config.advertise and "--advertise"):
            raise ConfigError(f"{given} is for stages on several machines; give --stage too, or drop it")
        return
    if not 0 <= config.stage < stages:
        raise ConfigError(
            f"replica {member.name} has the stages 0 to {stages - 1}; there is no stage {config.stage}"
        )
    if config.relay and (config.advertise or config.trust_network):
        raise ConfigError(
            "through a --relay nobody needs an address, and all is TLS; drop --advertise and "
            "--trust-network, or --relay"
        )
    if config.relay:
        Address.parse(config.relay, "--relay", "192.0.2.10:29520")
    advertised(config.advertise, 1)
    if member.config.backend == "nccl" and not config.trust_network:
        raise ConfigError(
            f'replica {member.name} has backend "nccl", which neither encrypts nor authenticates between '
            "machines; pass --trust-network to all its stages where the network is closed to others, or "
            "leave `backend` out of the recipe"
        )
