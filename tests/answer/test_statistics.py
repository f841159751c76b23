from __future__ import annotations

import math

import numpy as np
import pytest

from fsdp_tune.answer.statistics import Scores, bootstrap, mcnemar, paired_bootstrap, wilson


@pytest.mark.parametrize(
    ("matches", "rows", "low", "high"),
    [(0, 20, 0.0, 0.1611), (10, 20, 0.2993, 0.7007), (20, 20, 0.8389, 1.0)],
)
def test_wilson_interval_has_published_values(matches: int, rows: int, low: float, high: float) -> None:
    found = wilson(matches, rows)
    assert (found.value, found.low, found.high) == pytest.approx((matches / rows, low, high), abs=1e-4)


def test_mcnemar_is_exact_binomial_of_discordant_rows() -> None:
    first, second = np.zeros(40), np.zeros(40)
    first[:10] = 1.0  # only the first model
    second[10:12] = 1.0  # only the second
    first[20:30] = second[20:30] = 1.0
    found = mcnemar(first, second)
    assert found.difference == pytest.approx(0.2)
    assert found.p == pytest.approx(2 * sum(math.comb(12, k) for k in (0, 1, 2)) / 2**12)
    assert found.low < 0.2 < found.high
    swapped = mcnemar(second, first)
    assert (swapped.low, swapped.high, swapped.p) == pytest.approx((-found.high, -found.low, found.p))


def test_interval_of_difference_covers_bootstrap_of_many_rows() -> None:
    generator = np.random.default_rng(1)
    first = (generator.random(2000) < 0.6).astype(float)
    second = np.where(generator.random(2000) < 0.7, first, generator.random(2000) < 0.4).astype(float)
    exact, resampled = (
        mcnemar(first, second),
        paired_bootstrap(Scores(first, np.ones(2000)), Scores(second, np.ones(2000))),
    )
    assert (exact.low, exact.high) == pytest.approx((resampled.low, resampled.high), abs=0.004)


def test_equal_models_do_not_differ() -> None:
    rows = np.array([1.0, 0.0, 1.0])
    assert mcnemar(rows, rows).p == 1.0
    scores = Scores(rows, np.ones(3))
    assert paired_bootstrap(scores, scores).p == 1.0


def test_few_rows_are_no_proof_of_a_difference() -> None:
    for rows in (1, 2, 5):
        first, second = (
            Scores(np.arange(rows) + 1.0, np.ones(rows)),
            Scores(np.arange(rows) + 2.0, np.ones(rows)),
        )
        assert paired_bootstrap(first, second).p == 2.0 ** (1 - rows)


def test_few_rows_that_differ_among_equal_ones_are_no_proof_of_a_difference() -> None:
    first, second, ones = np.zeros(100), np.zeros(100), np.ones(100)
    first[[3, 20, 50, 90]] = 1.0
    exact, resampled = mcnemar(first, second), paired_bootstrap(Scores(first, ones), Scores(second, ones))
    assert exact.p == resampled.p == 0.125


def test_rows_without_counts_are_no_proof_of_a_difference() -> None:
    """One of 100 rows counts: a third of the resamples lack it, and the others all have its difference."""
    counts = np.zeros(100)
    counts[7] = 1.0
    assert paired_bootstrap(Scores(counts * 2.0, counts), Scores(counts, counts)).p == 1.0


def test_bootstrap_weighs_tokens_and_resamples_rows() -> None:
    generator = np.random.default_rng(2)
    counts = generator.integers(1, 50, 400).astype(float)
    totals = counts * generator.normal(2.0, 0.5, 400)
    found = bootstrap(Scores(totals, counts))
    assert found.value == pytest.approx(totals.sum() / counts.sum())
    residuals = totals - found.value * counts
    expected = 1.96 * math.sqrt((residuals**2).sum()) / counts.sum()  # linearised variance of a ratio
    assert (found.high - found.low) / 2 == pytest.approx(expected, rel=0.1)
    assert bootstrap(Scores(totals, counts)) == found


def test_perplexity_has_exponentials_of_the_losses_interval() -> None:
    loss = bootstrap(Scores(np.array([1.0, 3.0, 2.0]), np.ones(3)))
    assert loss.exponential().as_dict() == pytest.approx(
        {key: math.exp(value) for key, value in loss.as_dict().items()}
    )
