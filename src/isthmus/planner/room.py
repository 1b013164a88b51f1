"""What private state takes on a disk, and whether that is there before anything starts. Standard library."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from isthmus.config import Member, Recipe
from isthmus.disk import check_room, shortage
from isthmus.layout.traffic import outer_bytes
from isthmus.planner.memory import MASTER_BYTES, process_memory, state_bytes

KEPT = 2  # whole states of a process, beside the one that is being written


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes on a disk: of one state, of all that lies there at most, and what a round cannot do without."""

    state: int = 0
    most: int = 0
    round: int = 0

    def __add__(self, other: "Room") -> "Room":
        return Room(self.state + other.state, self.most + other.most, self.round + other.round)


def replica_room(recipe: Recipe, member: Member, stage: int | None = None) -> Room:
    """What the processes of a replica write, or that of one stage; see private_state.py."""
    config = member.config
    total = Room()
    for part in range(config.parts) if stage is None else [stage]:
        memory = process_memory(recipe, config, part, 1)
        state = memory.moments + memory.feedback + memory.anchor + memory.outer
        # A full replica of one process also saves the middle of a round: once, and the next beside it.
        middle = state + memory.weights if config.kind == "full" and config.processes <= 1 else 0
        total += Room(state, (KEPT + 1) * state + 2 * middle)
    update, _ = outer_bytes(recipe, member)
    return total + Room(update, (KEPT + 2) * update, update)


def fleet_room(recipe: Recipe, members: Iterable[Member], bucket: bool) -> Room:
    """All replicas on one disk; with `bucket`, what lies in a bucket beside them."""
    members = list(members)
    total = sum((replica_room(recipe, member) for member in members), Room())
    if bucket:
        updates = sum(outer_bytes(recipe, member)[0] for member in members)
        kept = min(recipe.outer.rounds, recipe.bucket.keep_rounds or recipe.outer.rounds)
        anchors = (kept // recipe.bucket.anchor_every + 2) * 4 * recipe.model.num_stored
        total += Room(updates, kept * updates + anchors, updates)
    return total


def simulator_room(recipe: Recipe, precision: str) -> Room:
    """A simulation keeps one state of the whole fleet, and writes the next beside it."""
    weights = MASTER_BYTES[precision] * recipe.model.num_stored
    one = weights + recipe.num_replicas * (state_bytes(recipe, precision) - weights)  # one anchor for all
    return Room(one, 2 * one + weights)


def check_disk(folder: Path, room: Room, what: str, begun: bool = False) -> str:
    """ConfigError where two states do not fit, or one where the run has begun; else a warning where all that
    may lie there does not, or nothing."""
    check_room(folder, room.state if begun else 2 * room.state, what)
    if not begun and (words := shortage(folder, room.most, f"{what}, all in all,")):
        return f"{words}, or it may become full on the way"
    return ""
