"""Processes of a replica find each other through a TCPStore, and link by gloo or NCCL.

It authenticates no peer. So it serves the processes of one machine, on loopback, and with `--trust-network`
machines on a closed network.
"""

import ipaddress
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # torch's stubs do not list these names as exported
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from isthmus.errors import ConfigError, RunError, Unreachable
from isthmus.replica.links import LinkPeers
from isthmus.replica.process_link import ProcessLink

Store = TorchStore
MOST_ADDRESS = 64


def open_store(
    *,
    replica: str,
    rank: int,
    host: str,
    port: int,
    listener: socket.socket | None = None,
    session: str = "",
    hosted: str = "",
    join_seconds: float = 120.0,
) -> Store:
    """The store of a replica's processes. Rank 0 serves it, at `listener` or at this address. If the
    process's starter serves it, `hosted` is our prefix in it.

    `session` must be the same for all of them, such as the run and the replica's start: with another one, a
    process has the address of another replica.
    """
    timeout, deadline = timedelta(seconds=join_seconds), time.monotonic() + join_seconds
    try:
        store: Store
        if hosted:
            client = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
            store = PrefixStore(hosted, client)
        elif rank == 0:
            # Without our socket the store would listen on every address of this machine.
            fd = (listener or _listen(host, port)).detach()
            store = TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=fd)
        else:
            store = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        if rank == 0:
            store.set("session", session)
    except RuntimeError:
        raise Unreachable(
            f"replica {replica}: no stage 0 at {host}:{port} within {join_seconds:g} s; start it"
        ) from None
    if _ask(store, "session", deadline, replica) != session:
        raise Unreachable(
            f"replica {replica}: {host}:{port} is stage 0 of another run or start than stage {rank}'s"
        )
    return store


def own_address(host: str, port: int) -> str:
    """This machine's source address for connections to another one."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return probe.getsockname()[0]
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
) -> tuple[ProcessLink | None, ProcessLink | None]:
    """Connect a stage to the previous and the next one; return its links, None at the ends.

    `address` is this stage's own: it listens only there, and publishes that number to its neighbours. For a
    store that outlives a restart, give every start a separate prefix. No setting comes from the environment.
    A neighbour may be silent for timeout_seconds.
    """
    if not 0 <= stage < num_stages:
        raise ConfigError(
            f"replica {replica}: there is no stage {stage}; its stages are 0 to {num_stages - 1}"
        )
    timeout, deadline = timedelta(seconds=join_seconds), time.monotonic() + join_seconds

    def linked(neighbour: int) -> ProcessLink:
        there = _ask(store, f"stage/{neighbour}", deadline, replica)
        if there is None:
            raise RunError(f"replica {replica}: stage {neighbour} did not join within {join_seconds:g} s")
        peers = LinkPeers(replica, stage, neighbour, _checked(there, replica, neighbour))
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
        return link

    store.set(f"stage/{stage}", address)
    before = linked(stage - 1) if stage > 0 else None
    return before, linked(stage + 1) if stage + 1 < num_stages else None


def _checked(there: str, replica: str, neighbour: int) -> str:
    """A neighbour's address, checked to be numeric."""
    try:
        return str(ipaddress.ip_address(there[:MOST_ADDRESS]))
    except ValueError as error:  # it can be fixed there
        raise RunError(
            f"replica {replica}: stage {neighbour} gave the address {there[:MOST_ADDRESS]!r}: {error}"
        ) from None


def make_group(backend: str, store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """A process group that listens on `address` and advertises it, without a default group."""
    torch_distributed: Any = dist  # its stubs lack these constructors
    if backend == "nccl":
        return torch_distributed.ProcessGroupNCCL(store, rank, size, timeout)
    gloo = torch_distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address, lazy_init=False)]
    options._timeout, options._threads = timeout, 1
    return gloo(store, rank, size, options)


@contextmanager
def lost_processes(replica: str, rank: int) -> Iterator[None]:
    """Name the fault if the other processes of a full replica are gone."""
    try:
        yield
    except RuntimeError as error:
        if any(word in str(error) for word in ("by peer", "imed out", "pair closure")):
            raise RunError(
                f"replica {replica}: process {rank} lost the other processes of the replica"
            ) from None
        raise


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise Unreachable(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _ask(store: Store, key: str, deadline: float, replica: str) -> str | None:
    """The value that another process sets for a key, or None at the deadline."""
    try:
        store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        return store.get(key).decode(errors="replace")
    except RuntimeError:
        if time.monotonic() < deadline - 0.5:
            raise RunError(f"replica {replica}: stage 0 went away while the stages connected") from None
        return None
