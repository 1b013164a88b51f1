"""Replicas, their links and their bucket, as a recipe states them. Standard library only."""

import re
from dataclasses import dataclass, field
from fractions import Fraction

from isthmus.config.checks import above, choice, name_of, short, within
from isthmus.errors import ConfigError

MOST_REPLICAS = 4096  # of a run
LEAST_KEPT = 10  # rounds, where not all are
MOST_STAGES = 256  # or processes, of a replica
MOST_BATCH = 1 << 20
MOST_MICRO_BATCHES = 4096
RATIO = re.compile(r"\s*[0-9.]{1,30}(/[0-9]{1,30}|e-?[0-9]{1,2})?\s*")
WIRES = ("bf16", "int8", "int6", "int5", "int4", "fp32", "fp64")  # layout.wire knows their bytes
AUTO = "auto"  # to be picked before a run: compression and wire by the link, the rest by the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """What a link can carry, each way."""

    mbps: float = 1000.0
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        above("link.mbps", self.mbps, 0, 1e9)
        within("link.latency_ms", self.latency_ms, 0, 1e7)

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
    sharding: str = AUTO  # "full": its processes cut the model between them; "none": each has it whole
    recompute: str = AUTO  # "yes": as inner.recompute, for these replicas only; or "no"
    batch: int = 0  # sequences of its inner step, by which its updates are weighed; 0: inner.batch
    # That its batch is cut into, one after another in memory; 0: inner.micro_batches where pipelined; where
    # full, the whole batch at once, or as many as the stated memory asks for.
    micro_batches: int = 0
    compression: str = "none"  # k/d between stages, as "1/8"; "auto": planner.auto picks it before a run
    # What crosses a link, both ways: one of WIRES, or "auto", which it is in a file that has compression =
    # "auto" and no wire.
    wire: str = "bf16"
    backend: str = "gloo"  # between stages; "nccl" where all are GPUs on one fast network
    link: LinkConfig = field(default_factory=LinkConfig)  # between stages
    bucket_link: LinkConfig | None = None  # to the other replicas, by every machine; as `link` when not given
    tflops: float = 0.0  # training rate of one machine; 0: not known, the simulator's own time is taken
    memory_gb: float = 0.0  # that one process may use, in 1e9 bytes: of its GPU, where it has one; 0: unknown

    def __post_init__(self) -> None:
        where = f"replica {self.name}"
        name_of("replica name", self.name, "-_")
        choice(f"{where}: kind", self.kind, ("full", "pipelined"))
        choice(f"{where}: wire", self.wire, (*WIRES, AUTO))
        choice(f"{where}: backend", self.backend, ("gloo", "nccl"))
        choice(f"{where}: sharding", self.sharding, (AUTO, "none", "full"))
        choice(f"{where}: recompute", self.recompute, (AUTO, "no", "yes"))
        within(f"{where}: count", self.count, 1, MOST_REPLICAS)
        within(f"{where}: stages", self.stages, 1, MOST_STAGES)
        within(f"{where}: processes", self.processes, 1, MOST_STAGES)
        within(f"{where}: batch", self.batch, 0, MOST_BATCH)
        within(f"{where}: micro_batches", self.micro_batches, 0, MOST_MICRO_BATCHES)
        within(f"{where}: tflops", self.tflops, 0, 1e9)
        within(f"{where}: memory_gb", self.memory_gb, 0, 1e9)
        if self.kind == "pipelined" and self.processes > 1:
            raise ConfigError(f"{where} is pipelined: one process for each stage; drop processes")
        if self.sharding == "full" and self.processes == 1:
            raise ConfigError(
                f'{where}: sharding = "full" cuts the model between the processes of a full replica; give it '
                "processes = 2 or more, or drop sharding"
            )
        if self.kind == "full" and (self.stages != 1 or self.compression != "none"):
            raise ConfigError(
                f'{where} is full: no stages and no compression; set kind = "pipelined" or drop them'
            )
        if self.kind == "full" and self.wire == AUTO:
            raise ConfigError(
                f'{where} is full: there is no link between stages; set kind = "pipelined" or drop wire'
            )
        if self.kind == "pipelined" and self.stages < 2:
            raise ConfigError(f"{where} is pipelined with {self.stages} stage; give stages = 2 or more")
        if self.compression not in ("none", AUTO):
            self._stated_ratio()

    @property
    def auto(self) -> str:
        """The key that is still to be picked by the link, or ""."""
        return "compression" if self.compression == AUTO else "wire" if self.wire == AUTO else ""

    @property
    def ratio(self) -> Fraction | None:
        """k/d, or None where the boundary is open."""
        if self.auto:
            raise ConfigError(
                f'replica {self.name}: {self.auto} is still "auto"; planner.auto.resolve picks it'
            )
        return None if self.compression == "none" else self._stated_ratio()

    def _stated_ratio(self) -> Fraction:
        try:
            # An exponent is a number of digits: 1e999999999 would be computed for hours.
            ratio = Fraction(self.compression if RATIO.fullmatch(self.compression) else 0)
        except (ValueError, ZeroDivisionError):
            ratio = Fraction(0)
        if not 0 < ratio <= 1:
            raise ConfigError(
                f'replica {self.name}: compression is "{short(self.compression)}"; k/d is a fraction above 0 '
                'and at most 1 such as "1/8", or "none", or "auto"'
            )
        return ratio

    @property
    def sharded(self) -> bool:
        """Is a full replica cut between its processes? "auto" is not, until planner.auto.resolve says so."""
        return self.sharding == "full"

    @property
    def parts(self) -> int:
        """Processes that each answer for a part of the model in the outer step: stages, or shards."""
        return self.processes if self.sharded else self.stages

    @property
    def compressed(self) -> bool:
        return self.ratio is not None

    def subspace_dim(self, width: int) -> int:
        """K; all of D when the boundary is open."""
        return width if self.ratio is None else max(1, int(width * self.ratio))

    @property
    def outer_link(self) -> LinkConfig:
        return self.bucket_link or self.link


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """Where a real fleet keeps its rounds and when one is closed; the simulator has no use for it."""

    url: str = ""  # default: a folder beside the run
    deadline_seconds: float = 0.0  # a round may be closed without the missing; 0: from the rounds before it
    quorum: int = 0  # contributions that suffice then; 0: more than half of the members
    missed_rounds: int = 3  # that a replica lives through without delivering until nobody waits for it
    anchor_every: int = 10  # rounds between whole models in the bucket
    keep_rounds: int = 0  # payloads and anchors of older rounds are deleted as the run goes; 0: all stay
    heartbeat_seconds: float = 3.0
    norm_limit: float = 3.0  # times the round's median norm; an update beyond is refused
    sign_agreement: float = 0.4  # an update is refused whose signs agree less than this with most others

    def __post_init__(self) -> None:
        within("bucket.deadline_seconds", self.deadline_seconds, 0, 1e7)
        within("bucket.quorum", self.quorum, 0, MOST_REPLICAS)
        within("bucket.missed_rounds", self.missed_rounds, 1, 1e6)
        within("bucket.anchor_every", self.anchor_every, 1, 1e9)
        within("bucket.keep_rounds", self.keep_rounds, 0, 1e9)
        if 0 < self.keep_rounds < LEAST_KEPT:
            raise ConfigError(
                f"bucket.keep_rounds is {self.keep_rounds}; 0 keeps all, and otherwise at least {LEAST_KEPT} "
                "rounds stay, since closers look back that far"
            )
        above("bucket.heartbeat_seconds", self.heartbeat_seconds, 0, 86_400)
        above("bucket.norm_limit", self.norm_limit, 1, 1e9)
        within("bucket.sign_agreement", self.sign_agreement, 0, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreConfig:
    """How closers judge updates by what they do to held-out text (docs/protocol.md, Scores)."""

    batches: int = 2  # of inner.batch held-out sequences, for each update that is scored; 0: none is
    bound: float = 0.03  # nats; an update that makes the held-out loss worse by more is refused
    probation: int = 1  # rounds in which a newcomer's updates must pass before they count; 0: none
    sample: int = 2  # updates of others that are scored in each round

    def __post_init__(self) -> None:
        within("score.batches", self.batches, 0, 1e6)
        above("score.bound", self.bound, 0, 1e6)
        within("score.probation", self.probation, 0, 1e6)
        within("score.sample", self.sample, 0, MOST_REPLICAS)


@dataclass(frozen=True, slots=True)
class Member:
    """One replica of the fleet: its number in the run and what it is."""

    index: int
    name: str
    config: ReplicaConfig
