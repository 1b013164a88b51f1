"""A stage's links to its neighbours: Unix sockets on one machine, TLS between machines.

A recipe's `backend = "nccl"` and `--trust-network` select torch's process groups instead.
"""

import socket
import time
from collections.abc import Callable
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
from isthmus.runtime.addresses import Address, UnixPlace, listen
from isthmus.runtime.certificates import contexts
from isthmus.runtime.leaving import LinkNote
from isthmus.runtime.peer import HANDSHAKE_SECONDS, Endpoint, Find, Listener, StageStart
from isthmus.runtime.process import JoinConfig, Log
from isthmus.runtime.relay_place import RelayListener, RelayPlace
from isthmus.runtime.stage_documents import NOWHERE, StageDocuments, advertised, places_of

if TYPE_CHECKING:
    import torch

    from isthmus.config import Member
    from isthmus.protocol.ledger import Ledger

# Times a link's time-out: a stage may be uploading between inner steps, so the others wait longer.
CONTROL_TIMEOUT_FACTOR = 30
FOLDER = "links"  # in the work folder, for the sockets of stages on one machine
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
        connections = {n: endpoint.meet(n, peers[n], finder(n)) for n in neighbours}
        links: dict[int, SocketLink] = {}
        notes = _Notes(self.note, self.log)
        try:
            for n, connection in connections.items():
                while not connection.reach(LOOK_SECONDS):
                    notes.wait(n, connection.trouble)
                    for link in links.values():
                        if link.fault:  # that neighbour restarts, and so do we
                            raise link.fault
                links[n] = SocketLink(connection, peers[n], self.device, self.config.link_timeout_seconds)
        finally:
            notes.note.over()
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
            listener = RelayListener(self._at_relay(relay, self.stage, own.start), HANDSHAKE_SECONDS)
        else:
            listening = _listen(config)
            addresses = advertised(config.advertise, listening.getsockname()[1])
            own, listener = documents.begin(self.stage, addresses, True, self.last_error), listening
        endpoint = Endpoint(self._start(own.start), listener, contexts(self.signer), self.log)

        def finder(neighbour: int) -> Find | None:
            if not relay:
                return documents.finder(own, neighbour)
            find, at = documents.find(neighbour), relay

            def found() -> tuple[list[RelayPlace], int]:
                _, start = find()
                return [self._at_relay(at, neighbour, start)], start

            return found if neighbour < self.stage else None

        return endpoint, finder

    def _at_relay(self, relay: Address, stage: int, start: int) -> RelayPlace:
        return RelayPlace(relay, self.signer, (self.ledger.run.run_id, self.member.name, stage, start))

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
        find, notes = documents.find(0, secured=False), _Notes(self.note, self.log)
        while True:
            try:
                places, start = find()
                notes.note.over()
                return places[0], own_address(places[0].host, places[0].port), None, start
            except ConnectionError as error:
                notes.wait(0, str(error))
            time.sleep(LOOK_SECONDS)


def _listen(config: JoinConfig) -> socket.socket:
    """Listen at the port in `--advertise`, or at any port."""
    port = 0
    if config.advertise not in ("", NOWHERE):
        port = Address.parse(config.advertise, "--advertise").port
    return listen("", port, "give --advertise a free port")


class _Notes:
    """What a stage waits for before it has its links: for its supervisor, and now and then in its log."""

    def __init__(self, note: LinkNote, log: Log) -> None:
        self.note, self.log, self.said_at = note, log, time.monotonic()

    def wait(self, stage: int, why: str) -> None:
        self.note.wait(stage, why)
        if time.monotonic() - self.said_at > LOG_SECONDS:
            self.log(f"waiting for stage {stage}: {why}")
            self.said_at = time.monotonic()


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
