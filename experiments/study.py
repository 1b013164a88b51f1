"""What the notebook asks of results/: losses by row and seed, prices, corrected p-values, bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from experiments.lines import digest, read, scored_on, wire_version
from experiments.rows import Row, rows, scales
from isthmus.config import Recipe, stored_recipe
from isthmus.layout.traffic import dense_round_bytes, inner_step_bytes, outer_bytes, shard_bytes

LEVEL = 0.05


@dataclass(frozen=True, slots=True)
class Price:
    """How far one row's loss lies from another's, in percent: paired by seed, with Student's t."""

    mean: float
    error: float  # one standard error over seeds; nan for one seed
    p: float  # two-sided, against no difference; nan for one seed
    seeds: int

    def __str__(self) -> str:
        if self.seeds < 2:
            return f"{self.mean:+.2f} % (one seed)"
        return f"{self.mean:+.2f} ± {self.error:.2f} %"


class Study:
    """Every line of results/, and which of them belong to a row of rows.toml."""

    def __init__(self, folder: Path) -> None:
        lines = [line for line in read(folder) if not line.get("failed")]
        facts = pd.DataFrame(lines)
        facts["wire"] = [wire_version(line) for line in lines]
        self.lines = facts
        self.rows = {(row.scale, row.name): row for row in rows()}
        self.digests = {key: digest(row.recipe(0)) for key, row in self.rows.items()}

    def of(self, name: str, scale: str = "12m") -> pd.DataFrame:
        """The lines of a row, one for each seed. Of a few-bit wire, those of its causal form as soon as one
        is there."""
        row, lines = self.rows[scale, name], self.lines[self.lines.scale == scale]
        text = scored_on(scales()[scale]["corpus"].split()[-1], row.text)
        lines = lines[lines.corpus == text]
        own = lines[lines.digest == self.digests[scale, name]]
        if own.empty and _few_bits(row):
            same = [
                other
                for (s, other), d in self.digests.items()
                if (s, d) == (scale, self.digests[scale, name])
            ]
            own = lines[lines.row.isin(same) & (lines.wire > 0)]
            own = own[own.wire == own.wire.max()]
            own = own[own.digest == own.digest.iloc[-1]] if len(own) else own
        return own.drop_duplicates("seed", keep="last").set_index("seed").sort_index()

    def is_old(self, name: str, scale: str = "12m") -> bool:
        """Whether the row's lines are of the few-bit wire that was not causal."""
        return bool((self.of(name, scale).wire == 1).any())

    def loss(self, name: str, scale: str = "12m", view: str = "mixed") -> pd.Series:
        return self.of(name, scale)[f"loss_{view}"]

    def price(self, name: str, against: str, scale: str = "12m", view: str = "mixed") -> Price:
        return compare(self.loss(name, scale, view), self.loss(against, scale, view))

    def recipe(self, name: str, scale: str = "12m") -> Recipe:
        """The recipe of the row's lines, or of rows.toml where it has none yet."""
        own = self.of(name, scale)
        return stored_recipe(own.recipe.iloc[0]) if len(own) else self.rows[scale, name].recipe(0)


def compare(one: pd.Series, other: pd.Series) -> Price:
    """The distance of `one` in percent of `other`, over the seeds that both have."""
    both = one.index.intersection(other.index)
    gaps = 100 * (one[both] / other[both] - 1)
    if len(gaps) < 2:
        return Price(float(gaps.mean()), np.nan, np.nan, len(gaps))
    test = stats.ttest_1samp(gaps, 0.0)
    return Price(float(gaps.mean()), float(stats.sem(gaps)), float(test.pvalue), len(gaps))


def difference(one: Sequence[pd.Series], other: Sequence[pd.Series]) -> Price:
    """The difference of two prices, in points: (a, its base) against (b, its base), paired by seed."""
    seeds = one[0].index
    for series in (one[1], *other):
        seeds = seeds.intersection(series.index)
    points = 100 * (one[0][seeds] / one[1][seeds] - other[0][seeds] / other[1][seeds])
    p = float(stats.ttest_1samp(points, 0.0).pvalue) if len(points) > 1 else np.nan
    error = float(stats.sem(points)) if len(points) > 1 else np.nan
    return Price(float(points.mean()), error, p, len(points))


