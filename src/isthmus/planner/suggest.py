"""`isthmus plan --suggest`: turn a list of machines into a working recipe with reasons.

`grouping` makes replicas of the machines; this module chooses H, k/d and micro-batches. The order: the
grouping with the finest micro-batches (they need the least memory), then the coarsest micro-batches that lose
little, then H.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from isthmus.config import FinishConfig, Recipe, SubspaceConfig
from isthmus.errors import ConfigError
from isthmus.planner.auto import Pick
from isthmus.planner.grouping import EXCHANGE_SHARE, FULL, INNER_STEPS, OUT, Group, Grouping, lacking
from isthmus.planner.machines import Machine, MachineList
from isthmus.planner.plan import Forecast, predict

SLACK = 0.02  # share of speed that larger micro-batches may cost
STRAGGLER = 1.5  # name a replica whose round takes this many times as long as the next


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedReplica:
    """One [[replicas]] table of the suggestion."""

    machines: tuple[Machine, ...]  # of each stage
    pick: Pick | None
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A recipe, and the reasons for it."""

    recipe: Recipe
    forecast: Forecast
    replicas: tuple[SuggestedReplica, ...]
    why: dict[str, str]  # by recipe key: "outer.inner_steps" and so on
    left_out: dict[str, str]  # by machine name


def suggest(base: Recipe, machines: MachineList, pinned: Collection[str] = ()) -> Suggestion:
    """Suggest the fleet that trains the most tokens a second by the planner's own forecast.

    Model, data and optimisers come from the base; its replicas are ignored. `pinned` keys
    (inner.micro_batches, outer.inner_steps) keep the base's values.
    """
    if base.outer.method == "adamw":
        raise ConfigError('--suggest is about rounds; outer.method is "adamw", which has none')
    given, base = base, replace(base, subspace=SubspaceConfig(), finish=FinishConfig())
    grouping, choices = _grouped(base, machines, pinned)
    groups = grouping.groups(choices)
    if not groups:
        raise ConfigError(_nothing_fits(grouping))
    fine = grouping
    grouping, groups, why = _micro_batches(base, machines, grouping, groups, pinned)
    recipe, why["outer.inner_steps"] = _inner_steps(grouping.recipe(groups), base, pinned)
    recipe = _compressing(recipe, given)
    forecast = predict(recipe)
    why["fleet"] = _slowest(forecast)
    replicas = tuple(
        SuggestedReplica(
            machines=tuple(grouping.machines[i] for i in group.stages),
            pick=grouping.assigned(group.stages).pick,
            why=tuple(_reasons(grouping, group)),
        )
        for group in groups
    )
    left_out = _left_out(fine, choices, groups)
    return Suggestion(recipe=recipe, forecast=forecast, replicas=replicas, why=why, left_out=left_out)


