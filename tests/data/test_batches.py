"""Rows become micro-batches: the order of an epoch, and micro-batches by token slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.data.batches import WINDOW_ROWS, epoch_order, rank_micro_batches, splitmix64
from fsdp_tune.data.collate import collate
from fsdp_tune.data.store import Int32, Int64, Row
from fsdp_tune.data.token_budget import TokenBudget, filling, filling_lines, token_micro_batches
from tests.parity.store import make_store
from tests.planner.recipes import resolved


def order(
    rows: int, *, seed: int = 42, epoch: int = 0, shuffle: bool = True, group: bool = False, batch: int = 8
) -> Int64:
    lengths = np.random.default_rng(7).integers(1, 1000, rows)
    return epoch_order(
        lengths, seed=seed, epoch=epoch, shuffle=shuffle, group_by_length=group, global_batch_size=batch
    )


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 5), st.booleans(), st.integers(1, 40))
def test_epoch_contains_each_row_once(rows: int, seed: int, epoch: int, group: bool, batch: int) -> None:
    assert sorted(order(rows, seed=seed, epoch=epoch, group=group, batch=batch)) == list(range(rows))


def test_order_is_fixed_across_versions() -> None:
    """A run that is resumed after an upgrade of numpy or of this package must continue the order that it
    began."""
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
        found = epoch_order(
            lengths, seed=1, epoch=0, shuffle=True, group_by_length=group, global_batch_size=32
        )
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
    ungrouped = epoch_order(
        lengths, seed=5, epoch=1, shuffle=True, group_by_length=False, global_batch_size=batch
    )
    assert found[whole:].tolist() == ungrouped[whole:].tolist()


@pytest.mark.parametrize("rows", [16, 13, 1])
@pytest.mark.parametrize(("dp_size", "micro"), [(1, 16), (16, 1), (2, 4), (4, 2), (3, 2)])
def test_ranks_split_global_batch_without_gap_or_overlap(rows: int, dp_size: int, micro: int) -> None:
    batch = np.arange(100, 100 + rows)
    by_rank = [
        rank_micro_batches(batch, dp_rank=rank, dp_size=dp_size, micro_batch_size=micro)
        for rank in range(dp_size)
    ]
    assert len({len(micro_batches) for micro_batches in by_rank}) == 1, (
        "every rank takes part in every micro-step"
    )
    assert (
        sorted(row for micro_batches in by_rank for taken in micro_batches for row in taken) == batch.tolist()
    )
    assert all(len(taken) <= micro for micro_batches in by_rank for taken in micro_batches)


def test_micro_step_spans_neighbouring_rows_of_all_ranks() -> None:
    batch = np.arange(16)
    second = [
        rank_micro_batches(batch, dp_rank=rank, dp_size=2, micro_batch_size=4)[1].tolist()
        for rank in range(2)
    ]
    assert second == [[8, 9, 10, 11], [12, 13, 14, 15]]


MAX_LENGTH = 40
some_lengths = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=60).map(
    lambda values: np.array(values, np.int64)
)
budgets = st.builds(
    TokenBudget,
    st.integers(1, 6).map(lambda rows: rows * MAX_LENGTH),
    st.sampled_from([1, 8, 64]),
    st.just(MAX_LENGTH),
)
sizes = st.integers(1, 5)


def slots_of(lengths: Int64, budget: TokenBudget) -> int:
    """What the collator makes of such rows."""
    empty: list[Int32] = [np.zeros(length, np.int32) for length in lengths.tolist()]
    rows = [Row(ids, ids, (len(ids),), 0) for ids in empty]
    return collate(rows, 0, budget.multiple_of, max_length=budget.max_length)["input_ids"].size


@given(some_lengths, budgets, sizes)
def test_each_row_is_in_one_micro_batch_within_budget(
    lengths: Int64, budget: TokenBudget, dp_size: int
) -> None:
    cut = token_micro_batches(lengths, budget, dp_size)
    assert all(len(ranks) == dp_size for ranks in cut), "every rank takes part in every micro-step"
    assert sorted(index for ranks in cut for taken in ranks for index in taken) == list(range(len(lengths)))
    assert all(slots_of(lengths[taken], budget) <= budget.slots for ranks in cut for taken in ranks)


@given(some_lengths, budgets, sizes)
def test_rank_is_empty_only_with_too_few_rows(lengths: Int64, budget: TokenBudget, dp_size: int) -> None:
    cut = token_micro_batches(lengths, budget, dp_size)
    empty = sum(1 for ranks in cut for taken in ranks if not len(taken))
    assert empty == max(0, len(cut) * dp_size - len(lengths))


@given(some_lengths, budgets, sizes)
def test_micro_step_count_is_bounded_by_full_length_rows(
    lengths: Int64, budget: TokenBudget, dp_size: int
) -> None:
    """The places of a step, the accumulation that is printed and the time that is planned rest on it."""
    assert len(token_micro_batches(lengths, budget, dp_size)) <= -(
        -len(lengths) // (budget.slots // MAX_LENGTH * dp_size)
    )


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    for parts in partitions(rows[1:]):
        yield [[rows[0]], *parts]
        for at in range(len(parts)):
            yield [*parts[:at], [rows[0], *parts[at]], *parts[at + 1 :]]


@given(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=6), budgets, st.integers(1, 2))
def test_micro_step_count_is_minimal(lengths: list[int], budget: TokenBudget, dp_size: int) -> None:
    widths = dict(zip(lengths, budget.widths(np.array(lengths)), strict=True))
    fits = (
        parts
        for parts in partitions(lengths)
        if all(len(part) * widths[max(part)] <= budget.slots for part in parts)
    )
    fewest = min(len(parts) for parts in fits)
    assert len(token_micro_batches(np.array(lengths), budget, dp_size)) == -(-fewest // dp_size)


def test_token_micro_batches_are_fixed_across_versions() -> None:
    """Ranks cut by themselves: with another answer on one of them the others would wait for it."""
    lengths = np.array([3, 40, 9, 9, 17, 31, 2, 40, 5, 12])
    cut = token_micro_batches(lengths, TokenBudget(80, 8, 40), 2)
    assert [[taken.tolist() for taken in ranks] for ranks in cut] == [
        [[1, 7], [5, 4]],
        [[9, 2, 3], [8, 0, 6]],
    ]


def test_row_beyond_budget_raises() -> None:
    with pytest.raises(ValueError, match="a row of 41 token slots exceeds the budget of 40"):
        token_micro_batches(np.array([41]), TokenBudget(40, 8, 40), 1)


def like_gsm8k(rows: int) -> Int64:
    """Lengths with GSM8K's median and tail."""
    return np.clip(np.random.default_rng(0).lognormal(4.9, 0.45, rows), 20, 512).astype(np.int64)


