"""Statistics of the answers of models: metrics with their intervals, and whether two models differ.

A row has a total and a count. A metric is the sum of the totals over the sum of the counts: rows that match
over rows, token losses over tokens. So rows are the units that are resampled, and tokens of one row stay
together. Levels of intervals are 95 %.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Z = 1.959963984540054
"""Quantile of the normal distribution at 97.5 %."""
RESAMPLES = 2000
SEED = 0
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scores:
    """Total and count of each row."""

    totals: Floats
    counts: Floats

    def value(self) -> float:
        return float(self.totals.sum() / self.counts.sum())


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def exponential(self) -> Estimate:
        """Return a loss as a perplexity: the interval of a monotonic function has the function's values as
        its ends."""
        return Estimate(*(math.exp(min(each, 700.0)) for each in (self.value, self.low, self.high)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first model minus the second on the same rows."""

    difference: float
    low: float
    high: float
    p: float
    """Probability of such a difference, in either direction, if the models were equally good."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def wilson(matches: int, rows: int) -> Estimate:
    """Return a proportion with its Wilson score interval (Wilson, 1927), which holds for few rows and for
    proportions near 0 and 1."""
    share = matches / rows
    middle = (share + Z**2 / (2 * rows)) / (1 + Z**2 / rows)
    half = Z / (1 + Z**2 / rows) * math.sqrt(share * (1 - share) / rows + Z**2 / (4 * rows**2))
    return Estimate(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def bootstrap(scores: Scores) -> Estimate:
    """Return a quotient of sums with its percentile interval over resampled rows."""
    low, high = np.nanquantile(_resampled(scores)[0], (0.025, 0.975))
    return Estimate(scores.value(), float(low), float(high))


def mcnemar(first: Floats, second: Floats) -> Comparison:
    """Compare two proportions on the same rows: the exact McNemar test, and Newcombe's interval of the
    difference.

    `first` and `second` are 1 where a row matches. Newcombe, Statistics in Medicine 17 (1998) 2635, method
    10.
    """
    rows = len(first)
    both, only_first = int((first * second).sum()), int((first * (1 - second)).sum())
    only_second = int(second.sum()) - both
    neither = rows - both - only_first - only_second
    one, two = wilson(both + only_first, rows), wilson(both + only_second, rows)
    product = math.sqrt(
        (both + only_first) * (only_second + neither) * (both + only_second) * (only_first + neither)
    )
    excess = both * neither - only_first * only_second
    correlation = (max(excess - rows / 2, 0.0) if excess > 0 else excess) / product if product else 0.0

    def distance(left: float, right: float) -> float:
        return math.sqrt(max(left**2 - 2 * correlation * left * right + right**2, 0.0))

    difference = one.value - two.value
    low = difference - distance(one.value - one.low, two.high - two.value)
    high = difference + distance(one.high - one.value, two.value - two.low)
    return Comparison(
        difference, low, high, _two_sided(min(only_first, only_second), only_first + only_second)
    )


def _two_sided(smaller: int, trials: int) -> float:
    """Return the probability that fair coins fall as unevenly as `smaller` of `trials`, or more so."""
    tail = sum(math.comb(trials, count) for count in range(smaller + 1))
    return min(1.0, 2 * tail / 2**trials)


def paired_bootstrap(first: Scores, second: Scores) -> Comparison:
    """Compare two quotients of sums on the same rows: both are resampled with the same rows."""
    one, two = _resampled(first, second)
    differences = one - two
    low, high = np.nanquantile(differences, (0.025, 0.975))
    # A resample in which a metric counts nothing shows no difference, so it is on both sides.
    above, below = int((~(differences < 0)).sum()), int((~(differences > 0)).sum())
    # Resamples of few rows vary too little. Exchanging the models in each row (a permutation test) gives no
    # smaller p than this; in a row with equal scores that changes nothing.
    least = 2.0 ** (1 - np.count_nonzero((first.totals != second.totals) | (first.counts != second.counts)))
    p = min(1.0, max(least, 2 * (min(above, below) + 1) / (RESAMPLES + 1)))
    return Comparison(first.value() - second.value(), float(low), float(high), p)


def _resampled(*models: Scores) -> list[Floats]:
    """Return the quotient of each model in each resample; all models have the same rows in it."""
    rows = len(models[0].totals)
    generator = np.random.Generator(np.random.PCG64(SEED))
    found = np.empty((len(models), RESAMPLES))
    for resample in range(RESAMPLES):
        times = np.bincount(generator.integers(0, rows, rows), minlength=rows)
        for index, scores in enumerate(models):
            count = times @ scores.counts
            found[index, resample] = times @ scores.totals / count if count else np.nan
    return list(found)
