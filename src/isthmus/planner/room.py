"""Disk space of private state, and a check for it before anything starts. Standard library."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from isthmus.config import Member, Recipe
from isthmus.disk import check_room, shortage
from isthmus.layout.traffic import outer_bytes
from isthmus.planner.memory import MASTER_BYTES, process_memory, state_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes on a disk: of one state, the most at any time, and what a round cannot do without."""

    state: int = 0
    most: int = 0
    round: int = 0

    def __add__(self, other: "Room") -> "Room":
        return Room(self.state + other.state, self.most + other.most, self.round + other.round)


def replica_room(recipe: Recipe, member: Member, stage: int | None = None) -> Room:
    """Return what a replica's processes write, or those of one stage; see runtime/checkpoint.py.

    Each keeps a checkpoint from the end of a round and one from inside a round while it writes the next. If
    there are several processes, each also keeps the previous one until all have the newer.
    """
    config = member.config
    total, kept = Room(), 1 if config.parts == 1 else 2
    for part in range(config.parts) if stage is None else [stage]:
        memory = process_memory(recipe, config, part, 1)
        edge = memory.moments + memory.feedback + memory.anchor + memory.outer
        inside = edge + memory.weights
        total += Room(edge, kept * (edge + inside) + inside)
    return total


def fleet_room(recipe: Recipe, members: Iterable[Member], bucket: bool) -> Room:
    """Add up all replicas on one disk; `bucket` includes a bucket on it."""
    members = list(members)
    total = sum((replica_room(recipe, member) for member in members), Room())
    if bucket:
        updates = sum(outer_bytes(recipe, member)[0] for member in members)
        kept = min(recipe.outer.rounds, recipe.bucket.keep_rounds or recipe.outer.rounds)
        anchors = (kept // recipe.bucket.anchor_every + 2) * 4 * recipe.model.num_stored
        total += Room(updates, kept * updates + anchors, updates)
    return total


def simulator_room(recipe: Recipe, precision: str) -> Room:
    """Return what a simulation keeps: one state of the whole fleet, and the next while it is written."""
    weights = MASTER_BYTES[precision] * recipe.model.num_stored
    one = weights + recipe.num_replicas * (state_bytes(recipe, precision) - weights)  # one anchor for all
    return Room(one, 2 * one + weights)


def check_disk(folder: Path, room: Room, what: str, begun: bool = False) -> str:
    """Raise ConfigError unless two states fit, or one if the run has begun. Return a warning if the most that
    it may write does not fit, else nothing."""
    check_room(folder, room.state if begun else 2 * room.state, what)
    if not begun and (words := shortage(folder, room.most, f"{what}, all in all,")):
        return f"{words}, or it may become full on the way"
    return ""
