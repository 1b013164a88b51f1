"""The Recipe tree: frozen dataclasses that check themselves. Standard library only."""

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from isthmus.errors import ConfigError

AUTO = "auto"  # a replica's compression, to be picked by its link


def choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f'{name} is "{value}"; it is one of {", ".join(known)}{nearest(value, known)}')


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}")


def _above(name: str, value: float, bound: float) -> None:
    if not bound < value < float("inf"):
        raise ConfigError(f"{name} is {value}; it must be a finite number above {bound}")


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean "keep"?`, or nothing when no known word is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f'; did you mean "{close[0]}"?' if close else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A LLaMA: RMSNorm, RoPE, SwiGLU, untied head."""

    preset: str = "custom"
    vocab: int
    width: int
    layers: int
    heads: int
    ffn: int
    context: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    start: str = ""  # a Hugging Face LLaMA folder to go on from; "": random weights

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "layers", "heads", "ffn", "context"):
            _at_least(f"model.{name}", getattr(self, name), 1)
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(
                f"model.heads is {self.heads} and model.width {self.width}; "
                "the width must be an even number of entries for every head"
            )
        _above("model.init_std", self.init_std, 0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's full-model name and shape, in the order that every replica shares."""
        d, f = self.width, self.ffn
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (self.vocab, d)}
        for i in range(self.layers):
            block = f"layers.{i}"
            shapes[f"{block}.attention_norm.weight"] = (d,)
            for matrix in ("wq", "wk", "wv", "wo"):
                shapes[f"{block}.attention.{matrix}.weight"] = (d, d)
            shapes[f"{block}.ffn_norm.weight"] = (d,)
            shapes[f"{block}.feed_forward.w1.weight"] = (f, d)
            shapes[f"{block}.feed_forward.w3.weight"] = (f, d)
            shapes[f"{block}.feed_forward.w2.weight"] = (d, f)
        shapes["norm.weight"] = (d,)
        shapes["output.weight"] = (self.vocab, d)
        return shapes

    @property
    def num_parameters(self) -> int:
        d, f = self.width, self.ffn
        return 2 * self.vocab * d + self.layers * (4 * d * d + 3 * d * f + 2 * d) + d

    @property
    def token_bytes(self) -> int:
        """Token ids cross a link as the smallest integer type that holds the vocabulary."""
        return 1 if self.vocab <= 2**8 else 2 if self.vocab <= 2**16 else 4


def _preset(
    name: str, vocab: int, width: int, layers: int, heads: int, ffn: int, context: int
) -> ModelConfig:
    return ModelConfig(
        preset=name, vocab=vocab, width=width, layers=layers, heads=heads, ffn=ffn, context=context
    )


# 178m, 512m and 1b are the paper's (Tables 6 and 9 of arXiv 2601.02360, with METHOD's corrections).
PRESETS: dict[str, ModelConfig] = {
    model.preset: model
    for model in (
        _preset("nano", 1024, 128, 4, 4, 384, 128),
        _preset("10m", 8192, 256, 8, 4, 704, 512),
        _preset("20m", 8192, 384, 8, 6, 1024, 512),
        _preset("178m", 32000, 1024, 9, 8, 2688, 2048),
        _preset("512m", 32000, 1536, 12, 12, 5440, 2048),
        _preset("1b", 32000, 2048, 16, 8, 8192, 1024),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where the tokens are, and how much held-out text each round is scored on."""

    corpus: str = "builtin:sample"
    eval_batches: int = 4  # held-out batches of `inner.batch` sequences
    eval_every: int = 1  # rounds

    def __post_init__(self) -> None:
        _at_least("data.eval_batches", self.eval_batches, 1)
        _at_least("data.eval_every", self.eval_every, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerConfig:
    """InnerOpt (eq. 1): AdamW with warm-up and cosine; defaults from Table 9 of arXiv 2601.02360."""

    batch: int = 32  # sequences per replica and inner step
    micro_batches: int = 8  # of a pipelined replica's inner step
    in_flight: int = 0  # the most of them that a stage holds activations of; 0: as many as its link asks for
    backward: str = "whole"  # or "split": weight gradients are computed where a stage would wait
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
    precision: str = "auto"  # "auto": bf16 on CUDA, fp32 on CPU; or "fp32", "bf16", "fp64"

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batches"):
            _at_least(f"inner.{name}", getattr(self, name), 1)
        for name in ("in_flight", "warmup_steps", "schedule_steps", "weight_decay", "clip"):
            _at_least(f"inner.{name}", getattr(self, name), 0)
        for name in ("lr", "eps"):
            _above(f"inner.{name}", getattr(self, name), 0)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"inner.{name} is {getattr(self, name)}; it lies in [0, 1)")
        for name in ("warmup_start", "final_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"inner.{name} is {getattr(self, name)}; a share of inner.lr lies in [0, 1]"
                )
        choice("inner.backward", self.backward, ("whole", "split"))
        choice("inner.clip_scope", self.clip_scope, ("replica", "stage"))
        choice("inner.precision", self.precision, ("auto", "fp32", "bf16", "fp64"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """The outer method; defaults are SparseLoCo's in Table 9 of arXiv 2601.02360."""

    method: str = "sparseloco"  # or "diloco", or "adamw" (gradients averaged every inner step)
    inner_steps: int = 50  # H
    rounds: int = 116
    lr: float = 0.0  # 0: 1.0 for sparseloco, 0.7 for diloco
    chunk_side: int = 64
    keep: int = 32  # kappa
    values: str = "fp32"  # Q: "fp32", "bf16" or "2bit"; "fp64" for float64 runs
    feedback_decay: float = 0.95  # beta
    feedback_lr_scaled: bool = (
        False  # scale the pseudo-gradient by lr before the feedback, as public code does
    )
    aggregation: str = "contributors"  # or "all": eq. 2 read literally
    clip: str = "none"  # or "median": payloads are scaled down to the round's median norm
    momentum: float = 0.9  # Nesterov, diloco only

    def __post_init__(self) -> None:
        choice("outer.method", self.method, ("sparseloco", "diloco", "adamw"))
        for name in ("inner_steps", "rounds", "chunk_side"):
            _at_least(f"outer.{name}", getattr(self, name), 1)
        if self.chunk_side > 64:
            raise ConfigError(f"outer.chunk_side is {self.chunk_side}; a chunk is at most 64 x 64")
        if not 1 <= self.keep <= self.chunk_side**2:
            raise ConfigError(f"outer.keep is {self.keep}; a chunk holds 1 to {self.chunk_side**2} entries")
        choice("outer.values", self.values, ("fp32", "bf16", "2bit", "fp64"))
        choice("outer.aggregation", self.aggregation, ("contributors", "all"))
        choice("outer.clip", self.clip, ("none", "median"))
        _at_least("outer.lr", self.lr, 0)
        for name in ("feedback_decay", "momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"outer.{name} is {getattr(self, name)}; it lies in [0, 1]")

    @property
    def step_size(self) -> float:
        """eta of eq. 2."""
        return self.lr or (0.7 if self.method == "diloco" else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubspaceConfig:
    """How pipelined replicas compress (sec. 2.2 and 2.4), with the ablations of Table 5."""

    basis: str = "global"  # one U for the run; or "replica", "boundary": one for each
    adaptation: bool = True  # eqs. 3-4 after every round; false: T_perp stays at its first value
    weight_projection: bool = (
        False  # Table 5b: W_p1, W_p2 of compressed replicas back onto S after every step
    )
    grassmann_every: int = 0  # Table 5c: inner steps between updates of U; 0: never
    grassmann_lr: float = 0.1
    modified_adamw: bool = False  # Table 5d

    def __post_init__(self) -> None:
        choice("subspace.basis", self.basis, ("global", "replica", "boundary"))
        _at_least("subspace.grassmann_every", self.grassmann_every, 0)
        _above("subspace.grassmann_lr", self.grassmann_lr, 0)
        if self.grassmann_every and self.basis != "global":
            raise ConfigError(
                'subspace.grassmann_every needs subspace.basis = "global": all replicas turn one U'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishConfig:
    """Rounds at the end of a run in which boundaries are opened, so that the plain model is good as well."""

    rounds: int = 0  # the last of outer.rounds
    how: str = "open"  # round by round, or "full": as uncompressed replicas from the first of them on

    def __post_init__(self) -> None:
        _at_least("finish.rounds", self.rounds, 0)
        choice("finish.how", self.how, ("open", "full"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """What a link can carry, each way."""

    mbps: float = 1000.0
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        _above("link.mbps", self.mbps, 0)
        _at_least("link.latency_ms", self.latency_ms, 0)

    def seconds(self, payload_bytes: float) -> float:
        return payload_bytes * 8 / (self.mbps * 1e6) + self.latency_ms / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """One kind of replica and how many there are of it."""

    name: str
    kind: str = "full"  # or "pipelined"
    count: int = 1
    stages: int = 1
    processes: int = 1  # of a full replica: several GPUs of one machine that share every batch
    compression: str = (
        "none"  # k/d between stages, as "1/8"; "auto": planner.auto picks it before a run starts
    )
    wire: str = "bf16"  # what activations and their gradients cross a link as; or "fp32", "fp64"
    backend: str = "gloo"  # between stages; "nccl" where all are GPUs on one fast network
    link: LinkConfig = field(default_factory=LinkConfig)  # between stages
    bucket_link: LinkConfig | None = None  # to the other replicas, by every machine; as `link` when not given
    tflops: float = 0.0  # training rate of one machine; 0: not known, the simulator's own time is taken

    def __post_init__(self) -> None:
        where = f"replica {self.name}"
        if not self.name or not all(c.isalnum() or c in "-_" for c in self.name):
            raise ConfigError(f'replica name "{self.name}": use letters, digits, "-" and "_"')
        choice(f"{where}: kind", self.kind, ("full", "pipelined"))
        choice(f"{where}: wire", self.wire, ("bf16", "fp32", "fp64"))
        choice(f"{where}: backend", self.backend, ("gloo", "nccl"))
        _at_least(f"{where}: count", self.count, 1)
        _at_least(f"{where}: stages", self.stages, 1)
        _at_least(f"{where}: processes", self.processes, 1)
        _at_least(f"{where}: tflops", self.tflops, 0)
        if self.kind == "pipelined" and self.processes > 1:
            raise ConfigError(f"{where} is pipelined: one process for each stage; drop processes")
        if self.kind == "full" and (self.stages != 1 or self.compression != "none"):
            raise ConfigError(
                f'{where} is full: no stages and no compression; set kind = "pipelined" or drop them'
            )
        if self.kind == "pipelined" and self.stages < 2:
            raise ConfigError(f"{where} is pipelined with {self.stages} stage; give stages = 2 or more")
        if self.compression != AUTO:
            self.ratio  # noqa: B018 - raises when compression is malformed

    @property
    def ratio(self) -> Fraction | None:
        """k/d, or None where the boundary is open."""
        if self.compression == "none":
            return None
        if self.compression == AUTO:
            raise ConfigError(
                f'replica {self.name}: compression is still "auto"; planner.auto.resolve puts a k/d there'
            )
        try:
            ratio = Fraction(self.compression)
        except (ValueError, ZeroDivisionError):
            ratio = Fraction(0)
        if not 0 < ratio <= 1:
            raise ConfigError(
                f'replica {self.name}: compression is "{self.compression}"; k/d is a fraction above 0 and at '
                'most 1 such as "1/8", or "none", or "auto"'
            )
        return ratio

    @property
    def compressed(self) -> bool:
        return self.ratio is not None

    def subspace_dim(self, width: int) -> int:
        """K; all of D when the boundary is open."""
        return width if self.ratio is None else max(1, int(width * self.ratio))

    @property
    def wire_bytes(self) -> int:
        return {"bf16": 2, "fp32": 4, "fp64": 8}[self.wire]

    @property
    def outer_link(self) -> LinkConfig:
        return self.bucket_link or self.link


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """Where a real fleet keeps its rounds and when one is closed; the simulator has no use for it."""

    url: str = ""  # default: a folder beside the run
    deadline_seconds: float = 0.0  # a round may be closed without the missing; 0: from the rounds before it
    quorum: int = 0  # contributions that suffice then; 0: more than half of the members
    anchor_every: int = 10  # rounds between whole models in the bucket
    heartbeat_seconds: float = 3.0
    norm_limit: float = 20.0  # times the round's median norm; a payload beyond is refused

    def __post_init__(self) -> None:
        for name in ("deadline_seconds", "quorum"):
            _at_least(f"bucket.{name}", getattr(self, name), 0)
        _at_least("bucket.anchor_every", self.anchor_every, 1)
        _above("bucket.heartbeat_seconds", self.heartbeat_seconds, 0)
        _above("bucket.norm_limit", self.norm_limit, 1)


@dataclass(frozen=True, slots=True)
class Member:
    """One replica of the fleet: its place in the run and what it is."""

    index: int
    name: str
    config: ReplicaConfig


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
        if (
            not self.name
            or not all(c.isalnum() or c in "-_." for c in self.name)
            or self.name.startswith(".")
        ):
            raise ConfigError(f'name is "{self.name}"; use letters, digits, "-", "_" and "."')
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or more and below 2**63")
        if not self.replicas:
            raise ConfigError('no replicas; add a [[replicas]] table with a name and kind = "full"')
        for name, number in Counter(member.name for member in self.fleet()).items():
            if number > 1:
                raise ConfigError(
                    f'two replicas are called "{name}"; give each [[replicas]] table its own name'
                )
        for replica in self.replicas:
            if replica.stages > self.model.layers:
                raise ConfigError(
                    f"replica {replica.name}: {replica.stages} stages for {self.model.layers} layers; "
                    f"stages is at most {self.model.layers}"
                )
            if self.inner.batch % replica.processes:
                raise ConfigError(
                    f"replica {replica.name}: {replica.processes} processes do not divide inner.batch = "
                    f"{self.inner.batch}; change one of them"
                )
            if replica.kind == "pipelined" and self.inner.batch % self.inner.micro_batches:
                raise ConfigError(
                    f"inner.batch is {self.inner.batch}, which {self.inner.micro_batches} micro-batches "
                    "do not divide; change inner.batch or inner.micro_batches"
                )
        every = self.subspace.grassmann_every
        if every % self.outer.inner_steps:
            raise ConfigError(
                f"subspace.grassmann_every is {every}; U turns right after a round, so it must be a "
                f"multiple of outer.inner_steps = {self.outer.inner_steps}"
            )
        self._check_ablations()
        if self.outer.values == "fp64" and self.inner.precision != "fp64":
            raise ConfigError('outer.values is "fp64"; that is for runs with inner.precision = "fp64"')

    def _check_ablations(self) -> None:
        if self.inner.clip_scope == "stage" and self.outer.method == "adamw":
            raise ConfigError(
                'inner.clip_scope "stage" is for replicas with weights of their own; set "replica"'
            )
        # "auto" may become "none": what it is then is checked again.
        compressed = [r for r in self.replicas if r.compression == AUTO or r.compressed]
        if self.subspace.weight_projection and self.subspace.basis == "boundary":
            raise ConfigError(
                'subspace.weight_projection projects onto one U; set subspace.basis to "global"'
            )
        self._check_finish(bool(compressed))
        alike = len({(replica.stages, replica.compression) for replica in self.replicas}) == 1
        for name in ("weight_projection", "modified_adamw"):
            # AdamW's replicas share one set of weights: it cannot be projected for some and not for others.
            if getattr(self.subspace, name) and self.outer.method == "adamw" and not alike:
                raise ConfigError(
                    f'subspace.{name} with outer.method = "adamw" needs replicas that are all alike'
                )
            if getattr(self.subspace, name) and not compressed:
                raise ConfigError(f"subspace.{name} is for compressed replicas, and there is none")

    def _check_finish(self, compressed: bool) -> None:
        if not self.finish.rounds:
            return
        if self.finish.rounds > self.outer.rounds:
            raise ConfigError(
                f"finish.rounds is {self.finish.rounds}; they are the last of outer.rounds, so at most "
                f"{self.outer.rounds}"
            )
        if not compressed:
            raise ConfigError(
                f"finish.rounds is {self.finish.rounds}, but no replica is compressed: nothing is there "
                "to open; set 0, or give a pipelined replica a compression"
            )
        if self.subspace.weight_projection:
            raise ConfigError(
                "finish.rounds opens boundaries, and subspace.weight_projection keeps the weights in S; drop "
                "one of them"
            )

    def opening(self, round_number: int) -> float | None:
        """a of x_hat = T + (P + a (I - P)) (x - T) in this outer round; None where boundaries compress."""
        finishing = round_number - (self.outer.rounds - self.finish.rounds)
        if not 0 < finishing <= self.finish.rounds:
            return None
        return 1.0 if self.finish.how == "full" else finishing / self.finish.rounds

    def in_round(self, round_number: int) -> "Recipe":
        """For bytes and seconds: in a finishing round whole streams cross between stages. The replicas are
        still compressed ones, at k = d: every stage holds the embedding and reads its update."""
        if self.opening(round_number) is None:
            return self
        replicas = tuple(replace(r, compression="1") if r.compressed else r for r in self.replicas)
        return replace(self, replicas=replicas)

    def is_scored(self, round_number: int) -> bool:
        """After every `eval_every` rounds, at the end, and where finishing begins: what it starts from."""
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
        return self.outer.inner_steps * self.num_replicas * self.inner.batch * self.model.context

    def fleet(self) -> tuple[Member, ...]:
        """Every replica by name, in the order in which updates are summed."""
        members: list[Member] = []
        for replica in self.replicas:
            for i in range(replica.count):
                name = replica.name if replica.count == 1 else f"{replica.name}-{i}"
                members.append(Member(len(members), name, replica))
        return tuple(members)
