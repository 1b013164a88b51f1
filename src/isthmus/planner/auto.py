"""`compression = "auto"`: the mildest k/d at which the link between stages is not the bottleneck.

The rule, in figures that a run can measure: once the pipeline is full, the link is busy for less than 95 % of
the time. That share is the link's seconds for a micro-batch, one way, over the seconds between micro-batches,
which come from the event simulation of the schedule. `inner.in_flight` plays no part: where it makes stages
wait for round trips, the link is idle, and more compression would cost loss and gain little.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from isthmus.config import AUTO, Member, Recipe, ReplicaConfig
from isthmus.errors import ConfigError
from isthmus.layout.traffic import micro_batch_bytes
from isthmus.planner.fit import MemoryPick, choose
from isthmus.planner.paper_loss import penalty
from isthmus.planner.step import compute_of, steady_pace

BUSY = 0.95
LADDER = ("none", *(f"1/{n}" for n in (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 384, 768)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One k/d of the ladder on one replica's link, once its pipeline is full."""

    compression: str
    link_seconds: float  # one micro-batch, one way
    pace_seconds: float  # between micro-batches

    @property
    def busy(self) -> float:
        return self.link_seconds / self.pace_seconds

    @property
    def enough(self) -> bool:
        return self.busy < BUSY


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """What "auto" became for one [[replicas]] table, and why."""

    replica: str
    mbps: float
    rung: Rung
    milder: Rung | None  # the next milder one, which is not enough; None where nothing milder exists

    @property
    def compression(self) -> str:
        return self.rung.compression

    @property
    def ratio(self) -> Fraction | None:
        return None if self.compression == "none" else Fraction(self.compression)

    @property
    def reason(self) -> str:
        """In one line, with what the paper lost at this k/d."""
        return f"{self.choice}; {penalty(self.ratio)}"

    @property
    def choice(self) -> str:
        chosen = f'replica {self.replica}: compression = "auto" is {self.compression}'
        if not self.rung.enough:
            return (
                f"{chosen}, the strongest there is, and the link of {self.mbps:g} Mb/s stays the bottleneck: "
                f"{self.rung.busy:.0%} busy once the pipeline is full"
            )
        milder = f" ({self.milder.compression}: {self.milder.busy:.0%})" if self.milder else ""
        return (
            f"{chosen}: the link of {self.mbps:g} Mb/s is then "
            f"{self.rung.busy:.0%} busy once the pipeline is full{milder}"
        )


def resolve(
    recipe: Recipe, tflops: float = 0.0, memory_gb: float = 0.0
) -> tuple[Recipe, tuple[Pick | MemoryPick, ...]]:
    """The recipe with a k/d wherever it said "auto", and why; the same of sharding and recomputation where
    the memory is stated. The recipe itself where there was nothing to pick.

    `tflops` and `memory_gb` are those of machines whose own the recipe does not state.
    """
    picks = tuple(pick(recipe, r, tflops) for r in recipe.replicas if r.compression == AUTO)
    found = {chosen.replica: chosen.compression for chosen in picks}
    if found:
        replicas = [replace(r, compression=found.get(r.name, r.compression)) for r in recipe.replicas]
        recipe = replace(recipe, replicas=tuple(replicas))
    if memory_gb:
        known = [replace(r, memory_gb=r.memory_gb or memory_gb) for r in recipe.replicas]
        recipe = replace(recipe, replicas=tuple(known))
    fitted = {r.name: chosen for r in recipe.replicas if (chosen := choose(recipe, r, tflops))}
    if fitted:
        settled = [
            replace(r, sharding=fitted[r.name].sharding, recompute=fitted[r.name].recompute)
            if r.name in fitted
            else r
            for r in recipe.replicas
        ]
        recipe = replace(recipe, replicas=tuple(settled))
    return recipe, (*picks, *fitted.values())


def pick(recipe: Recipe, replica: ReplicaConfig, tflops: float = 0.0) -> Pick:
    """The mildest k/d that is enough. Where none is, the strongest: the run is right, only slow."""
    rate = replica.tflops or tflops
    if rate <= 0:
        raise ConfigError(
            f'replica {replica.name}: compression = "auto" needs the training rate of its machines; set '
            'tflops (`isthmus doctor` on such a machine measures it), or a k/d such as compression = "1/8"'
        )
    milder = None
    for rung in rungs(recipe, replica, rate):
        if rung.enough:
            break
        milder, last = rung, milder
    else:
        milder = last
    return Pick(replica=replica.name, mbps=replica.link.mbps, rung=rung, milder=milder)


def rungs(recipe: Recipe, replica: ReplicaConfig, tflops: float) -> Iterator[Rung]:
    """The ladder on this replica's link, mildest first, as far as the model's width has dimensions for it."""
    m = recipe.inner.micro_batches
    compute = compute_of(recipe, replica, tflops)
    each = tuple(seconds / m for seconds in compute.stage_seconds_per_step)
    for compression in LADDER:
        if compression != "none" and recipe.model.width * Fraction(compression) < 1:
            return
        member = Member(0, replica.name, replace(replica, compression=compression))
        link = micro_batch_bytes(recipe, member)[0] * 8 / (replica.link.mbps * 1e6)
        # A full pipeline is deep enough for the latency, which delays all arrivals by the same time.
        pace = steady_pace(each, link, 0.0)
        yield Rung(compression=compression, link_seconds=link, pace_seconds=pace)
