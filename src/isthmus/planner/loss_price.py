"""The expected loss of a wire and a k/d, from the measurements in loss_prices.toml.

They come from one small model. Between two measured k/d of a wire, the price is linear in log k/d, and so in
log bytes. Above the largest measured k/d it is at most the price there; below the smallest it rises as in
bf16. Standard library only.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from math import log
from pathlib import Path

from isthmus.layout.wire import FLOAT_BYTES

FILE = Path(__file__).with_name("loss_prices.toml")
NAMES = {"adamw": "AdamW", "muon": "Muon"}
LEARNED = "-learned"  # suffix of an InnerOpt's name: prices with subspace.anchor = "learned"
FEW = 6  # an InnerOpt with fewer measurements uses AdamW's
BASES = MEASURED, BETWEEN, MILDER, BEYOND = "measured", "between", "milder", "beyond"  # best known first


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPrice:
    """Percent of loss above the same run with open bf16 boundaries, all replicas pipelined."""

    percent: float
    # "measured"; "between" measured points; "milder" than all, so at most this; "beyond" them.
    basis: str
    optimizer: str  # the InnerOpt of the measurements
    learned: bool  # whether the anchors were learned
    parameters: int  # of the measured model

    @property
    def short(self) -> str:
        """Return `+2.8 %`, `at most +2.8 %` or `about +31 %`."""
        figure = f"{self.percent:+.1f} %" if abs(self.percent) < 10 else f"{self.percent:+.0f} %"
        return {MILDER: "at most ", BEYOND: "about "}.get(self.basis, "") + figure

    def text(self) -> str:
        """Return a clause with the source of the number."""
        where = {
            MEASURED: "measured",
            BETWEEN: "between points measured",
            MILDER: "less compression than measured",
            BEYOND: "beyond what was measured",
        }[self.basis]
        return (
            f"expected price {self.short} of loss, {where} at {self.parameters / 1e6:.0f} M parameters "
            f"with {NAMES[self.optimizer]}{' and learned anchors' * self.learned}"
        )


@dataclass(frozen=True)
class Measured:
    """All measurements with one InnerOpt, with fixed anchors or with learned ones."""

    name: str
    parameters: int
    percents: Mapping[str, Mapping[str, float]]  # wire -> compression -> percent
    base: "Measured | None" = None  # supplies the wires that are missing here

    @property
    def wires(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*(self.base.wires if self.base else ()), *self.percents]))

    def opens(self, wire: str) -> bool:
        """Return whether this wire may have an open boundary: few bits without U must be measured first."""
        return wire in FLOAT_BYTES or "none" in self._of(wire).percents.get(wire, {})

    def price(self, wire: str, compression: str) -> LossPrice:
        known = "bf16" if wire in FLOAT_BYTES else wire
        own = self._of(known)
        if compression in own.percents[known]:
            percent, basis = own.percents[known][compression], MEASURED
        else:
            percent, basis = own._at(known, _ratio(compression))
        return LossPrice(
            percent=percent,
            basis=basis,
            optimizer=own.name.removesuffix(LEARNED),
            learned=own.name.endswith(LEARNED),
            parameters=own.parameters,
        )

    def _of(self, wire: str) -> "Measured":
        return self if wire in self.percents or self.base is None else self.base._of(wire)

    @cached_property
    def curves(self) -> dict[str, list[tuple[Fraction, float]]]:
        """Map each wire to its (k/d, percent) points, the smallest k/d first."""
        curves = {}
        for wire, points in self.percents.items():
            # If both were measured, "1" continues the curve: U rotates it, like all points below.
            ordered = sorted(points.items(), key=lambda each: each[0] != "none")
            curves[wire] = sorted({_ratio(k): percent for k, percent in ordered}.items())
        return curves

    def _at(self, wire: str, ratio: Fraction) -> tuple[float, str]:
        points = self.curves[wire]
        if ratio in dict(points):
            return dict(points)[ratio], MEASURED
        for (low, dear), (high, cheap) in pairwise(points):
            if low < ratio < high:
                return cheap + log(high / ratio) / log(high / low) * (dear - cheap), BETWEEN
        least, dearest = points[0]
        if ratio > least:
            return points[-1][1], MILDER
        if wire == "bf16":  # the steepest measured slope
            slopes = [(dear - cheap) / log(high / low) for (low, dear), (high, cheap) in pairwise(points)]
            return dearest + max(slopes, default=0.0) * log(least / ratio), BEYOND
        # Fewer dimensions cost as much as in bf16.
        bf16 = self._of("bf16")
        return dearest + bf16._at("bf16", ratio)[0] - bf16._at("bf16", least)[0], BEYOND


def _ratio(compression: str) -> Fraction:
    return Fraction(1) if compression == "none" else Fraction(compression)


def measured(optimizer: str, anchor: str = "fixed") -> Measured:
    """Return the prices for this InnerOpt and these anchors, else for fixed anchors or AdamW."""
    if anchor == "learned" and (learned := tables().get(f"{optimizer}{LEARNED}")):
        return learned
    own = tables().get(optimizer)
    if own is not None and sum(map(len, own.percents.values())) >= FEW:
        return own
    return tables()["adamw"]


@lru_cache(maxsize=1)
def tables() -> dict[str, Measured]:
    """Return the prices by InnerOpt, with the suffix LEARNED for learned anchors."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    found: dict[str, Measured] = {}
    # AdamW has the most measurements, and fixed anchors precede learned ones: the others build on them.
    names = sorted(
        (key for key in table if isinstance(table[key], dict)), key=lambda key: (key != "adamw", key)
    )
    for name in names:
        percents = {
            w: {k: each["percent"] for k, each in points.items()} for w, points in table[name].items()
        }
        base = found.get(name.removesuffix(LEARNED), found.get("adamw"))
        found[name] = Measured(name, table["parameters"], percents, base)
    return found


def price_of(optimizer: str, wire: str, compression: str, anchor: str = "fixed") -> LossPrice:
    return measured(optimizer, anchor).price(wire, compression)
