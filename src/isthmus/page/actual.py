"""Plan against actual: the figures that `isthmus plan` predicts for a run's recipe next to the measured ones.

For real processes a prediction uses the compute rate measured in the run, so that it tests bytes, links,
bubble and exchange, and a wrong rate does not look like a wrong plan; a rate that the recipe states has a
line of its own. A simulation's clock uses the stated rate, and so does its prediction.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from isthmus.config import Recipe
from isthmus.planner.cost import step_flops
from isthmus.planner.plan import Forecast, KindForecast, predict
from isthmus.planner.step import recomputed_share
from isthmus.runlog import REAL, About, Row, RunDir
from isthmus.runlog.row import Figures

TFLOP = 1e12
FORWARD, BACKWARD = ("activations", "tokens"), ("gradients",)  # bytes on a link between stages


@dataclass(frozen=True, slots=True)
class Line:
    """One figure, predicted and measured; bytes cover the whole run and all replicas of the kind."""

    kind: str  # the [[replicas]] table; "" for the fleet
    where: str  # a link ("stage 0 to 1", "to the bucket"), a stage, or "" for the replica
    what: str
    unit: str  # "seconds", "bytes", "share" or "tflops"
    predicted: float | None
    measured: float | None
    source: str = "measured"  # "virtual clock", "by shape": the source if nothing was measured

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted and self.measured is not None else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    rounds: int
    simulated: bool
    rates: dict[str, str]  # of each kind's prediction: "stated" in the recipe or "measured" in the run
    lines: tuple[Line, ...]

    def to_dict(self) -> dict[str, Any]:
        facts = {"rounds": self.rounds, "simulated": self.simulated, "rates": self.rates}
        return facts | {"lines": [line.to_dict() for line in self.lines]}


def compare(run_dir: str | Path | RunDir) -> Comparison | None:
    """Compare a run as far as it has come; None if no round is finished or no figures were kept."""
    run = run_dir if isinstance(run_dir, RunDir) else RunDir.open(run_dir)
    return compare_rows(run.recipe, run.about, run.rows())


def compare_rows(recipe: Recipe, about: About, rows: Iterable[Row]) -> Comparison | None:
    """Compare rows, whatever their source."""
    trained = [row for row in rows if row.round > 0 and row.measured]
    if not trained:
        return None
    simulated = about.get("mode") != REAL
    measured = {r.name: rate for r in recipe.replicas if (rate := _rate(recipe, r.name, trained))}
    stated = {r.name: r.tflops for r in recipe.replicas if r.tflops}
    if {r.name for r in recipe.replicas} - measured.keys() - stated.keys():
        return None  # a kind that took no part and states no rate: the whole cannot be planned
    recipe = _as_run(recipe, about, trained)
    plan = predict(_at(recipe, measured | stated if simulated else stated | measured))
    lines = _fleet(plan, trained, simulated)
    for kind in plan.kinds:
        figures = [row.measured[kind.name] for row in trained if row.measured.get(kind.name)]
        both = _Kind(kind, figures, recipe.outer.inner_steps)
        if not simulated:
            if kind.name in stated and kind.name in measured:
                rates = stated[kind.name], measured[kind.name]
                lines.append(Line(kind.name, "", "training rate of a machine", "tflops", *rates))
            lines += (
                _steps(both, trained) + _links(both, len(trained)) + _exchange(both) + _memory(both, about)
            )
        else:
            lines += _shapes(both)
    predicted, peak = about.get("predicted_bytes"), about.get("peak_bytes")
    if simulated and predicted and peak:
        lines.append(Line("", "", "peak memory", "bytes", predicted, peak))
    at_stated = stated.keys() if simulated else stated.keys() - measured.keys()
    rates = {r.name: "stated" if r.name in at_stated else "measured" for r in recipe.replicas}
    return Comparison(rounds=len(trained), simulated=simulated, rates=rates, lines=tuple(lines))


def _as_run(recipe: Recipe, about: About, trained: Sequence[Row]) -> Recipe:
    """Limit the recipe to the finished rounds, in the precision that `auto` chose."""
    precision = about.get("precision")
    inner = replace(recipe.inner, precision=precision) if precision else recipe.inner
    finishing = sum(recipe.opening(row.round) is not None for row in trained)
    outer, finish = replace(recipe.outer, rounds=len(trained)), replace(recipe.finish, rounds=finishing)
    return replace(recipe, inner=inner, outer=outer, finish=finish)


def _at(recipe: Recipe, rates: Mapping[str, float]) -> Recipe:
    replicas = tuple(replace(r, tflops=rates[r.name]) for r in recipe.replicas)
    return replace(recipe, replicas=replicas)


def _rate(recipe: Recipe, kind: str, rows: Sequence[Row]) -> float | None:
    """TFLOP/s of one machine, by 6 N a token and recomputation. For a simulated replica: of the device, in
    the replica's share of its time."""
    replica = next(r for r in recipe.replicas if r.name == kind)
    figures = [row.measured[kind] for row in rows if row.measured.get(kind)]
    at_once = replica.processes if replica.sharded else 1  # processes on one machine; every stage has its own
    spent = [sum(f.get("compute_seconds") or ()) / at_once or f.get("seconds") for f in figures]
    seconds = _typical(spent)
    flops = step_flops(recipe, replica) * recomputed_share(recipe, replica) * recipe.outer.inner_steps
    return flops / seconds / TFLOP if seconds else None


