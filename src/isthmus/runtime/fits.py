"""Check with the planner's memory model that replicas fit on their GPU, before starting them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from isthmus.config import Member, Recipe
from isthmus.errors import ConfigError
from isthmus.planner.fit import cures, fewest_parts, in_flight_of
from isthmus.planner.memory import ProcessMemory, replica_memory

SURE_SHARE = 0.75  # the share of the predicted activations that is certain


def check_fits(
    recipe: Recipe, members: Sequence[Member], device_bytes: int, device: str, stage: int | None = None
) -> str:
    """ConfigError if the device cannot hold weights, optimiser, anchor and feedback, alone or with most of
    the activations on top: the prediction's error is smaller than that.

    Otherwise return a warning if the predicted peak is too large, or "". `members` share the device, each
    with all of its stages, or with `stage` only; the processes of a full replica have a device each.
    """
    if len(members) == 1:
        members = [cut_to_fit(recipe, members[0], device_bytes)]
    parts = [part for member in members for part in _parts(recipe, member, stage)]
    resting, peak = sum(map(resting_bytes, parts)), sum(part.total for part in parts)
    names = ", ".join(member.name for member in members)
    who = f"replica{'s' * (len(members) > 1)} {names}" if len(names) < 60 else f"{len(members)} replicas"
    if stage is not None:
        who = f"stage {stage} of {who}"
    if resting > device_bytes:
        cure = _cure(recipe, members, max(map(resting_bytes, parts)), device_bytes)
        raise ConfigError(
            f"{who}: weights, optimiser, anchor and error feedback alone take {_gb(resting)}, {device} has "
            f"{_gb(device_bytes)}; {cure}"
        )
    if resting + SURE_SHARE * sum(part.activations for part in parts) > device_bytes:
        cure = _cure(recipe, members, max(part.total for part in parts), device_bytes)
        raise ConfigError(
            f"{who} does not fit: about {_gb(peak)} at the peak, and {device} has {_gb(device_bytes)}; {cure}"
        )
    if peak > device_bytes:
        return (
            f"{who} may need {_gb(peak)} at the peak, {device} has {_gb(device_bytes)}; if memory runs out, "
            'lower its batch, or set more micro_batches or recompute = "yes"'
        )
    return ""


def cut_to_fit(recipe: Recipe, member: Member, device_bytes: int) -> Member:
    """A full replica whose batch exceeds the device accumulates gradients over parts of it: the fewest that
    fit. Each machine may choose this, since only rounding changes. Settings in the replica's table are
    kept."""
    config = replace(member.config, memory_gb=device_bytes / 1e9)
    parts = fewest_parts(recipe, config, on_gpu=True)
    if parts == recipe.micro_batches_of(config):
        return member
    return replace(member, config=replace(member.config, micro_batches=parts))


def told_parts(recipe: Recipe, member: Member, device_bytes: int, device: str) -> str:
    """The log line about `cut_to_fit`, or ""."""
    parts = cut_to_fit(recipe, member, device_bytes).config.micro_batches
    if parts == member.config.micro_batches:
        return ""
    return (
        f"replica {member.name}: a batch of {recipe.batch_of(member.config)} is too large for {device} of "
        f"{_gb(device_bytes)}, so gradients are added up over {parts} parts of it"
    )


def device_memory(device: torch.device) -> tuple[int, str]:
    """A GPU's total bytes and its name."""
    found = torch.cuda.get_device_properties(device)
    return found.total_memory, found.name


def resting_bytes(part: ProcessMemory) -> int:
    """Bytes that a process holds between two steps, whatever its batch."""
    return part.weights + part.moments + part.feedback + part.anchor + part.outer


def _parts(recipe: Recipe, member: Member, stage: int | None) -> Sequence[ProcessMemory]:
    """The processes of a replica on this device."""
    config = member.config
    found = replica_memory(recipe, config, in_flight_of(recipe, config), on_gpu=True)
    if config.kind == "full":
        return [max(found, key=resting_bytes)]
    return found if stage is None else [found[stage]]


def _cure(recipe: Recipe, members: Sequence[Member], largest: int, device_bytes: int) -> str:
    if largest <= device_bytes:
        return "give each replica and stage a device of its own, by `isthmus join --device`"
    replica = replace(members[0].config, memory_gb=device_bytes / 1e9)
    if fitting := cures(recipe, replica)[:2]:
        return f"what would fit: {', or '.join(fitting)}"
    return "use a larger device or a smaller model; `isthmus plan --suggest` looks for a fleet that fits"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
