"""The paper's utilisation in closed form (docs/plan.md, The paper's utilisation)."""

from dataclasses import dataclass


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
    """The formula that reproduces the paper's stated utilisation.

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
