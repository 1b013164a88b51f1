"""A run in words: its summary, and the format of bytes, counts and times."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from isthmus.config import Recipe, ReplicaConfig
from isthmus.layout.wire import INT_BITS
from isthmus.runlog.row import Row, outside_tokens
from isthmus.runlog.run_dir import REAL, About, RunDir, Totals, totals


def first_and_last(rows: Iterable[Row], field: str) -> tuple[Row, Row] | None:
    """Return the first and the last row that measured `field`; None if none did."""
    measured = [row for row in rows if row[field] is not None]
    return (measured[0], measured[-1]) if measured else None


def rounds_in_words(rounds: Sequence[int]) -> str:
    """Return `round 7` or `rounds 8 to 12`; gaps between the rounds are not shown."""
    if len(rounds) == 1:
        return f"round {rounds[0]}"
    return f"rounds {min(rounds)} to {max(rounds)}"


def summary(run: RunDir | str | Path) -> list[str]:
    """Return the run in plain words, one sentence per entry."""
    run = run if isinstance(run, RunDir) else RunDir.open(run)
    return sentences(run.recipe, run.about, run.rows())


def sentences(recipe: Recipe, about: About, rows: list[Row]) -> list[str]:
    """Return the sentences of `summary` for rows already read."""
    outer, sums = recipe.outer, totals(rows)
    done, status = sums["rounds"], about.get("status")
    model = f"a model of {count(about.get('parameters') or recipe.model.num_parameters)} parameters"
    progress = f"round {done} of {outer.rounds}"
    ending = {
        "running": f"The run has not ended: {progress} is the last one written down.",
        "interrupted": f"The run was interrupted after {progress}.",
        "failed": f"The run failed after {progress}: {_one_line(about.get('error') or 'no reason kept')}.",
    }.get(status or "", "")
    if done == 0:
        opening = f"{fleet_in_words(recipe)} will train {model}; no round has been completed."
        return [opening, *_losses(rows, recipe), *([ending] if status == "failed" else [])]
    how = f"{_many(done, 'round')} of {_many(outer.inner_steps, 'inner step')}"
    spent = f"{count(sums['tokens'])} tokens in {duration(sums['seconds'])}"
    said = [f"{fleet_in_words(recipe)} trained {model} for {how} on {spent}."]
    said += [*([ending] if ending else []), *_finish(done, recipe)]
    said += [*_losses(rows, recipe), *_traffic(sums, recipe, rows)]
    return said + _virtual(sums, recipe, about)


def _virtual(sums: Totals, recipe: Recipe, about: About) -> list[str]:
    """Describe the virtual clock, if it says more than the run itself: about other machines, or links."""
    stated = all(replica.tflops for replica in recipe.replicas)
    if sums["fleet_seconds"] is None or (about.get("mode") == REAL and not stated):
        return []
    fleet = "With machines and links as the recipe states them"
    if not stated:
        fleet = "With the recipe's links, and a machine like this one for each that it names,"
    return [f"{fleet} it would take {duration(sums['fleet_seconds'])}: a formula, not a measurement."]


def fleet_in_words(recipe: Recipe) -> str:
    """Return `4 replicas (2 full; 2 pipelined in 2 stages at k/d = 1/8)`."""
    shapes: dict[str, int] = {}
    for replica in recipe.replicas:
        shapes[_shape(replica)] = shapes.get(_shape(replica), 0) + replica.count
    total = recipe.num_replicas
    if list(shapes) == ["full"]:
        return _many(total, "full replica")
    if len(shapes) == 1:
        return f"{_many(total, 'replica')}, {next(iter(shapes))},"
    return f"{_many(total, 'replica')} ({'; '.join(f'{number} {shape}' for shape, number in shapes.items())})"


def _shape(replica: ReplicaConfig) -> str:
    if replica.kind == "full":
        return "full"
    at = f"at k/d = {replica.ratio}" if replica.compressed else "without compression"
    if replica.wire in INT_BITS:
        at = f"{at} in {replica.wire}" if replica.compressed else f"in {replica.wire}"
    return f"pipelined in {replica.stages} stages {at}"


def _finish(done: int, recipe: Recipe) -> list[str]:
    """Say how far the rounds that open boundaries got."""
    if not (rounds := recipe.finish.rounds):
        return []
    so_far = done - (recipe.outer.rounds - rounds)
    if so_far <= 0:
        return [f"Its last {_many(rounds, 'round')} will open the boundaries for a plain model."]
    return [f"Boundaries opened in {so_far} of {_many(rounds, 'finishing round')}, for a plain model."]


def _losses(rows: list[Row], recipe: Recipe) -> list[str]:
    if (ends := first_and_last(rows, "loss_mixed")) is None:
        return ["The held-out loss has not been measured."]
    first, last = ends
    before, after = first.loss_mixed or 0.0, last.loss_mixed or 0.0
    pipelined = any(replica.kind == "pipelined" for replica in recipe.replicas)
    if last.round == 0:
        return [f"Before training the held-out loss is {before:.2f} nats."]
    if first is last:
        text = f"Held-out loss was {after:.2f} nats after round {last['round']}"
    else:
        verb = "fell" if after < before else "rose" if after > before else "stayed"
        text = f"Held-out loss {verb} from {before:.2f} to {after:.2f} nats"
    if pipelined:
        text += " as the replicas train (mixed)"
        for field, forward in (("loss_full", "full"), ("loss_pipelined", "pipelined")):
            if last[field] is not None:
                text += f", {last[field]:.2f} as a {forward} forward"
    if first is not last and last.round != rows[-1].round:
        text += f" (last measured after round {last['round']})"
    sentences = [f"{text}."]
    if rows[-1].round > 0 and rows[-1].loss_train is None:
        sentences.append("The training loss of the last round was not a finite number: the run diverged.")
    return sentences


def _traffic(sums: Totals, recipe: Recipe, rows: list[Row]) -> list[str]:
    sent, links, dense = sums["bytes"], sums["link_bytes"], sums["dense_bytes"]
    sentences = []
    if links["stages"]:
        names = {"activations": "activations", "gradients": "gradients", "tokens": "token ids"}
        parts = ", ".join(f"{name} {size(sent[key], like=links['stages'])}" for key, name in names.items())
        text = f"Between stages {size(links['stages'])} crossed ({parts})"
        if dense["stages"]:
            text += f"; uncompressed they would have sent {versus(links['stages'], dense['stages'])}"
        sentences.append(f"{text}.")
    if outside := outside_tokens(rows):
        sentences.append(
            f"{outside:,} tokens on stage links had values outside the range of a few-bit wire, "
            'which cuts them off: train with wire = "bf16" and look for what makes them so large or small.'
        )
    if recipe.num_replicas == 1:
        sentences.append("With one replica there was nothing to exchange between replicas.")
    elif links["replicas"]:
        updates = sent["payload_up"] + sent["payload_down"]
        names = {"payload_up": "up", "payload_down": "down"}
        parts = ", ".join(f"{size(sent[key], like=updates)} {name}" for key, name in names.items())
        what = {
            "sparseloco": "sparse updates, once a round",
            "diloco": "dense updates, once a round",
            "adamw": "gradients, after every inner step",
        }[recipe.outer.method]
        text = f"Between replicas {size(updates)} crossed ({parts}): {what}"
        if recipe.outer.method == "adamw":
            text += ", which is dense data parallelism"
        elif dense["replicas"]:
            text += f"; dense data parallelism would have sent {versus(updates, dense['replicas'])}"
        sentences.append(f"{text}.")
        if sent["control"]:
            sentences.append(
                f"Snapshots, manifests and heartbeats in the bucket took {size(sent['control'])} more."
            )
    return sentences


def _one_line(text: object) -> str:
    return " ".join(f"{text!s:.1000}".split()).rstrip(".")


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _scale(value: float, names: tuple[str, ...]) -> tuple[float, str]:
    for power, name in enumerate(names):
        if value < 999.5 * 1000**power or name == names[-1]:
            return value / 1000**power, name
    raise AssertionError


def _figure(value: float) -> str:
    """Format a number with one decimal below 100 if it matters: 7.6, 8.0, 93, 1,700."""
    text = f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
    return text.removesuffix(".0") if value >= 9.95 or value == 0 else text


_BYTE_NAMES = ("B", "kB", "MB", "GB", "TB", "PB")


def size(num_bytes: float, like: float | None = None) -> str:
    """Return `12.3 MB`; with `like`, only the figure in the unit of `like`."""
    if like is None:
        value, name = _scale(num_bytes, _BYTE_NAMES)
        return f"{_figure(value)} {name}" if name != "B" else f"{value:.0f} B"
    value = num_bytes / 1000 ** _BYTE_NAMES.index(_scale(like, _BYTE_NAMES)[1])
    return "under 0.1" if 0 < value < 0.05 else f"{value:,.1f}" if value < 99.95 else f"{value:,.0f}"


def versus(num_bytes: float, dense_bytes: float) -> str:
    """Return `93 MB (7.6 times as much)`."""
    return f"{size(dense_bytes)} ({times(dense_bytes / num_bytes)})"


SAME = "the same"


def times(ratio: float) -> str:
    if 0.95 <= ratio < 1.05:
        return SAME
    if ratio >= 100:  # only two digits are significant
        ratio = round(ratio, 1 - math.floor(math.log10(ratio)))
    return f"{_figure(ratio)} times as much" if ratio >= 1.05 else f"{ratio:.2f} times as much"


def count(number: float) -> str:
    """Return `1.2 M`."""
    value, name = _scale(number, ("", " k", " M", " B", " T"))
    return f"{_figure(value)}{name}" if name else f"{value:g}"


def duration(seconds: float) -> str:
    """Return `58 s`, `4 min 10 s`, `3 h 05 min` or `5 d 4 h`."""
    if seconds < 9.95:
        return f"{_figure(seconds)} s" if seconds >= 0.05 else "under 0.1 s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def clock(seconds: float) -> str:
    """Return `1m10s`: a short duration."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def rate(tokens_per_second: float) -> str:
    """Return `48.1k tok/s`."""
    value, name = _scale(tokens_per_second, ("", "k", "M", "G"))
    return f"{value:.1f}{name} tok/s" if value < 99.95 else f"{value:.0f}{name} tok/s"
