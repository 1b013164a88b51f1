"""Whether a replica's part fits on its GPU, by the planner's memory model, before anything is started."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from isthmus.config import Member, Recipe, ReplicaConfig
from isthmus.errors import ConfigError
from isthmus.planner.memory import ProcessMemory, process_memory


def check_fits(
    recipe: Recipe, members: Sequence[Member], device_bytes: int, device: str, stage: int | None = None
) -> str:
    """ConfigError where weights, optimiser, anchor and feedback alone are more than the device holds.

    Otherwise a warning where the predicted peak is more, or nothing. `members` share the device, each with
    all of its stages, or with `stage` only; the processes of a full replica have a device each.
    """
    parts = [part for member in members for part in _parts(recipe, member, stage)]
    resting, peak = sum(map(resting_bytes, parts)), sum(part.total for part in parts)
    names = ", ".join(member.name for member in members)
    who = (
        f"replica{'s' * (len(members) > 1)} {names}" if len(names) < 60 else f"these {len(members)} replicas"
    )
    if stage is not None:
        who = f"stage {stage} of {who}"
    if resting > device_bytes:
        raise ConfigError(
            f"{who}: weights, optimiser, anchor and error feedback alone take {_gb(resting)}, {device} has "
            f"{_gb(device_bytes)}; {_cure(recipe, members, device_bytes)}"
        )
    if peak > device_bytes:
        return (
            f"{who} may need {_gb(peak)} at the peak, {device} has {_gb(device_bytes)}; if memory runs out, "
            "lower inner.batch or set inner.recompute = true"
        )
    return ""


def device_memory(device: torch.device) -> tuple[int, str]:
    """Bytes of a GPU, all of them, and what it is called."""
    found = torch.cuda.get_device_properties(device)
    return found.total_memory, found.name


def resting_bytes(part: ProcessMemory) -> int:
    """What a process holds between two steps, whatever its batch is."""
    return part.weights + part.adam + part.feedback + part.anchor + part.outer


def _parts(recipe: Recipe, member: Member, stage: int | None) -> list[ProcessMemory]:
    stages = range(member.config.stages) if stage is None else [stage]
    return [process_memory(recipe, member.config, s, 1) for s in stages]


def _cure(recipe: Recipe, members: Sequence[Member], device_bytes: int) -> str:
    """The fewest stages of one replica that fit on devices of this size, one each."""
    config = members[0].config
    for stages in range(2, recipe.model.layers + 1):
        if _largest(recipe, replace(config, kind="pipelined", stages=stages, processes=1)) <= device_bytes:
            if len(members) > 1 or config.stages >= stages:
                return "give the replicas and stages devices of their own, by `isthmus join --device`"
            return f'kind = "pipelined" with stages = {stages}, a device each, would fit'
    return "it needs a smaller model or a larger device; `isthmus plan --suggest` looks for a fleet that fits"


def _largest(recipe: Recipe, replica: ReplicaConfig) -> int:
    return max(process_memory(recipe, replica, stage, 1).total for stage in range(replica.stages))


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
