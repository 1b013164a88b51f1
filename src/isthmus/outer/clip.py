"""`outer.clip` in rounds that count fewer than three updates (docs/method.md, Aggregation).

The median of two is the smaller one, so a tiny update would shrink an honest one to nothing. With so few,
each whole update is compared with its own replica's earlier ones. This never refuses an update.
"""

import math
from collections.abc import Iterable, Sequence
from statistics import median

import torch

from isthmus.config import OuterConfig
from isthmus.outer.aggregate import scaled, squared_norm
from isthmus.outer.codec import Payloads
from isthmus.sparse import Bundle

FEWEST_FOR_MEDIAN = 3  # updates
EARLIER = 5  # a replica's earlier updates to compare the next one with
FEWEST_EARLIER = 2  # its first two updates are not clipped
TIMES = 3.0  # the median of those norms


def median_clips(config: OuterConfig, num_updates: int) -> str | None:
    """The clip among the updates of one round; None if there is none, or too few for a median."""
    return None if config.clip == "none" or num_updates < FEWEST_FOR_MEDIAN else config.clip


def history_clips(config: OuterConfig, num_updates: int) -> bool:
    """Whether each update of such a round needs its factor from `history_factor`."""
    return config.clip != "none" and num_updates < FEWEST_FOR_MEDIAN


def history_factor(norm: float, earlier: Sequence[float]) -> float:
    """The factor for a replica's whole update: min(1, 3 median / norm).

    `norm` is the update's. `earlier` are the norms of the replica's last five updates that were not clipped.
    All are as sent.
    """
    if len(earlier) < FEWEST_EARLIER or norm <= (limit := TIMES * median(earlier)):
        return 1.0
    return limit / norm


def update_norm(shards: Iterable[Payloads]) -> float:
    """The 2-norm of a whole update, with the same bits on every machine that adds its shards in order."""
    return math.sqrt(sum(float(squared_norm(payloads)) for payloads in shards))


def shrunk(payloads: Payloads, factor: float) -> Payloads:
    """The update times its factor; one that needs no clip keeps its bits."""
    if factor == 1.0:
        return payloads
    bundle = Bundle.of(payloads)
    device = bundle.groups[0].values.device
    wide = torch.float32 if device.type == "mps" else torch.float64
    return scaled(bundle, torch.full((len(bundle),), factor, dtype=wide, device=device))


def all_shrunk(updates: Sequence[Payloads], factors: Sequence[float] | None) -> Sequence[Payloads]:
    return updates if factors is None else [shrunk(*pair) for pair in zip(updates, factors, strict=True)]
