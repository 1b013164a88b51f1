"""Check whether a replica fits its machines, and what would make it fit: micro-batches, a smaller batch,
recomputation, sharding, more stages.

`memory_gb` of a [[replicas]] table limits each process. If it is stated, `sharding = "auto"`, `recompute =
"auto"` and a full replica's `micro_batches = 0` become the first of these that fits: none of them (fastest),
sharding (the processes of one machine exchange weights over its bus), the fewest parts of a batch (the same
sums in smaller pieces), recomputation (a third more compute), both.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from isthmus.config import AUTO, Member, Recipe, ReplicaConfig
from isthmus.config.fleet import MOST_MICRO_BATCHES
from isthmus.layout.schedule import depths
from isthmus.planner.memory import SPARE, replica_memory
from isthmus.planner.step import compute_of, inner_step

# Sharding, recomputation, and whether a batch may be cut.
ORDER = (
    ("none", "no", False), ("full", "no", False), ("none", "no", True), ("full", "no", True),
    ("none", "yes", False), ("full", "yes", False), ("none", "yes", True), ("full", "yes", True),
)  # fmt: skip
STAGES_COMPRESSION = "1/8"  # for stages of a replica that is now full


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

    @property
    def choice(self) -> str:
        chosen = [
            *(["sharding"] if self.sharding == "full" else []),
            *([f"micro_batches = {self.micro_batches}"] if self.micro_batches > 1 else []),
            *(["recomputation"] if self.recompute == "yes" else []),
        ]
        what = " and ".join(chosen) if chosen else "neither sharding nor recomputation"
        plain = f" ({_gb(self.plain_bytes)} without)" if chosen else ""
        room = f"{self.memory_gb:g} GB with {SPARE:.0%} to spare"
        fits = "fits" if self.needed_bytes <= usable(self.memory_gb) else "still does not fit"
        return (
            f'replica {self.replica}: "auto" is {what}: a process needs {_gb(self.needed_bytes)}{plain}, '
            f"which {fits} {room}"
        )

    @property
    def reason(self) -> str:
        return self.choice


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


def largest_batch(recipe: Recipe, replica: ReplicaConfig, tflops: float = 0.0) -> int:
    """Return the largest `batch` that fits and divides as the recipe requires; 0 if none does."""
    unit = replica.processes * recipe.micro_batches_of(replica)
    room, most = usable(replica.memory_gb), recipe.batch_of(replica) // unit
    sizes = range(1, most + 1)
    count = bisect_right(sizes, room, key=lambda n: needed(recipe, replace(replica, batch=n * unit), tflops))
    return count * unit


def may_shard(recipe: Recipe, replica: ReplicaConfig) -> bool:
    return replica.kind == "full" and 1 < replica.processes <= recipe.model.layers


def cures(recipe: Recipe, replica: ReplicaConfig, tflops: float = 0.0) -> tuple[str, ...]:
    """Return changes that would make a replica fit: each is one change of the recipe, with its bytes."""
    room = usable(replica.memory_gb)
    found = []
    for words, trial in _changes(recipe, replica):
        total = needed(recipe, trial, tflops)
        if total <= room:
            found.append(f"{words} ({_gb(total)})")
    return tuple(found)


def _changes(recipe: Recipe, replica: ReplicaConfig) -> Iterator[tuple[str, ReplicaConfig]]:
    """Yield each change alone, then with recomputation."""
    full, room = replica.kind == "full", usable(replica.memory_gb)
    rows = recipe.batch_of(replica) // replica.processes
    bases = [("", replica)]
    if not recipe.recomputes(replica):
        bases.append((' and recompute = "yes"', replace(replica, recompute="yes")))
    for also, base in bases:
        if also:
            yield 'recompute = "yes"', base
        parts = [n for n in range(recipe.micro_batches_of(base) + 1, rows + 1) if full and rows % n == 0]
        trials = (replace(base, micro_batches=n) for n in parts if n <= MOST_MICRO_BATCHES)
        if fewest := next((t for t in trials if needed(recipe, t) <= room), None):
            yield f"micro_batches = {fewest.micro_batches}{also}", fewest
        if batch := largest_batch(recipe, base):
            yield f"batch = {batch}{also}", replace(base, batch=batch)
        if may_shard(recipe, base) and not base.sharded:
            yield f'sharding = "full"{also}', replace(base, sharding="full")
        cut, words = base, ""
        if full:
            words = 'kind = "pipelined", '
            cut = replace(base, kind="pipelined", processes=1, sharding="none", stages=2)
            cut = replace(cut, compression=STAGES_COMPRESSION, micro_batches=0)  # the defaults of [inner]
        stages = range(max(2, replica.stages + 1), recipe.model.layers + 1)
        if trial := next((t for n in stages if needed(recipe, t := replace(cut, stages=n)) <= room), None):
            yield f"{words}stages = {trial.stages}{also}", trial


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