def _typical(values: Sequence[float | None]) -> float | None:
    """Return the median over rounds, without the first, which includes warm-up, unless it is the only one."""
    known = [value for value in (values[1:] if len(values) > 1 else values) if value]
    return median(known) if known else None


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of replica: its prediction, and its figures round by round."""

    plan: KindForecast
    figures: Sequence[Figures]
    steps: int  # H

    def line(
        self,
        where: str,
        what: str,
        unit: str,
        predicted: float,
        measured: float | None,
        source: str = "measured",
    ) -> Line:
        return Line(self.plan.name, where, what, unit, predicted, measured, source)

    def typical(self, key: str, process: int | None = None) -> float | None:
        if process is None:
            return _typical([figure.get(key) for figure in self.figures])
        rows = [figure.get(key) or [] for figure in self.figures]
        return _typical([row[process] if process < len(row) else None for row in rows])

    def total(self, key: str, process: int) -> float:
        rows = [figure.get(key) or [] for figure in self.figures]
        return sum(row[process] for row in rows if process < len(row))

    def sent(self, *purposes: str) -> int:
        return sum((figure.get("bytes") or {}).get(name, 0) for figure in self.figures for name in purposes)


def _fleet(plan: Forecast, rows: Sequence[Row], simulated: bool) -> list[Line]:
    key, source = ("fleet_seconds", "virtual clock") if simulated else ("seconds", "measured")
    seconds = _typical([row[key] for row in rows])
    return [Line("", "", "an outer round", "seconds", plan.round_seconds, seconds, source)]


def _steps(both: _Kind, rows: Sequence[Row]) -> list[Line]:
    kind, steps = both.plan, both.steps
    seconds = both.typical("seconds")
    lines = [both.line("", "an inner step", "seconds", kind.step.seconds, seconds and seconds / steps)]
    each = [both.typical("compute_seconds", s) for s in range(len(kind.memory))]
    if kind.stages > 1:
        for s, own in enumerate(each):
            compute = kind.compute.stage_seconds_per_step[s]
            lines.append(
                both.line(f"stage {s}", "compute in a step", "seconds", compute, own and own / steps)
            )
    round_seconds = _typical([row.seconds for row in rows])
    known = [own for own in each if own]
    share = sum(known) / len(kind.memory) / round_seconds if known and round_seconds else None
    return [*lines, both.line("", "utilisation", "share", kind.utilisation, share)]


def _links(both: _Kind, planned_rounds: int) -> list[Line]:
    """Compare every link, each way: bytes, and its use during training as a share of its stated rate."""
    link, seconds = both.plan.link, both.typical("seconds")
    if link is None:
        return []
    lines = []
    rounds = len(both.figures)
    replicas = sum(figure.get("replicas") or 0 for figure in both.figures)
    for s in range(link.num_links):
        for where, key, process, field, purposes in (
            (f"stage {s} to {s + 1}", "forth_bytes", s, "forward_bytes_per_micro_batch", FORWARD),
            (f"stage {s + 1} to {s}", "back_bytes", s + 1, "backward_bytes_per_micro_batch", BACKWARD),
        ):
            sent = both.total(key, process)
            whole = sum(both.plan.bytes[purpose] for purpose in purposes)  # includes finishing rounds
            expected = whole / link.num_links * rounds / planned_rounds
            lines.append(both.line(where, "bytes", "bytes", expected, sent))
            used = sent / replicas * 8 / (link.mbps * 1e6) / seconds if seconds and replicas else None
            share = _share_in_use(both.plan, field)
            lines.append(both.line(where, "share of its rate in use", "share", share, used))

    trip = link.forward_seconds_per_micro_batch + link.backward_seconds_per_micro_batch
    trip += 2 * link.latency_ms / 1e3
    what = "a micro-batch there and back"
    lines.append(both.line("slowest link", what, "seconds", trip, both.typical("trip_seconds")))
    return lines


def _share_in_use(kind: KindForecast, field: str) -> float:
    """Return the use of a replica's link, one way, during inner steps, as a share of its stated rate."""
    assert kind.link is not None, "only kinds with links have figures of them"
    step_bytes = getattr(kind.link, field) * kind.step.micro_batches
    return step_bytes * 8 / (kind.link.mbps * 1e6) / kind.step.seconds


