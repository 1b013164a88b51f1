"""How the processes of a replica find each other: a store that stage 0 keeps, private addresses only, and
then the links between neighbours."""

import ipaddress
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isthmus.errors import ConfigError, RunError
from isthmus.replica.links import Between, ProcessLink

PRIVATE = [
    ipaddress.ip_network(network)
    for network in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")
] + [ipaddress.ip_network(network) for network in ("::1/128", "fc00::/7", "fe80::/10")]


def check_private(host: str, trust_network: bool = False) -> str:
    """A host's address, as a number; ConfigError unless it is loopback or private, or the network trusted.

    A name is resolved once, here, and only what it resolved to is used afterwards.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ConfigError(f'no machine is called "{host}"; give an address or a name that resolves') from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    numbers = list(dict.fromkeys(entry[4][0] for entry in found))
    for number in numbers:
        address = ipaddress.ip_address(number)
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_unspecified or address.is_multicast:
            raise ConfigError(
                f"{host} is no machine's address; give the one at which the other stages reach it"
            )
        inside = any(address in network for network in PRIVATE if network.version == address.version)
        if not inside and not trust_network:
            raise ConfigError(
                f"{host} ({number}) is a public address, and gloo between stages neither encrypts nor "
                "authenticates; put the stages inside a WireGuard tunnel, or pass --trust-network"
            )
    return numbers[0]


def open_store(
    *,
    replica: str,
    stage: int,
    master: str,
    session: str = "",
    join_seconds: float = 120.0,
    trust_network: bool = False,
) -> tuple[dist.Store, str]:
    """Where the processes of a replica meet: a store that stage 0 keeps at `master`, HOST:PORT, and the
    address of this process, from which it reaches the master.

    `session` must be the same for all of them: the run, the replica's incarnation, whatever tells a stage
    that it came to the wrong place.
    """
    host, port = _split(master)
    host = check_private(host, trust_network)
    patience = timedelta(seconds=join_seconds)
    deadline = time.monotonic() + join_seconds
    if stage == 0:
        # Left to itself the store would listen on every address of this machine.
        fd, own = _listen(host, port).detach(), host
        store = dist.TCPStore(host, port, None, True, patience, wait_for_workers=False, master_listen_fd=fd)
        store.set("session", session)
    else:
        own = check_private(_reach(replica, host, port, deadline, join_seconds), trust_network)
        store = dist.TCPStore(host, port, None, False, patience, wait_for_workers=False)
    if _ask(store, "session", deadline, replica) != session:
        raise ConfigError(
            f"replica {replica}: {master} is stage 0 of another run or start than stage {stage}'s"
        )
    return store, own


def connect(
    *,
    replica: str,
    stage: int,
    num_stages: int,
    store: dist.Store,
    address: str,
    device: torch.device | str = "cpu",
    timeout_seconds: float = 60.0,
    join_seconds: float = 120.0,
    trust_network: bool = False,
    backend: str = "gloo",
) -> tuple[ProcessLink | None, ProcessLink | None]:
    """The links of a stage to the one before it and the one after it (None at the ends), once they are up.

    `address` is this stage's own: it listens there and nowhere else, and tells its neighbours that number.
    A store that outlives a restart is handed in with a prefix of its own for every start. Nothing is read
    from the environment. A neighbour may be silent for timeout_seconds.
    """
    if not 0 <= stage < num_stages:
        raise ConfigError(
            f"replica {replica}: there is no stage {stage}; its stages are 0 to {num_stages - 1}"
        )
    address = check_private(address, trust_network)
    patience, deadline = timedelta(seconds=join_seconds), time.monotonic() + join_seconds
    store.set(f"stage/{stage}", address)
    links: list[ProcessLink | None] = []
    for neighbour in (stage - 1, stage + 1):
        if not 0 <= neighbour < num_stages:
            links.append(None)
            continue
        there = _ask(store, f"stage/{neighbour}", deadline, replica)
        if there is None:
            raise RunError(f"replica {replica}: stage {neighbour} did not join within {join_seconds:g} s")
        between = Between(replica, stage, neighbour, check_private(there, trust_network))
        rank, edge = int(neighbour < stage), min(stage, neighbour)
        try:
            forth, back = (
                group(backend, dist.PrefixStore(f"{edge}/{way}", store), rank, 2, address, patience)
                for way in ("forth", "back")
            )
        except RuntimeError as error:
            raise RunError(between.lost(str(error).splitlines()[0])) from None
        out, into = (back, forth) if rank else (forth, back)
        link = ProcessLink(out, into, 1 - rank, between, torch.device(device), timeout_seconds)
        link.store = store
        links.append(link)
    return links[0], links[1]


def group(backend: str, store: dist.Store, rank: int, size: int, address: str, patience: timedelta) -> Any:
    """A process group on our address, which it advertises; there is no default group."""
    if backend == "nccl":
        return dist.ProcessGroupNCCL(store, rank, size, patience)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout, options._threads = patience, 1
    return dist.ProcessGroupGloo(store, rank, size, options)


def _split(master: str) -> tuple[str, int]:
    host, colon, port = master.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f'master is "{master}"; write HOST:PORT, for example 10.0.0.2:29500')
    return host.strip("[]"), int(port)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _reach(replica: str, host: str, port: int, deadline: float, join_seconds: float) -> str:
    """Wait for the master; the address from which it is reached."""
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(left, 5.0))) as probe:
                return probe.getsockname()[0]
        except OSError as error:
            if left <= 0:
                why = error.strerror or "no answer"
                raise ConfigError(
                    f"replica {replica}: no stage 0 at {host}:{port} within {join_seconds:g} s ({why}); "
                    "start it, or correct --master"
                ) from None
            time.sleep(min(0.2, max(0.0, left)))


def _ask(store: dist.Store, key: str, deadline: float, replica: str) -> str | None:
    """What another process has put there, or None when the time is over."""
    try:
        store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        return store.get(key).decode(errors="replace")
    except RuntimeError:
        if time.monotonic() < deadline - 0.5:
            raise RunError(f"replica {replica}: stage 0 went away while the stages met") from None
        return None
