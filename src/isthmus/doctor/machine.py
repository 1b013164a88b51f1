"""This machine's processor, memory and disk, as the operating system reports them. Standard library only."""

import platform
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.doctor.checks import Check
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
        return Check(
            name="memory",
            ok=False,
            words="this system does not say how much there is",
            cure="look it up, and compare with the memory that `isthmus plan RECIPE` predicts",
        )
    words = f"{size(found.available_bytes)} free of {size(found.total_bytes)}"
    need = f"even a nano replica needs {size(least_bytes)}"
    cure = f"{need}: end other programs, or raise the container's limit"
    ok = found.available_bytes >= least_bytes
    return Check(name="memory", ok=ok, words=words, cure="" if ok else cure, facts=asdict(found))


def check_disk(folder: Path) -> Check:
    """Check that runs and saved rounds can be written here, and the free space for them."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(
            name="disk",
            ok=False,
            words=f"cannot write to {folder}: {error.strerror or error}",
            cure="start isthmus in a folder that it may write to; runs and saved rounds go there",
        )
    ok = free >= LEAST_FREE_BYTES
    cure = f"free at least {size(LEAST_FREE_BYTES)}, or start isthmus in a folder on another disk"
    words = f"{size(free)} free in {folder}"
    return Check(name="disk", ok=ok, words=words, cure="" if ok else cure, facts={"free_bytes": free})
