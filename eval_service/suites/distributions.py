"""The three distributions that the statistics need, exact enough to agree with scipy, without needing scipy.

All of them are the regularized incomplete beta function, by its continued fraction (modified Lentz).
"""

from __future__ import annotations

import math
from statistics import NormalDist

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
_TINY = 1e-300
_EPSILON = 1e-16
_MOST_TERMS = 100_000
_BISECTIONS = 200
_EXACT_UP_TO = 1000  # tosses; 2**n is still a float then


def incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), for a, b > 0 and 0 <= x <= 1."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # beyond its mean the fraction converges slowly, and the mirrored one fast
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _fraction(a, b, x) / a


def t_two_sided(t: float, df: int) -> float:
    """The chance of a Student's t at least as far from 0."""
    if math.isinf(t):
        return 0.0
    if t * t < df:  # by the other tail: 1 - df / (df + t * t) would lose its digits
        return 1.0 - incomplete_beta(0.5, df / 2, t * t / (df + t * t))
    return incomplete_beta(df / 2, 0.5, df / (df + t * t))


def t_quantile(df: int) -> float:
    """How many standard errors a 95% interval reaches to either side."""
    low, high = 0.0, 1e4  # at one degree of freedom it is 12.7
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if t_two_sided(middle, df) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def sign_two_sided(successes: int, n: int) -> float:
    """The exact two-sided p-value of so many heads in n tosses of a fair coin."""
    fewer = min(successes, n - successes)
    if 2 * fewer == n:
        return 1.0
    if n <= _EXACT_UP_TO:
        return 2 * sum(math.comb(n, i) for i in range(fewer + 1)) / (1 << n)
    return min(1.0, 2 * incomplete_beta(n - fewer, fewer + 1, 0.5))


def wilson(mean: float, n: int) -> tuple[float, float]:
    """The 95% score interval of a proportion: never empty and never outside [0, 1], also where all n are equal."""
    z2 = Z * Z
    middle = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    return (0.0 if mean == 0.0 else middle - half), (1.0 if mean == 1.0 else middle + half)


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of I_x(a, b) after its first term."""
    c, d = 1.0, 1.0 / _away(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / _away(1.0 + even * d)
        c = _away(1.0 + even / c)
        value *= d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1.0 / _away(1.0 + odd * d)
        c = _away(1.0 + odd / c)
        value *= d * c
        if abs(d * c - 1.0) < _EPSILON:
            break
    return value


def _away(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
