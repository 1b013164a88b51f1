"""Machines -> replicas: which machines train the whole model, and which form a pipeline.

Equal machines (one [[machines]] table) are treated equally. They become full replicas if the model fits. All
others form pipelined replicas of the fewest stages that fit: inside a site, then across two linked sites. All
replicas wait for the slowest, so the planner finally leaves out the slowest tables if its forecast gains by
it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from isthmus.config import AUTO, Recipe, ReplicaConfig
from isthmus.planner.auto import Pick, pick, picked
from isthmus.planner.machines import MachineList, worst
from isthmus.planner.memory import SPARE, process_memory
from isthmus.planner.plan import Forecast, predict
from isthmus.planner.step import compute_of, inner_step

GAIN = 1.01  # a smaller fleet must be this many times as fast
EXCHANGE_SHARE = 0.05  # largest share of a round for the outer exchange
INNER_STEPS = range(15, 251, 5)  # H: the tested range of SparseLoCo
MOST_STAGES = 16
FULL, PIPELINED, OUT = range(3)  # choices for a table of machines


@dataclass(frozen=True, slots=True)
class Group:
    """`count` replicas on the same kinds of machines: each stage's machine, by its index in the list."""

    stages: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """One replica on its machines, with the memory that each needs."""

    replica: ReplicaConfig
    pick: Pick | None
    needs: tuple[int, ...]  # bytes of every stage


