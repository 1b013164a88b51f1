"""Neighbouring stages on different machines make their links: over TLS, by the replica's key."""

import ipaddress
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from isthmus.errors import RunError
from isthmus.replica.links import LinkPeers
from isthmus.replica.process_groups import meet_neighbours
from isthmus.replica.tls_link import TlsLink
from isthmus.runtime.addresses import Address, Meeting, Place
from isthmus.runtime.arrivals import Arrivals, LaunchersGate
from isthmus.runtime.channels import GateChannels, GuestChannels
from isthmus.runtime.handshake import Credentials
from isthmus.runtime.process import LauncherConfig

if TYPE_CHECKING:
    from isthmus.replica.process_groups import Store

TLS = "tls"
MOST_TEXT = 100
Find = Callable[[int, str], Place]  # a stage's gate, from its number and the address that it gave


def connect_as_told(
    config: LauncherConfig, credentials: Credentials, *, address: str, **common: Any
) -> tuple[TlsLink | None, TlsLink | None]:
    """The links of this machine's stage, by the address or the relay that its launcher was given."""
    if config.relay:
        relay = Address.parse(config.relay, "--relay")
        address, find = f"relay {relay}", at_relay(relay, credentials)
    else:
        find = at_address(credentials.signer.replica, Address.parse(config.master, "--master"))
    arrivals = LaunchersGate(config.handover) if config.handover else None
    return connect_secured(credentials=credentials, address=address, arrivals=arrivals, find=find, **common)


def connect_secured(
    *,
    stage: int,
    num_stages: int,
    store: "Store",
    credentials: Credentials,
    address: str,
    arrivals: Arrivals | None,
    find: Find,
    device: torch.device | str = "cpu",
    timeout_seconds: float = 60.0,
    join_seconds: float = 120.0,
) -> tuple[TlsLink | None, TlsLink | None]:
    """A stage's links to the one before it and the one after it, None at the ends.

    In the store each stage says where its gate is, and a number of this start. All but the last have
    `arrivals`; of the last, `address` is what messages call it. A neighbour may be silent for
    timeout_seconds.
    """
    replica, deadline = credentials.signer.replica, time.monotonic() + join_seconds
    own, address = (arrivals.session, arrivals.address) if arrivals else (0, address)

    def linked(neighbour: int, said: str) -> TlsLink:
        session, there = _understood(said, replica, stage, neighbour)
        seconds = max(1.0, deadline - time.monotonic())
        if neighbour < stage:
            gate = find(neighbour, there)
            peers = LinkPeers(replica, stage, neighbour, str(gate))
            channels = GuestChannels(gate, session, credentials, peers, seconds)
        else:
            assert arrivals, "all stages but the last have a gate"
            peers = LinkPeers(replica, stage, neighbour, there)
            channels = GateChannels(arrivals, credentials, peers, seconds)
        try:
            return TlsLink(channels, peers, torch.device(device), timeout_seconds)
        except BaseException:
            channels.close()
            raise

    told = f"{TLS} {own:x} {address}"
    return meet_neighbours(store, replica, stage, num_stages, told, linked, join_seconds)


def _understood(said: str, replica: str, stage: int, neighbour: int) -> tuple[int, str]:
    """(session, address) of what a neighbour says about itself."""
    found = re.fullmatch(rf"{TLS} ([0-9a-f]{{1,14}}) (\S.{{0,60}})", said)
    if found:
        return int(found[1], 16), found[2]
    try:
        ipaddress.ip_address(said)
    except ValueError:
        raise RunError(
            f"replica {replica}: stage {neighbour} said {said[:MOST_TEXT]!r} where its address was due"
        ) from None
    raise RunError(
        f"replica {replica}: stage {neighbour} was started with --trust-network, and stage {stage} was not; "
        "give it to all stages of a replica, or to none"
    )


def at_relay(relay: Address, credentials: Credentials) -> Find:
    return lambda stage, said: Meeting(relay, credentials, stage)


def at_address(replica: str, master: Place) -> Find:
    """Gates that listen, at the addresses that stages give; stage 0's where this machine was told that it is,
    which may be an address that stage 0's own machine does not have."""

    def find(stage: int, said: str) -> Place:
        if stage == 0:
            return master
        host, _, port = said.rpartition(":")
        try:
            number = str(ipaddress.ip_address(host.strip("[]")))
            if not port.isdecimal() or not 0 < int(port) < 2**16:
                raise ValueError
        except ValueError:
            raise RunError(f"replica {replica}: stage {stage} gave the address {said!r}") from None
        return Address(number, int(port))

    return find
