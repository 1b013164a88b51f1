"""Check whether a replica fits its machines, and what would make it fit: micro-batches, a smaller batch,
recomputation, sharding, more stages.

`memory_gb` of a [[replicas]] table limits each process. If it is stated, `sharding = "auto"`, `recompute =
"auto"` and a full replica's `micro_batches = 0` become the first of these that fits: none of them (fastest),
sharding (the processes of one machine exchange weights over its bus), the fewest parts of a batch (the same
sums in smaller pieces), recomputation (a third more compute), both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from isthmus.config import AUTO, Member, Recipe, ReplicaConfig, toml_line
from isthmus.config.fleet import MOST_MICRO_BATCHES
from isthmus.layout.schedule import depths
from isthmus.planner.memory import SPARE, replica_memory
from isthmus.planner.step import compute_of, inner_step

# Sharding, recomputation, and whether a batch may be cut.
ORDER = (
    ("none", "no", False), ("full", "no", False), ("none", "no", True), ("full", "no", True),
    ("none", "yes", False), ("full", "yes", False), ("none", "yes", True), ("full", "yes", True),
)  # fmt: skip
# What makes a full replica a pipelined one; `cures` states only its kind and stages.
PIPELINED = {
    "kind": "pipelined", "processes": 1, "sharding": "none", "compression": "1/8", "micro_batches": 0
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPick:
    """What `sharding` and `recompute = "auto"` and `micro_batches = 0` became for one [[replicas]] table, and
    why."""

    replica: str
    sharding: str
    recompute: str
    micro_batches: int  # 0: unchanged
    needed_bytes: int  # by its largest process
    plain_bytes: int  # with none of these changes
    memory_gb: float

    def apply(self, replica: ReplicaConfig) -> ReplicaConfig:
        return replace(
            replica, sharding=self.sharding, recompute=self.recompute, micro_batches=self.micro_batches
        )

    @property
    def reason(self) -> str:
        chosen = [
            *(["sharding"] if self.sharding == "full" else []),
            *([f"micro_batches = {self.micro_batches}"] if self.micro_batches > 1 else []),
            *(["recomputation"] if self.recompute == "yes" else []),
        ]
        what = " and ".join(chosen) if chosen else "neither sharding nor recomputation"
        plain = f" ({gb(self.plain_bytes)} without)" if chosen else ""
        room = f"{self.memory_gb:g} GB with {SPARE:.0%} to spare"
        fits = "fits" if self.needed_bytes <= usable(self.memory_gb) else "still does not fit"
        return (
            f'replica {self.replica}: "auto" is {what}: a process needs {gb(self.needed_bytes)}{plain}, '
            f"which {fits} {room}"
        )


def usable(memory_gb: float) -> float:
    """Return the bytes that a process's predicted peak may use."""
    return (1 - SPARE) * memory_gb * 1e9


def needed(recipe: Recipe, replica: ReplicaConfig, tflops: float = 0.0) -> int:
    """Return the bytes of a replica's largest process."""
    in_flight = in_flight_of(recipe, replica, tflops)
    return max(process.total for process in replica_memory(recipe, replica, in_flight))


def in_flight_of(recipe: Recipe, replica: ReplicaConfig, tflops: float = 0.0) -> tuple[int, ...]:
    """Return the most micro-batches that each stage holds; without a rate, for instantaneous links."""
    if replica.stages == 1:
        return (1,)
    rate = replica.tflops or tflops
    if rate <= 0:
        return depths(replica.stages, recipe.micro_batches_of(replica), 1.0, 0.0, 0.0, recipe.inner.in_flight)
    most = (0,) * replica.stages
    for round_number in (1, recipe.outer.rounds):  # finishing rounds send more, and so hold more
        usual = replace(recipe, replicas=(replica,)).in_round(round_number)
        member = Member(0, replica.name, usual.replicas[0])
        step = inner_step(usual, member, compute_of(usual, member.config, rate))[1]
        most = tuple(map(max, most, step.in_flight))
    return most


