"""Machines out of network namespaces: each has its own addresses and counters, and the cables have a rate.

A cable is a veth pair with a token bucket (`tc tbf`) at both ends. Not every kernel has netem, so a cable
with a latency is a pair of TUN devices joined by a process of ours (tunlink.py). The bucket is smaller than
the largest packets that TCP hands down, so on a cable with a rate the interfaces count segments of 1500
bytes, headers and all, as on a wire.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import tunlink
from deadlines import first_line

FRAME_BYTES, SEGMENT_BYTES = 1514, 1448  # a full packet with its Ethernet header; what TCP carries in it


def reason_to_skip() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: iproute2)"
    name = f"isth{os.getpid()}try"
    made = _try("ip", "netns", "add", name)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    _try("ip", "netns", "delete", name)
    return ""


@dataclass
class Cable:
    """Two machines and their addresses on the cable between them."""

    machines: tuple[str, str]
    interfaces: tuple[str, str]
    addresses: tuple[str, str]
    latency_ms: float = 0.0

    @property
    def overhead(self) -> float:
        """Bytes that the token bucket counts for each byte that TCP carries; TUN has no Ethernet headers."""
        return (FRAME_BYTES - 14 if self.latency_ms else FRAME_BYTES) / SEGMENT_BYTES


@dataclass
class Network:
    """Namespaces that live as long as the `with` block; what still runs in them then is killed."""

    prefix: str = field(default_factory=lambda: f"isth{os.getpid()}")
    machines: list[str] = field(default_factory=list)
    cables: list[Cable] = field(default_factory=list)
    carriers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        """Also after Ctrl-C; a second one does not stop this."""
        before = None
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for machine in self.machines:
            name = self._name(machine)
            for pid in _try("ip", "netns", "pids", name).stdout.split():  # we started all that is there
                _try("kill", "-9", pid)
            _try("ip", "netns", "delete", name)
        for carrier in self.carriers:
            carrier.kill()
            carrier.wait(60)
            carrier.stdout.close()
        if before is not None:
            signal.signal(signal.SIGINT, before)

    def machine(self, name: str) -> str:
        self.machines.append(name)
        _run("ip", "netns", "add", self._name(name))
        self._inside(name, "ip", "link", "set", "lo", "up")
        return name

    def cable(self, one: str, two: str, mbps: float = 0.0, latency_ms: float = 0.0) -> Cable:
        """Join two machines; `mbps` each way, 0 for as fast as it goes, `latency_ms` one way."""
        number = len(self.cables) + 1
        faces = (f"v{number}a", f"v{number}b")
        addresses = (f"10.77.{number}.1", f"10.77.{number}.2")
        ends = [(one, faces[0], addresses[0]), (two, faces[1], addresses[1])]
        if latency_ms:
            for machine, face, _ in ends:
                self._inside(machine, "ip", "tuntap", "add", "dev", face, "mode", "tun")
        else:
            pair = ["type", "veth", "peer", "name", faces[1], "netns", self._name(two)]
            _run("ip", "link", "add", faces[0], "netns", self._name(one), *pair)
        for machine, face, address in ends:
            self._inside(machine, "ip", "address", "add", f"{address}/30", "dev", face)
            self._inside(machine, "ip", "link", "set", face, "up")
        cable = Cable((one, two), faces, addresses, latency_ms)
        self.cables.append(cable)
        if mbps:
            self.limit(cable, mbps)
        if latency_ms:
            words = [word for machine, face, _ in ends for word in (self._name(machine), face)]
            command = [sys.executable, tunlink.__file__, *words, str(latency_ms)]
            self.carriers.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            if not first_line(self.carriers[-1]):
                raise RuntimeError(f"no cable with a latency between {one} and {two}")
        return cable

    def limit(self, cable: Cable, mbps: float, burst_bytes: int = 2**14) -> None:
        """Give a cable a rate, or another one. After a pause it sends burst_bytes as fast as it goes."""
        rate = ["rate", f"{round(mbps * 1e6)}bit", "burst", str(burst_bytes), "latency", "400ms"]
        for machine, face in zip(cable.machines, cable.interfaces, strict=True):
            self._inside(machine, "tc", "qdisc", "replace", "dev", face, "root", "tbf", *rate)

    def line(self, names: Sequence[str], mbps: float = 0.0, latency_ms: float = 0.0) -> list[Cable]:
        """Machines in a row, a cable between neighbours; those farther apart reach each other through them.

        A machine's address is that on the cable to the one before it; the first has but one.
        """
        for name in names:
            self.machine(name)
            self.set(name, "net.ipv4.ip_forward", 1)
        cables = [self.cable(one, two, mbps, latency_ms) for one, two in pairwise(names)]
        for at, name in enumerate(names):
            for number, cable in enumerate(cables):
                if number < at - 1:
                    way = cables[at - 1].addresses[0]
                elif number > at:
                    way = cables[at].addresses[1]
                else:
                    continue
                network = cable.addresses[0].rsplit(".", 1)[0] + ".0/30"
                self._inside(name, "ip", "route", "add", network, "via", way)
        return cables

    def set(self, machine: str, key: str, value: object) -> None:
        """A kernel setting of one machine, as `sysctl -w` would."""
        path = f"/proc/sys/{key.replace('.', '/')}"
        self._inside(machine, "sh", "-c", f"echo {value} > {path}")

    def counted(self, cable: Cable) -> int:
        """Bytes over a cable so far, both ways, link-layer headers and all, as its first end counted them."""
        return sum(self.sent_and_received(cable))

    def sent_and_received(self, cable: Cable) -> tuple[int, int]:
        """The same, by its first end."""
        folder = f"/sys/class/net/{cable.interfaces[0]}/statistics"
        counters = self._inside(cable.machines[0], "cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes")
        sent, received = map(int, counters.split())
        return sent, received

    def command(self, machine: str, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._name(machine), *command]

    def start(self, machine: str, command: Sequence[str], log: Path, **how: Any) -> subprocess.Popen[bytes]:
        with open(log, "ab") as file:
            return subprocess.Popen(
                self.command(machine, command), stdout=file, stderr=file, stdin=subprocess.DEVNULL, **how
            )

    def run(self, machine: str, command: Sequence[str], **how: Any) -> str:
        done = subprocess.run(self.command(machine, command), capture_output=True, text=True, **how)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[:4])} ...: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def _inside(self, machine: str, *command: str) -> str:
        return _run(*self.command(machine, command))

    def _name(self, machine: str) -> str:
        return f"{self.prefix}{machine}"


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def _run(*command: str) -> str:
    done = _try(*command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def isthmus(*words: object) -> list[str]:
    """A command as an operator types it."""
    return [sys.executable, "-m", "isthmus.cli.main", *map(str, words)]


def join_by_stages(
    network: Network, cable: Cable, url: str, replica: str, folder: Path, **environments: dict[str, str]
) -> list[subprocess.Popen[bytes]]:
    """`isthmus join --stage I` on both machines of a cable, each in a folder of its own that holds nothing
    but the keys. environments: of a machine, where it differs from ours."""
    processes = []
    for stage, machine in enumerate(cable.machines):
        own = folder / machine
        own.mkdir()
        shutil.copytree(folder / "keys", own / "keys")
        command = isthmus("join", url, "--replica", replica, "--stage", stage, "--threads", 1)
        env = {**os.environ, **environments.get(machine, {})}
        processes.append(network.start(machine, command, folder / f"{machine}.log", cwd=own, env=env))
    return processes


def wait_for(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Exit statuses, once all have ended; what has not by then is killed."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)
    return [process.returncode for process in processes]
