"""The role that this machine can take, by the planner's memory model and the measured rate."""

from dataclasses import asdict, dataclass
from typing import Any

from isthmus.config import PRESETS, InnerConfig, OuterConfig, Recipe, ReplicaConfig
from isthmus.layout.schedule import depths
from isthmus.planner.cost import step_flops
from isthmus.planner.memory import replica_memory

BATCH = InnerConfig().batch
ROUND_STEPS = OuterConfig().inner_steps
LONGEST_ROUND_SECONDS = 24 * 3600.0  # a fleet waits no longer for a machine
BATCHES = tuple(BATCH >> i for i in range(6))  # 32 ... 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One preset on this machine. A number is 0 if nothing fits."""

    preset: str
    full_batch: int  # the largest inner.batch of a full replica, up to the default
    full_bytes: int  # at that batch, or at a batch of 1 if none fits
    stages: int  # the fewest stages for which any stage fits this machine, at the default batch
    stage_bytes: int  # of the largest stage
    round_seconds: float | None  # full replica, 50 inner steps, default batch; None: rate unknown

    @property
    def full(self) -> bool:
        return self.full_batch > 0 and (self.round_seconds or 0.0) <= LONGEST_ROUND_SECONDS

    @property
    def stage(self) -> bool:
        return self.stages > 0 and (self.round_seconds or 0.0) / self.stages <= LONGEST_ROUND_SECONDS

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"full": self.full, "stage": self.stage}


def fits(available_bytes: int, precision: str, tflops: float | None) -> list[Fit]:
    """Fit every preset, the smallest first."""
    presets = sorted(PRESETS, key=lambda name: PRESETS[name].num_parameters)
    return [_fit(preset, available_bytes, precision, tflops) for preset in presets]


def least_bytes(precision: str = "fp32") -> int:
    """Return the memory that the smallest full replica needs."""
    return _needed("nano", precision, 1)


def _recipe(preset: str, precision: str, batch: int, stages: int) -> Recipe:
    replica = ReplicaConfig(name="doctor")
    if stages > 1:
        replica = ReplicaConfig(name="doctor", kind="pipelined", stages=stages, compression="1/8")
    inner = InnerConfig(batch=batch, micro_batches=min(batch, 8), precision=precision)
    return Recipe(name="doctor", model=PRESETS[preset], inner=inner, replicas=(replica,))


def _needed(preset: str, precision: str, batch: int, stages: int = 1) -> int:
    """Return the bytes of the largest process, with 1F1B on fast links; slow ones need more."""
    recipe = _recipe(preset, precision, batch, stages)
    in_flight = depths(stages, recipe.inner.micro_batches, 1.0, 0.0, 0.0)
    return max(process.total for process in replica_memory(recipe, recipe.replicas[0], in_flight))


def _fit(preset: str, available: int, precision: str, tflops: float | None) -> Fit:
    full = [(batch, _needed(preset, precision, batch)) for batch in BATCHES]
    batch, full_bytes = next((each for each in full if each[1] <= available), (0, full[-1][1]))
    num_stages = stage_bytes = 0
    for num_stages in range(2, PRESETS[preset].layers + 1):
        if (stage_bytes := _needed(preset, precision, BATCH, num_stages)) <= available:
            break
    whole = _recipe(preset, precision, BATCH, 1)
    flops = step_flops(whole, whole.replicas[0])
    return Fit(
        preset=preset,
        full_batch=batch,
        full_bytes=full_bytes,
        stages=num_stages if stage_bytes <= available else 0,
        stage_bytes=stage_bytes,
        round_seconds=ROUND_STEPS * flops / (tflops * 1e12) if tflops else None,
    )


def role(found: list[Fit], trains: bool) -> str:
    """Say in one sentence what this machine can be."""
    if not trains:
        return "none before torch works here: `isthmus plan` is all it can do"
    full = next((fit for fit in reversed(found) if fit.full), None)
    stage = next((fit for fit in reversed(found) if fit.stage), None)
    parts = []
    if full:
        small = f" with inner.batch up to {full.full_batch}" if full.full_batch < BATCH else ""
        parts.append(f"a full replica of {full.preset}{small}")
    if stage and (full is None or stage.preset != full.preset or full.full_batch < BATCH):
        parts.append(f"one of {stage.stages} stages of {stage.preset}")
    if not parts:
        return "none: too little memory even for a stage of nano, or too slow for it"
    return f"up to {', or '.join(parts)}"