def within(price: Price, limit: float) -> float:
    """The p-value of two one-sided tests that a price lies within `limit` either way."""
    if price.seeds < 2:
        return np.nan
    return float(stats.t.sf((limit - abs(price.mean)) / price.error, price.seeds - 1))


def above(price: Price, limit: float) -> float:
    """The two-sided p-value of a price against `limit`."""
    if price.seeds < 2:
        return np.nan
    return float(2 * stats.t.sf(abs(price.mean - limit) / price.error, price.seeds - 1))


def holm(pvalues: Mapping[str, float]) -> dict[str, bool]:
    """Which of a family are clear at 5 % by Holm's procedure; one seed (nan) never is."""
    known = sorted((p, name) for name, p in pvalues.items() if not np.isnan(p))
    clear, still = dict.fromkeys(pvalues, False), True
    for rank, (p, name) in enumerate(known):
        still = still and p <= LEVEL / (len(known) - rank)
        clear[name] = still
    return clear


@dataclass(frozen=True, slots=True)
class Fit:
    """Price against the share that is compressed: a line through the origin, tested for lack of fit."""

    slope: float
    slope_error: float
    largest: float  # deviation of a share's mean from the line, in points
    p: float  # of so much lack of fit if the line were right


def proportional(shares: Sequence[float], prices: Sequence[Sequence[float]]) -> Fit:
    """`prices` has a list over the same seeds for each share. All prices of a seed have one baseline, so the
    error is what is left after shares and seeds."""
    x, y = np.asarray(shares), np.asarray(prices)  # (shares,), (shares, seeds)
    means, slopes = y.mean(1), (x @ y) / (x @ x)
    slope = float(slopes.mean())
    left = y - means[:, None] - y.mean(0) + y.mean()
    lack, df_lack = y.shape[1] * float(((means - slope * x) ** 2).sum()), len(x) - 1
    error, df_error = float((left**2).sum()), (y.shape[0] - 1) * (y.shape[1] - 1)
    p = float(stats.f.sf((lack / df_lack) / (error / df_error), df_lack, df_error))
    return Fit(slope, float(stats.sem(slopes)), float(np.abs(means - slope * x).max()), p)


def stage_bytes(recipe: Recipe, wire: int = 2) -> float:
    """Bytes over all boundaries of a pipelined replica for each of its tokens, both ways, ids included."""
    tokens = recipe.inner.batch * recipe.model.context
    most = max(recipe.fleet(), key=lambda member: sum(inner_step_bytes(recipe, member).values()))
    total = sum(inner_step_bytes(recipe, most).values())
    if wire == 1:  # it also sent the largest step of each sequence, and forward its mean
        dim = most.config.subspace_dim(recipe.model.width)
        total += (most.config.stages - 1) * recipe.inner.batch * (2 * 4 + 2 * dim)
    return total / tokens


def replica_bytes(recipe: Recipe) -> float:
    """Bytes of updates up and down, for each token of the fleet."""
    sizes = shard_bytes(recipe)
    return sum(sum(outer_bytes(recipe, member, sizes)) for member in recipe.fleet()) / recipe.round_tokens


def every_step_bytes(recipe: Recipe) -> float:
    """What averaging fp32 gradients at every step would send instead."""
    plain = recipe.model.num_parameters / recipe.model.num_stored  # without learned tables
    return dense_round_bytes(recipe)["replicas"] * plain / recipe.round_tokens


def open_bytes(recipe: Recipe) -> float:
    """Bytes between stages with nothing compressed, in bf16."""
    replicas = tuple(replace(each, compression="none", wire="bf16") for each in recipe.replicas)
    return stage_bytes(replace(recipe, replicas=replicas))


def markdown(table: Sequence[Mapping[str, object]]) -> str:
    """A table as Markdown; columns are the keys of its first row."""
    names = list(table[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in table)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _few_bits(row: Row) -> bool:
    return any(replica.wire.startswith("int") for replica in row.recipe(0).replicas)


def anchor_bytes(recipe: Recipe) -> float:
    """The anchors that closers upload, for each token of the fleet: fp32, every so many rounds."""
    return 4 * recipe.model.num_stored / recipe.bucket.anchor_every / recipe.round_tokens
