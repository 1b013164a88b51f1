"""The role that this machine can take, by the planner's memory model and the measured rate."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.config import PRESETS, InnerConfig, OuterConfig, Recipe, ReplicaConfig
from isthmus.layout.schedule import depths
from isthmus.planner.cost import step_flops
from isthmus.planner.memory import process_memory, replica_memory
from isthmus.planner.step import FORWARD_SHARE

BATCH = InnerConfig().batch
ROUND_STEPS = OuterConfig().inner_steps
LONGEST_ROUND_SECONDS = 24 * 3600.0  # a fleet waits no longer for a machine
BATCHES = tuple(BATCH >> i for i in range(6))  # 32 ... 1
MICRO_BATCHES = (8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One preset on this machine. A number is 0 if nothing fits."""

    preset: str
    full_batch: int  # the largest inner.batch of a full replica, up to the default
    full_bytes: int  # at that batch, or at a batch of 1 if none fits
    full_batch_recomputed: int  # the same with inner.recompute
    full_bytes_recomputed: int
    stages: int  # the fewest stages for which any stage fits this machine, at the default batch
    micro_batches: int  # needed for those stages
    stage_bytes: int  # of the largest stage
    stages_recomputed: int  # the same with inner.recompute
    micro_batches_recomputed: int
    stage_bytes_recomputed: int
    round_seconds: float | None  # full replica, 50 inner steps, default batch; None: rate unknown

    @property
    def stage_round_seconds(self) -> float | None:
        return self.round_seconds / self.stages if self.round_seconds and self.stages else self.round_seconds

    @property
    def full(self) -> bool:
        return self.full_batch > 0 and (self.round_seconds or 0.0) <= LONGEST_ROUND_SECONDS

    @property
    def full_recomputed(self) -> bool:
        seconds = (self.round_seconds or 0.0) * (1 + FORWARD_SHARE)
        return self.full_batch_recomputed > 0 and seconds <= LONGEST_ROUND_SECONDS

    @property
    def stage(self) -> bool:
        return self.stages > 0 and (self.stage_round_seconds or 0.0) <= LONGEST_ROUND_SECONDS

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"full": self.full, "stage": self.stage}


def fits(available_bytes: int, precision: str, tflops: float | None) -> list[Fit]:
    """Fit every preset, the smallest first."""
    presets = sorted(PRESETS, key=lambda name: PRESETS[name].num_parameters)
    return [_fit(preset, available_bytes, precision, tflops) for preset in presets]


def least_bytes(precision: str = "fp32") -> int:
    """Return the memory that the smallest full replica needs."""
    return _full_bytes("nano", precision, 1)


def _recipe(
    preset: str,
    precision: str,
    replica: ReplicaConfig,
    batch: int,
    micro_batches: int = 8,
    recompute: bool = False,
) -> Recipe:
    inner = InnerConfig(
        batch=batch, micro_batches=min(batch, micro_batches), precision=precision, recompute=recompute
    )
    return Recipe(name="doctor", model=PRESETS[preset], inner=inner, replicas=(replica,))


def _full_bytes(preset: str, precision: str, batch: int, recompute: bool = False) -> int:
    replica = ReplicaConfig(name="doctor")
    recipe = _recipe(preset, precision, replica, batch, recompute=recompute)
    return process_memory(recipe, replica, 0, 1).total


def _stage_bytes(
    preset: str, precision: str, stages: int, micro_batches: int, recompute: bool = False
) -> int:
    """Return the bytes of the largest stage, for links fast enough for 1F1B's depths; slow ones need more."""
    replica = ReplicaConfig(name="doctor", kind="pipelined", stages=stages, compression="1/8")
    recipe = _recipe(preset, precision, replica, BATCH, micro_batches, recompute)
    chosen = depths(stages, micro_batches, 1.0, 0.0, 0.0)
    return max(process.total for process in replica_memory(recipe, replica, chosen))


def _full(preset: str, available: int, precision: str, recompute: bool) -> tuple[int, int]:
    """Return the largest batch that fits, or 0, and its bytes."""
    sizes = [(batch, _full_bytes(preset, precision, batch, recompute)) for batch in BATCHES]
    return next((each for each in sizes if each[1] <= available), (0, sizes[-1][1]))


def _stage(preset: str, available: int, precision: str, recompute: bool) -> tuple[int, int, int]:
    """Return the fewest stages and micro-batches that fit, or 0, and the bytes of the largest stage."""
    least = math.inf
    for stages in range(2, PRESETS[preset].layers + 1):
        for m in MICRO_BATCHES:
            needed = _stage_bytes(preset, precision, stages, m, recompute)
            if needed <= available:
                return stages, m, needed
            least = min(least, needed)
    return 0, 0, int(least)


def _fit(preset: str, available: int, precision: str, tflops: float | None) -> Fit:
    (batch, full), (again_batch, again_full) = (
        _full(preset, available, precision, recompute) for recompute in (False, True)
    )
    (stages, m, stage), (again_stages, again_m, again_stage) = (
        _stage(preset, available, precision, recompute) for recompute in (False, True)
    )
    whole = ReplicaConfig(name="doctor")
    flops = step_flops(_recipe(preset, precision, whole, BATCH), whole)
    return Fit(
        preset=preset,
        full_batch=batch,
        full_bytes=full,
        full_batch_recomputed=again_batch,
        full_bytes_recomputed=again_full,
        stages=stages,
        micro_batches=m,
        stage_bytes=stage,
        stages_recomputed=again_stages,
        micro_batches_recomputed=again_m,
        stage_bytes_recomputed=again_stage,
        round_seconds=ROUND_STEPS * flops / (tflops * 1e12) if tflops else None,
    )


def role(found: list[Fit], trains: bool, bucket_ok: bool) -> str:
    """Say in one sentence what this machine can be."""
    full = next((fit for fit in reversed(found) if fit.full), None)
    stage = next((fit for fit in reversed(found) if fit.stage), None)
    if not trains:
        return "none before torch works here: `isthmus plan` is all it can do"
    if full is None and stage is None:
        return "none: too little memory even for a stage of nano, or too slow for it"
    parts = []
    if full:
        small = f" with inner.batch up to {full.full_batch}" if full.full_batch < BATCH else ""
        parts.append(f"a full replica of {full.preset}{small}")
    if stage and (full is None or stage.preset != full.preset or full.full_batch < BATCH):
        small = f" with {stage.micro_batches} micro-batches" if stage.micro_batches > MICRO_BATCHES[0] else ""
        parts.append(f"one of {stage.stages} stages of {stage.preset}{small}")
    again = next((fit for fit in reversed(found) if fit.full_recomputed), None)
    if again and (full is None or found.index(again) > found.index(full)):
        batch = again.full_batch_recomputed
        small = f" and inner.batch up to {batch}" if batch < BATCH else ""
        parts.append(f"a full replica of {again.preset} with inner.recompute{small}")
    can = ", or ".join(parts)
    if not bucket_ok:
        return f"the simulator only, until the bucket can be used; then up to {can}"
    return f"up to {can}"
