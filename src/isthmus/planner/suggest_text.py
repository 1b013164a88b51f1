"""Write a suggestion as a recipe file: the differences from the defaults, with the reasons as comments."""

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from isthmus.config import PRESETS, LinkConfig, Recipe, ReplicaConfig, toml_line
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
        lines += ["", *_replica(replica, suggested)]
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


def _replica(replica: ReplicaConfig, suggested: SuggestedReplica) -> Iterator[str]:
    for reason in suggested.why:
        yield from _comment(reason)
    if suggested.pick is not None:
        yield from _comment(suggested.pick.reason)
    yield "[[replicas]]"
    for field in dataclasses.fields(replica):
        value = getattr(replica, field.name)
        if value is None or (value == _default(field) and field.name not in ("kind", "count")):
            continue
        yield toml_line(field.name, dataclasses.asdict(value) if isinstance(value, LinkConfig) else value)


def _default(field: dataclasses.Field) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default
