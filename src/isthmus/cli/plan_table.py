"""The table that `isthmus plan` prints. Loads no torch."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from isthmus.config import Recipe
from isthmus.planner.memory import SPARE
from isthmus.runlog.words import count, duration, fleet_in_words, rate, size

if TYPE_CHECKING:
    from isthmus.planner.plan import Forecast, KindForecast


def table(recipe: Recipe, forecast: "Forecast") -> str:
    """Return what a newcomer needs to decide, one fact per line, and the resolved recipe."""
    from isthmus.config import PRESETS

    model = f" ({recipe.model.preset})" if recipe.model.preset in PRESETS else ""
    lines = [
        f'Plan of "{forecast.name}": {fleet_in_words(recipe).rstrip(",")}, '
        f"{count(forecast.num_parameters)} parameters{model}, {forecast.rounds:,} rounds of "
        f"{forecast.inner_steps} inner steps.",
        "",
        "The whole run",
        *_lines(_run_rows(recipe, forecast)),
    ]
    for reason in forecast.auto:
        lines += ["", f"Auto: {reason}."]
    for kind in forecast.kinds:
        lines += ["", _title(kind), *_lines(_kind_rows(recipe, forecast, kind))]
    lines += [
        "",
        "Assumed: 6 N operations per token at the stated rates; links full duplex and at their stated rate, "
        "transfers overlapped with compute;",
        "nobody drops out; evaluation, packing and saving take no time. docs/plan.md has the formulas.",
    ]
    return "\n".join(lines)


def _lines(rows: Mapping[str, str]) -> list[str]:
    """Format labels and texts; further lines of a text are indented below its first."""
    return [f"  {label:<18}{text}".replace("\n", "\n" + " " * 20) for label, text in rows.items()]


def _run_rows(recipe: Recipe, forecast: "Forecast") -> dict[str, str]:
    sent, links = forecast.bytes, forecast.link_bytes
    usual_rounds = forecast.rounds - (forecast.finish.rounds if forecast.finish else 0)
    slowest = f"; {forecast.slowest} sets the pace" if len(forecast.kinds) > 1 else ""
    rows = {
        "time": f"{duration(forecast.hours * 3600)}: {usual_rounds:,} rounds of "
        f"{_time(forecast.round_seconds)}{slowest}"
    }
    if (finish := forecast.finish) is not None:
        way = "opened step by step" if finish.how == "open" else "open at once"
        many = "round" if finish.rounds == 1 else f"{finish.rounds:,} rounds"
        rows["finish"] = (
            f"the last {many} of {_time(finish.round_seconds)} each, boundaries {way}: "
            f"{size(finish.stage_bytes_per_round)} between stages in a round instead of "
            f"{size(finish.usual_stage_bytes_per_round)}; {finish.slowest} sets the pace"
        )
    rows["speed"] = f"{rate(forecast.tokens_per_second)}, {count(forecast.tokens)} tokens in all"
    machines = f"{forecast.num_machines:,} machines"
    rows["utilisation"] = f"{forecast.utilisation:.1%} of what the {machines} can compute is used"
    if links["stages"]:
        parts = {"activations": "activations", "gradients": "gradients", "tokens": "token ids"}
        text = ", ".join(f"{name} {size(sent[key])}" for key, name in parts.items())
        rows["between stages"] = f"{size(links['stages'])}: {text}"
    if links["to_bucket"]:
        saved = f", anchors {size(sent['snapshots'])}" if forecast.snapshots else ""
        rows["to the bucket"] = f"{size(links['to_bucket'])}: updates {size(sent['payload_up'])}{saved}"
        extra = f", by closers to check them {size(sent['control'])}" if sent["control"] else ""
        rows["from the bucket"] = (
            f"{size(links['from_bucket'])}: updates {size(sent['payload_down'])}{extra}; whoever joins "
            "late comes on top"
        )
        each = forecast.requests_per_round
        rows["requests"] = f"{each['put']:,} writes and {each['get']:,} reads a round, heartbeats included"
        keeps = recipe.bucket.keep_rounds
        when = f"at most, with bucket.keep_rounds = {keeps}" if keeps else "at the end, if nothing is swept"
        rows["bucket holds"] = f"{size(forecast.stored_bytes_most)} {when}"
    if (closing := forecast.closing) is not None:
        rows["closing a round"] = (
            f"{_time(closing.seconds)}: {closing.closer} checks {size(closing.verify_bytes)} of updates, "
            f"{size(closing.last_bytes)} of them after the last have arrived"
        )
    if (money := forecast.money) is not None:
        prices = [f"{k.removeprefix('machines.')} {price:,.2f}" for k, price in money.items() if k != "total"]
        rows["money"] = f"{money['total']:,.2f}: {', '.join(prices)}"
    return rows


def _title(kind: "KindForecast") -> str:
    many = f"{kind.count:,} replica{'s' * (kind.count > 1)}"
    machine = f"{kind.compute.tflops:g} TFLOP/s, {kind.batch} sequences a step"
    if kind.stages == 1 and kind.micro_batches > 1:
        machine += f" in {kind.micro_batches} parts"
    if kind.sharding == "full":
        return f"{kind.name}: {many}, each cut between {kind.processes} processes of one machine of {machine}"
    if kind.stages == 1:
        return f"{kind.name}: {many}, each whole on one machine of {machine}"
    return f"{kind.name}: {many}, each in {kind.stages} stages on machines of {machine}"


def _kind_rows(recipe: Recipe, forecast: "Forecast", kind: "KindForecast") -> dict[str, str]:
    exchange = kind.exchange
    rows = _step_rows(kind)
    if forecast.num_replicas > 1:
        per = "round" if recipe.outer.method != "adamw" else f"{recipe.outer.inner_steps} inner steps"
        rows["exchange"] = (
            f"every {per} up {size(exchange.up_bytes)} in {_time(exchange.up_seconds)}, down "
            f"{size(exchange.down_bytes)} in {_time(exchange.down_seconds)}, over {exchange.mbps:g} Mb/s"
        )
    rows["memory"] = _memory(kind)
    if kind.fits is not None:
        rows["fits"] = _room(kind)
    rows["utilisation"] = f"{kind.utilisation:.1%} of the run its machines compute"
    if kind.wait_seconds > 0.005 * forecast.round_seconds:
        rows["utilisation"] += f"; {kind.utilisation_alone:.1%} if they had nobody to wait for"
    return rows | {"bottleneck": bottleneck(forecast, kind)}


def _step_rows(kind: "KindForecast") -> dict[str, str]:
    compute, step, link = kind.compute, kind.step, kind.link
    if link is None:
        return {"inner step": f"{_time(step.seconds)}, all of it compute"}
    by_stage = ", ".join(_time(seconds) for seconds in compute.stage_seconds_per_step)
    rows = {
        "compute": f"{_time(compute.seconds_per_step)} a stage and inner step on average; as the layers fall "
        f"{by_stage}",
        "link": f"{link.mbps:g} Mb/s, {link.latency_ms:g} ms, k = {link.subspace_dim} in {kind.wire}: a "
        f"micro-batch takes "
        f"{_time(link.forward_seconds_per_micro_batch)} forward "
        f"({size(link.forward_bytes_per_micro_batch)}) and "
        f"{_time(link.backward_seconds_per_micro_batch)} back;\n"
        f"it is busy {link.busy:.0%} of the step, "
        f"{link.steady_busy:.0%} once the pipeline is full",
    }
    if kind.loss_price:
        what = f"k/d = {kind.compression}" if kind.compression != "none" else "open"
        rows["compression"] = f"{what} in {kind.wire}: {kind.loss_price.text()}"
    rows["schedule"] = (
        f"{step.micro_batches} micro-batches; stages run {', '.join(map(str, step.depths))} of them "
        "forward before their first backward"
    )
    if step.in_flight != step.depths:
        rows["schedule"] += f", and hold {', '.join(map(str, step.in_flight))}"
    rows["inner step"] = f"{_time(step.seconds)} by event simulation; stages idle {step.bubble:.0%} of it"
    return rows


def _memory(kind: "KindForecast") -> str:
    names = {
        "weights": "weights",
        "moments": "moments",
        "gradients": "gradients",
        "feedback": "feedback",
        "anchor": "anchor",
        "outer": "outer momentum",
        "embedding_copy": "embedding copy",
        "gathered": "parts that are whole while they run",
        "activations": "activations in flight",
    }
    top = max(kind.memory, key=lambda process: process["total"])
    parts = ", ".join(f"{name} {size(top[key])}" for key, name in names.items() if top[key])
    other, totals = ("without", kind.memory_plain) if kind.recompute else ("with", kind.memory_recomputed)
    lines = [f"{size(top['total'])}: {parts}"]
    if len(kind.memory) > 1:
        what = "shard" if kind.sharding == "full" else "stage"
        lines = [f"{_sizes(process['total'] for process in kind.memory)} by {what};"]
        lines.append(f"{what} {top['stage']}: {parts}")
    own = "recomputed" if kind.recompute else "kept"
    lines.append(f"activations are {own}; {other} recomputation it would be {_sizes(totals)}")
    where = "beside it in the host's memory" if top["on_gpu"] else "of it"
    lines.append(f"{size(top['host_copy'])} {where}: the copy of the state that is being written")
    return "\n".join(lines)


def _sizes(totals: Iterable[int]) -> str:
    return ", ".join(map(size, totals))


def _room(kind: "KindForecast") -> str:
    """Say whether the role fits the machine, and what would make it fit."""
    most = max(process["total"] for process in kind.memory)
    room = f"{kind.memory_gb:g} GB"
    if kind.fits:
        return f"yes: {size(most)} of {room}"
    cures = (
        f"what would fit:\n{chr(10).join(kind.cures)}" if kind.cures else "no change of it was found to fit"
    )
    return f"NO: it does not fit. {size(most)}, and a process may use {room} less {SPARE:.0%}; {cures}"


def bottleneck(forecast: "Forecast", kind: "KindForecast") -> str:
    """Say in words what to change first."""
    if kind.bottleneck == "waiting":
        return f"{forecast.slowest}: every round {_time(kind.wait_seconds)} pass in waiting for it"
    if kind.bottleneck == "exchange":
        share = (kind.exchange.seconds + forecast.close_seconds) / forecast.round_seconds
        return (
            f"the exchange: {share:.0%} of a round; more inner steps, "
            "fewer kept entries or a faster link to the bucket shorten it"
        )
    if kind.bottleneck == "link":
        return (
            "the link between stages: if it took no time an inner step would take "
            f"{_time(kind.step.linkless_seconds)}; compress more, find a faster one, or give it more "
            "micro-batches to overlap"
        )
    if kind.bottleneck == "bubble":
        slow = max(kind.compute.stage_seconds_per_step) / kind.compute.seconds_per_step
        uneven = f", and the slowest stage has {slow:.2f} times the average work" if slow > 1.05 else ""
        return (
            f"filling and draining the pipeline with {kind.step.micro_batches} micro-batches{uneven}; more "
            "micro-batches help"
        )
    return "compute, as it should be"


def _time(seconds: float) -> str:
    if seconds >= 0.9995:
        return f"{seconds:.2f} s" if seconds < 9.95 else duration(seconds)
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else "under 0.1 ms" if seconds else "0 s"
