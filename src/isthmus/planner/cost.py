"""Recipe -> seconds on its fleet, in closed formulas (docs/method.md, The virtual clock)."""

from isthmus.config import Member, Recipe, ReplicaConfig
from isthmus.layout.traffic import micro_batch_bytes, outer_bytes, shard_bytes


def step_flops(recipe: Recipe, replica: ReplicaConfig) -> float:
    """6 N per token: forward and backward of one replica's inner step."""
    return 6.0 * recipe.model.num_parameters * recipe.batch_of(replica) * recipe.model.context


def inner_step_seconds(recipe: Recipe, member: Member, measured_seconds: float) -> float:
    """Return the seconds of a replica's inner step, with full-duplex links that overlap with compute.

    With m micro-batches of t seconds of compute per stage and l on the link each way, the slower of the two
    sets the pace, and the pipeline fills and drains once: m max(t, l) + (S-1)(t + 2 (l + latency)). For l <=
    t this is the ceiling U = m / (m + (S-1)(1 + 2(r + lat/t))) that no flushing schedule beats.

    measured_seconds replaces the compute of the whole replica if the recipe states no rate.
    """
    replica = member.config
    stages, m = replica.stages, recipe.micro_batches_of(replica)
    if replica.tflops:
        compute = step_flops(recipe, replica) / stages / (replica.tflops * 1e12)
    else:
        compute = measured_seconds / stages
    if stages == 1:
        return compute
    forward, _ = micro_batch_bytes(recipe, member)
    t, latency = compute / m, replica.link.latency_ms / 1e3
    link = forward * 8 / (replica.link.mbps * 1e6)
    return m * max(t, link) + (stages - 1) * (t + 2 * (link + latency))


def round_seconds(recipe: Recipe, measured_step_seconds: float) -> float:
    """One outer round: H inner steps of the slowest replica, then its exchange, up and then down.

    measured_step_seconds belong to the average replica; a larger batch takes proportionally longer.
    """
    sizes, average = shard_bytes(recipe), recipe.step_sequences / recipe.num_replicas
    return max(
        recipe.outer.inner_steps
        * inner_step_seconds(
            recipe, member, measured_step_seconds * (recipe.batch_of(member.config) / average)
        )
        + exchange_seconds(recipe, member, sizes)
        for member in recipe.fleet()
    )


def exchange_seconds(recipe: Recipe, member: Member, sizes: tuple[int, ...] | None = None) -> float:
    """Return the seconds for upload, then download of all other updates, each machine over its own link."""
    if recipe.num_replicas == 1:
        return 0.0
    up, down = outer_bytes(recipe, member, sizes)
    link, machines = member.config.outer_link, member.config.stages
    if recipe.outer.method == "adamw":  # a ring sends and receives at the same time, every inner step
        latency = 2 * (recipe.num_replicas - 1) * recipe.outer.inner_steps * link.latency_ms / 1e3
        return up / machines * 8 / (link.mbps * 1e6) + latency
    return link.seconds(up / machines) + link.seconds(down / machines)
