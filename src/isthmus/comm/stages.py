"""StageLink between processes, on torch.distributed: frames of known size, one group per direction.

A link carries frames: a few tensors whose shapes both sides know, laid end to end as bytes. Nothing on the
wire says what it is, and nothing that arrives is unpickled. Whatever keeps the promises of `StageEnd` can
take the place of gloo here.
"""

import ipaddress
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.errors import ConfigError, RunError

STAGE_PURPOSES = ("activations", "gradients", "tokens", "control")
TOKEN_TYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}
PRIVATE = [
    ipaddress.ip_network(network)
    for network in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")
] + [ipaddress.ip_network(network) for network in ("::1/128", "fc00::/7", "fe80::/10")]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a frame, and what its bytes are counted as."""

    purpose: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Layout = tuple[Part, ...]


class StageEnd(Protocol):
    """One stage's end of its link to a neighbour."""

    counts: dict[str, int]  # bytes sent from this end, by purpose

    def expect(self, frames: Sequence[Layout], ahead: int) -> None:
        """Make ready for these frames, `ahead` of them at a time; at most `ahead` of ours wait to be sent."""

    def send(self, frame: Mapping[str, Tensor]) -> None:
        """Hand over one frame, purpose by purpose, and go on at once."""

    def take(self, patience_seconds: float | None = None) -> tuple[Tensor, ...]:
        """The next frame expected, when it is here; RunError when the neighbour dies or stalls."""

    def ready(self) -> bool:
        """False where `take` would wait for something that this very thread has to do first."""

    def close(self) -> None:
        """Part from a neighbour that closes too."""


def pack(frame: Mapping[str, Tensor], buffer: Tensor) -> None:
    at = 0
    for tensor in frame.values():
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        buffer[at : at + len(data)].copy_(data, non_blocking=True)
        at += len(data)


def unpack(buffer: Tensor, layout: Layout, device: torch.device) -> tuple[Tensor, ...]:
    parts, at = [], 0
    for part in layout:
        data = buffer[at : at + part.num_bytes].to(device, copy=True)  # a copy of its own is aligned
        parts.append(data.view(part.dtype).view(part.shape))
        at += part.num_bytes
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Between:
    """Who is on the two sides of a link: what an error has to say."""

    replica: str
    stage: int
    neighbour: int
    address: str  # the neighbour's

    @property
    def them(self) -> str:
        return f"stage {self.neighbour} at {self.address}"

    def silent(self, seconds: float) -> str:
        return f"replica {self.replica}: stage {self.stage} heard nothing from {self.them} for {seconds:g} s"

    def stuck(self, seconds: float) -> str:
        return f"replica {self.replica}: {self.them} took nothing from stage {self.stage} for {seconds:g} s"

    def lost(self, why: str) -> str:
        return f"replica {self.replica}: stage {self.stage} lost its link to {self.them}: {why}"


