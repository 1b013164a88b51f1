"""How sure a difference is: p-values of Student's t, and what is left of them among many.

The page has dozens of verdicts. Which are called clear is decided by Benjamini and Hochberg's procedure over
all of them: of the cells that it calls clear, one in twenty is expected to be wrong. That is proved for tests
that are independent or go together in one direction, as three scores of the same runs do; rows that share a
baseline may not, so the level is approximate. Holm's is marked beside it: it keeps the chance of even one
false cell at the same level, and with three seeds few differences can pass it, true or not.
Standard library only.
"""

import math
from collections.abc import Sequence

LEVEL = 0.05


def two_sided(t: float, freedom: int) -> float:
    """The chance of a |t| at least as large where there is no difference."""
    if math.isinf(t):
        return 0.0
    x = freedom / (freedom + t * t)
    return _beta(x, freedom / 2, 0.5)


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _beta(1 - x, b, a)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    fraction = 0.0
    for m in range(200, 0, -1):  # the continued fraction, from its far end
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        fraction = even / (1 + odd / (1 + fraction))
    first = -(a + b) * x / (a + 1)
    return math.exp(scale) / a / (1 + first / (1 + fraction))


def benjamini_hochberg(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given: a difference is clear at a level that is not below its own."""
    order = sorted(range(len(ps)), key=ps.__getitem__, reverse=True)
    adjusted, least = [0.0] * len(ps), 1.0
    for done, i in enumerate(order):
        least = min(least, ps[i] * len(ps) / (len(ps) - done))
        adjusted[i] = least
    return adjusted


def holm(ps: Sequence[float]) -> list[float]:
    order = sorted(range(len(ps)), key=ps.__getitem__)
    adjusted, most = [0.0] * len(ps), 0.0
    for done, i in enumerate(order):
        most = max(most, min(1.0, ps[i] * (len(ps) - done)))
        adjusted[i] = most
    return adjusted
