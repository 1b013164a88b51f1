"""Recipe -> seconds on that fleet, in closed formulas (docs/method.md, The virtual clock)."""

from dataclasses import dataclass

from isthmus.config import Member, Recipe
from isthmus.layout.traffic import micro_batch_bytes, outer_bytes


def step_flops(recipe: Recipe) -> float:
    """6 N per token: forward and backward of one replica's inner step."""
    return 6.0 * recipe.model.num_parameters * recipe.inner.batch * recipe.model.context


def inner_step_seconds(recipe: Recipe, member: Member, measured_seconds: float) -> float:
    """One inner step of a replica with its links full duplex and overlapped with compute.

    With m micro-batches of t seconds of compute per stage and l on the link each way, the slower of the two
    sets the pace and the pipeline fills and drains once: m max(t, l) + (S-1)(t + 2 (l + latency)). For l <=
    t this is the ceiling U = m / (m + (S-1)(1 + 2(r + lat/t))) that no flushing schedule beats.

    measured_seconds stands in for the compute of the whole replica where the recipe gives no rate.
    """
    replica = member.config
    stages, m = replica.stages, recipe.inner.micro_batches
    if replica.tflops:
        compute = step_flops(recipe) / stages / (replica.tflops * 1e12)
    else:
        compute = measured_seconds / stages
    if stages == 1:
        return compute
    forward, _ = micro_batch_bytes(recipe, member)
    t, latency = compute / m, replica.link.latency_ms / 1e3
    link = forward * 8 / (replica.link.mbps * 1e6)
    return m * max(t, link) + (stages - 1) * (t + 2 * (link + latency))


def round_seconds(recipe: Recipe, measured_step_seconds: float) -> float:
    """One outer round: H inner steps of the slowest replica, then its exchange, up and then down."""
    return max(
        recipe.outer.inner_steps * inner_step_seconds(recipe, member, measured_step_seconds)
        + exchange_seconds(recipe, member)
        for member in recipe.fleet()
    )


def exchange_seconds(recipe: Recipe, member: Member) -> float:
    """Upload, then download of all the others' updates, every machine of the replica over its own link."""
    if recipe.num_replicas == 1:
        return 0.0
    up, down = outer_bytes(recipe, member)
    link, machines = member.config.outer_link, member.config.stages
    if recipe.outer.method == "adamw":  # a ring sends and receives at once, every inner step
        latency = 2 * (recipe.num_replicas - 1) * recipe.outer.inner_steps * link.latency_ms / 1e3
        return up / machines * 8 / (link.mbps * 1e6) + latency
    return link.seconds(up / machines) + link.seconds(down / machines)


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """One stage of a pipelined replica, in seconds: the data of figures 2 and 3 of arXiv 2601.02360."""

    compute_seconds: float  # t_c, of an inner step
    link_seconds: float  # t_l, of an inner step, each way
    outer_seconds: float  # t_o, of an outer round
    step_seconds: float  # max(t_c, t_l), or t_c + 2 t_l where nothing overlaps
    inner_steps: int

    @property
    def round_seconds(self) -> float:
        return self.inner_steps * self.step_seconds + self.outer_seconds

    @property
    def utilisation(self) -> float:
        """U = H t_c / (H max(t_c, t_l) + t_o)."""
        return self.inner_steps * self.compute_seconds / self.round_seconds


def closed_form(
    num_parameters: float = 70e9,
    num_stages: int = 4,
    width: int = 8192,
    k_over_d: float = 1 / 8,
    inner_steps: int = 50,
    mbps: float = 100.0,
    flops_per_stage: float = 4e14,
    batch: int = 32,
    context: int = 2048,
    *,
    density: float = 32 / 4096,
    bits_per_value: float = 14.0,
    wire_bits: int = 16,
    id_bits: int | None = None,
    downloads: int = 0,
    overlap: bool = True,
    outer_mbps: float | None = None,
) -> ClosedForm:
    """The formula that reproduces the paper's stated utilisation (docs/plan.md, The paper's utilisation).

        tokens = b L
        t_c = 6 (N/S) tokens / F        F: FLOP/s of one stage (4e14: one H100 at 40 %)
        t_l = tokens (k wire_bits + id_bits) / B
        t_o = (N/S) density bits_per_value (1 + downloads) / B_outer

    Links are full duplex, transfers overlap compute perfectly and the pipeline never fills or drains. A
    token's id is 16 bits on a compressed boundary and is not sent on an open one, unless `id_bits` says
    otherwise. The paper counts uploads only (`downloads` = 0); all-read-all has M - 1 downloads.
    """
    tokens = batch * context
    k = width if k_over_d >= 1 else max(1, int(width * k_over_d + 1e-9))
    ids = (0 if k == width else 16) if id_bits is None else id_bits
    compute = 6 * num_parameters / num_stages * tokens / flops_per_stage
    link = tokens * (k * wire_bits + ids) / (mbps * 1e6)
    payload_bits = num_parameters / num_stages * density * bits_per_value
    outer = payload_bits * (1 + downloads) / ((outer_mbps or mbps) * 1e6)
    step = max(compute, link) if overlap else compute + 2 * link
    return ClosedForm(compute, link, outer, step, inner_steps)
