"""How sure a difference is: p-values of Student's t, and what is left of them among many.

The page has dozens of verdicts. Which are called clear is decided by Benjamini and Hochberg's procedure over
all of them: of the cells that it calls clear, one in twenty is expected to be wrong. That is proved for tests
that are independent or go together in one direction, as three scores of the same runs do; rows that share a
baseline may not, so the level is approximate. Holm's is marked beside it: it keeps the chance of even one
false cell at the same level, and with three seeds few differences can pass it, true or not.

Two or three seeds hardly know their own spread: two that agree by luck look sure, and two that do not hide
what is there. So every p-value is also computed with a spread that is pooled over comparisons, as far as
their spreads are alike: the moderated t of Smyth (2004, "Linear models and empirical Bayes methods").
Standard library only.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEVEL = 0.05
POWER = 0.8  # of the differences that are there, the share that is to be seen


def two_sided(t: float, freedom: float) -> float:
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


@dataclass(frozen=True, slots=True)
class Spread:
    """What all comparisons say of the spread of one: a variance, and the degrees of freedom by which it is
    known; none where they say nothing of each other."""

    variance: float = 1.0
    freedom: float = 0.0

    @classmethod
    def of(cls, variances: Sequence[float], freedoms: Sequence[int], most: float) -> "Spread":
        """Smyth's estimate. If true variances are drawn from a scaled inverse chi-squared distribution of d0
        degrees of freedom, then log s^2 - psi(d/2) + log(d/2) of a measured one, which has d, has the mean
        log(variance) - psi(d0/2) + log(d0/2) and the variance psi'(d/2) + psi'(d0/2). A few dozen comparisons
        of the same runs know no variance better than these runs do: d0 is `most` at most."""
        if len(variances) < 3:
            return cls()
        least = 1e-5 * statistics.median(variances)  # that two seeds agree to the last digit is luck
        if not least or most <= 0:
            return cls()
        logs = [
            math.log(max(variance, least)) - digamma(d / 2) + math.log(d / 2)
            for variance, d in zip(variances, freedoms, strict=True)
        ]
        left = statistics.variance(logs) - statistics.mean(trigamma(d / 2) for d in freedoms)
        half = _falling_to(left, trigamma) if left > 0 else math.inf
        mean = statistics.mean(logs) + (digamma(half) - math.log(half) if half < math.inf else 0.0)
        return cls(math.exp(mean), min(2 * half, most))

    def with_own(self, variance: float, freedom: int) -> tuple[float, float]:
        """The variance of one comparison and its degrees of freedom: its own and the pooled ones together."""
        together = self.freedom + freedom
        return (self.freedom * self.variance + freedom * variance) / together, together

    def seen(self, seeds: int) -> float:
        """The smallest true difference that so many seeds show POWER of the times, one comparison by itself:
        about, by the sum of two quantiles."""
        freedom = self.freedom + seeds - 1
        both = sum(quantile(p, freedom) for p in (LEVEL, 2 * (1 - POWER)))
        return both * math.sqrt(self.variance / seeds)


def quantile(p: float, freedom: float) -> float:
    """The |t| that is exceeded with this chance."""
    return _falling_to(p, lambda t: two_sided(t, freedom))


def _falling_to(value: float, function: Callable[[float], float]) -> float:
    """Where a function that falls takes this value, by halving on a scale of logarithms."""
    low, high = 1e-9, 1e9
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if function(middle) > value else (low, middle)
    return low


def digamma(x: float) -> float:
    """The derivative of log Gamma: Stirling's series, after steps up to where it is exact to rounding."""
    up = 0.0
    while x < 12:
        up, x = up - 1 / x, x + 1
    y = 1 / (x * x)
    return up + math.log(x) - 0.5 / x - y * (1 / 12 - y * (1 / 120 - y * (1 / 252 - y * (1 / 240 - y / 132))))


def trigamma(x: float) -> float:
    """The derivative of digamma."""
    up = 0.0
    while x < 12:
        up, x = up + 1 / (x * x), x + 1
    y = 1 / (x * x)
    series = 1 / 6 - y * (1 / 30 - y * (1 / 42 - y * (1 / 30 - y * (5 / 66))))
    return up + 1 / x + y / 2 + series * y / x
