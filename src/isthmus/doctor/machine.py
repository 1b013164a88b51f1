"""This machine's processor, memory and disk, as the operating system reports them. Standard library only."""

import os
import platform
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.doctor.checks import Check
from isthmus.memory import Memory
from isthmus.planner.rate import usable_cores
from isthmus.runlog.words import size

LEAST_FREE_BYTES = 10**9  # a few saved rounds of a small model need less than this
MOST_WRITTEN_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Cpu:
    name: str
    cores: int  # that this process may use
    bf16: bool  # whether they multiply bf16 in hardware


def cpu() -> Cpu:
    lines: list[tuple[str, str]] = []
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        lines = [
            (key.strip(), value.strip()) for key, _, value in (li.partition(":") for li in text.split("\n"))
        ]
    known = dict(reversed(lines))
    flags = (known.get("flags") or known.get("Features") or "").split()
    name = known.get("model name") or platform.processor() or platform.machine() or "unknown"
    native = any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))
    return Cpu(" ".join(name.split()), usable_cores(), native)


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


def check_disk(folder: Path, seconds: float) -> Check:
    """Check the free space for runs and saved rounds, and the speed of writing and syncing."""
    path, block = folder / f".isthmus-doctor-{secrets.token_hex(8)}", os.urandom(1 << 20)
    try:
        free = shutil.disk_usage(folder).free
        most, written = min(MOST_WRITTEN_BYTES, max(0, free - LEAST_FREE_BYTES // 10)), 0
        if most < len(block):
            return _full_disk(folder, free)
        began = time.perf_counter()
        with open(path, "xb", buffering=0) as file:
            while written < most and time.perf_counter() - began < seconds:
                written += file.write(block)
                os.fsync(file.fileno())
        rate = written / (time.perf_counter() - began)
    except OSError as error:
        return Check(
            name="disk",
            ok=False,
            words=f"cannot write to {folder}: {error.strerror or error}",
            cure="start isthmus in a folder that it may write to; runs and saved rounds go there",
        )
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    if free < LEAST_FREE_BYTES:
        return _full_disk(folder, free)
    words = f"{size(free)} free in {folder}, {size(rate)}/s written and synced"
    return Check(
        name="disk", ok=True, words=words, facts={"free_bytes": free, "write_bytes_per_second": round(rate)}
    )


def _full_disk(folder: Path, free: int) -> Check:
    return Check(
        name="disk",
        ok=False,
        words=f"{size(free)} free in {folder}",
        cure=f"free at least {size(LEAST_FREE_BYTES)}, or start isthmus in a folder on another disk",
        facts={"free_bytes": free},
    )
