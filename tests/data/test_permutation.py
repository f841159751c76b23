from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.data.order.permutation import WINDOW_ROWS, epoch_order, rank_micro_batches, splitmix64
from fsdp_tune.data.store import Int64


def order(rows: int, *, seed: int = 42, epoch: int = 0, shuffle: bool = True, group: bool = False, batch: int = 8) -> Int64:
    lengths = np.random.default_rng(7).integers(1, 1000, rows)
    return epoch_order(lengths, seed=seed, epoch=epoch, shuffle=shuffle, group_by_length=group, global_batch_size=batch)


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 5), st.booleans(), st.integers(1, 40))
def test_epoch_contains_each_row_once(rows: int, seed: int, epoch: int, group: bool, batch: int) -> None:
    assert sorted(order(rows, seed=seed, epoch=epoch, group=group, batch=batch)) == list(range(rows))


def test_order_is_fixed_across_versions() -> None:
    """A run that is resumed after an upgrade of numpy or of this package must continue the order that it began."""
    assert order(10).tolist() == [4, 9, 8, 1, 6, 3, 5, 0, 2, 7]
    assert splitmix64(np.arange(2, dtype=np.uint64)).tolist() == [16294208416658607535, 10451216379200822465]


def test_order_depends_on_seed_and_epoch() -> None:
    orders = [tuple(order(1000, seed=seed, epoch=epoch)) for seed in (0, 1, 42) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 9


def test_unshuffled_epochs_keep_row_order() -> None:
    assert order(100, shuffle=False, group=True, epoch=3).tolist() == list(range(100))


def test_shuffle_is_uniform() -> None:
    """Each row is first about equally often: chi-squared over 8 rows and 4,000 seeds, far from both tails."""
    first = np.bincount([order(8, seed=seed)[0] for seed in range(4000)], minlength=8)
    assert 1.0 < ((first - 500) ** 2 / 500).sum() < 24.0


def test_length_grouping_reduces_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 20_000)

    def padding(group: bool) -> float:
        found = epoch_order(lengths, seed=1, epoch=0, shuffle=True, group_by_length=group, global_batch_size=32)
        batches = lengths[found].reshape(-1, 32)
        return 1 - batches.sum() / (batches.max(axis=1) * 32).sum()

    assert padding(group=False) > 0.4
    assert padding(group=True) < 0.02


def test_grouped_batches_are_not_sorted_by_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 2000, 20_000)
    found = epoch_order(lengths, seed=1, epoch=0, shuffle=True, group_by_length=True, global_batch_size=32)
    means = lengths[found].reshape(-1, 32).mean(axis=1)[1:]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.1
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.15


def test_longest_row_is_in_the_first_batch_and_the_partial_batch_is_last() -> None:
    rows, batch = 3 * WINDOW_ROWS + 11, 16
    lengths = np.random.default_rng(0).integers(1, 2000, rows)
    found = epoch_order(lengths, seed=5, epoch=1, shuffle=True, group_by_length=True, global_batch_size=batch)
    whole = rows - rows % batch
    assert lengths[found[:whole]].max() == lengths[found[:batch]].max()
    ungrouped = epoch_order(lengths, seed=5, epoch=1, shuffle=True, group_by_length=False, global_batch_size=batch)
    assert found[whole:].tolist() == ungrouped[whole:].tolist()


@pytest.mark.parametrize("rows", [16, 13, 1])
@pytest.mark.parametrize(("dp_size", "micro"), [(1, 16), (16, 1), (2, 4), (4, 2), (3, 2)])
def test_ranks_split_global_batch_without_gap_or_overlap(rows: int, dp_size: int, micro: int) -> None:
    batch = np.arange(100, 100 + rows)
    by_rank = [rank_micro_batches(batch, dp_rank=rank, dp_size=dp_size, micro_batch_size=micro) for rank in range(dp_size)]
    assert len({len(micro_batches) for micro_batches in by_rank}) == 1, "every rank takes part in every micro-step"
    assert sorted(row for micro_batches in by_rank for taken in micro_batches for row in taken) == batch.tolist()
    assert all(len(taken) <= micro for micro_batches in by_rank for taken in micro_batches)


def test_micro_step_spans_neighbouring_rows_of_all_ranks() -> None:
    batch = np.arange(16)
    second = [rank_micro_batches(batch, dp_rank=rank, dp_size=2, micro_batch_size=4)[1].tolist() for rank in range(2)]
    assert second == [[8, 9, 10, 11], [12, 13, 14, 15]]
