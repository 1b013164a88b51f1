"""Predict the memory in bytes of a simulated fleet, or of a process of a real one."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from math import prod

from isthmus.config import Member, Recipe, ReplicaConfig
from isthmus.layout.stages import EMBEDDING, layers_per_stage, stage_names

MASTER_BYTES = {"fp32": 4, "bf16": 4, "fp64": 8}  # of weights, moments, feedback
# Memory of a process besides tensors, measured on a CPU as the peak of a run with 0.2 M parameters:
# interpreter, torch, libraries, thread pools, and for some the corpus with its tokenizer.
RUNTIME_BYTES = 326 * 10**6  # the simulator
FULL_BYTES = 268 * 10**6  # a full replica of a real fleet
SHARD_BYTES = 347 * 10**6  # it loads FSDP
FIRST_STAGE_BYTES = 298 * 10**6
LATER_STAGE_BYTES = 216 * 10**6  # it reads no corpus
# Work copies of the weights at a round's end, measured. DiLoCo sends every entry, and a real process also
# checks, stores and reads them; the allocator keeps much of that.
CODEC_COPIES = {"sparseloco": 3.0, "diloco": 7.0, "adamw": 0.0}
KERNEL_COPIES = 0.5  # on a GPU, measured
BUCKET_COPIES = {"sparseloco": 0.0, "diloco": 4.0, "adamw": 0.0}
PAYLOAD_COPIES = 2.5  # of the entries that every replica sends: as bytes, as values, as positions
STREAM_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
SPARE = 0.10  # share of a machine's memory to leave free: the prediction is off by about as much


@dataclass(frozen=True, slots=True)
class SimulatorPlan:
    """How the simulator holds the fleet: `group` replicas advance together, each batch in `grad_accum_steps`
    parts."""

    group: int
    grad_accum_steps: int
    parked: bool  # waiting groups are in host memory
    predicted_bytes: int

    def describe(self, num_replicas: int) -> str:
        how = "stacked, all together" if self.group == num_replicas else f"in turns, {self.group} at a time"
        parked = ", those that wait parked on the host" if self.parked else ""
        parts = f", each batch in {self.grad_accum_steps} parts" if self.grad_accum_steps > 1 else ""
        return f"{how}{parked}{parts}; about {self.predicted_bytes / 2**30:.2f} GiB"


def num_moments(recipe: Recipe, names: Iterable[str]) -> int:
    """Count the numbers that InnerOpt keeps for these weights: one per weight for Muon, else two."""
    muon, shapes = recipe.inner.optimizer == "muon", recipe.model.shapes()
    one = {name for name in shapes if muon and name.startswith("layers.") and len(shapes[name]) == 2}
    return sum(prod(shapes[name]) * (1 if name in one else 2) for name in names)


def state_bytes(recipe: Recipe, precision: str) -> int:
    """Return the bytes of a replica at rest: weights, moments, feedback."""
    copies = 2 if recipe.outer.method == "sparseloco" else 1
    shapes = recipe.model.shapes()
    numbers = copies * recipe.model.num_stored + num_moments(recipe, shapes)
    return numbers * MASTER_BYTES[precision]


def exchange_copies(recipe: Recipe, kernels: bool = False) -> float:
    """Return the extra copies of the weights at a round's end: all payloads are unpacked before they are
    averaged. GPU kernels avoid most of the codec's for sparse payloads."""
    outer = recipe.outer
    if outer.method == "adamw":
        return 0.0
    density = outer.keep / outer.chunk_side**2 if outer.method == "sparseloco" else 1.0
    codec = KERNEL_COPIES if kernels and outer.method == "sparseloco" else CODEC_COPIES[outer.method]
    return codec + PAYLOAD_COPIES * recipe.num_replicas * density


