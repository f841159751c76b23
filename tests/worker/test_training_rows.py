"""The rows of a step do not depend on how many ranks share them, and no row is lost or read twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.data.batches import epoch_order
from fsdp_tune.data.row_order import Attempt, RowOrder, continued
from fsdp_tune.data.store import Row
from fsdp_tune.data.token_budget import TokenBudget
from fsdp_tune.worker.rows.batches import FILLER, NOTHING, ByTokens, Collator, MicroBatches, eval_batches

SPLITS = [(1, 8, 1), (1, 2, 4), (2, 4, 1), (2, 1, 4), (4, 2, 1), (4, 1, 2), (8, 1, 1)]
"""(ranks, micro-batch, accumulation) of one global batch of 8."""


def order_of(rows: int) -> RowOrder:
    def order(epoch: int, lengths: np.ndarray, size: int) -> np.ndarray:
        return epoch_order(
            lengths, seed=3, epoch=epoch, shuffle=True, group_by_length=True, global_batch_size=size
        )

    return RowOrder(order, np.arange(1, rows + 1, dtype=np.int64), [Attempt(0, 8)])


def samplers(rows: int, split: tuple[int, int, int]) -> list[MicroBatches]:
    ranks, micro_batch, accumulation = split
    return [
        MicroBatches(
            order_of(rows),
            data_rank=rank,
            data_size=ranks,
            micro_batch=micro_batch,
            accumulation=accumulation,
        )
        for rank in range(ranks)
    ]


def steps(rows: int, split: tuple[int, int, int], epoch: int) -> list[list[int]]:
    """The rows of each step over all ranks, sorted; asserts that ranks go in step."""
    ranks = samplers(rows, split)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in ranks]
    assert len({len(mine) for mine in batches}) == 1, (
        "a rank with fewer micro-batches would leave the others waiting"
    )
    assert all(len(mine) == len(sampler) for mine, sampler in zip(batches, ranks, strict=True)), (
        "__len__ must tell the truth"
    )
    accumulation = split[2]
    found = []
    for start in range(0, len(batches[0]), accumulation):
        step = [
            row
            for mine in batches
            for micro_batch in mine[start : start + accumulation]
            for row in micro_batch
        ]
        found.append(sorted(row for row in step if row != FILLER))
    return found


@given(rows=st.integers(1, 60), epoch=st.integers(0, 3))
def test_every_split_of_a_global_batch_has_the_same_steps(rows: int, epoch: int) -> None:
    first, *others = (steps(rows, split, epoch) for split in SPLITS)
    assert all(other == first for other in others)
    assert sorted(row for step in first for row in step) == list(range(rows)), "each row once an epoch"


@given(rows=st.integers(1, 60), step=st.integers(0, 40))
def test_epochs_after_a_step_do_not_depend_on_the_number_of_ranks(rows: int, step: int) -> None:
    found = {sampler.epochs_after(step) for split in SPLITS for sampler in samplers(rows, split)}
    assert len(found) == 1
    assert samplers(rows, SPLITS[0])[0].epochs_after(-(-rows // 8)) == 1.0
    assert found.pop() < samplers(rows, SPLITS[0])[0].epochs_after(step + 1)


@given(rows=st.integers(1, 60), epoch=st.integers(0, 3))
def test_rows_of_all_ranks_are_those_of_the_step(rows: int, epoch: int) -> None:
    for step, found in enumerate(steps(rows, SPLITS[3], epoch)):
        order = order_of(rows)
        assert sorted(order.batch_after(order.first_step(epoch) + step)) == found


def test_epochs_have_different_reproducible_orders() -> None:
    [sampler] = samplers(40, (1, 8, 1))
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]


LONGEST_ROWS = 2
BUDGET = TokenBudget(slots=LONGEST_ROWS * 64, multiple_of=8, max_length=64)


def by_tokens(rows: int, ranks: int) -> list[MicroBatches]:
    """Of the same global batches of 8 as `samplers`."""
    lengths = np.arange(1, rows + 1, dtype=np.int64)
    kinds = {"micro_batch": LONGEST_ROWS, "accumulation": -(-8 // (LONGEST_ROWS * ranks))}
    cut = ByTokens(BUDGET, lengths)
    return [
        MicroBatches(order_of(rows), data_rank=rank, data_size=ranks, by_tokens=cut, **kinds)
        for rank in range(ranks)
    ]


@given(rows=st.integers(1, 60), ranks=st.integers(1, 5), epoch=st.integers(0, 2))
def test_token_budget_has_equal_micro_steps_on_all_ranks(rows: int, ranks: int, epoch: int) -> None:
    each = by_tokens(rows, ranks)
    for sampler in each:
        sampler.set_epoch(epoch)
    places = [list(sampler) for sampler in each]
    assert {len(mine) for mine in places} == {len(each[0])}, (
        "__len__ must tell the truth, and ranks go in step"
    )
    for taken in zip(*places, strict=True):
        assert len({bool(rows_of_rank) for rows_of_rank in taken}) == 1, (
            "a place is empty on every rank or on none"
        )
    of_rows = steps(rows, (1, 8, 1), epoch)
    assert (each[0].order.steps(epoch), each[0].global_batch) == (len(of_rows), 8)
    for step, wanted in enumerate(of_rows):
        assert sorted(row for sampler in each for row in sampler.rows_of_step(step)) == wanted
        at = step * -(-8 // (LONGEST_ROWS * ranks))
        mine = places[0][at : at + -(-len(wanted) // (LONGEST_ROWS * ranks))]
        assert mine == sorted(mine, key=bool), (
            "empty places come first: a step ends with its last micro-batch, which reduces"
        )
        assert mine[-1]


@given(rows=st.integers(0, 40), ranks=st.integers(1, 5), micro_batch=st.integers(1, 4))
def test_evaluation_reads_every_row_once_on_any_number_of_ranks(
    rows: int, ranks: int, micro_batch: int
) -> None:
    each = [
        eval_batches(rows, data_rank=rank, data_size=ranks, micro_batch=micro_batch) for rank in range(ranks)
    ]
    assert len({len(batches) for batches in each}) == 1
    assert all(0 < len(batch) <= micro_batch for batches in each for batch in batches)
    read = [row for batches in each for batch in batches for row in batch if row != FILLER]
    assert sorted(read) == list(range(rows))


def row(length: int, row_id: int = 0) -> Row:
    ids = np.arange(length, dtype=np.int32)
    labels = ids.copy()
    labels[0] = -100
    return Row(ids, labels, (length,), row_id)


def test_filler_batch_is_padding_without_targets() -> None:
    batch = Collator(pad_token_id=9, multiple_of=8)([None])
    assert (batch.row_ids, batch.tokens, batch.supervised_tokens) == ((), 0, 0)
    assert batch.tensors["input_ids"].tolist() == [[9] * 8]


def test_batch_counts_tokens_without_padding_and_targets_without_the_first() -> None:
    batch = Collator(pad_token_id=0, multiple_of=8)([row(3, 7), row(10, 2)])
    assert batch.tensors["input_ids"].shape == (2, 16)
    assert (batch.row_ids, batch.tokens, batch.supervised_tokens) == ((7, 2), 13, 2 + 9)


def test_batches_carry_no_attention_mask() -> None:
    # An all-ones mask would switch off what keeps packed examples apart (transformers#46634).
    batch = Collator(pad_token_id=0, multiple_of=8)([row(3)])
    assert set(batch.tensors) == {"input_ids", "labels"}
    assert all(tensor.dtype == torch.int64 for tensor in batch.tensors.values())


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_yields_batches_in_sampler_order(workers: int, tmp_path) -> None:
    from fsdp_tune.data.store import RowStore
    from fsdp_tune.worker.rows.batches import loader
    from tests.parity.store import make_store

    store = RowStore(make_store(tmp_path / "store") / "train")
    [sampler] = samplers(40, (1, 2, 4))
    found = [
        batch.row_ids for batch in loader(store, sampler, Collator(0, 8), workers=workers, pin_memory=False)
    ]
    assert found == [tuple(rows) for rows in sampler]


@pytest.mark.parametrize("workers", [0, 1])
def test_empty_slot_yields_nothing_batch(workers: int, tmp_path) -> None:
    from fsdp_tune.data.store import RowStore
    from fsdp_tune.worker.rows.batches import loader
    from tests.parity.store import make_store

    store = RowStore(make_store(tmp_path / "store") / "train")
    found = list(loader(store, [[], [0, 1], [FILLER]], Collator(0, 8), workers=workers, pin_memory=False))  # type: ignore[arg-type]
    assert [bool(batch.tensors) for batch in found] == [False, True, True]
    assert found[0] == NOTHING


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_does_not_advance_dropout_generator(workers: int, tmp_path) -> None:
    """With processes it would draw once per launch, so that a run resumed between two epochs had other masks
    than one that was not."""
    from fsdp_tune.data.store import RowStore
    from fsdp_tune.worker.rows.batches import loader
    from tests.parity.store import make_store

    store = RowStore(make_store(tmp_path / "store") / "train")
    before = torch.get_rng_state()
    list(loader(store, [[0], [1]], Collator(0, 8), workers=workers, pin_memory=False))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


@given(
    rows=st.integers(1, 40),
    before=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), max_size=3),
    ranks=st.integers(1, 3),
    micro_batch=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    by_tokens=st.booleans(),
)
def test_places_of_a_resumed_epoch_are_those_that_the_trainer_skips_and_counts(
    rows: int, before: list[tuple[int, int]], ranks: int, micro_batch: int, accumulation: int, by_tokens: bool
) -> None:
    """`Trainer._run_epoch` skips (steps of the epoch × accumulation) places, then takes `accumulation` of
    them a step."""
    attempts: tuple[Attempt, ...] = ()
    step = 0
    for steps_of_attempt, size in before:
        attempts = continued(attempts, step, size)
        step += steps_of_attempt
    attempts = continued(attempts, step, ranks * micro_batch * accumulation)
    lengths = np.arange(1, rows + 1, dtype=np.int64)

    def order_of_epoch(epoch: int, of: np.ndarray, size: int) -> np.ndarray:
        return epoch_order(
            of, seed=3, epoch=epoch, shuffle=True, group_by_length=True, global_batch_size=size
        )

    order = RowOrder(order_of_epoch, lengths, attempts)
    cut = (
        ByTokens(TokenBudget(slots=micro_batch * 64, multiple_of=8, max_length=64), lengths)
        if by_tokens
        else None
    )
    each = [
        MicroBatches(
            order,
            data_rank=rank,
            data_size=ranks,
            micro_batch=micro_batch,
            accumulation=accumulation,
            by_tokens=cut,
        )
        for rank in range(ranks)
    ]
    epoch, index = order.locate(step)
    for sampler in each:
        sampler.set_epoch(epoch)
    places = [list(sampler) for sampler in each]
    assert {len(mine) for mine in places} == {len(each[0])}
    assert -(-len(each[0]) // accumulation) == order.steps(epoch), (
        "the Trainer counts the steps of an epoch by its places"
    )
    for at in range(index, order.steps(epoch)):
        taken = [mine[at * accumulation : (at + 1) * accumulation] for mine in places]
        seen = sorted(
            row for mine in taken for micro_batch_rows in mine for row in micro_batch_rows if row != FILLER
        )
        assert seen == sorted(order.batch_after(order.first_step(epoch) + at))
