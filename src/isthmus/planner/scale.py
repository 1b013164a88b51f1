"""Beyond one machine, on paper: what grows with M, and when an aggregated update object would pay.

Every replica reads every other's payload, so a round's egress grows like M (M - 1). An
aggregator could read them once and write one object for all; its size depends on how far replicas agree on
which entries they keep.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import erf, exp, pi, sqrt
from statistics import NormalDist

from isthmus.config import Recipe
from isthmus.layout.chunks import chunk_bytes
from isthmus.layout.traffic import codec_settings
from isthmus.planner.plan import VERIFY_BYTES_PER_SECOND, check_names, machine_dollars, predict

FLEETS = (8, 64, 1000)
CORRELATIONS = (0.0, 0.3, 0.6, 0.9)
WRITTEN = ("2bit", "bf16", "fp32")  # how the values of an aggregated object may be written
CORRELATION = 0.3  # between two replicas' feedback, where nothing else is said
EGRESS_PER_GB, PUT_PER_MILLION, GET_PER_MILLION = 0.09, 5.0, 0.40  # stated, as common list prices in USD


def expected_union(num_replicas: int, entries: int = 4096, keep: int = 32, correlation: float = 0.0) -> float:
    """Expected number of distinct entries of a chunk that at least one of M replicas keeps.

    Independent: entries (1 - (1 - keep/entries)^M). With correlation rho an entry of replica m is
    sqrt(rho) c + sqrt(1 - rho) z_m, all normal; it is kept where it exceeds the threshold that keeps
    keep/entries of them, and given c the replicas are independent: the union is an integral over c. At M = 8
    it gives the densities that were measured, 6.1 / 5.6 / 4.4 / 2.3 % for rho = 0 / .3 / .6 / .9.
    """
    share = keep / entries
    if keep >= entries:
        return float(entries)
    if correlation <= 0:
        return entries * (1 - (1 - share) ** num_replicas)
    if correlation >= 1:
        return float(keep)
    threshold = NormalDist().inv_cdf(1 - share / 2)
    common, own = sqrt(correlation), sqrt(1 - correlation)
    total, step, width = 0.0, 0.01, 8.0
    for i in range(int(width / step)):  # the integrand is even: midpoints of the positive half
        c = (i + 0.5) * step
        below = _normal((threshold - common * c) / own) - _normal((-threshold - common * c) / own)
        total += 2 * step * exp(-c * c / 2) / sqrt(2 * pi) * (1 - below**num_replicas)
    return entries * total


def _normal(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


def aggregate_ratio(
    num_replicas: int,
    values: str,
    aggregate_values: str,
    *,
    entries: int = 4096,
    keep: int = 32,
    correlation: float = 0.0,
) -> float:
    """Size of the aggregated object over that of one payload, chunk for chunk, as the codec would pack it."""
    union = min(entries, max(keep, round(expected_union(num_replicas, entries, keep, correlation))))
    return chunk_bytes(entries, union, aggregate_values) / chunk_bytes(entries, keep, values)


def pays_from(
    values: str, aggregate_values: str, *, entries: int = 4096, keep: int = 32, correlation: float = 0.0
) -> int | None:
    """The least M at which reading one object A beats reading M - 1 payloads p, over all replicas.

    All-read-all reads M (M-1) p; with an aggregator (M-1) p + (M-1) A, which is less when M - 1 > A / p.
    """

    def pays(m: int) -> bool:
        ratio = aggregate_ratio(
            m, values, aggregate_values, entries=entries, keep=keep, correlation=correlation
        )
        return m - 1 > ratio

    low, high = 1, 2  # the union grows ever slower with M, so they cross once
    while not pays(high):
        low, high = high, 2 * high
        if high > 2**20:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One fleet of M replicas, one outer round."""

    num_replicas: int
    payload_bytes: int
    up_bytes: int  # all replicas
    down_bytes: int  # all replicas: M (M - 1) payloads, more where stages share the embedding
    down_bytes_each: int  # of the slowest kind's replica
    down_seconds: float  # of the slowest kind
    puts: int
    gets: int
    control_each: float  # requests for each replica, besides those that read updates
    egress_dollars: float
    request_dollars: float
    machine_dollars: float | None  # of those that have a price; None where none was given
    verify_bytes: int
    verify_seconds: float  # by one closer, on one core
    close_seconds: float  # from the last upload to the manifest
    manifest_bytes: int
    round_seconds: float
    utilisation: float
    aggregate_bytes: dict[str, int]  # of the one object instead, by how its values are written
    aggregate_down_bytes: dict[str, int]  # a round's reading with it