def activation_bytes(recipe: Recipe, precision: str, num_sequences: int, compiled: bool) -> int:
    """Return the bytes that one forward keeps for its backward.

    A layer keeps about 9 tensors of the stream's width and 5 of the FFN's, and the fp32 copies of both norms.
    Of the 9, 4 are the stream's own (input, two normed inputs, the second input), 2 have the width of all
    queries and 3 that of all keys. The head keeps logits, their fp32 copy and log-probabilities, plus their
    gradient. Compiled code recomputes what is cheap: 8 and 2 remain, and of the head little more than logits
    and their gradient. Recomputed layers keep their input, and one at a time its interior.
    """
    model, num_tokens = recipe.model, num_sequences * recipe.model.context
    per_layer, logits = _token_bytes(recipe, precision, compiled)
    if recipe.inner.recompute:
        stream = STREAM_BYTES[precision] * model.width
        return num_tokens * (model.layers * stream + max(per_layer, logits))
    return num_tokens * (model.layers * per_layer + logits)


def _token_bytes(recipe: Recipe, precision: str, compiled: bool) -> tuple[int, int]:
    """Return the bytes that one token leaves in one layer, and in the head."""
    model, size = recipe.model, STREAM_BYTES[precision]
    keys = model.num_kv_heads if precision == "bf16" else model.heads  # see `llama.mix`
    heads = (2 * model.heads + 3 * keys) * model.head_size * size
    if compiled:  # measured on an H200 with `10m`; the head's share was fitted
        return heads + 3 * size * model.width + 2 * size * model.ffn, int(2.75 * size * model.vocab)
    heads += 4 * size * model.width + 5 * size * model.ffn
    if precision == "bf16":  # measured there with `178m`, one replica
        return heads + 16 * model.width, 8 * model.vocab
    return heads + 6 * max(size, 4) * model.width, 3 * size * model.vocab


def simulator_bytes(
    recipe: Recipe, precision: str, group: int, grad_accum_steps: int, parked: bool, compiled: bool
) -> int:
    """Return the simulator's peak on its device."""
    n, size = recipe.model.num_stored, MASTER_BYTES[precision]
    replicas = recipe.num_replicas
    resident = group if parked else replicas
    shared = 1 if recipe.outer.method == "adamw" else resident
    # Besides the replicas: the anchor, DiLoCo's momentum.
    beside = 1 + (recipe.outer.method == "diloco")
    weights = shared * state_bytes(recipe, precision) + int(beside * n * size)
    if precision == "bf16":  # the half-width weights; see Stack for when gradients are half-width too
        half_gradients = compiled and grad_accum_steps == 1 and recipe.outer.method != "adamw"
        weights += 0 if half_gradients else min(shared, group) * n * 2
    sequences = max(
        len(members)
        * recipe.batch_of(members[0].config)
        // parts_of(recipe, members[0].config, grad_accum_steps)
        for members in stacked_members(recipe, group)
    )
    inner = min(shared, group) * n * size + activation_bytes(recipe, precision, sequences, compiled)
    # The work copies of the exchange; GPU kernels avoid them for sparse payloads. Gradients and activations
    # are gone by then; on a GPU the small rest was measured on top.
    exchange = KERNEL_COPIES if compiled and recipe.outer.method == "sparseloco" else exchange_copies(recipe)
    copies = int(exchange * n * size)
    return RUNTIME_BYTES + weights + (inner + copies if compiled else max(inner, copies))


def stacked_members(recipe: Recipe, group: int) -> list[tuple[Member, ...]]:
    """Group neighbours in the fleet with equal batches, up to `group` each, which can be stacked."""
    stacks: list[tuple[Member, ...]] = []
    for _, alike in groupby(recipe.fleet(), lambda member: recipe.batch_of(member.config)):
        members = tuple(alike)
        stacks += [members[at : at + group] for at in range(0, len(members), group)]
    return stacks


def largest_batch(recipe: Recipe) -> int:
    return max(recipe.batch_of(replica) for replica in recipe.replicas)


