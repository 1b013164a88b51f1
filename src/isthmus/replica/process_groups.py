"""How the processes of a replica find each other: stage 0's store, and links by gloo or NCCL."""

import ipaddress
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import (  # torch's stubs do not list these names as exported
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from isthmus.errors import ConfigError, RunError, Unreachable
from isthmus.replica.links import LinkPeers
from isthmus.replica.listeners import go_deaf, new_listeners
from isthmus.replica.process_link import ProcessLink

Store = TorchStore
Link = TypeVar("Link")
MAX_ADDRESS = 64


def resolve(host: str) -> str:
    """A host's address, as a number. A name is resolved only here; afterwards its address is used."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ConfigError(f'no machine is called "{host}"; give an address or a name that resolves') from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    number = str(found[0][4][0])
    address = ipaddress.ip_address(number)
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(
            f"{host} is not the address of one machine; give the one at which the other stages reach it"
        )
    return number


def open_store(
    *,
    replica: str,
    stage: int,
    master: str,
    session: str = "",
    join_seconds: float = 120.0,
) -> tuple[Store, str]:
    """The store of a replica's processes, which stage 0 serves at `master`, HOST:PORT, and the address from
    which this process reaches it.

    `session` must be the same for all of them, such as the run and the replica's incarnation: with another
    one, a stage has the address of another replica.
    """
    host, port = _split(master)
    host = resolve(host)
    timeout = timedelta(seconds=join_seconds)
    deadline = time.monotonic() + join_seconds
    if stage == 0:
        # With a socket of its own the store would listen on every address of this machine.
        fd, own = _listen(host, port).detach(), host
        store = TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=fd)
        store.set("session", session)
    else:
        own = resolve(_reach(replica, host, port, deadline, join_seconds))
        try:
            store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        except RuntimeError:  # somebody took the connection, and did not answer as a store
            raise Unreachable(_absent(replica, host, port, join_seconds, "no store answers")) from None
    if ask(store, "session", deadline, replica) != session:
        raise Unreachable(
            f"replica {replica}: {master} is stage 0 of another run or start than stage {stage}'s"
        )
    return store, own


def own_address(master: str, stage: int) -> str:
    """The address at which a stage's neighbours reach it: the one from which it reaches the master itself."""
    host, port = _split(master)
    host = resolve(host)
    if stage == 0:
        return host
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return resolve(probe.getsockname()[0])
    except OSError as error:
        raise Unreachable(f"no way from here to {host}: {error.strerror}; look at the network") from None


def connect(
    *,
    replica: str,
    stage: int,
    num_stages: int,
    store: Store,
    address: str,
    device: torch.device | str = "cpu",
    timeout_seconds: float = 60.0,
    join_seconds: float = 120.0,
    backend: str = "gloo",
    prove: Callable[[ProcessLink], None] | None = None,
) -> tuple[ProcessLink | None, ProcessLink | None]:
    """Connect a stage to the one before it and the one after it; its links, None at the ends.

    `address` is this stage's own: it listens only there, and publishes that number to its neighbours. For a
    store that outlives a restart, give every start a prefix of its own. Nothing is read from the environment.
    A neighbour may be silent for timeout_seconds. `prove` sees to it that it is the right one: gloo takes
    whoever comes first.
    """
    if not 0 <= stage < num_stages:
        raise ConfigError(
            f"replica {replica}: there is no stage {stage}; its stages are 0 to {num_stages - 1}"
        )
    address = resolve(address)
    timeout = timedelta(seconds=join_seconds)

    def linked(neighbour: int, said: str) -> ProcessLink:
        peers = LinkPeers(replica, stage, neighbour, _checked(said, replica, stage, neighbour))
        rank, edge = int(neighbour < stage), min(stage, neighbour)
        try:
            forward, back = (
                make_group(backend, PrefixStore(f"{edge}/{way}", store), rank, 2, address, timeout)
                for way in ("forth", "back")
            )
        except RuntimeError as error:
            raise RunError(peers.lost(str(error).splitlines()[0])) from None
        out, into = (back, forward) if rank else (forward, back)
        link = ProcessLink(out, into, 1 - rank, peers, torch.device(device), timeout_seconds)
        link.store = store
        if prove:
            prove(link)
        return link

    return meet_neighbours(store, replica, stage, num_stages, address, linked, join_seconds)


def meet_neighbours(
    store: Store,
    replica: str,
    stage: int,
    num_stages: int,
    own: str,
    linked: Callable[[int, str], Link],
    join_seconds: float,
) -> tuple[Link | None, Link | None]:
    """Say in the store how this stage is found, and make a link with each neighbour by what that one says:
    (to the stage before, to the one after), None at the ends."""
    deadline = time.monotonic() + join_seconds
    store.set(f"stage/{stage}", own)
    links: list[Link | None] = []
    for neighbour in (stage - 1, stage + 1):
        if not 0 <= neighbour < num_stages:
            links.append(None)
            continue
        said = ask(store, f"stage/{neighbour}", deadline, replica)
        if said is None:
            raise RunError(f"replica {replica}: stage {neighbour} did not join within {join_seconds:g} s")
        links.append(linked(neighbour, said))
    return links[0], links[1]


def _checked(there: str, replica: str, stage: int, neighbour: int) -> str:
    """The address that a neighbour gave: a number, and that of one machine."""
    if there.startswith("tls "):
        raise RunError(
            f"replica {replica}: stage {stage} was started with --trust-network, and stage {neighbour} was "
            "not; give it to all stages of a replica, or to none"
        )
    try:
        return resolve(str(ipaddress.ip_address(there[:MAX_ADDRESS])))
    except ValueError as error:  # ConfigError is one; whatever a neighbour says can be mended there
        raise RunError(
            f"replica {replica}: stage {neighbour} gave the address {there[:MAX_ADDRESS]!r}: {error}"
        ) from None


def make_group(backend: str, store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """A process group that listens on `address` and advertises it; there is no default group."""
    torch_distributed: Any = dist  # whose stubs lack these constructors
    if backend == "nccl":
        return torch_distributed.ProcessGroupNCCL(store, rank, size, timeout)
    gloo = torch_distributed.ProcessGroupGloo
    options = gloo._Options()
    with new_listeners() as listeners:
        options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
    options._timeout, options._threads = timeout, 1
    try:
        return gloo(store, rank, size, options)
    finally:
        for listener in listeners:
            go_deaf(listener)


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
        raise Unreachable(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _reach(replica: str, host: str, port: int, deadline: float, join_seconds: float) -> str:
    """Wait for the master; returns the address from which it is reached."""
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.1, min(left, 5.0))) as probe:
                return probe.getsockname()[0]
        except OSError as error:
            if left <= 0:
                why = error.strerror or "no answer"
                raise Unreachable(_absent(replica, host, port, join_seconds, why)) from None
            time.sleep(min(0.2, max(0.0, left)))


def _absent(replica: str, host: str, port: int, seconds: float, why: str) -> str:
    return (
        f"replica {replica}: no stage 0 at {host}:{port} within {seconds:g} s ({why}); start it, or correct "
        "--master"
    )


def ask(store: Store, key: str, deadline: float, replica: str) -> str | None:
    """The value that another process sets there, or None at the deadline."""
    try:
        store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        return store.get(key).decode(errors="replace")
    except RuntimeError:
        if time.monotonic() < deadline - 0.5:
            raise RunError(f"replica {replica}: stage 0 went away while the stages connected") from None
        return None
