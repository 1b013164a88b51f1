"""The Recipe tree: frozen dataclasses that check themselves. Standard library only."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from isthmus.config.checks import above, choice, name_of, short, within
from isthmus.config.fleet import (
    MOST_BATCH,
    MOST_MICRO_BATCHES,
    MOST_REPLICAS,
    BucketConfig,
    Member,
    ReplicaConfig,
)
from isthmus.config.model import ModelConfig
from isthmus.errors import ConfigError

MOST_ROUNDS = 1_000_000
MOST_SLOTS = 1 << 16  # of the schedules that a plan simulates: some seconds
MOST_PARTS = 1 << 17  # layers that a plan counts


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The corpus, and how much held-out text scores each round."""

    corpus: str = "builtin:sample"
    eval_batches: int = 4  # held-out batches of `inner.batch` sequences
    eval_every: int = 1  # rounds
    eval_by: str = "auto"  # which replica scores a bucket run; "auto": the first full one; or "none"

    def __post_init__(self) -> None:
        name_of("data.eval_by", self.eval_by, "-_.")
        within("data.eval_batches", self.eval_batches, 1, 1e6)
        within("data.eval_every", self.eval_every, 1, 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    """InnerOpt (eq. 1): AdamW with warm-up and cosine; defaults from Table 9 of arXiv 2601.02360."""

    batch: int = 32  # sequences per replica and inner step; a [[replicas]] table may override it
    micro_batches: int = 8  # of a pipelined replica's inner step
    in_flight: int = 0  # the most that a stage holds activations of; 0: as many as its link needs
    backward: str = "whole"  # or "split": compute weight gradients while a stage would wait
    optimizer: str = "adamw"  # or "muon" for the layers' matrices, with AdamW for the rest
    lr: float = 3e-4
    warmup_steps: int = 500
    warmup_start: float = 0.1  # share of lr at the first step
    final_lr: float = 0.1  # share of lr at the last step
    schedule_steps: int = 0  # length of the cosine; 0: the whole run
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # 0: none
    clip_scope: str = "replica"  # or "stage": the norm of each stage on its own
    precision: str = "auto"  # bf16 on CUDA from Ampere on, else fp32; or "fp32", "bf16", "fp64"
    recompute: bool = False  # keep one stream per layer, and recompute the layer in the backward

    def __post_init__(self) -> None:
        within("inner.batch", self.batch, 1, MOST_BATCH)
        within("inner.micro_batches", self.micro_batches, 1, MOST_MICRO_BATCHES)
        within("inner.in_flight", self.in_flight, 0, MOST_MICRO_BATCHES)
        for name in ("warmup_steps", "schedule_steps", "clip"):
            within(f"inner.{name}", getattr(self, name), 0, 1e12)
        within("inner.weight_decay", self.weight_decay, 0, 1e6)
        for name in ("lr", "eps"):
            above(f"inner.{name}", getattr(self, name), 0, 1e6)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"inner.{name} is {getattr(self, name)}; it must be in [0, 1)")
        for name in ("warmup_start", "final_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"inner.{name} is {getattr(self, name)}; it is a share of inner.lr, from 0 to 1"
                )
        choice("inner.optimizer", self.optimizer, ("adamw", "muon"))
        choice("inner.backward", self.backward, ("whole", "split"))
        choice("inner.clip_scope", self.clip_scope, ("replica", "stage"))
        choice("inner.precision", self.precision, ("auto", "fp32", "bf16", "fp64"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """The outer method; defaults are SparseLoCo's in Table 9 of arXiv 2601.02360, plus a clip."""

    method: str = "sparseloco"  # or "diloco", or "adamw" (gradients averaged every inner step)
    inner_steps: int = 50  # H
    rounds: int = 116
    lr: float = 0.0  # 0: 1.0 for sparseloco, 0.7 for diloco
    chunk_side: int = 64
    keep: int = 32  # kappa
    values: str = "fp32"  # Q: "fp32", "bf16" or "2bit"; "fp64" for float64 runs
    feedback_decay: float = 0.95  # beta
    feedback_lr_scaled: bool = False  # lr scales the pseudo-gradient before the feedback, as in public code
    aggregation: str = "contributors"  # or "all": eq. 2 read literally
    clip: str = "median"  # scale a tensor down to its median norm over all replicas; "none" as in eq. 2
    momentum: float = 0.9  # Nesterov, diloco only

    def __post_init__(self) -> None:
        choice("outer.method", self.method, ("sparseloco", "diloco", "adamw"))
        within("outer.inner_steps", self.inner_steps, 1, MOST_ROUNDS)
        within("outer.rounds", self.rounds, 1, MOST_ROUNDS)
        within("outer.chunk_side", self.chunk_side, 1, 1e9)
        within("outer.keep", self.keep, 0, 1e9)
        if self.chunk_side > 64:
            raise ConfigError(f"outer.chunk_side is {self.chunk_side}; a chunk is at most 64 x 64")
        if not 1 <= self.keep <= self.chunk_side**2:
            raise ConfigError(f"outer.keep is {self.keep}; a chunk holds 1 to {self.chunk_side**2} entries")
        choice("outer.values", self.values, ("fp32", "bf16", "2bit", "fp64"))
        choice("outer.aggregation", self.aggregation, ("contributors", "all"))
        choice("outer.clip", self.clip, ("none", "median"))
        within("outer.lr", self.lr, 0, 1e6)
        for name in ("feedback_decay", "momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"outer.{name} is {getattr(self, name)}; it must be in [0, 1]")

    @property
    def step_size(self) -> float:
        """eta of eq. 2."""
        return self.lr or (0.7 if self.method == "diloco" else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubspaceConfig:
    """How pipelined replicas compress (sec. 2.2 and 2.4), with the ablations of Table 5."""

    basis: str = "global"  # one U for the run; or "replica", "boundary": one for each
    anchor: str = "fixed"  # T_perp alone; or "learned": a trained table at each boundary
    decay_t_perp: bool = False  # true: weight decay also shrinks T_perp, a constant in the paper
    adaptation: bool = True  # eqs. 3-4 after every round; false: T_perp stays at its first value
    weight_projection: bool = False  # Table 5b: project compressed W_p1 and W_p2 onto S after every step
    grassmann_every: int = 0  # Table 5c: inner steps between updates of U; 0: never
    grassmann_lr: float = 0.1
    modified_adamw: bool = False  # Table 5d

    def __post_init__(self) -> None:
        choice("subspace.basis", self.basis, ("global", "replica", "boundary"))
        choice("subspace.anchor", self.anchor, ("fixed", "learned"))
        within("subspace.grassmann_every", self.grassmann_every, 0, 1e12)
        above("subspace.grassmann_lr", self.grassmann_lr, 0, 1e6)
        if self.grassmann_every and self.basis != "global":
            raise ConfigError('subspace.grassmann_every needs subspace.basis = "global": all turn one U')


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishConfig:
    """The last rounds of a run, which open boundaries so that the plain model is good as well."""

    rounds: int = 0  # how many, at the end of outer.rounds
    how: str = "open"  # gradually; or "full": train as uncompressed replicas from the first of them on

    def __post_init__(self) -> None:
        within("finish.rounds", self.rounds, 0, MOST_ROUNDS)
        choice("finish.how", self.how, ("open", "full"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole run."""

    name: str
    seed: int = 0
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)
    finish: FinishConfig = field(default_factory=FinishConfig)
    bucket: BucketConfig = field(default_factory=BucketConfig)
    replicas: tuple[ReplicaConfig, ...]

    def __post_init__(self) -> None:
        name_of("name", self.name, "-_.")
        if self.name.startswith("."):
            raise ConfigError(f'name "{self.name}": begin with a letter or a digit')
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {short(self.seed)}; it must be 0 or more and below 2**63")
        if not self.replicas:
            raise ConfigError('no replicas; add a [[replicas]] table with a name and kind = "full"')
        # Check this before anything is built for each of them.
        within("replicas: the sum of their counts", self.num_replicas, 1, MOST_REPLICAS)
        stages = sum(replica.stages for replica in self.replicas)
        what = "the stages of all [[replicas]] tables"
        slots = sum(replica.stages * self.micro_batches_of(replica) for replica in self.replicas)
        within(f"{what} x their micro-batches", slots, 1, MOST_SLOTS)
        within(f"{what} x model.layers", stages * self.model.layers, 1, MOST_PARTS)
        for name, number in Counter(member.name for member in self.fleet()).items():
            if number > 1:
                raise ConfigError(f'two replicas are called "{name}"; give each table its own name')
        for replica in self.replicas:
            if replica.stages > self.model.layers:
                raise ConfigError(
                    f"replica {replica.name}: {replica.stages} stages for {self.model.layers} layers; "
                    f"stages is at most {self.model.layers}"
                )
            if replica.sharded and replica.processes > self.model.layers:
                raise ConfigError(
                    f"replica {replica.name}: {replica.processes} processes share {self.model.layers} layers "
                    f'with sharding = "full"; processes is at most {self.model.layers} then'
                )
            self._check_batch(replica)
        every = self.subspace.grassmann_every
        if every % self.outer.inner_steps:
            raise ConfigError(
                f"subspace.grassmann_every is {every}; U turns right after a round, so it must be a "
                f"multiple of outer.inner_steps = {self.outer.inner_steps}"
            )
        self._check_ablations()
        self._count_tables()
        if self.outer.values == "fp64" and self.inner.precision != "fp64":
            raise ConfigError('outer.values is "fp64"; that is for runs with inner.precision = "fp64"')

    def _check_batch(self, replica: ReplicaConfig) -> None:
        batch, parts = self.batch_of(replica), self.micro_batches_of(replica)
        key = f"replica {replica.name}: batch" if replica.batch else "inner.batch"
        if batch % replica.processes:
            raise ConfigError(
                f"replica {replica.name}: {replica.processes} processes do not divide {key.split(': ')[-1]} "
                f"= {batch}; change one of them"
            )
        if batch // replica.processes % parts:
            rows = f", {batch // replica.processes} for each process" if replica.processes > 1 else ""
            own = "its " if replica.micro_batches else "inner."
            what = f"{key} is {batch}{rows}, which {parts} micro-batches do not divide"
            raise ConfigError(f"{what}; change it or {own}micro_batches")
        if self.outer.method == "adamw" and batch != self.inner.batch:
            raise ConfigError(
                f'replica {replica.name}: outer.method = "adamw" gives all batches the same weight; '
                "drop batch, or take another method"
            )

    def _count_tables(self) -> None:
        """Count learned tables. All replicas train the same ones, so all have the same boundaries. In a mixed
        fleet they do not pay for their bytes (docs/results.md), so full replicas lack them."""
        tables = 0
        if self.subspace.anchor == "learned":
            for replica in self.replicas:
                if replica.kind != "pipelined":
                    raise ConfigError(
                        f'replica {replica.name}: subspace.anchor = "learned" works only if every '
                        'replica is pipelined; set "fixed"'
                    )
            if len({replica.stages for replica in self.replicas}) > 1:
                raise ConfigError(
                    'subspace.anchor = "learned" needs the same number of stages in every replica; set '
                    '"fixed", or equal stages'
                )
            tables = self.replicas[0].stages - 1
        object.__setattr__(self, "model", replace(self.model, boundary_tables=tables))

    def _check_ablations(self) -> None:
        if self.inner.clip_scope == "stage" and self.outer.method == "adamw":
            raise ConfigError('inner.clip_scope "stage" needs replicas with their own weights; set "replica"')
        if self.inner.optimizer == "muon" and self.subspace.modified_adamw:
            raise ConfigError('subspace.modified_adamw changes AdamW; set inner.optimizer to "adamw"')
        # "auto" may become "none", which must pass the same checks.
        compressed = [r for r in self.replicas if r.compression != "none"]
        if self.subspace.weight_projection and self.subspace.basis == "boundary":
            raise ConfigError('subspace.weight_projection needs one U; set subspace.basis to "global"')
        self._check_finish(bool(compressed))
        alike = len({(replica.stages, replica.compression) for replica in self.replicas}) == 1
        for name in ("weight_projection", "modified_adamw"):
            # AdamW's replicas share one set of weights, which cannot be projected for only some of them.
            if getattr(self.subspace, name) and self.outer.method == "adamw" and not alike:
                raise ConfigError(f'subspace.{name} with outer.method = "adamw" needs identical replicas')
            if getattr(self.subspace, name) and not compressed:
                raise ConfigError(f"subspace.{name} is for compressed replicas, and there is none")

    def _check_finish(self, compressed: bool) -> None:
        if not (rounds := self.finish.rounds):
            return
        if rounds > self.outer.rounds:
            raise ConfigError(f"finish.rounds is {rounds}; at most outer.rounds = {self.outer.rounds}")
        if not compressed:
            cure = "set 0, or give a pipelined replica a compression"
            raise ConfigError(f"finish.rounds is {rounds}, but no replica is compressed; {cure}")
        if self.subspace.weight_projection:
            what = "finish.rounds opens boundaries, and subspace.weight_projection keeps the weights in S"
            raise ConfigError(f"{what}; drop one of them")

    def recomputes(self, replica: ReplicaConfig) -> bool:
        """Return whether these replicas recompute their layers in the backward."""
        return self.inner.recompute or replica.recompute == "yes"

    def batch_of(self, replica: ReplicaConfig) -> int:
        """Return the sequences in one inner step of these replicas."""
        return replica.batch or self.inner.batch

    def micro_batches_of(self, replica: ReplicaConfig) -> int:
        """Return the parts of that batch: what crosses the links, or what a full replica accumulates over."""
        return replica.micro_batches or (self.inner.micro_batches if replica.kind == "pipelined" else 1)

    def trained_by(self, member: Member) -> "Recipe":
        """Return the recipe as this replica trains it: with its own answer for inner.recompute."""
        return replace(self, inner=replace(self.inner, recompute=self.recomputes(member.config)))

    def opening(self, round_number: int) -> float | None:
        """a of x_hat = T + (P + a (I - P)) (x - T) in this outer round; None if boundaries compress."""
        finishing = round_number - (self.outer.rounds - self.finish.rounds)
        if not 0 < finishing <= self.finish.rounds:
            return None
        return 1.0 if self.finish.how == "full" else finishing / self.finish.rounds

    def in_round(self, round_number: int) -> "Recipe":
        """Return the recipe for counting a round's bytes and seconds: finishing rounds send whole streams.
        Compressed replicas get k = d: their stages still hold the embedding and read its update."""
        if self.opening(round_number) is None:
            return self
        replicas = tuple(replace(r, compression="1") if r.compressed else r for r in self.replicas)
        return replace(self, replicas=replicas)

    def is_scored(self, round_number: int) -> bool:
        """Return whether a round is scored: every `eval_every`, the last, and the last before finishing."""
        last = (self.outer.rounds, self.outer.rounds - self.finish.rounds)
        return round_number in last or round_number % self.data.eval_every == 0

    @property
    def num_replicas(self) -> int:
        return sum(replica.count for replica in self.replicas)

    @property
    def num_inner_steps(self) -> int:
        return self.outer.rounds * self.outer.inner_steps

    @property
    def round_tokens(self) -> int:
        return self.outer.inner_steps * self.step_sequences * self.model.context

    @property
    def step_sequences(self) -> int:
        """Count the sequences that all replicas together take in one inner step."""
        return sum(replica.count * self.batch_of(replica) for replica in self.replicas)

    def tokens_of(self, members: Iterable[Member]) -> int:
        """Count the tokens that these replicas train on in one round."""
        sequences = sum(self.batch_of(member.config) for member in members)
        return self.outer.inner_steps * sequences * self.model.context

    def fleet(self) -> tuple[Member, ...]:
        """Return every replica in the order of the sum of updates."""
        members: list[Member] = []
        for replica in self.replicas:
            for i in range(replica.count):
                name = replica.name if replica.count == 1 else f"{replica.name}-{i}"
                members.append(Member(len(members), name, replica))
        return tuple(members)
