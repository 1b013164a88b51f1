"""Pick `compression = "auto"` and `wire = "auto"`: the least loss among all that the link can carry.

The rule uses figures that a run can measure: with a full pipeline, the link is busy for less than 95 % of the
time. That share is the link's seconds for a micro-batch, one way, over the seconds between micro-batches,
which an event simulation of the schedule yields. `inner.in_flight` plays no part: if it makes stages wait for
round trips, the link is idle, and more compression would cost loss and gain little. Of all pairs of a wire
and a k/d that satisfy the rule, the one with the least expected price wins (`loss_price`).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from isthmus.config import AUTO, Member, Recipe, ReplicaConfig
from isthmus.layout.traffic import micro_batch_bytes
from isthmus.planner.fit import MemoryPick, choose
from isthmus.planner.loss_price import BASES, LossPrice, Measured, measured
from isthmus.planner.step import compute_of, rate_of, steady_pace

BUSY = 0.95
LADDER = (
    "1/2", "3/8", "1/3", "1/4", "1/6", "1/8", "1/12", "1/16", "1/24", "1/32", "1/48", "1/64", "1/96", "1/128",
    "1/192", "1/384", "1/768",
)  # fmt: skip


@dataclass(frozen=True)
class Rung:
    """A wire and a k/d on one replica's link, with a full pipeline."""

    wire: str
    compression: str
    price: LossPrice
    link_seconds: float  # one micro-batch, one way
    stage_seconds: tuple[float, ...]  # of each stage for a micro-batch

    @cached_property
    def pace_seconds(self) -> float:
        """Seconds between micro-batches."""
        # A full pipeline is deep enough for the latency, which delays all arrivals equally.
        return steady_pace(self.stage_seconds, self.link_seconds, 0.0)

    @property
    def busy(self) -> float:
        return self.link_seconds / self.pace_seconds

    @property
    def enough(self) -> bool:
        return self.busy < BUSY

    @property
    def rank(self) -> tuple[float, int, float]:
        """Sort key, best first: the price, then how well it is known, then how much it carries."""
        return max(0.0, self.price.percent), BASES.index(self.price.basis), -self.link_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Untied:
    """Reports that a run has two tables where its recipe states one."""

    num_parameters: int  # of the second table

    @property
    def reason(self) -> str:
        return (
            f"embedding and head are untied, {self.num_parameters:,} parameters more: the first and the last "
            "stage would have to exchange the table's whole gradient in every step"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """What "auto" became for one [[replicas]] table, and why."""

    replica: str
    picked: tuple[str, ...]  # the keys that were "auto"
    mbps: float
    rung: Rung
    milder: Rung | None  # the nearest cheaper one, which the link cannot carry; None if there is none

    @property
    def compression(self) -> str:
        return self.rung.compression

    @property
    def wire(self) -> str:
        return self.rung.wire

    @property
    def reason(self) -> str:
        """The reason in one line, with the expected price."""
        price = self.rung.price.text()
        keys = " and ".join(f'{key} = "{getattr(self.rung, key)}"' for key in self.picked)
        chosen = f'replica {self.replica}: "auto" is {keys}'
        if not self.rung.enough:
            return (
                f"{chosen}, the strongest there is, and the link of {self.mbps:g} Mb/s stays the bottleneck: "
                f"{self.rung.busy:.0%} busy once the pipeline is full; {price}"
            )
        milder = ""
        if self.milder:
            other = " in ".join(getattr(self.milder, key) for key in self.picked)
            milder = f" ({other}: {self.milder.busy:.0%})"
        return (
            f"{chosen}: the link of {self.mbps:g} Mb/s is then "
            f"{self.rung.busy:.0%} busy once the pipeline is full{milder}; {price}"
        )


def resolve(
    recipe: Recipe, tflops: float = 0.0, memory_gb: float = 0.0, room: Sequence[int] = ()
) -> tuple[Recipe, tuple[Untied | Pick | MemoryPick, ...]]:
    """Return the recipe with every "auto" wire and k/d picked, and the reasons. If the memory is stated, also
    pick sharding and recomputation. If a replica is pipelined, or may join (`room`), untie embedding and head
    in every replica. Without anything to pick, return the recipe itself.

    `tflops` and `memory_gb` apply to machines for which the recipe states none.
    """
    untied: tuple[Untied, ...] = ()
    if recipe.model.tie_embeddings and (room or any(r.stages > 1 for r in recipe.replicas)):
        untied = (Untied(num_parameters=recipe.model.vocab * recipe.model.width),)
        recipe = replace(recipe, model=replace(recipe.model, tie_embeddings=False))
    picks = tuple(pick(recipe, r, tflops) for r in recipe.replicas if r.auto)
    found = {chosen.replica: chosen for chosen in picks}
    if found:
        replicas = [picked(r, found[r.name]) if r.name in found else r for r in recipe.replicas]
        recipe = replace(recipe, replicas=tuple(replicas))
    if memory_gb:
        known = [replace(r, memory_gb=r.memory_gb or memory_gb) for r in recipe.replicas]
        recipe = replace(recipe, replicas=tuple(known))
    fitted = {r.name: chosen for r in recipe.replicas if (chosen := choose(recipe, r, tflops))}
    if fitted:
        settled = [fitted[r.name].apply(r) if r.name in fitted else r for r in recipe.replicas]
        recipe = replace(recipe, replicas=tuple(settled))
    return recipe, (*untied, *picks, *fitted.values())


def picked(replica: ReplicaConfig, chosen: Pick) -> ReplicaConfig:
    return replace(replica, compression=chosen.compression, wire=chosen.wire)


def pick(recipe: Recipe, replica: ReplicaConfig, tflops: float = 0.0) -> Pick:
    """Pick the least price that the link can carry: on one wire, the mildest k/d. If it can carry none, pick
    the one with the fewest bytes: the run is right, only slow."""
    options = rungs(recipe, replica, rate_of(replica, tflops))
    first = bisect_left(options, True, key=lambda rung: rung.enough)  # fewer bytes never keep the link busier
    enough = options[first:] or options[-1:]
    best, heavier = enough[0], options[: min(first, len(options) - 1)]
    if replica.wire == AUTO:
        best = min(enough, key=lambda rung: rung.rank)
        heavier = [rung for rung in heavier if rung.rank < best.rank]
    return Pick(
        replica=replica.name,
        picked=tuple(key for key in ("compression", "wire") if getattr(replica, key) == AUTO),
        mbps=replica.link.mbps,
        rung=best,
        milder=heavier[-1] if heavier else None,
    )


def rungs(recipe: Recipe, replica: ReplicaConfig, tflops: float) -> list[Rung]:
    """Return all choices for this replica's link, most bytes first, as far as the model's width has enough
    dimensions."""
    micro_batches = recipe.micro_batches_of(replica)
    known, anchor = measured(recipe.inner.optimizer, recipe.subspace.anchor), recipe.subspace.anchor
    compute = compute_of(recipe, replica, tflops)
    each = tuple(seconds / micro_batches for seconds in compute.stage_seconds_per_step)
    found = []
    for wire, compression in _pairs(known, replica, anchor):
        if compression != "none" and recipe.model.width * Fraction(compression) < 1:
            continue
        member = Member(0, replica.name, replace(replica, compression=compression, wire=wire))
        link = micro_batch_bytes(recipe, member)[0] * 8 / (replica.link.mbps * 1e6)
        found.append(Rung(wire, compression, known.price(wire, compression), link, each))
    return sorted(found, key=lambda rung: -rung.link_seconds)


def _pairs(known: Measured, replica: ReplicaConfig, anchor: str) -> list[tuple[str, str]]:
    wires = known.wires if replica.wire == AUTO else (replica.wire,)
    if replica.compression != AUTO:
        return [(wire, replica.compression) for wire in wires]
    # At k = d, U still rotates few-bit streams, unless an open boundary was measured with them. With learned
    # anchors, no boundary may be open.
    first = {wire: "none" if anchor == "fixed" and known.opens(wire) else "1" for wire in wires}
    return [(wire, k) for wire in wires for k in (first[wire], *LADDER)]
