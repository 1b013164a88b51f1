"""How the stages of a replica find each other: members/<replica>/stage-<s>.json, signed by its key.

The process that holds a stage writes its document when it starts: its start number, its addresses, and the
error that ended the previous start. Neighbours read it before each dial, so a stage may come back on another
machine or port. Of two neighbours the later one dials, unless only it has an address.
"""

import fcntl
import ipaddress
import re
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from isthmus.errors import ConfigError
from isthmus.protocol.documents import MOST_ADDRESSES, StageDocument, decode
from isthmus.protocol.trust import Refused, Signer, open_raw
from isthmus.runlog.facts import MAX_WORD
from isthmus.runtime.addresses import Address
from isthmus.runtime.peer import Find
from isthmus.store import Store, StoreError, StoreRefused

KIND = "stage"
MOST_BYTES = 2**14
NOWHERE = "none"  # --advertise none: other machines cannot reach this one
ADDRESS = r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}"
SIOCGIFADDR = 0x8915  # of linux/sockios.h


class StageDocuments:
    """The documents of one replica's stages."""

    def __init__(self, store: Store, run_id: str, signer: Signer) -> None:
        self.store, self.run_id, self.signer = store, run_id, signer

    def key(self, stage: int) -> str:
        return f"members/{self.signer.replica}/stage-{stage}.json"

    def write(self, document: StageDocument) -> None:
        self.store.put(self.key(document.stage), self.signer.seal(KIND, self.run_id, document), durable=False)

    def read(self, stage: int) -> StageDocument | None:
        """A stage's document, or None if there is none that our key signed. Other objects do not count."""
        try:
            data = self.store.get(self.key(stage), max_bytes=MOST_BYTES)
            if data is None:
                return None
            _, body = open_raw(data, KIND, self.run_id, {self.signer.replica: self.signer.public_key})
            document = decode(body, StageDocument, "document of a stage")
            return document if document.stage == stage and all(places_of(document)) else None
        except (Refused, StoreRefused, ConfigError):
            return None

    def begin(
        self,
        stage: int,
        addresses: tuple[str, ...],
        secured: bool = True,
        last_error: str = "",
        clock: Callable[[], float] = time.time,
    ) -> StageDocument:
        """Write the document of a new start. Clocks may be set back; start numbers only grow."""
        before = self.read(stage)
        start = max(before.start + 1 if before else 1, int(clock() * 1e6))
        document = StageDocument(
            stage=stage,
            start=start,
            addresses=addresses,
            secured=secured,
            last_error=last_error[:MAX_WORD],
        )
        self.write(document)
        return document

    def find(self, stage: int, secured: bool = True) -> "Callable[[], tuple[list[Address], int]]":
        """A function that reads a neighbour's addresses anew. Its links must be secured as ours are."""

        def find() -> tuple[list[Address], int]:
            try:
                document = self.read(stage)
            except StoreError as error:
                raise ConnectionError(f"the bucket does not answer ({error})") from None
            if document is None:
                raise ConnectionError("no answer; start `isthmus join` there")
            if document.secured != secured:
                with_it, without = ("it", "we") if secured else ("we", "it")
                raise ConnectionError(
                    f"{with_it} started with --trust-network, {without} did not; give it to all stages of a "
                    "replica, or to none"
                )
            if not secured and not places_of(document):
                raise ConnectionError("it gives no address; leave out --advertise none there")
            return places_of(document), document.start

        return find

    def finder(self, own: StageDocument, neighbour: int) -> Find | None:
        """How this stage makes a link: dial what this finds, or (None) wait to be dialed."""
        return None if neighbour > own.stage and own.addresses else self.find(neighbour)


def places_of(document: StageDocument) -> list[Address]:
    return [Address.parse(each, "an address of a stage") for each in document.addresses]


def advertised(option: str, port: int) -> tuple[str, ...]:
    """A stage's addresses: the value of --advertise, or this machine's interfaces."""
    if option == NOWHERE:
        return ()
    if option:
        address = Address.parse(option, "--advertise", "203.0.113.7:29500")
        if address.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"--advertise is {option}, which is not the address of one machine; give the one at "
                "which the other stages reach this machine"
            )
        if not re.fullmatch(ADDRESS, str(address)):
            raise ConfigError(f'--advertise is "{option}"; write HOST:PORT, for example 203.0.113.7:29500')
        return (str(address),)
    return tuple(str(Address(host, port)) for host in own_hosts())


def own_hosts() -> list[str]:
    """The addresses of this machine's interfaces; loopback only if there are no others."""
    found = [*_ipv4(), *_ipv6()]
    numbers = [ipaddress.ip_address(host) for host in found]
    usable = [str(n) for n in numbers if not (n.is_loopback or n.is_link_local)]
    return usable[:MOST_ADDRESSES] or ["127.0.0.1"]


def _ipv4() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]))
    return found


def _ipv6() -> list[str]:
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        return [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in file]
    return []
