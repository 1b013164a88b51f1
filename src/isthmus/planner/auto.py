"""`compression = "auto"` and `wire = "auto"`: what costs the least loss of all that the link can carry.

The rule, in figures that a run can measure: once the pipeline is full, the link is busy for less than 95 % of
the time. That share is the link's seconds for a micro-batch, one way, over the seconds between micro-batches,
which come from the event simulation of the schedule. `inner.in_flight` plays no part: where it makes stages
wait for round trips, the link is idle, and more compression would cost loss and gain little. Of all pairs of
a wire and a k/d that satisfy it, the one with the least expected price is taken (`loss_price`).
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from isthmus.config import AUTO, Member, Recipe, ReplicaConfig
from isthmus.errors import ConfigError
from isthmus.layout.traffic import micro_batch_bytes
from isthmus.planner.fit import MemoryPick, choose
from isthmus.planner.loss_price import BASES, LossPrice, Measured, measured
from isthmus.planner.step import compute_of, steady_pace

BUSY = 0.95
LADDER = (
    "1/2", "3/8", "1/3", "1/4", "1/6", "1/8", "1/12", "1/16", "1/24", "1/32", "1/48", "1/64", "1/96", "1/128",
    "1/192", "1/384", "1/768",
)  # fmt: skip


@dataclass(frozen=True)
class Rung:
    """A wire and a k/d on one replica's link, once its pipeline is full."""

    wire: str
    compression: str
    price: LossPrice
    link_seconds: float  # one micro-batch, one way
    stage_seconds: tuple[float, ...]  # of each stage for a micro-batch

    @cached_property
    def pace_seconds(self) -> float:
        """Between micro-batches."""
        # A full pipeline is deep enough for the latency, which delays all arrivals by the same time.
        return steady_pace(self.stage_seconds, self.link_seconds, 0.0)

    @property
    def busy(self) -> float:
        return self.link_seconds / self.pace_seconds

    @property
    def enough(self) -> bool:
        return self.busy < BUSY

    @property
    def rank(self) -> tuple[float, int, float]:
        """The least is the best: the price, then how well it is known, then how much it carries."""
        return max(0.0, self.price.percent), BASES.index(self.price.basis), -self.link_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """What "auto" became for one [[replicas]] table, and why."""

    replica: str
    picked: tuple[str, ...]  # the keys that were "auto"
    mbps: float
    num_parameters: int
    rung: Rung
    milder: Rung | None  # the nearest that costs less and is not enough; None where there is none

    @property
    def compression(self) -> str:
        return self.rung.compression

    @property
    def wire(self) -> str:
        return self.rung.wire

    @property
    def reason(self) -> str:
        """In one line, with the price that is expected."""
        return f"{self.choice}; {self.rung.price.text(self.num_parameters)}"

    @property
    def choice(self) -> str:
        keys = " and ".join(f'{key} = "{getattr(self.rung, key)}"' for key in self.picked)
        chosen = f'replica {self.replica}: "auto" is {keys}'
        if not self.rung.enough:
            return (
                f"{chosen}, the strongest there is, and the link of {self.mbps:g} Mb/s stays the bottleneck: "
                f"{self.rung.busy:.0%} busy once the pipeline is full"
            )
        milder = ""
        if self.milder:
            other = " in ".join(getattr(self.milder, key) for key in self.picked)
            milder = f" ({other}: {self.milder.busy:.0%})"
        return (
            f"{chosen}: the link of {self.mbps:g} Mb/s is then "
            f"{self.rung.busy:.0%} busy once the pipeline is full{milder}"
        )


def resolve(
    recipe: Recipe, tflops: float = 0.0, memory_gb: float = 0.0
) -> tuple[Recipe, tuple[Pick | MemoryPick, ...]]:
    """The recipe with a wire and a k/d wherever it said "auto", and why; the same of sharding and
    recomputation where the memory is stated. The recipe itself where there was nothing to pick.

    `tflops` and `memory_gb` are those of machines whose own the recipe does not state.
    """
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
        settled = [
            replace(
                r,
                sharding=fitted[r.name].sharding,
                recompute=fitted[r.name].recompute,
                micro_batches=fitted[r.name].micro_batches,
            )
            if r.name in fitted
            else r
            for r in recipe.replicas
        ]
        recipe = replace(recipe, replicas=tuple(settled))
    return recipe, (*picks, *fitted.values())


def picked(replica: ReplicaConfig, chosen: Pick) -> ReplicaConfig:
    return replace(replica, compression=chosen.compression, wire=chosen.wire)


def pick(recipe: Recipe, replica: ReplicaConfig, tflops: float = 0.0) -> Pick:
    """The least price of all that is enough: of one wire, the mildest k/d. Where nothing is enough, what
    carries least: the run is right, only slow."""
    rate = replica.tflops or tflops
    if rate <= 0:
        instead = 'a k/d such as compression = "1/8"' if replica.compression == AUTO else 'wire = "bf16"'
        raise ConfigError(
            f'replica {replica.name}: {replica.auto} = "auto" needs the training rate of its machines; set '
            f"tflops (`isthmus doctor` on such a machine measures it), or {instead}"
        )
    options = rungs(recipe, replica, rate)
    first = bisect_left(options, True, key=lambda rung: rung.enough)  # fewer bytes never keep it busier
    enough = options[first:] or options[-1:]
    best, heavier = enough[0], options[: min(first, len(options) - 1)]
    if replica.wire == AUTO:
        best = min(enough, key=lambda rung: rung.rank)
        heavier = [rung for rung in heavier if rung.rank < best.rank]
    return Pick(
        replica=replica.name,
        picked=tuple(key for key in ("compression", "wire") if getattr(replica, key) == AUTO),
        mbps=replica.link.mbps,
        num_parameters=recipe.model.num_parameters,
        rung=best,
        milder=heavier[-1] if heavier else None,
    )


def rungs(recipe: Recipe, replica: ReplicaConfig, tflops: float) -> list[Rung]:
    """All that "auto" may become on this replica's link, the most bytes first, as far as the model's width
    has dimensions for it."""
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
    # At k = d few bits are turned by U all the same, unless an open boundary was measured with them. Where
    # anchors are learned, no boundary may be open.
    first = {wire: "none" if anchor == "fixed" and known.opens(wire) else "1" for wire in wires}
    return [(wire, k) for wire in wires for k in (first[wire], *LADDER)]
