"""This machine's processor, memory and disk, as the operating system reports them. Standard library only."""

import platform
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.doctor.checks import Check, failed, passed
from isthmus.memory import Memory
from isthmus.planner.rate import usable_cores
from isthmus.runlog.words import size

LEAST_FREE_BYTES = 10**9  # a few saved rounds of a small model need less than this


@dataclass(frozen=True, slots=True)
class Cpu:
    name: str
    cores: int  # that this process may use


def cpu() -> Cpu:
    lines: list[tuple[str, str]] = []
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        lines = [
            (key.strip(), value.strip()) for key, _, value in (li.partition(":") for li in text.split("\n"))
        ]
    known = dict(reversed(lines))
    name = known.get("model name") or platform.processor() or platform.machine() or "unknown"
    return Cpu(" ".join(name.split()), usable_cores())


def check_memory(found: Memory | None, least_bytes: int) -> Check:
    """Check memory; `least_bytes` is the need of the smallest replica."""
    if found is None:
        cure = "look it up, and compare with the memory that `isthmus plan RECIPE` predicts"
        return failed("memory", "this system does not say how much there is", cure)
    words, facts = f"{size(found.available_bytes)} free of {size(found.total_bytes)}", asdict(found)
    if found.available_bytes >= least_bytes:
        return passed("memory", words, **facts)
    cure = (
        f"even a nano replica needs {size(least_bytes)}: end other programs, or raise the container's limit"
    )
    return failed("memory", words, cure, **facts)


def check_disk(folder: Path) -> Check:
    """Check that runs and saved rounds can be written here, and the free space for them."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        words = f"cannot write to {folder}: {error.strerror or error}"
        return failed("disk", words, "start isthmus in a folder for its runs that it may write to")
    words = f"{size(free)} free in {folder}"
    if free >= LEAST_FREE_BYTES:
        return passed("disk", words, free_bytes=free)
    cure = f"free at least {size(LEAST_FREE_BYTES)}, or start isthmus in a folder on another disk"
    return failed("disk", words, cure, free_bytes=free)
