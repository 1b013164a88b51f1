"""Measured training FLOP/s: the real inner step of a full replica, counted as the planner counts it."""

import statistics
import time

import torch
from torch import Tensor

from isthmus.config import PRESETS, InnerConfig, Member, Recipe, ReplicaConfig
from isthmus.data.tokens import Batches
from isthmus.doctor.checks import Gpu, TrainingRate
from isthmus.planner.cost import step_flops
from isthmus.planner.memory import process_memory
from isthmus.replica.full import FullReplica

USABLE_SHARE = 0.92  # of a GPU's free memory, as the simulator takes it
MOST_SEQUENCES = 32  # inner.batch's default
STEPS = 4  # about, in the time given


def gpus() -> list[Gpu]:
    """Every CUDA device, with its memory."""
    found = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(i)
        found.append(
            Gpu(
                device=f"cuda:{i}",
                name=torch.cuda.get_device_name(i),
                total_bytes=total,
                free_bytes=free,
                available_bytes=int(free * USABLE_SHARE),
            )
        )
    return found


def recipe_of(preset: str, precision: str, sequences: int) -> Recipe:
    """One full replica of a preset."""
    return Recipe(
        name="doctor",
        model=PRESETS[preset],
        inner=InnerConfig(batch=sequences, precision=precision),
        replicas=(ReplicaConfig(name="doctor"),),
    )


class _Noise(Batches):
    """Random tokens instead of a corpus: a training rate does not depend on the text."""

    def __init__(self, vocab: int, context: int) -> None:
        self.batch = 1  # and more, step by step
        self.tokens = torch.randint(vocab, (MOST_SEQUENCES, context + 1), generator=torch.Generator())

    def at(self, replica: int, inner_step: int) -> Tensor:
        return self.tokens[: self.batch]


def training_rate(
    device: str, precision: str, preset: str, seconds: float, available_bytes: int
) -> TrainingRate:
    """Train `preset` for about `seconds`: forward, backward, clipping and AdamW, as a worker of a fleet does.

    The batch is doubled as long as several inner steps fit into the time, and one into the memory.
    """
    recipe = recipe_of(preset, precision, 1)
    batches = _Noise(recipe.model.vocab, recipe.model.context)
    # The batch grows while the replica stays: what a step takes is asked of `batches`.
    replica = FullReplica(
        recipe, Member(0, "doctor", recipe.replicas[0]), batches, device=device, precision=precision
    )
    count = 0

    def step() -> float:
        nonlocal count
        began = time.perf_counter()
        replica.inner_step(count)
        if device != "cpu":
            torch.cuda.synchronize(device)
        count += 1
        return time.perf_counter() - began

    step()  # the first one also allocates and chooses kernels
    began, spent = time.perf_counter(), step()
    while (double := 2 * batches.batch) <= MOST_SEQUENCES:
        wanted = recipe_of(preset, precision, double)
        needed = process_memory(wanted, wanted.replicas[0], 0, 1).total
        if 2 * spent * STEPS > seconds or needed > available_bytes:
            break
        batches.batch = double
        step()
        spent = step()
    times = [spent]
    while time.perf_counter() - began + spent < seconds or len(times) < 3:
        times.append(step())
    each = statistics.median(times)
    flops = step_flops(recipe_of(preset, precision, batches.batch))
    return TrainingRate(
        device=device,
        precision=precision,
        preset=preset,
        sequences=batches.batch,
        steps=len(times),
        step_seconds=each,
        tflops=flops / each / 1e12,
        tokens_per_second=batches.batch * recipe.model.context / each,
    )


def num_threads() -> int:
    """Of the CPU: OMP_NUM_THREADS may allow fewer than there are cores."""
    return torch.get_num_threads()
