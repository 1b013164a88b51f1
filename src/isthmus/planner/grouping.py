"""Machines -> replicas: which machines train the whole model, and which share one in stages.

Machines that are alike (one [[machines]] table) are treated alike: each is a full replica, or they form
pipelined replicas of so many stages, or they are mixed with what is left over elsewhere, or left out. The
planner's own forecast decides. All replicas wait for the slowest: leaving out a slow machine can be a gain.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, pairwise

from isthmus.config import AUTO, Recipe, ReplicaConfig
from isthmus.planner.auto import Pick, pick, picked
from isthmus.planner.machines import MachineList, worst
from isthmus.planner.memory import SPARE, process_memory
from isthmus.planner.plan import Forecast, predict
from isthmus.planner.step import compute_of, inner_step

GAIN = 1.01  # a more complicated fleet must be faster by this factor
EXCHANGE_SHARE = 0.05  # of a round that may pass in the outer exchange
INNER_STEPS = range(15, 251, 5)  # H: the range that SparseLoCo was tried in
MOST_STAGES = 16
MORE_STAGES = 3  # than the fewest that fit are tried
MOST_FORECASTS = 150
FULL, MIX, OUT = 1, 0, -1  # what is done with a table of machines; 2 and more: stages


@dataclass(frozen=True, slots=True)
class Group:
    """`count` replicas on the same kinds of machines: the machine of each stage, by its index in the list."""

    stages: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """One replica on its machines, with the memory that each of them needs."""

    replica: ReplicaConfig
    pick: Pick | None
    needs: tuple[int, ...]  # bytes of every stage


class Grouping:
    """All ways to make replicas of one model of a list of machines, for one setting of the inner step."""

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
        """Bytes of machine i that a process may take."""
        return (1 - SPARE) * self.machines[i].memory_gb * 1e9

    def assignment(self, stages: tuple[int, ...]) -> Assignment | None:
        """The replica whose stages lie on these machines, in this order; None where two have no link."""
        if stages not in self.assignments:
            self.assignments[stages] = self._assignment(stages)
        return self.assignments[stages]

    def assigned(self, stages: tuple[int, ...]) -> Assignment:
        """`assignment` of machines that are linked."""
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
        """An order of these machines as stages that fits: each site in one piece, large stages on large
        machines; None where there is none."""
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

    # What can be done with one table of machines

    def most_stages(self) -> int:
        return min(MOST_STAGES, self.base.model.layers)

    def options(self, i: int) -> list[int]:
        """Simplest first: full, the fewest stages that fit and a few more, mixed with others, left out."""
        found = [FULL] if self.fits((i,)) else []
        stages = range(2, 1 + min(self.most_stages(), self.machines[i].count))
        fitting = islice((s for s in stages if self.order((i,) * s)), 1 + MORE_STAGES)
        return [*found, *fitting, *([MIX] if not found else []), OUT]

    def groups(self, choices: Sequence[int]) -> tuple[Group, ...]:
        """The replicas that these choices, one for each table of machines, come to."""
        groups: list[Group] = []
        left: Counter[int] = Counter()
        for i, choice in enumerate(choices):
            count = self.machines[i].count
            if choice == FULL:
                groups.append(Group((i,), count))
            elif choice >= 2:
                stages = self.order((i,) * choice)
                assert stages is not None, "options offers only numbers of stages that fit"
                groups.append(Group(stages, count // choice))
                left[i] = count % choice
            elif choice == MIX:
                left[i] = count
        mixed = Counter(self._mixed(+left))
        return (*groups, *(Group(stages, count) for stages, count in mixed.items()))

    def _mixed(self, left: Counter[int]) -> Iterator[tuple[int, ...]]:
        """What is left over, along the fastest links: first inside a site, then across two."""
        names = [site.name for site in self.list.sites]
        for pairs in (zip(names, names, strict=True), combinations(names, 2)):
            linked = [(link.mbps, pair) for pair in pairs if (link := self.list.between(*pair))]
            for _, pair in sorted(linked, key=lambda each: -each[0]):
                while stages := self._fewest(left, set(pair)):
                    yield stages
                    left.subtract(stages)

    def _fewest(self, left: Counter[int], sites: set[str]) -> tuple[int, ...] | None:
        """The fewest of the machines left at these sites that hold a replica; similar rates go together."""
        units = [
            i
            for i, n in left.items()
            for _ in range(min(n, self.most_stages()))
            if self.machines[i].site in sites
        ]
        units.sort(key=lambda i: (-self.machines[i].tflops, i))
        for num_stages in range(2, 1 + min(self.most_stages(), len(units))):
            for first in range(len(units) - num_stages + 1):
                window = units[first : first + num_stages]
                every_site = {self.machines[i].site for i in window} == sites
                if every_site and (found := self.order(window)):
                    return found
        return None

    # The forecast decides

    def recipe(self, groups: Sequence[Group]) -> Recipe:
        """The whole fleet; tables are named after their machines."""
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

    def speed(self, choices: Sequence[int]) -> float:
        """Tokens a second, at the H that this fleet would get."""
        groups = self.groups(choices)
        return self.fleet_speed(groups) if groups else 0.0

    def fleet_speed(self, groups: tuple[Group, ...]) -> float:
        return steps_and_speed(self.forecast(groups), self.base, self.inner_steps)[1]

    def best(self) -> list[int]:
        """Choices whose fleet trains the most tokens a second, the simpler where two are about equal."""
        options = [self.options(i) for i in range(len(self.machines))]
        choices = [each[0] for each in options]
        speed = self.speed(choices)
        for _ in range(3):
            before = list(choices)
            for trial in self._trials(choices, options):
                if len(self.scores) >= MOST_FORECASTS:
                    break
                if (found := self.speed(trial)) > GAIN * speed:
                    choices[:], speed = trial, found
            if choices == before:
                break
        return choices

    def _trials(self, choices: list[int], options: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """One table treated otherwise; then the slowest tables left out together, the slowest first."""
        for i, own in enumerate(options):
            for option in own:
                if option != choices[i]:
                    yield [*choices[:i], option, *choices[i + 1 :]]
        groups = self.groups(choices)
        if not groups:
            return
        kinds = self.forecast(groups).kinds
        slowest = sorted(zip(kinds, groups, strict=True), key=lambda pair: -pair[0].round_seconds)
        out: set[int] = set()
        for _, group in slowest[:-1]:
            out |= set(group.stages)
            yield [OUT if i in out else choice for i, choice in enumerate(choices)]


def steps_and_speed(
    forecast: Forecast, base: Recipe, allowed: Sequence[int] = INNER_STEPS
) -> tuple[int, float]:
    """(H, tokens a second at it), with the smallest H whose exchange is at most EXCHANGE_SHARE of a round.

    From the forecast of another H, closing taken to last as long.
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
    """(stages, bytes needed, bytes lacking) of machine i where it lacks least: as a full replica, or as the
    lightest stage of a pipelined one."""
    found = []
    for num_stages in range(1, 1 + grouping.most_stages()):
        if known := grouping.assignment((i,) * num_stages):
            needs = known.needs
        else:  # machines of this site have no link
            name = grouping.machines[i].name
            replica = ReplicaConfig(name=name, kind="pipelined", stages=num_stages, compression="1/8")
            recipe = replace(grouping.base, replicas=(replica,))
            needs = [process_memory(recipe, replica, s, 1).total for s in range(num_stages)]
        found.append((num_stages, min(needs), min(needs) - grouping.usable(i)))
    return min(found, key=lambda each: each[2])
