"""Check whether this machine can be the replica of a file, and how long a round will take here."""

from dataclasses import replace

from isthmus.config import Recipe, ReplicaConfig
from isthmus.doctor.checks import Check, failed, passed
from isthmus.planner.plan import KindForecast, predict
from isthmus.runlog.words import duration, size


def check_seat(
    recipe: Recipe, name: str, room: int, precision: str, tflops: float | None, last_seconds: float | None
) -> Check:
    """Check the seat. `room`: memory for a process here; `tflops`: this machine's training rate;
    `last_seconds`: duration of the run's last round."""
    config = next(member.config for member in recipe.fleet() if member.name == name)
    mine = _mine(recipe, config, precision, tflops)
    need, one = max(process["total"] for process in mine.memory), config.parts == 1
    all_of_it = sum(process["total"] for process in mine.memory)
    kind = "full replica" if config.kind == "full" else f"replica of {config.stages} stages"
    said = f'{name}, a {kind} of the run "{recipe.name}"'
    needs = f"{size(need)} of memory" if one else f"{size(all_of_it)} of memory, {size(need)} for one stage"
    if need > room:
        cures = [*mine.cures, "ask the run's owner for a place with more stages"]
        words = f"this machine cannot be {said}: it needs {needs}, and {size(room)} are free"
        return failed("place", words, "; or ".join(cures))
    alone = "" if one or all_of_it <= room else "one stage of "
    words = f"this machine can be {alone}{said}: it needs {needs}, and {size(room)} are free"
    if tflops:
        words += (
            f"; a round of {recipe.outer.inner_steps} inner steps takes about {duration(mine.round_seconds)}"
        )
        if last_seconds:
            words += f" here (the run's last took {duration(last_seconds)})"
    round_seconds = mine.round_seconds if tflops else None
    return passed("place", words, replica=name, needed_bytes=need, round_seconds=round_seconds)


def _mine(recipe: Recipe, config: ReplicaConfig, precision: str, tflops: float | None) -> KindForecast:
    """Forecast its kind in this run, on a machine like this one."""
    inner = recipe.inner if recipe.inner.precision != "auto" else replace(recipe.inner, precision=precision)
    rates = {config.name: tflops or 1.0}
    fleet = tuple(
        replace(each, tflops=rates.get(each.name, each.tflops or tflops or 1.0)) for each in recipe.replicas
    )
    forecast = predict(replace(recipe, inner=inner, replicas=fleet))
    return next(kind for kind in forecast.kinds if kind.name == config.name)
