"""Run all checks of `isthmus doctor`, one after another; a failed one does not stop the others."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.config import PRESETS, Recipe
from isthmus.doctor import machine
from isthmus.doctor.checks import Check, Gpu, LinkRate, Say
from isthmus.doctor.role import Fit, fits, least_bytes, role
from isthmus.doctor.seat import check_seat
from isthmus.memory import machine_memory
from isthmus.planner.rate import TrainingRate

if TYPE_CHECKING:
    from isthmus.runtime.addresses import Address

CPU_PRESET, GPU_PRESET = "10m", "178m"
PAYS = 1.1  # recommend bf16 on a CPU if it is this many times as fast


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRate(TrainingRate):
    name: str  # of the device

    @property
    def recipe_value(self) -> float:
        return float(f"{self.tflops:.3g}")

    @property
    def source(self) -> str:
        doubt = ", too low perhaps: see the warning" if self.warning else ""
        return f"{self.name}, {self.precision}, measured with {self.preset}{doubt}"


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
        """The rate at which training would run here: `auto` uses the GPU, else the CPU; a GPU in bf16 unless
        it is old, the CPU in fp32."""
        auto = {gpu.device: gpu.precision for gpu in self.gpus} | {"cpu": "fp32"}
        usual = [r for r in self.rates if r.precision == auto.get(r.device, "bf16")]
        return next((r for r in usual if r.device != "cpu"), usual[0] if usual else None)

    @property
    def faster_in_bf16(self) -> NamedRate | None:
        """The CPU's rate in bf16, if it trains here and bf16 would be faster."""
        best = self.best
        if best is None or best.device != "cpu":
            return None
        others = [r for r in self.rates if r.device == "cpu" and r.precision == "bf16"]
        return next((r for r in others if r.tflops > PAYS * best.tflops), None)

    def recipe_lines(self) -> list[str]:
        """Return lines to paste into a [[replicas]] table."""
        lines = []
        if self.best:
            lines.append((f"tflops = {self.best.recipe_value}", self.best.source))
        if faster := self.faster_in_bf16:
            note = f'with inner.precision = "bf16", {faster.source}'
            lines.append((f"# tflops = {faster.recipe_value}", note))
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
    folder: Path | None = None,
) -> Survey:
    """Check this machine, then every given bucket and machine. With `run`, the first check is whether the
    machine can be its replica `replica`."""
    found = Survey(cpu=machine.cpu())
    memory = machine_memory()
    found.checks.append(machine.check_memory(memory, least_bytes()))
    say("writing to the disk")
    found.checks.append(machine.check_disk(folder or Path.cwd(), min(1.0, seconds)))
    available = memory.available_bytes if memory else 0
    trains = _train(found, available, preset, seconds, say)
    bucket_ok = True
    for url in buckets:
        try:
            from isthmus.doctor.store_checks import check_bucket
        except ImportError:
            cure = "install it: pip install -c constraints.txt obstore"
            checks, rate = [Check(name=url, ok=False, words="obstore is not installed", cure=cure)], None
        else:
            checks, rate = check_bucket(url, seconds, say, replica)
        bucket_ok &= all(check.ok for check in checks)
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
    found.role = role(found.fits, trains, bucket_ok)
    return found


def _train(found: Survey, available: int, preset: str, seconds: float, say: Say) -> bool:
    """Measure one device of each kind; return True if training works here at all."""
    try:
        from isthmus.doctor.compute import gpus, num_threads, training_rate
    except (ImportError, OSError) as error:  # a torch build for another system raises OSError
        words = f"torch cannot be loaded: {' '.join(str(error).split())[:160]}"
        cure = "install it: pip install -c constraints.txt torch (docs/operate.md, section 1)"
        found.checks.append(Check(name="training", ok=False, words=words, cure=cure))
        return False
    found.gpus = gpus()
    alike = {gpu.name: gpu for gpu in reversed(found.gpus)}
    todo = [
        (gpu.device, gpu.name, gpu.available_bytes, precision, preset or GPU_PRESET)
        for gpu in reversed(alike.values())
        for precision in ("bf16", "fp32")
    ]
    threads = f"{num_threads()} thread{'s' * (num_threads() > 1)}"
    cpu = ("cpu", f"{found.cpu.name}, {threads}", available)
    todo += [(*cpu, p, preset or CPU_PRESET) for p in ("fp32", "bf16") if p == "fp32" or found.cpu.bf16]
    done = False
    for device, name, room, precision, wanted in todo:
        model = _that_fits(wanted, precision, room)
        say(f"training {model} on {device} in {precision}")
        try:
            rate = training_rate(device, precision, model, seconds, room)
        except (RuntimeError, MemoryError) as error:  # no kernel for this device, or too little memory
            words = f"{device} in {precision}: {' '.join(str(error).split())[:160]}"
            cure = "see whether other programs hold its memory, and whether torch fits its driver"
            found.checks.append(Check(name="training", ok=False, words=words, cure=cure))
            continue
        done = True
        found.rates.append(NamedRate(**asdict(rate), name=name))
        words = (
            f"{device} {precision}: {rate.tflops:.3g} TFLOP/s, {rate.tokens_per_second:,.0f} tokens/s of "
            f"{model} on {rate.sequences} x {PRESETS[model].context} tokens ({rate.sample})"
        )
        found.checks.append(
            Check(name="training", ok=True, words=words, warning=rate.warning, facts=asdict(rate))
        )
    return done


def _that_fits(preset: str, precision: str, room: int) -> str:
    """Return the requested preset, or the largest of which one sequence fits."""
    sizes = [fit.preset for fit in fits(room, precision, None) if fit.full_batch]
    return preset if preset in sizes or not sizes else sizes[-1]
