"""This machine's compute: its GPUs, and the training rate of a preset on one device."""

import torch

from isthmus import gpu
from isthmus.config import PRESETS, InnerConfig, Recipe, ReplicaConfig
from isthmus.doctor.checks import Gpu
from isthmus.planner.rate import TrainingRate
from isthmus.replica import speed

USABLE_SHARE = 0.92  # of a GPU's free memory, the simulator's limit too


def gpus() -> list[Gpu]:
    """Return every CUDA device, with its memory."""
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
                precision="bf16" if gpu.computes_in_bf16(torch.device("cuda", i)) else "fp32",
            )
        )
    return found


def training_rate(
    device: str, precision: str, preset: str, seconds: float, available_bytes: int
) -> TrainingRate:
    """Train a preset for about `seconds`, on the largest batch that fits the time and the memory."""
    one = Recipe(
        name="doctor",
        model=PRESETS[preset],
        inner=InnerConfig(batch=1, precision=precision),
        replicas=(ReplicaConfig(name="doctor"),),
    )
    return speed.training_rate(one, device, precision, seconds, available_bytes)