class Grouping:
    """All ways to group a list of machines into replicas of one model, for one setting of the inner step."""

    def __init__(
        self,
        base: Recipe,
        machines: MachineList,
        micro_batches: int,
        in_flight: int = 0,
        inner_steps: Sequence[int] = INNER_STEPS,
    ) -> None:
        inner = replace(base.inner, micro_batches=micro_batches, in_flight=in_flight)
        self.base, self.list = replace(base, inner=inner), machines
        self.machines, self.inner_steps = machines.machines, inner_steps
        self.assignments: dict[tuple[int, ...], Assignment | None] = {}
        self.orders: dict[frozenset[tuple[int, int]], tuple[int, ...] | None] = {}
        self.scores: dict[tuple[Group, ...], Forecast] = {}

    def usable(self, i: int) -> float:
        """Return the bytes of machine i that a process may use."""
        return (1 - SPARE) * self.machines[i].memory_gb * 1e9

    def assignment(self, stages: tuple[int, ...]) -> Assignment | None:
        """Return the replica with its stages on these machines, in this order; None if two have no link."""
        if stages not in self.assignments:
            self.assignments[stages] = self._assignment(stages)
        return self.assignments[stages]

    def assigned(self, stages: tuple[int, ...]) -> Assignment:
        """Return the assignment of linked machines."""
        found = self.assignment(stages)
        assert found is not None, f"machines {stages} have no link"
        return found

    def _assignment(self, stages: tuple[int, ...]) -> Assignment | None:
        own = [self.machines[i] for i in stages]
        bucket = worst([self.list.site(machine.site).bucket_link for machine in own])
        rate = min(machine.tflops for machine in own)
        replica = ReplicaConfig(name=own[0].name, tflops=rate, bucket_link=bucket)
        if len(stages) == 1:
            return Assignment(replica, None, (process_memory(self._alone(replica), replica, 0, 1).total,))
        links = [link for a, b in pairwise(own) if (link := self.list.between(a.site, b.site))]
        if len(links) < len(stages) - 1:
            return None
        replica = replace(replica, kind="pipelined", stages=len(stages), compression=AUTO, wire=AUTO)
        replica = replace(replica, link=worst(links))
        chosen = pick(self._alone(replica), replica)
        replica = picked(replica, chosen)
        recipe = self._alone(replica)
        _, step = inner_step(recipe, recipe.fleet()[0], compute_of(recipe, replica, rate))
        needs = [process_memory(recipe, replica, s, step.in_flight[s]).total for s in range(len(stages))]
        return Assignment(replica, chosen, tuple(needs))

    def _alone(self, replica: ReplicaConfig) -> Recipe:
        return replace(self.base, replicas=(replica,))

    def fits(self, stages: tuple[int, ...]) -> bool:
        found = self.assignment(stages)
        return found is not None and all(
            need <= self.usable(i) for need, i in zip(found.needs, stages, strict=True)
        )

    def order(self, units: Sequence[int]) -> tuple[int, ...] | None:
        """Return an order of these machines as stages that fits, with each site in one piece and large stages
        on large machines; None if there is none."""
        key = frozenset(Counter(units).items())
        if key not in self.orders:
            self.orders[key] = next(filter(self.fits, self._orders(units)), None)
        return self.orders[key]

    def _orders(self, units: Sequence[int]) -> Iterator[tuple[int, ...]]:
        sites = list(dict.fromkeys(self.machines[i].site for i in units))
        for order in (sites, sites[::-1]) if len(sites) > 1 else (sites,):
            blocks = [[i for i in units if self.machines[i].site == site] for site in order]
            flat = tuple(i for block in blocks for i in block)
            if (found := self.assignment(flat)) is None:
                continue
            stages, start, needs = list(flat), 0, found.needs
            for block in blocks:
                heaviest = sorted(range(start, start + len(block)), key=lambda s: -needs[s])
                for s, i in zip(heaviest, sorted(block, key=lambda i: -self.usable(i)), strict=True):
                    stages[s] = i
                start += len(block)
            yield tuple(stages)

    # Choices for one table of machines

    def most_stages(self) -> int:
        return min(MOST_STAGES, self.base.model.layers)

    def choice(self, i: int) -> int:
        return FULL if self.fits((i,)) else PIPELINED

    def groups(self, choices: Sequence[int]) -> tuple[Group, ...]:
        """Return the replicas that follow from these choices, one per table of machines."""
        counts = [machine.count for machine in self.machines]
        full = [Group((i,), counts[i]) for i, choice in enumerate(choices) if choice == FULL]
        left = Counter({i: counts[i] for i, choice in enumerate(choices) if choice == PIPELINED})
        return (*full, *self._pipelined(left))

    def _pipelined(self, left: Counter[int]) -> Iterator[Group]:
        """Yield replicas of the machines left, by the fastest links: inside a site, then across two."""
        names = [site.name for site in self.list.sites]
        for pairs in (zip(names, names, strict=True), combinations(names, 2)):
            linked = [(link.mbps, pair) for pair in pairs if (link := self.list.between(*pair))]
            for _, pair in sorted(linked, key=lambda each: -each[0]):
                while stages := self._fewest(left, set(pair)):
                    used = Counter(stages)
                    group = Group(stages, min(left[i] // n for i, n in used.items()))
                    left.subtract({i: n * group.count for i, n in used.items()})
                    yield group

    def _fewest(self, left: Counter[int], sites: set[str]) -> tuple[int, ...] | None:
        """Return the fewest machines left at these sites that hold a replica; similar rates stay together."""
        here = [i for i in left if self.machines[i].site in sites]
        here.sort(key=lambda i: (-self.machines[i].tflops, i))
        units = [i for i in here for _ in range(min(left[i], self.most_stages()))]
        for num_stages in range(2, 1 + min(self.most_stages(), len(units))):
            for first in range(len(units) - num_stages + 1):
                window = units[first : first + num_stages]
                every_site = {self.machines[i].site for i in window} == sites
                if every_site and (found := self.order(window)):
                    return found
        return None

    # The forecast decides

    def recipe(self, groups: Sequence[Group]) -> Recipe:
        """Return the whole fleet's recipe; tables are named after their machines."""
        replicas, names = [], set()
        for group in groups:
            kinds = list(dict.fromkeys(self.machines[i].name for i in group.stages))
            name = kinds[0] if len(kinds) == 1 else "mix-" + "-".join(kinds[:3])
            while name in names:
                name += "-more"
            names.add(name)
            replicas.append(replace(self.assigned(group.stages).replica, name=name, count=group.count))
        return replace(self.base, replicas=tuple(replicas))

    def forecast(self, groups: tuple[Group, ...]) -> Forecast:
        if groups not in self.scores:
            self.scores[groups] = predict(self.recipe(groups))
        return self.scores[groups]

    def fleet_speed(self, groups: tuple[Group, ...]) -> float:
        """Return tokens a second, at the H that this fleet would get."""
        return steps_and_speed(self.forecast(groups), self.base, self.inner_steps)[1]

    def best(self) -> list[int]:
        """Return the greedy choice for each table, without the slowest tables if that trains more tokens."""
        choices = [self.choice(i) for i in range(len(self.machines))]
        groups = self.groups(choices)
        if not groups:
            return choices
        best, speed = choices, self.fleet_speed(groups)
        kinds = self.forecast(groups).kinds
        slowest = sorted(zip(kinds, groups, strict=True), key=lambda pair: -pair[0].round_seconds)
        out: set[int] = set()
        for _, group in slowest[:-1]:
            out |= set(group.stages)
            trial = [OUT if i in out else choice for i, choice in enumerate(choices)]
            if (rest := self.groups(trial)) and (found := self.fleet_speed(rest)) > GAIN * speed:
                best, speed = trial, found
        return best


def steps_and_speed(
    forecast: Forecast, base: Recipe, allowed: Sequence[int] = INNER_STEPS
) -> tuple[int, float]:
    """Return (H, its tokens a second) for the smallest H with an exchange of at most EXCHANGE_SHARE.

    It uses the forecast for another H, and assumes that closing takes equally long.
    """
    close = forecast.close_seconds
    ends = [kind.exchange.seconds for kind in forecast.kinds]
    steps = [kind.step.seconds for kind in forecast.kinds]
    for h in allowed:
        seconds = close + max(end + h * step for end, step in zip(ends, steps, strict=True))
        if max(ends) + close <= EXCHANGE_SHARE * seconds:
            break
    return h, h * forecast.num_replicas * base.inner.batch * base.model.context / seconds


def lacking(grouping: Grouping, i: int) -> tuple[int, int, float]:
    """Return (stages, bytes needed, bytes lacking) for the role that machine i comes nearest to: a full
    replica, or the lightest stage of a pipelined one."""
    found = []
    for num_stages in range(1, 1 + grouping.most_stages()):
        if known := grouping.assignment((i,) * num_stages):
            needs = known.needs
        else:  # this site's machines have no link
            name = grouping.machines[i].name
            replica = ReplicaConfig(name=name, kind="pipelined", stages=num_stages, compression="1/8")
            recipe = replace(grouping.base, replicas=(replica,))
            needs = [process_memory(recipe, replica, s, 1).total for s in range(num_stages)]
        found.append((num_stages, min(needs), min(needs) - grouping.usable(i)))
    return min(found, key=lambda each: each[2])
