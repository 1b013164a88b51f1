"""Replicas, their links and their bucket, as a recipe states them. Standard library only."""

import re
from dataclasses import dataclass, field
from fractions import Fraction

from isthmus.config.checks import above, choice, name_of, short, within
from isthmus.errors import ConfigError

MOST_REPLICAS = 4096  # of a run
LEAST_KEPT = 10  # rounds, if not all are kept
MOST_STAGES = 256  # of a replica, or processes
MOST_BATCH = 1 << 20
MOST_MICRO_BATCHES = 4096
RATIO = re.compile(r"\s*[0-9.]{1,30}(/[0-9]{1,30}|e-?[0-9]{1,2})?\s*")
WIRES = ("bf16", "int8", "int6", "int5", "int4", "fp32", "fp64")  # layout.wire knows their bytes
AUTO = "auto"  # isthmus picks it before a run: compression and wire by the link, the rest by memory


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
    processes: int = 1  # of a full replica: GPUs of one machine that share every batch
    sharding: str = AUTO  # "full": its processes split the model; "none": each has all of it
    recompute: str = AUTO  # "yes" or "no": overrides inner.recompute for these replicas
    batch: int = 0  # sequences per inner step; its updates are weighed by this; 0: inner.batch
    # Parts of its batch, which run one after another to save memory. 0: inner.micro_batches if pipelined; if
    # full, the whole batch at once, or as many parts as the stated memory requires.
    micro_batches: int = 0
    compression: str = "none"  # k/d between stages, as "1/8"; "auto": planner.auto picks it before a run
    # Encoding on a link, both ways: one of WIRES, or "auto", the default in a file with compression = "auto".
    wire: str = "bf16"
    backend: str = "gloo"  # between stages; "nccl" if all are GPUs on one fast network
    link: LinkConfig = field(default_factory=LinkConfig)  # between stages
    bucket_link: LinkConfig | None = None  # from every machine to the other replicas; default: `link`
    tflops: float = 0.0  # training rate of one machine; 0: unknown, the simulator uses its own time
    memory_gb: float = 0.0  # for one process, in 1e9 bytes: of its GPU, if it has one; 0: unknown

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
        """Return the key that the link still has to decide, or ""."""
        return "compression" if self.compression == AUTO else "wire" if self.wire == AUTO else ""

    @property
    def ratio(self) -> Fraction | None:
        """Return k/d, or None if the boundary is open."""
        if self.auto:
            raise ConfigError(
                f'replica {self.name}: {self.auto} is still "auto"; planner.auto.resolve picks it'
            )
        return None if self.compression == "none" else self._stated_ratio()

    def _stated_ratio(self) -> Fraction:
        try:
            # Refuse exponents: computing 1e999999999 would take hours.
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
        """Return whether a full replica is split between its processes; an unresolved "auto" counts as no."""
        return self.sharding == "full"

    @property
    def parts(self) -> int:
        """Count the processes that each own a part of the model in the outer step: stages, or shards."""
        return self.processes if self.sharded else self.stages

    @property
    def compressed(self) -> bool:
        return self.ratio is not None

    def subspace_dim(self, width: int) -> int:
        """Return K; all of D if the boundary is open."""
        return width if self.ratio is None else max(1, int(width * self.ratio))

    @property
    def outer_link(self) -> LinkConfig:
        return self.bucket_link or self.link


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """The store of a real fleet's rounds, and when a round closes; the simulator ignores it."""

    url: str = ""  # default: a folder next to the run
    deadline_seconds: float = 0.0  # when a round may close without the missing; 0: from the rounds before it
    start_seconds: float = 0.0  # round 1 waits so long for every replica, from its first update on
    quorum: int = 0  # contributions that suffice then; 0: more than half of the members
    missed_rounds: int = 3  # rounds that a replica may miss in a row before the others stop waiting for it
    anchor_every: int = 10  # rounds between whole models in the bucket
    keep_rounds: int = 0  # older rounds' payloads and anchors are deleted during the run; 0: all stay
    heartbeat_seconds: float = 3.0
    norm_limit: float = 3.0  # times the round's median norm; larger updates are refused

    def __post_init__(self) -> None:
        within("bucket.deadline_seconds", self.deadline_seconds, 0, 1e7)
        within("bucket.start_seconds", self.start_seconds, 0, 1e7)
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


@dataclass(frozen=True, slots=True)
class Member:
    """One replica of the fleet: its number in the run and its configuration."""

    index: int
    name: str
    config: ReplicaConfig