def choose(recipe: Recipe, replica: ReplicaConfig, tflops: float = 0.0) -> MemoryPick | None:
    """Choose for a table that leaves a choice and states its memory; if nothing fits, take what needs least.

    A choice of parts alone is not made here: older runs have settled the rest, and keep it.
    """
    shardings, recomputes = (replica.sharding,), (replica.recompute,)
    if replica.sharding == AUTO:
        shardings = ("none", "full") if may_shard(recipe, replica) else ("none",)
    if replica.recompute == AUTO:
        recomputes = ("yes",) if recipe.inner.recompute else ("no", "yes")
    if not replica.memory_gb or len(shardings) == len(recomputes) == 1:
        return None
    tried: list[tuple[int, str, str, int]] = []
    for shard, again, cut in ORDER:
        if shard in shardings and again in recomputes:
            trial = replace(replica, sharding=shard, recompute=again)
            for parts in _cuts(recipe, replica) if cut else (replica.micro_batches,):
                total = needed(recipe, replace(trial, micro_batches=parts), tflops)
                tried.append((total, shard, again, parts))
    fitting = [each for each in tried if each[0] <= usable(replica.memory_gb)]
    total, shard, again, parts = fitting[0] if fitting else min(tried)
    return MemoryPick(
        replica=replica.name,
        sharding=shard,
        recompute=again,
        micro_batches=parts,
        needed_bytes=total,
        plain_bytes=tried[0][0],
        memory_gb=replica.memory_gb,
    )


def _cuts(recipe: Recipe, replica: ReplicaConfig) -> list[int]:
    """Return the possible numbers of parts of a full replica's batch, fewest first; none if stated."""
    if replica.kind != "full" or replica.micro_batches:
        return []
    rows = recipe.batch_of(replica) // replica.processes
    return [parts for parts in range(2, min(rows, MOST_MICRO_BATCHES) + 1) if rows % parts == 0]


def fewest_parts(recipe: Recipe, replica: ReplicaConfig, on_gpu: bool | None = None) -> int:
    """Return the fewest micro-batches that make a full replica fit its memory; its own number if none do, or
    all are stated."""
    room = usable(replica.memory_gb)
    for parts in (recipe.micro_batches_of(replica), *_cuts(recipe, replica)):
        trial = replace(replica, micro_batches=parts)
        if (
            replica.kind == "full"
            and max(p.total for p in replica_memory(recipe, trial, on_gpu=on_gpu)) <= room
        ):
            return parts
    return recipe.micro_batches_of(replica)


def may_shard(recipe: Recipe, replica: ReplicaConfig) -> bool:
    return replica.kind == "full" and 1 < replica.processes <= recipe.model.layers


def cures(recipe: Recipe, replica: ReplicaConfig, tflops: float = 0.0) -> tuple[str, ...]:
    """Return changes of its table that each make a replica fit, with the bytes; if none does, those that do
    together with recomputation."""
    room, found = usable(replica.memory_gb), []
    for base in ({}, {"recompute": "yes"}):
        for trials in _changes(recipe, replica):
            for trial in trials:
                keys = base | trial
                if (total := needed(recipe, replace(replica, **keys), tflops)) <= room:
                    said = {k: v for k, v in keys.items() if k == "kind" or PIPELINED.get(k) != v}
                    found.append(f"{' and '.join(toml_line(k, v) for k, v in said.items())} ({gb(total)})")
                    break
        if found:
            break
    return tuple(found)


def _changes(recipe: Recipe, replica: ReplicaConfig) -> Iterator[list[dict[str, Any]]]:
    """Yield each kind of change, the smallest first."""
    full, rows = replica.kind == "full", recipe.batch_of(replica) // replica.processes
    own = recipe.micro_batches_of(replica)
    if not recipe.recomputes(replica):
        yield [{"recompute": "yes"}]
    if full:
        most = min(rows, MOST_MICRO_BATCHES)
        yield [{"micro_batches": n} for n in range(own + 1, most + 1) if rows % n == 0]
    unit = replica.processes * own
    yield [{"batch": unit * (rows // own >> halved)} for halved in range(1, (rows // own).bit_length())]
    if may_shard(recipe, replica) and not replica.sharded:
        yield [{"sharding": "full"}]
    stages = range(max(2, replica.stages + 1), recipe.model.layers + 1)
    yield [(PIPELINED if full else {}) | {"stages": n} for n in stages]


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
