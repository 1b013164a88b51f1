"""This machine's memory, and the one-line error if something does not fit. Standard library only."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from isthmus.disk import in_words
from isthmus.errors import ConfigError

_GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


@dataclass(frozen=True, slots=True)
class Memory:
    total_bytes: int
    available_bytes: int


def machine_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Memory | None:
    """Return the memory, capped by a container's limit; None if the system does not report it."""
    try:
        with open(proc / "meminfo", encoding="ascii") as file:
            facts = dict(line.split(":", 1) for line in file)
        total, available = (int(facts[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        try:  # not Linux: free memory is unknown
            total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError, AttributeError):
            return None
    for limit, used in _GROUPS:
        with suppress(OSError, ValueError):  # "max": no limit
            most = int((groups / limit).read_text())
            if most < total:
                left = most - int((groups / used).read_text())
                total, available = most, max(0, min(available, left))
    return Memory(total, available)


def check_fits_memory(needed: int, what: str) -> None:
    """Raise ConfigError if `what` needs more than this machine's memory, before anything is allocated."""
    found = machine_memory()
    if found and needed > found.total_bytes:
        raise ConfigError(
            f"{what} takes {in_words(needed)} of memory, and this machine has "
            f"{in_words(found.total_bytes)}; use a larger machine"
        )