class ProcessLink:
    """A StageEnd between processes. gloo moves host memory: frames of a CUDA stage go through pinned memory.

    Receives are posted ahead, so that the sender's bytes leave as soon as they exist; sends are asynchronous.
    The two directions have groups of their own, because one gloo group is half duplex for large frames.
    """

    def __init__(
        self, out: Any, into: Any, peer: int, between: Between, device: torch.device, timeout_seconds: float
    ) -> None:
        """out and into are process groups of two; `peer` is the neighbour's rank in both."""
        self.out, self.into, self.peer, self.between = out, into, peer, between
        self.device, self.timeout_seconds = device, timeout_seconds
        self.on_device = out.name() == "nccl"
        self.counts = dict.fromkeys(STAGE_PURPOSES, 0)
        self.sending: deque[tuple[Any, Tensor]] = deque()
        self.posted: deque[tuple[Any, Tensor, Layout]] = deque()
        self.expected: deque[Layout] = deque()
        self.ahead, self.broken = 1, False
        self.store: dist.Store | None = None  # stage 0's serves those that still join, so it stays open
        self.num_sent = self.num_posted = 0  # the tags: a frame can meet no other receive than its own

    def _buffer(self, num_bytes: int) -> Tensor:
        if self.on_device:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def expect(self, frames: Sequence[Layout], ahead: int) -> None:
        self.expected.extend(frames)
        self.ahead = max(1, ahead)
        self._post()

    def _post(self) -> None:
        while self.expected and len(self.posted) < self.ahead:
            layout = self.expected.popleft()
            buffer = self._buffer(sum(part.num_bytes for part in layout))
            with self._faults():
                self.posted.append((self.into.recv([buffer], self.peer, self.num_posted), buffer, layout))
            self.num_posted = (self.num_posted + 1) % 2**31

    def send(self, frame: Mapping[str, Tensor]) -> None:
        while len(self.sending) >= self.ahead:
            self._settle(self.timeout_seconds)
        sizes = {purpose: tensor.numel() * tensor.element_size() for purpose, tensor in frame.items()}
        buffer = self._buffer(sum(sizes.values()))
        pack(frame, buffer)
        if self.device.type == "cuda" and not self.on_device:
            torch.cuda.current_stream(self.device).synchronize()  # gloo reads the host's copy
        with self._faults():
            self.sending.append((self.out.send([buffer], self.peer, self.num_sent), buffer))
        self.num_sent = (self.num_sent + 1) % 2**31
        for purpose, size in sizes.items():
            self.counts[purpose] += size

    def _settle(self, patience_seconds: float) -> None:
        self._wait(self.sending[0][0], patience_seconds, self.between.stuck(patience_seconds))
        self.sending.popleft()

    def take(self, patience_seconds: float | None = None) -> tuple[Tensor, ...]:
        work, buffer, layout = self.posted[0]
        patience_seconds = patience_seconds or self.timeout_seconds
        self._wait(work, patience_seconds, self.between.silent(patience_seconds))
        self.posted.popleft()
        self._post()
        return unpack(buffer, layout, self.device)

    def _wait(self, work: Any, seconds: float, late: str) -> None:
        with self._faults(late):
            if self.on_device:  # there `wait` only orders streams
                deadline = time.monotonic() + seconds
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise RunError(late)
                    time.sleep(1e-4)
            work.wait(timedelta(seconds=seconds))

    @contextmanager
    def _faults(self, late: str = "") -> Iterator[None]:
        """Turn what torch.distributed raises into one line that names the link."""
        try:
            yield
        except RunError:
            self.broken = True
            raise
        except RuntimeError as error:
            self.broken = True
            text = str(error)
            if late and "imed out" in text:
                raise RunError(late) from None
            closed = any(word in text for word in ("by peer", "Broken pipe", "ocket closed"))
            why = "the connection was closed" if closed else text.splitlines()[0]
            raise RunError(self.between.lost(why)) from None

    def ready(self) -> bool:
        return True

    def close(self) -> None:
        """Both sides say goodbye and hear it, so that neither's exit cuts off what the other still reads.

        A link given up in the middle of a step is dropped: the neighbour sees the connection close.
        """
        with suppress(RunError):
            if not self.broken and not self.posted:
                self.expect([(Part("control", (1,), torch.uint8),)], 1)
                self.send({"control": torch.zeros(1, dtype=torch.uint8, device=self.device)})
                self.take()
                while self.sending:
                    self._settle(self.timeout_seconds)
        self.sending.clear()
        self.posted.clear()
        self.out = self.into = None


class LocalEnd:
    """A StageEnd inside one process: frames wait in a queue, and are counted as if they travelled."""

    def __init__(self, out: deque, into: deque) -> None:
        self.out, self.into = out, into
        self.counts = dict.fromkeys(STAGE_PURPOSES, 0)
        self.expected: deque[Layout] = deque()

    def expect(self, frames: Sequence[Layout], ahead: int) -> None:
        self.expected.extend(frames)

    def send(self, frame: Mapping[str, Tensor]) -> None:
        for purpose, tensor in frame.items():
            self.counts[purpose] += tensor.numel() * tensor.element_size()
        self.out.append(tuple(tensor.detach() for tensor in frame.values()))

    def take(self, patience_seconds: float | None = None) -> tuple[Tensor, ...]:
        frame, layout = self.into.popleft(), self.expected.popleft()
        for tensor, part in zip(frame, layout, strict=True):
            if tuple(tensor.shape) != part.shape or tensor.dtype != part.dtype:
                raise ValueError(
                    f"{part.purpose} came as {tuple(tensor.shape)} {tensor.dtype}, not as {part}"
                )
        return frame

    def ready(self) -> bool:
        return bool(self.into)

    def close(self) -> None:
        self.out.clear()
        self.into.clear()


def local_pair() -> tuple[LocalEnd, LocalEnd]:
    """The two ends of a link inside one process: the earlier stage's, the later stage's."""
    down, up = deque(), deque()
    return LocalEnd(down, up), LocalEnd(up, down)


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