def parts_of(recipe: Recipe, replica: ReplicaConfig, grad_accum_steps: int) -> int:
    """Return the parts of a replica's batch, none larger than those of the fleet's largest batch."""
    batch, rows = recipe.batch_of(replica), largest_batch(recipe) // grad_accum_steps
    return next(parts for parts in range(1, batch + 1) if batch % parts == 0 and batch // parts <= rows)


def plan_simulator(
    recipe: Recipe,
    precision: str,
    available_bytes: int,
    *,
    compiled: bool,
    can_park: bool,
    mode: str = "auto",
) -> SimulatorPlan:
    """Plan the largest group that fits, then the fewest parts of a batch; park only if nothing else fits."""
    replicas, batch = recipe.num_replicas, largest_batch(recipe)
    most = max(map(len, stacked_members(recipe, replicas)))
    groups = [g for g in range(most, 0, -1) if most % g == 0]
    if mode == "stacked" or recipe.outer.method == "adamw":
        groups = [most]
    elif mode == "turns":
        groups = [1]
    splits = [p for p in range(1, batch + 1) if batch % p == 0]
    tried: list[SimulatorPlan] = []
    for parked, group, steps in product((False, True) if can_park else (False,), groups, splits):
        needed = simulator_bytes(recipe, precision, group, steps, parked, compiled)
        tried.append(SimulatorPlan(group, steps, parked and group < replicas, needed))
        if needed <= available_bytes:
            return tried[-1]
    return min(tried, key=lambda plan: plan.predicted_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """The bytes of one real process: a full replica, a stage of a pipelined one, or a shard."""

    stage: int  # or the shard's number
    weights: int
    moments: int  # InnerOpt's
    gradients: int
    feedback: int  # e of eq. 2; none under DiLoCo
    anchor: int  # theta^(t-1); a compressed stage also holds the embedding's
    outer: int  # the momentum of DiLoCo
    embedding_copy: int  # the table in every compressed stage's boundary
    low_precision: int  # the half-width weights that the forward reads in bf16
    gathered: int  # of a shard: the parts of the model that are whole while they run
    activations: int  # of all micro-batches in flight
    slack: int  # kept by the allocator between micro-batches: measured on a CPU as half of one's activations
    exchange: int  # work copies of the codec at the end of a round, after activations are freed
    runtime: int
    host_copy: int  # of the private state, written to disk during the next round
    on_gpu: bool  # then the host's copy is elsewhere
    keeps_freed: bool

    @property
    def total(self) -> int:
        """The peak. Activations and the codec's work copies never coexist, but a CPU's allocator keeps what
        the inner steps freed. A shard maps large blocks, which it gives back (replica/sharded.py)."""
        resting = self.weights + self.moments + self.gradients + self.feedback + self.anchor + self.outer
        inner = self.activations + self.slack + self.low_precision + self.gathered
        copied = 0 if self.on_gpu else self.host_copy
        both = inner + self.exchange if self.keeps_freed else max(inner, self.exchange)
        return self.runtime + resting + copied + self.embedding_copy + both

    def to_dict(self) -> dict[str, int]:
        return asdict(self) | {"total": self.total}


def process_memory(
    recipe: Recipe, replica: ReplicaConfig, stage: int, depth: int, on_gpu: bool | None = None
) -> ProcessMemory:
    """Return the most that this stage's or shard's process holds, with `depth` micro-batches in flight.

    A full replica runs its whole batch at once: depth 1. `inner.precision = "auto"` counts as on CUDA: a bf16
    stream over fp32 weights. Without `on_gpu`, bf16 counts as on a GPU and all else as on a CPU.
    """
    precision = "bf16" if recipe.inner.precision == "auto" else recipe.inner.precision
    model, size, method = recipe.model, MASTER_BYTES[precision], recipe.outer.method
    shapes = model.shapes()
    # Its part of the outer step; in the inner step every shard has its rows of everything.
    names = stage_names(model, replica.parts)[stage]
    answers = sum(prod(shapes[name]) for name in names)
    own = -(-model.num_parameters // replica.parts) if replica.sharded else answers
    table = prod(shapes[EMBEDDING]) if replica.compressed else 0
    anchored = answers + (table if stage else 0)
    feedback = answers * size if method == "sparseloco" else 0
    anchor = 0 if method == "adamw" else anchored * size
    outer = anchored * size if method == "diloco" else 0
    on_gpu = precision == "bf16" if on_gpu is None else on_gpu
    activations, slack = _kept(recipe, replica, stage, depth, precision, on_gpu)
    copies = exchange_copies(recipe, on_gpu) + BUCKET_COPIES[method]
    whole = answers if replica.sharded else 0  # its part of the weights, gathered for the codec
    return ProcessMemory(
        stage=stage,
        weights=own * size,
        moments=(
            -(-num_moments(recipe, shapes) // replica.parts)
            if replica.sharded
            else num_moments(recipe, names)
        )
        * size,
        gradients=own * size,
        feedback=feedback,
        anchor=anchor,
        outer=outer,
        embedding_copy=table * size,
        low_precision=own * 2 if precision == "bf16" and not replica.sharded else 0,
        gathered=_gathered(recipe, precision) if replica.sharded else 0,
        activations=activations,
        slack=slack,
        exchange=int((copies * anchored + whole) * size),
        runtime=_runtime(replica, stage),
        host_copy=3 * own * size + feedback + anchor + outer,  # of a checkpoint inside a round
        on_gpu=on_gpu,
        keeps_freed=not on_gpu and not replica.sharded,
    )


def _runtime(replica: ReplicaConfig, stage: int) -> int:
    if replica.kind == "full":
        return SHARD_BYTES if replica.sharded else FULL_BYTES
    return LATER_STAGE_BYTES if stage else FIRST_STAGE_BYTES


def _kept(
    recipe: Recipe, replica: ReplicaConfig, stage: int, depth: int, precision: str, on_gpu: bool
) -> tuple[int, int]:
    """Return a process's activations for its backwards, and the allocator's slack.

    On a GPU replicas and stages are compiled, unless the backward is split. Recomputed layers keep only their
    input, and one at a time its interior; by then the head has freed its logits.
    """
    model, inner, full = recipe.model, recipe.inner, replica.kind == "full"
    rows = max(1, recipe.batch_of(replica) // (replica.processes * recipe.micro_batches_of(replica)))
    num_tokens = rows * model.context
    num_layers = model.layers if full else layers_per_stage(model, replica.stages)[stage]
    compiled = on_gpu and (full or inner.backward != "split")
    per_layer, logits = _token_bytes(recipe, precision, compiled)
    # Only one micro-batch has logits at a time: the last stage starts its backward at once (depth 1).
    head = num_tokens * logits if full or stage == replica.stages - 1 else 0
    if recipe.recomputes(replica):
        micro_batch = num_tokens * num_layers * STREAM_BYTES[precision] * model.width
        kept, here = depth * micro_batch, max(head, num_tokens * per_layer)
    else:
        micro_batch = num_tokens * num_layers * per_layer
        kept, here = depth * micro_batch, head
    return kept + here, 0 if full else (micro_batch + here) // 2


def _gathered(recipe: Recipe, precision: str) -> int:
    """Return what FSDP holds whole at a time: the head with its gradient, and two layers, one being fetched.

    Whole weights and gradients have the stream's type; averaged gradients have the weights' own.
    """
    model, size, kept = recipe.model, STREAM_BYTES[precision], MASTER_BYTES[precision]
    table, layer = model.vocab * model.width, sum(map(prod, model.layer_shapes().values()))
    head = table * (2 * size + kept) + 2 * layer * size
    return max(head, 3 * table * kept + layer * size)


def replica_memory(
    recipe: Recipe, replica: ReplicaConfig, in_flight: Sequence[int] = (1,), on_gpu: bool | None = None
) -> tuple[ProcessMemory, ...]:
    """Return the processes of a replica that own a part of the model; `in_flight` by stage."""
    return tuple(
        process_memory(recipe, replica, s, in_flight[s] if replica.stages > 1 else 1, on_gpu)
        for s in range(replica.parts)
    )


def recomputing(recipe: Recipe, replica: ReplicaConfig, yes: bool) -> tuple[Recipe, ReplicaConfig]:
    """Return both with recomputation switched on or off."""
    inner = replace(recipe.inner, recompute=False)
    return replace(recipe, inner=inner), replace(replica, recompute="yes" if yes else "no")
