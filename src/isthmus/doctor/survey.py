"""Run all checks of `isthmus doctor`, one after another; a failed one does not stop the others."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.config import PRESETS, Recipe
from isthmus.doctor import machine
from isthmus.doctor.checks import Check, Gpu, LinkRate, Say, failed, passed
from isthmus.doctor.role import Fit, fits, least_bytes, role
from isthmus.doctor.seat import check_seat
from isthmus.memory import machine_memory
from isthmus.planner.rate import TrainingRate

if TYPE_CHECKING:
    from isthmus.runtime.addresses import Address

CPU_PRESET, GPU_PRESET = "10m", "178m"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRate(TrainingRate):
    name: str  # of the device

    @property
    def recipe_value(self) -> float:
        return float(f"{self.tflops:.3g}")

    @property
    def source(self) -> str:
        doubt = ", too low perhaps: see the warning" if self.warning else ""
        threads = f", {self.threads} threads" if self.threads > 1 else ""
        return f"{self.name}{threads}, {self.precision}, measured with {self.preset}{doubt}"


@dataclass(slots=True)
class Survey:
    """The results of all checks."""

    cpu: machine.Cpu
    gpus: list[Gpu] = field(default_factory=list)
    rates: list[NamedRate] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    links: list[tuple[str, str, LinkRate]] = field(default_factory=list)  # recipe key, peer, rate
    fits: list[Fit] = field(default_factory=list)
    role: str = ""

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def best(self) -> NamedRate | None:
        """The rate at which training would run here: `auto` uses the GPU, else the CPU."""
        return self.rates[0] if self.rates else None

    def recipe_lines(self) -> list[str]:
        """Return lines to paste into a [[replicas]] table."""
        lines = []
        if self.best:
            lines.append((f"tflops = {self.best.recipe_value}", self.best.source))
        if self.gpus:
            free = f"free on {self.gpus[0].device}: what a process may use"
            lines.append((f"memory_gb = {self.gpus[0].available_bytes / 1e9:.1f}", free))
        lines += [(f"{key} = {rate.recipe_value()}", to) for key, to, rate in self.links]
        return [f"{line:<54} # {note}" for line, note in lines]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "cpu": asdict(self.cpu),
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "rates": [asdict(rate) for rate in self.rates],
            "checks": [asdict(check) for check in self.checks],
            "links": [
                {"key": key, "to": to, **asdict(rate), "mbps": rate.mbps, "latency_ms": rate.latency_ms}
                for key, to, rate in self.links
            ],
            "presets": [fit.to_dict() for fit in self.fits],
            "role": self.role,
            "recipe": self.recipe_lines(),
        }


@dataclass(frozen=True, slots=True)
class RunToJoin:
    """The run that the replica belongs to."""

    recipe: Recipe
    last_seconds: float | None  # duration of its last round


def survey(
    buckets: list[str],
    hosts: "list[Address]",
    *,
    relay: "Address | None" = None,
    seconds: float,
    say: Say,
    preset: str = "",
    replica: str = "",
    run: "RunToJoin | None" = None,
) -> Survey:
    """Check this machine, then every given bucket and machine. With `run`, the first check is whether the
    machine can be its replica `replica`."""
    found = Survey(cpu=machine.cpu())
    memory = machine_memory()
    found.checks.append(machine.check_memory(memory, least_bytes()))
    found.checks.append(machine.check_disk(Path.cwd()))
    available = memory.available_bytes if memory else 0
    trains = _train(found, available, preset, seconds, say)
    for url in buckets:
        from isthmus.doctor.store_checks import check_bucket  # loads obstore

        checks, rate = check_bucket(url, seconds, say, replica)
        found.checks += checks
        if rate:
            found.links.append(("bucket_link", checks[0].name, rate))
    for target in hosts or [relay] if relay else hosts:
        from isthmus.doctor.link_test import check_link  # loads torch

        checks, rate = check_link(target, relay, seconds, say)
        found.checks += checks
        if rate:
            found.links.append(("link", checks[0].name, rate))
    first = found.gpus[0] if found.gpus else None
    room, precision = (first.available_bytes, first.precision) if first else (available, "fp32")
    if run:
        tflops = found.best.tflops if found.best else None
        found.checks.insert(0, check_seat(run.recipe, replica, room, precision, tflops, run.last_seconds))
    found.fits = fits(room, precision, found.best.tflops if found.best else None)
    found.role = role(found.fits, trains)
    return found


def _train(found: Survey, available: int, preset: str, seconds: float, say: Say) -> bool:
    """Measure one device of each kind; return True if training works here at all."""
    try:
        from isthmus.doctor.compute import gpus, training_rate
    except (ImportError, OSError) as error:  # a torch build for another system raises OSError
        words = f"torch cannot be loaded: {' '.join(str(error).split())[:160]}"
        cure = "install it: pip install -c constraints.txt torch (docs/operate.md, section 1)"
        found.checks.append(failed("training", words, cure))
        return False
    found.gpus = gpus()
    alike = {gpu.name: gpu for gpu in reversed(found.gpus)}
    todo = [
        (gpu.device, gpu.name, gpu.available_bytes, gpu.precision, preset or GPU_PRESET)
        for gpu in reversed(alike.values())
    ]
    todo.append(("cpu", found.cpu.name, available, "fp32", preset or CPU_PRESET))
    for device, name, room, precision, wanted in todo:
        model = _that_fits(wanted, precision, room)
        say(f"training {model} on {device} in {precision}")
        try:
            rate = training_rate(device, precision, model, seconds, room)
        except (RuntimeError, MemoryError) as error:  # no kernel for this device, or too little memory
            words = f"{device} in {precision}: {' '.join(str(error).split())[:160]}"
            cure = "see whether other programs hold its memory, and whether torch fits its driver"
            found.checks.append(failed("training", words, cure))
            continue
        found.rates.append(NamedRate(**asdict(rate), name=name))
        words = (
            f"{device} {precision}: {rate.tflops:.3g} TFLOP/s, {rate.tokens_per_second:,.0f} tokens/s of "
            f"{model} on {rate.sequences} x {PRESETS[model].context} tokens ({rate.sample})"
        )
        found.checks.append(passed("training", words, rate.warning, **asdict(rate)))
    return bool(found.rates)


def _that_fits(preset: str, precision: str, room: int) -> str:
    """Return the requested preset if one sequence fits, else the largest that does."""
    sizes = [fit.preset for fit in fits(room, precision, None) if fit.full_batch]
    return preset if preset in sizes or not sizes else sizes[-1]