@pytest.mark.parametrize("grouped", [False, True])
def test_token_budget_fills_more_slots_in_fewer_micro_steps_than_rows(*, grouped: bool) -> None:
    lengths, budget, dp_size, size = like_gsm8k(4000), TokenBudget(4096, 8, 512), 2, 64
    order = epoch_order(
        lengths, seed=1, epoch=0, shuffle=True, group_by_length=grouped, global_batch_size=size
    )
    steps = [lengths[order[at : at + size]] for at in range(0, len(order) // size * size, size)]
    by_tokens = filling(
        (
            [[rows[taken] for taken in ranks] for ranks in token_micro_batches(rows, budget, dp_size)]
            for rows in steps
        ),
        budget,
    )
    by_rows = filling(
        ([[rows[at : at + 8], rows[at + 8 : at + 16]] for at in range(0, size, 16)] for rows in steps), budget
    )
    assert by_tokens.tokens == by_rows.tokens
    assert set(by_rows.micro_steps) == {4}
    assert sum(by_tokens.micro_steps) < 0.6 * sum(by_rows.micro_steps)
    assert by_tokens.slots < (1.01 if grouped else 0.8) * by_rows.slots
    assert by_tokens.held_slots < 1.03 * by_tokens.slots, "ranks of a micro-step take about as many slots"


def test_steps_of_a_token_budget_are_reported_before_the_epoch_starts(tmp_path: Path) -> None:
    train = make_store(tmp_path / "store") / "train"
    recipe = resolved(
        gpus=2,
        global_batch=16,
        micro_batch=2,
        data={"max_length": 32},
        training={"per_device_train_batch_tokens": 64},
    )
    assert filling_lines(recipe, train) == [
        "64 token slots at most: 1 to 4 micro-batches a step and rank, 2.8 on average; 78.6% of the "
        "slots are real tokens"
    ]
    assert (
        filling_lines(resolved(gpus=2, global_batch=16, micro_batch=2, data={"max_length": 32}), train) == []
    )
