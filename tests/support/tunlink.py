"""A cable with a latency: carries packets between a TUN device in each of two network namespaces.

    python tests/support/tunlink.py NAMESPACE DEVICE NAMESPACE DEVICE LATENCY_MS

Not every kernel has netem. Each packet is delivered LATENCY_MS after it came, whatever the others do; the
rate is the devices' own affair (a token bucket on each). Prints one line when it carries, and goes on until
it is killed. Needs root and /dev/net/tun. Standard library only.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUN = "/dev/net/tun"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MOST_BYTES = 65536


def reason_to_skip() -> str:
    """Why there can be no such cable here; empty where there can."""
    if not os.path.exists(TUN):
        return f"there is no {TUN}"
    try:
        os.close(os.open(TUN, os.O_RDWR))
    except OSError as error:
        return f"{TUN}: {error.strerror}"
    return ""


def attach(namespace: str, device: str) -> int:
    """The packets of a TUN device that exists in a namespace, as a file."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"namespace {namespace}")
    os.close(descriptor)
    file = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    return file


def carry(one: int, two: int, latency_seconds: float) -> None:
    """Both ways, each in the order in which packets came."""
    under_way: dict[int, deque[tuple[float, bytes]]] = {one: deque(), two: deque()}  # by where they go
    while True:
        due = min((packets[0][0] for packets in under_way.values() if packets), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for file in select.select([one, two], [], [], timeout)[0]:
            packets = under_way[two if file == one else one]
            with suppress(BlockingIOError):
                while True:
                    packet = os.read(file, MOST_BYTES)
                    packets.append((time.monotonic() + latency_seconds, packet))
        now = time.monotonic()
        for file, packets in under_way.items():
            while packets and packets[0][0] <= now:
                with suppress(BlockingIOError):  # a full device drops, as a router does
                    os.write(file, packets.popleft()[1])


def main() -> int:
    ends = attach(*sys.argv[1:3]), attach(*sys.argv[3:5])
    print("carrying", flush=True)
    with suppress(KeyboardInterrupt, OSError):  # a device went away with its namespace
        carry(*ends, float(sys.argv[5]) / 1e3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
