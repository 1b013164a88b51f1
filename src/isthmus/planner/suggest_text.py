"""Write a suggestion as a recipe file: the differences from the defaults, with the reasons as comments."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from isthmus.config import (
    PRESETS,
    LinkConfig,
    Recipe,
    ReplicaConfig,
    toml_line,
)
from isthmus.planner.machines import Machine
from isthmus.planner.plan import Forecast
from isthmus.planner.suggest import SuggestedReplica, Suggestion

SHOWN = ("micro_batches", "in_flight", "inner_steps", "rounds", "batch")  # shown even at their defaults


def recipe_text(suggestion: Suggestion, source: str) -> str:
    """Return a recipe that `load_recipe` accepts unchanged."""
    recipe, forecast = suggestion.recipe, suggestion.forecast
    lines = [
        *_comment(
            f"Suggested by `isthmus plan --suggest {source}`. Forecast: {forecast.tokens_per_second:,.0f} "
            f"tokens/s, {forecast.utilisation:.0%} of {forecast.num_machines} machines' compute is used, "
            f"{forecast.rounds:,} rounds of {forecast.round_seconds:.3g} s, {forecast.hours:.3g} hours; "
            f"`isthmus plan` on this file has the details."
        ),
        *(line for text in [suggestion.why.get("fleet")] if text for line in _comment(text)),
    ]
    if suggestion.left_out:
        lines.append("# Left out:")
        for name, why in suggestion.left_out.items():
            lines += _comment(f"- {name}: {why}")
    lines += ["", toml_line("name", recipe.name)]
    if recipe.seed:
        lines.append(toml_line("seed", recipe.seed))
    lines += ["", "[model]", *_model(recipe)]
    for field in dataclasses.fields(recipe):
        if field.default_factory is not dataclasses.MISSING:  # a section whose keys all have defaults
            own = list(_section(field.name, getattr(recipe, field.name), _default(field), suggestion.why))
            lines += ["", f"[{field.name}]", *own] if own else []
    for replica, suggested in zip(recipe.replicas, suggestion.replicas, strict=True):
        lines += ["", *_replica(recipe, forecast, replica, suggested)]
    return "\n".join(lines) + "\n"


def _comment(text: str, width: int = 110) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="# ", subsequent_indent="#   ", break_long_words=False)


def _model(recipe: Recipe) -> Iterator[str]:
    model = dataclasses.asdict(recipe.model)
    known = dataclasses.asdict(PRESETS[recipe.model.preset]) if recipe.model.preset in PRESETS else {}
    for key, value in model.items():
        if key == "preset" or known.get(key) != value:
            yield toml_line(key, value)


def _section(section: str, config: Any, default: Any, why: dict[str, str]) -> Iterator[str]:
    for field in dataclasses.fields(config):
        key, value = field.name, getattr(config, field.name)
        if (reason := why.get(f"{section}.{key}")) is not None:
            yield from _comment(reason)
        if value != getattr(default, key) or key in SHOWN:
            yield toml_line(key, value)


def _replica(
    recipe: Recipe, forecast: Forecast, replica: ReplicaConfig, suggested: SuggestedReplica
) -> Iterator[str]:
    for reason in suggested.why:
        yield from _comment(reason)
    if suggested.pick is not None:
        yield from _comment(_link_words(suggested.machines))
        kind = next(kind for kind in forecast.kinds if kind.name == replica.name)
        deep = ", ".join(map(str, kind.step.depths))
        yield from _comment(f"warm-up: stages run {deep} micro-batches forward before their first backward")
        yield from _comment(suggested.pick.reason)
    yield "[[replicas]]"
    for field in dataclasses.fields(replica):
        value = getattr(replica, field.name)
        if value is None or (value == _default(field) and field.name not in ("kind", "count")):
            continue
        yield toml_line(field.name, dataclasses.asdict(value) if isinstance(value, LinkConfig) else value)


def _default(field: dataclasses.Field) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def _link_words(machines: Sequence[Machine]) -> str:
    sites = list(dict.fromkeys(machine.site for machine in machines))
    rates = {machine.tflops for machine in machines}
    where = f"inside {sites[0]}" if len(sites) == 1 else f"from {sites[0]} to {sites[1]}"
    text = f"link: {where}, the slowest between two stages"
    return text + ("; tflops: of the slowest of its machines" if len(rates) > 1 else "")