def with_replicas(recipe: Recipe, num_replicas: int) -> Recipe:
    """The same mixture in a fleet of this size, by largest remainders; kinds may vanish from a small one."""
    total = recipe.num_replicas
    exact = [replica.count * num_replicas / total for replica in recipe.replicas]
    counts = [int(share) for share in exact]
    for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: num_replicas - sum(counts)]:
        counts[i] += 1
    kinds = [replace(r, count=n) for r, n in zip(recipe.replicas, counts, strict=True) if n]
    return replace(recipe, replicas=tuple(kinds))


def scale(
    recipe: Recipe,
    num_replicas: int,
    tflops: float = 0.0,
    *,
    correlation: float = CORRELATION,
    verify_bytes_per_second: float = VERIFY_BYTES_PER_SECOND,
    egress_per_gb: float = EGRESS_PER_GB,
    put_per_million: float = PUT_PER_MILLION,
    get_per_million: float = GET_PER_MILLION,
    per_hour: Mapping[str, float] | None = None,
) -> Scale:
    """The recipe's mixture of replicas at this M, one round of it; machines cost where they have a price."""
    check_names(recipe, per_hour or {})  # of the whole mixture: a small fleet may lack a kind
    fleet = with_replicas(recipe, num_replicas)
    forecast = predict(fleet, tflops, verify_bytes_per_second=verify_bytes_per_second)
    machines = machine_dollars(fleet, per_hour or {}, forecast.round_seconds / 3600)
    keep, values = codec_settings(recipe)
    entries = recipe.outer.chunk_side**2
    payload = forecast.payload_bytes
    slow = next(kind for kind in forecast.kinds if kind.name == forecast.slowest)
    down = sum(kind.count * kind.exchange.down_bytes for kind in forecast.kinds)
    requests = forecast.requests_per_round
    sizes = {}
    for kind in WRITTEN:
        ratio = aggregate_ratio(
            num_replicas, values, kind, entries=entries, keep=keep, correlation=correlation
        )
        sizes[kind] = round(payload * ratio)
    closing = forecast.closing
    return Scale(
        num_replicas=num_replicas,
        payload_bytes=payload,
        up_bytes=num_replicas * payload,
        down_bytes=down,
        down_bytes_each=slow.exchange.down_bytes,
        down_seconds=slow.exchange.down_seconds,
        puts=requests["put"],
        gets=requests["get"],
        control_each=(requests["put"] + requests["get"] - requests["payload_get"]) / num_replicas,
        egress_dollars=down / 1e9 * egress_per_gb,
        request_dollars=(requests["put"] * put_per_million + requests["get"] * get_per_million) / 1e6,
        machine_dollars=sum(machines.values()) if per_hour else None,
        verify_bytes=closing.verify_bytes if closing else 0,
        verify_seconds=closing.verify_bytes / verify_bytes_per_second if closing else 0.0,
        close_seconds=forecast.close_seconds,
        manifest_bytes=closing.manifest_bytes if closing else 0,
        round_seconds=forecast.round_seconds,
        utilisation=forecast.utilisation,
        aggregate_bytes=sizes,
        aggregate_down_bytes={kind: (num_replicas - 1) * (payload + n) for kind, n in sizes.items()},
    )