def _exchange(both: _Kind) -> list[Line]:
    lines = []
    for where, way in (("to the bucket", "up"), ("from the bucket", "down")):
        if not both.plan.bytes[f"payload_{way}"]:
            continue
        lines.append(_payload(both, where, way))
        rounds = max(1, len(both.figures))
        spent = [both.total(f"{way}_seconds", s) / rounds for s in range(len(both.plan.memory))]
        seconds = getattr(both.plan.exchange, f"{way}_seconds")
        lines.append(both.line(where, "in a round", "seconds", seconds, max(spent)))
    return lines


def _payload(both: _Kind, where: str, way: str) -> Line:
    name = f"payload_{way}"
    return both.line(where, "bytes", "bytes", both.plan.bytes[name], both.sent(name))


def _memory(both: _Kind, about: About) -> list[Line]:
    """Compare every process's peak."""
    on_gpu = about.get("device") not in (None, "cpu")
    if not about.get("precision"):
        return []  # for a run that was only joined, the choice of `auto` is unknown
    lines, plan = [], both.plan
    what = "shard" if plan.sharding == "full" else "stage"
    for s in range(len(plan.memory)):
        peaks = [row[s] for figure in both.figures if s < len(row := figure.get("peak_bytes") or [])]
        if not any(peaks):
            continue
        where = f"{what} {s}" if len(plan.memory) > 1 else ""
        lines.append(both.line(where, "peak memory", "bytes", _peak(plan, s, on_gpu), max(peaks)))
    return lines


def _peak(kind: KindForecast, s: int, on_gpu: bool) -> float:
    """Return the predicted peak on this run's device. The runtime and the copy being written are in host
    memory."""
    memory = kind.memory[s]
    total = memory["total"] - (0 if memory["on_gpu"] else memory["host_copy"])
    return total - memory["runtime"] if on_gpu else total + memory["host_copy"]


def _shapes(both: _Kind) -> list[Line]:
    """Compare a simulated kind. It sends nothing, so stage links count the shapes that would cross them."""
    lines, num_links = [], both.plan.link.num_links if both.plan.link else 0
    for s in range(num_links):
        for where, purposes in ((f"stage {s} to {s + 1}", FORWARD), (f"stage {s + 1} to {s}", BACKWARD)):
            expected = sum(both.plan.bytes[purpose] for purpose in purposes) / num_links
            sent = both.sent(*purposes) / num_links
            lines.append(both.line(where, "bytes", "bytes", expected, sent, "by shape"))
    for where, way in (("to the bucket", "up"), ("from the bucket", "down")):
        if both.plan.bytes[f"payload_{way}"]:
            lines.append(_payload(both, where, way))
    return lines
