"""One outer round of a run: a line of metrics.jsonl, simulated or real. Standard library only."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NotRequired, Protocol, Self, TypedDict

from isthmus.config import Member, Recipe
from isthmus.config.model import NamedTensors
from isthmus.layout.learning_rate import learning_rate
from isthmus.layout.traffic import PURPOSES, dense_round_bytes
from isthmus.planner.cost import round_seconds
from isthmus.runlog.facts import Facts

# These depend on the clock; two runs with the same recipe and seed agree in all other fields.
TIMING_FIELDS = ("seconds", "tokens_per_second", "fleet_seconds", "measured")
# Lists of a row's `measured`, with one entry per process; how they combine over a kind's replicas:
SUMMED = ("forth_bytes", "back_bytes", "outside_tokens")
AVERAGED = ("compute_seconds", "up_seconds", "down_seconds", "wait_seconds")
# Times of the pause between rounds, in which nothing trains, and its total
AVERAGED += ("encode_seconds", "save_seconds", "apply_seconds", "edge_seconds")
LARGEST = ("peak_bytes",)


class Figures(TypedDict):
    """What the replicas of one [[replicas]] table measured in a round."""

    replicas: int
    bytes: dict[str, int]  # by purpose
    seconds: NotRequired[float]
    trip_seconds: NotRequired[float]
    forth_bytes: NotRequired[list[float]]
    back_bytes: NotRequired[list[float]]
    outside_tokens: NotRequired[list[float]]  # sent, with values outside the range of a few-bit wire
    compute_seconds: NotRequired[list[float]]
    up_seconds: NotRequired[list[float]]
    down_seconds: NotRequired[list[float]]
    wait_seconds: NotRequired[list[float]]
    encode_seconds: NotRequired[list[float]]
    save_seconds: NotRequired[list[float]]
    apply_seconds: NotRequired[list[float]]
    edge_seconds: NotRequired[list[float]]
    peak_bytes: NotRequired[list[float]]


class Scores(TypedDict):
    """The held-out losses of an anchor."""

    loss_full: float | None
    loss_pipelined: float | None
    loss_mixed: float | None
    loss_by_kind: dict[str, float]


NO_SCORES = Scores(loss_full=None, loss_pipelined=None, loss_mixed=None, loss_by_kind={})


class EntryOfManifest(Protocol):
    @property
    def replica(self) -> str: ...
    @property
    def facts(self) -> Facts: ...


class SettledManifest(Protocol):
    """The fields of a ledger's manifest that a row uses."""

    @property
    def round(self) -> int: ...
    @property
    def entries(self) -> Sequence[EntryOfManifest]: ...
    @property
    def refused(self) -> Sequence[tuple[str, str]]: ...
    @property
    def seconds(self) -> float: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Row(Mapping[str, Any]):
    """One round. `row.loss_full` and `row["loss_full"]` are the same; None means not measured.

    As a mapping it has the keys of metrics.jsonl; the last three exist only for real processes.
    """

    round: int
    inner_steps: int = 0
    tokens: int = 0
    lr: float | None = None
    loss_train: float | None = None
    train_by_kind: dict[str, float] = field(default_factory=dict)
    loss_full: float | None = None
    loss_pipelined: float | None = None
    loss_mixed: float | None = None
    loss_by_kind: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    fleet_seconds: float | None = None
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PURPOSES, 0))
    dense_bytes: dict[str, int] = field(default_factory=lambda: {"stages": 0, "replicas": 0})
    measured: dict[str, Figures] = field(default_factory=dict)
    contributors: list[str] | None = None
    refused: dict[str, str] | None = None
    anchor: str | None = None

    @classmethod
    def untrained(cls, recipe: Recipe, scores: Scores | None, seconds: float) -> Self:
        """Return row 0: the model before training."""
        return cls(round=0, lr=_rate(recipe, 0), seconds=seconds, fleet_seconds=0.0, **(scores or NO_SCORES))

    @classmethod
    def from_simulation(
        cls,
        recipe: Recipe,
        round: int,
        facts: Mapping[str, Facts],
        scores: Scores | None,
        *,
        loss_train: float,
        grad_norm: float,
        seconds: float,
    ) -> Self:
        """Build a simulated round, in which every replica took part; `facts` are theirs by name."""
        step_seconds = _mean([fact.seconds for fact in facts.values()]) or 0.0
        row = cls._trained(recipe, round, facts, scores, seconds, step_seconds / recipe.outer.inner_steps)
        row.tokens, row.loss_train, row.grad_norm = round * recipe.round_tokens, loss_train, grad_norm
        return row

    @classmethod
    def from_manifest(
        cls,
        recipe: Recipe,
        manifest: SettledManifest,
        tokens_before: int,
        scores: Scores | None = None,
        anchor: str | None = None,
    ) -> Self:
        """Build a settled round of real processes, from the replicas' reports with their updates."""
        facts = {entry.replica: entry.facts for entry in manifest.entries}
        step_seconds = manifest.seconds / recipe.outer.inner_steps
        row = cls._trained(recipe, manifest.round, facts, scores, manifest.seconds, step_seconds)
        row.tokens = tokens_before + _tokens(recipe, facts)
        row.loss_train = _mean([fact.loss for fact in facts.values()])
        row.grad_norm = _mean([fact.grad_norm for fact in facts.values()])
        row.contributors, row.refused, row.anchor = list(facts), dict(manifest.refused), anchor
        if not all(replica.tflops for replica in recipe.replicas):
            # For machines without a stated rate only their time is known.
            row.fleet_seconds = None
        return row

    @classmethod
    def _trained(
        cls,
        recipe: Recipe,
        round: int,
        facts: Mapping[str, Facts],
        scores: Scores | None,
        seconds: float,
        step_seconds: float,
    ) -> Self:
        took_part = [member for member in recipe.fleet() if member.name in facts]
        known = [(m, loss) for m in took_part if (loss := facts[m.name].loss) is not None]
        step = round * recipe.outer.inner_steps
        row = cls(
            round=round,
            inner_steps=step,
            lr=_rate(recipe, step - 1),
            train_by_kind=by_kind([m for m, _ in known], [loss for _, loss in known]),
            seconds=seconds,
            tokens_per_second=_tokens(recipe, facts) / max(seconds, 1e-9),
            fleet_seconds=round_seconds(recipe.in_round(round), step_seconds),
            dense_bytes=dict(dense_round_bytes(recipe, took_part)),
            measured=measured_by_kind(took_part, facts),
            **(scores or NO_SCORES),
        )
        for fact in facts.values():
            row._count(fact)
        return row

    def add_farewells(self, recipe: Recipe, farewells: Mapping[str, Facts]) -> None:
        """Add what replicas counted after their last commits; `self` is the run's last row."""
        for fact in farewells.values():
            self._count(fact)
        for name, last in measured_by_kind(recipe.fleet(), farewells).items():
            kind = self.measured.setdefault(name, {"replicas": last["replicas"], "bytes": {}})
            for purpose, number in last["bytes"].items():
                kind["bytes"][purpose] = kind["bytes"].get(purpose, 0) + number
            for key in (*SUMMED, *AVERAGED, *LARGEST):
                if more := last.get(key):
                    pairs = zip(kind.get(key) or [0] * len(more), more, strict=False)
                    kind[key] = [max(pair) if key in LARGEST else sum(pair) for pair in pairs]

    def fill_in(self, scores: Scores | None, anchor: str | None) -> None:
        """Add what is known late: held-out losses and the digest of the weights."""
        for name, value in (scores or {}).items():
            setattr(self, name, value)
        if self.round:
            self.anchor = anchor

    def is_filled_in(self, recipe: Recipe) -> bool:
        """Return whether this row has all that `fill_in` gives it. Losses that are not finite are None, but
        have kinds."""
        scored = self.loss_full is not None or bool(self.loss_by_kind) or not recipe.is_scored(self.round)
        return scored and (self.anchor is not None or self.round == 0)

    def _count(self, facts: Facts) -> None:
        for purpose, number in facts.bytes.items():
            self.bytes[purpose] = self.bytes.get(purpose, 0) + number

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of metrics.jsonl, with keys in order."""
        return {name: getattr(self, name) for name in self}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """Read a row of metrics.jsonl: ignore unknown keys; fields that an older version lacks are None."""
        known: dict[str, Any] = {name: found[name] for name in FIELDS if found.get(name) is not None}
        known["round"] = int(known["round"])
        return cls(**known)

    def __getitem__(self, key: str) -> Any:
        if key not in FIELDS or (key in OPTIONAL and getattr(self, key) is None):
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (name for name in FIELDS if name not in OPTIONAL or getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}


FIELDS = tuple(field.name for field in fields(Row))
OPTIONAL = ("contributors", "refused", "anchor")


def by_kind(members: Sequence[Member], values: Sequence[float]) -> dict[str, float]:
    """Return the mean over the replicas of each [[replicas]] table."""
    kinds: dict[str, list[float]] = {}
    for member, value in zip(members, values, strict=True):
        kinds.setdefault(member.config.name, []).append(value)
    return {name: sum(group) / len(group) for name, group in kinds.items()}


def measured_by_kind(members: Sequence[Member], facts: Mapping[str, Facts]) -> dict[str, Figures]:
    """Return one round's figures of every [[replicas]] table: sums of bytes, means of seconds, largest
    peaks."""
    kinds: dict[str, list[Facts]] = {}
    for member in members:
        if member.name in facts:
            kinds.setdefault(member.config.name, []).append(facts[member.name])
    return {name: _together(group) for name, group in kinds.items()}


def _together(facts: Sequence[Facts]) -> Figures:
    figures: Figures = {"replicas": len(facts), "bytes": {}}
    for key in ("seconds", "trip_seconds"):
        if (mean := _mean([getattr(fact, key) or None for fact in facts])) is not None:
            figures[key] = mean
    for fact in facts:
        for purpose, number in fact.bytes.items():
            figures["bytes"][purpose] = figures["bytes"].get(purpose, 0) + number
    for key in (*SUMMED, *AVERAGED, *LARGEST):
        columns = list(zip(*(row for fact in facts if (row := fact.measured.get(key))), strict=False))
        if not columns:
            continue
        if key in AVERAGED:
            figures[key] = [round(sum(column) / len(column), 5) for column in columns]
        else:
            figures[key] = [max(column) if key in LARGEST else sum(column) for column in columns]
    return figures


def outside_tokens(rows: Iterable[Row]) -> int:
    """Count tokens on stage links with values outside the range of a few-bit wire."""
    kinds = [kind for row in rows for kind in row.measured.values()]
    return int(sum(count for kind in kinds for count in kind.get("outside_tokens", ())))


def _tokens(recipe: Recipe, took_part: Mapping[str, Facts]) -> int:
    """Count tokens; a replica that this recipe lacks counts with the usual batch."""
    if isinstance(recipe.model, NamedTensors):  # as many as the loops have counted
        return int(sum(sum(facts.measured.get("tokens", ())) for facts in took_part.values()))
    sizes = {member.name: recipe.batch_of(member.config) for member in recipe.fleet()}
    sequences = sum(sizes.get(name, recipe.inner.batch) for name in took_part)
    return recipe.outer.inner_steps * sequences * recipe.model.context


def _rate(recipe: Recipe, step: int) -> float | None:
    """The learning rate; of a loop of its own it is not known."""
    own = isinstance(recipe.model, NamedTensors)
    return None if own else learning_rate(step, recipe.inner, recipe.num_inner_steps)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