def _compressing(recipe: Recipe, base: Recipe) -> Recipe:
    """Copy the base's compression settings, which are allowed only in a recipe that compresses something."""
    if not any(replica.compressed for replica in recipe.replicas):
        return recipe
    steps, turn = recipe.outer.inner_steps, base.subspace.grassmann_every
    subspace = replace(base.subspace, grassmann_every=-(-turn // steps) * steps)  # a multiple of H
    finish = replace(base.finish, rounds=min(base.finish.rounds, recipe.outer.rounds))
    return replace(recipe, subspace=subspace, finish=finish)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _grouped(base: Recipe, machines: MachineList, pinned: Collection[str]) -> tuple[Grouping, list[int]]:
    """Return the grouping with the finest micro-batches, which need the least memory."""
    m = base.inner.micro_batches if "inner.micro_batches" in pinned else base.inner.batch
    steps = [base.outer.inner_steps] if "outer.inner_steps" in pinned else INNER_STEPS
    grouping = Grouping(base, machines, m, base.inner.in_flight, steps)
    return grouping, grouping.best()


def _micro_batches(
    base: Recipe,
    machines: MachineList,
    grouping: Grouping,
    groups: tuple[Group, ...],
    pinned: Collection[str],
) -> tuple[Grouping, tuple[Group, ...], dict[str, str]]:
    """Choose the fewest micro-batches that fit and are within SLACK of the best."""
    inner = base.inner
    if all(len(group.stages) == 1 for group in groups):
        return Grouping(base, machines, inner.micro_batches, inner.in_flight), groups, {}
    if "inner.micro_batches" in pinned:
        return grouping, groups, {"inner.micro_batches": "kept as it was set"}
    found = []
    for m in _divisors(inner.batch):
        trial = Grouping(base, machines, m, inner.in_flight, grouping.inner_steps)
        ordered = tuple(
            Group(stages, group.count)
            for group in groups
            if (stages := trial.order(group.stages) if len(group.stages) > 1 else group.stages)
        )
        if len(ordered) == len(groups):
            found.append((trial.fleet_speed(ordered), m, trial, ordered))
    best = max(speed for speed, *_ in found)
    speed, m, trial, ordered = next(each for each in found if each[0] >= (1 - SLACK) * best)
    why = (
        f"the fewest that fit the memory and reach {1 - SLACK:.0%} of the best speed ({speed / best:.1%} of "
        f"it); {inner.batch // m} of {inner.batch} sequences in each"
    )
    return trial, ordered, {"inner.micro_batches": why}


def _inner_steps(recipe: Recipe, base: Recipe, pinned: Collection[str]) -> tuple[Recipe, str]:
    """Choose the smallest H with a small share of exchange per round, and the same total of inner steps."""
    if recipe.num_replicas == 1:
        return recipe, "one replica has nobody to exchange with"
    if "outer.inner_steps" in pinned:
        return recipe, "kept as it was set"
    for steps in INNER_STEPS:
        rounds = max(1, round(base.num_inner_steps / steps))
        trial = replace(recipe, outer=replace(base.outer, inner_steps=steps, rounds=rounds))
        if (share := exchange_share(predict(trial))) <= EXCHANGE_SHARE:
            break
    within = f"the smallest multiple of 5 with at most {EXCHANGE_SHARE:.0%}"
    if share > EXCHANGE_SHARE:
        within = f"the most that SparseLoCo was tried with; {EXCHANGE_SHARE:.0%} would need more"
    return trial, f"H: the exchange takes {share:.1%} of a round; {within}"


def exchange_share(forecast: Forecast) -> float:
    """Return the largest share of a round that any kind of replica spends in upload, closing and download."""
    longest = max(kind.exchange.seconds for kind in forecast.kinds)
    return (longest + forecast.close_seconds) / forecast.round_seconds


# The reasons


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


def _reasons(grouping: Grouping, group: Group) -> list[str]:
    first = group.stages[0]
    machine = grouping.machines[first]
    whole = grouping.assigned((first,)).needs[0]
    if len(group.stages) == 1:
        return [f"the whole model on each: it needs {gb(whole)} of {gb(machine.memory_gb * 1e9)}"]
    lines = [
        f"a full replica would need {gb(whole)} on one machine{_smaller_batch(grouping, first)}; "
        f"{len(group.stages)} stages are the fewest that fit"
    ]
    needs = grouping.assigned(group.stages).needs
    for s, (i, need) in enumerate(zip(group.stages, needs, strict=True)):
        own = grouping.machines[i]
        lines.append(f"stage {s}: {own.name} at {own.site}, {gb(need)} of {gb(own.memory_gb * 1e9)}")
    return lines


def _smaller_batch(grouping: Grouping, i: int) -> str:
    """Return a hint: the largest batch at which the machine would hold the whole model."""
    inner = grouping.base.inner
    for batch in reversed(_divisors(inner.batch)[:-1]):
        small = replace(grouping.base, inner=replace(inner, batch=batch, micro_batches=1))
        if Grouping(small, grouping.list, 1).fits((i,)):
            return f" (with inner.batch = {batch} it would fit)"
    return ""


def _slowest(forecast: Forecast) -> str:
    times = sorted(kind.round_seconds for kind in forecast.kinds)
    if len(times) > 1 and times[-1] > STRAGGLER * times[-2]:
        return (
            f"{forecast.slowest} takes {times[-1] / times[-2]:.1f} times as long for a round as the next; "
            "all wait for it, and yet the fleet is faster with it than without"
        )
    return ""


def _nothing_fits(grouping: Grouping) -> str:
    i = min(range(len(grouping.machines)), key=lambda i: lacking(grouping, i)[2])
    machine, (stages, need, lack) = grouping.machines[i], lacking(grouping, i)
    batch = grouping.base.inner.batch
    hint = "a smaller model" + (f" or inner.batch (it is {batch})" if batch > 1 else "") + " needs less"
    if lack <= 0:
        return (
            f"no replica can be made: {machine.name} at {machine.site} could hold one of {stages} stages "
            f"({gb(need)}), but the machines it is linked to do not hold the others; {hint}"
        )
    return (
        f"no replica can be made: even as {_role(stages)} {machine.name} at {machine.site} needs {gb(need)} "
        f"and may use {gb(grouping.usable(i))} of {gb(machine.memory_gb * 1e9)}; it lacks {gb(lack)}; {hint}"
    )


def _role(stages: int) -> str:
    return "a full replica" if stages == 1 else f"the lightest of {stages} stages"


def _left_out(grouping: Grouping, choices: list[int], groups: tuple[Group, ...]) -> dict[str, str]:
    """Map every unused machine to the reason."""
    reasons = {}
    for i, (machine, idle) in enumerate(zip(grouping.machines, _idle(grouping, groups), strict=True)):
        if not idle:
            continue
        stages, need, lack = lacking(grouping, i)
        if lack > 0:
            text = (
                f"lacks {gb(lack)} of memory: even {_role(stages)} needs {gb(need)}, and it may use "
                f"{gb(grouping.usable(i))} of {gb(machine.memory_gb * 1e9)}"
            )
        elif choices[i] == OUT:
            text = _too_slow(grouping, choices, i, grouping.choice(i))
        else:
            text = "no machine is left that is linked to it and makes up a replica with it"
        reasons[machine.name] = (f"{idle} of {machine.count}: " if idle < machine.count else "") + text
    return reasons


def _idle(grouping: Grouping, groups: tuple[Group, ...]) -> list[int]:
    """Count the unused machines of each table."""
    used: Counter[int] = Counter()
    for group in groups:
        for i in group.stages:
            used[i] += group.count
    return [machine.count - used[i] for i, machine in enumerate(grouping.machines)]


def _too_slow(grouping: Grouping, choices: list[int], i: int, option: int) -> str:
    with_it = [*choices[:i], option, *choices[i + 1 :]]
    now, then = (grouping.groups(each) for each in (choices, with_it))
    how = (
        f"in {option} stages"
        if option > 1
        else "as full replicas"
        if option == FULL
        else "in a mixed replica"
    )
    times = [grouping.forecast(groups).round_seconds for groups in (now, then)]
    return (
        f"too slow: with it ({how}) a round takes {times[1] / times[0]:.1f} times as long, and the fleet "
        f"trains {grouping.fleet_speed(then):,.0f} instead of {grouping.fleet_speed(now):,.0f} tokens/s"
    )
