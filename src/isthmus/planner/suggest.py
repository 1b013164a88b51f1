"""`isthmus plan --suggest`: turn a list of machines into a working recipe with reasons.

`grouping` makes replicas of the machines; this module chooses H, k/d and micro-batches. The order: the
grouping with the finest micro-batches (they need the least memory), then the coarsest micro-batches that lose
little, then H.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from isthmus.config import FinishConfig, Recipe, SubspaceConfig
from isthmus.errors import ConfigError
from isthmus.planner.auto import Pick
from isthmus.planner.fit import gb
from isthmus.planner.grouping import EXCHANGE_SHARE, INNER_STEPS, OUT, Group, Grouping, lacking
from isthmus.planner.machines import Machine, MachineList
from isthmus.planner.plan import Forecast, predict

SLACK = 0.02  # share of speed that larger micro-batches may cost


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
    finest = base.inner.micro_batches if "inner.micro_batches" in pinned else base.inner.batch
    allowed = [base.outer.inner_steps] if "outer.inner_steps" in pinned else INNER_STEPS
    grouping = Grouping(base, machines, finest, base.inner.in_flight, allowed)
    choices = grouping.best()
    groups = grouping.groups(choices)
    if not groups:
        raise ConfigError(_nothing_fits(grouping))
    fine = grouping
    grouping, groups, why = _micro_batches(base, machines, grouping, groups, pinned)
    recipe, why["outer.inner_steps"] = _inner_steps(grouping.recipe(groups), base, pinned)
    recipe = _compressing(recipe, given)
    forecast = predict(recipe)
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
    for m in (n for n in range(1, inner.batch + 1) if inner.batch % n == 0):
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


def _reasons(grouping: Grouping, group: Group) -> list[str]:
    first = group.stages[0]
    machine = grouping.machines[first]
    whole = grouping.assigned((first,)).needs[0]
    if len(group.stages) == 1:
        return [f"the whole model on each: it needs {gb(whole)} of {gb(machine.memory_gb * 1e9)}"]
    lines = [
        f"a full replica would need {gb(whole)} on one machine; "
        f"{len(group.stages)} stages are the fewest that fit"
    ]
    needs = grouping.assigned(group.stages).needs
    for s, (i, need) in enumerate(zip(group.stages, needs, strict=True)):
        own = grouping.machines[i]
        lines.append(f"stage {s}: {own.name} at {own.site}, {gb(need)} of {gb(own.memory_gb * 1e9)}")
    return lines


def _nothing_fits(grouping: Grouping) -> str:
    i = min(range(len(grouping.machines)), key=lambda i: lacking(grouping, i)[2])
    machine = grouping.machines[i]
    return (
        f"no replica can be made: {machine.name} at {machine.site} {_unused(grouping, i)}; a smaller "
        f"model or inner.batch (it is {grouping.base.inner.batch}) needs less"
    )


def _unused(grouping: Grouping, i: int) -> str:
    stages, need, lack = lacking(grouping, i)
    if lack <= 0:
        return (
            f"could hold one of {stages} stages ({gb(need)}), but no machine linked to it can take the others"
        )
    return (
        f"lacks {gb(lack)} of memory: even {_role(stages)} needs {gb(need)}, and it may use "
        f"{gb(grouping.usable(i))} of {gb(grouping.machines[i].memory_gb * 1e9)}"
    )


def _role(stages: int) -> str:
    return "a full replica" if stages == 1 else f"the lightest of {stages} stages"


def _left_out(grouping: Grouping, choices: list[int], groups: tuple[Group, ...]) -> dict[str, str]:
    """Map every unused machine to the reason."""
    reasons = {}
    for i, machine in enumerate(grouping.machines):
        idle = machine.count - sum(group.count * group.stages.count(i) for group in groups)
        if not idle:
            continue
        if choices[i] == OUT:
            with_it = grouping.groups([*choices[:i], grouping.choice(i), *choices[i + 1 :]])
            text = (
                f"too slow: with it the fleet trains {grouping.fleet_speed(with_it):,.0f} instead of "
                f"{grouping.fleet_speed(groups):,.0f} tokens/s, because all wait for it"
            )
        else:
            text = _unused(grouping, i)
        reasons[machine.name] = (f"{idle} of {machine.count}: " if idle < machine.count else "") + text
    return reasons
