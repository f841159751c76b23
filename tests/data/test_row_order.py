"""Which rows the steps of a run train, over all its attempts: each row of an epoch exactly once, whatever the
global batches were."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from fsdp_tune.data.batches import epoch_order
from fsdp_tune.data.row_order import Attempt, RowOrder, continued

SEED = 3


@functools.cache
def lengths_of(rows: int) -> np.ndarray:
    return np.array([1 + row * 7 % 11 for row in range(rows)], np.int64)


@functools.cache
def permutation(rows: int, kept: bytes, epoch: int, grouped: bool, size: int) -> np.ndarray:
    """The order of an epoch, computed once for all sequences."""
    lengths = np.frombuffer(kept, np.int64)
    return epoch_order(
        lengths, seed=SEED, epoch=epoch, shuffle=True, group_by_length=grouped, global_batch_size=size
    )


def order_of(
    rows: int,
    *attempts: tuple[int, int],
    grouped: bool = True,
    removed: list[tuple[int, list[int]]] | None = None,
) -> RowOrder:
    def order(epoch: int, lengths: np.ndarray, size: int) -> np.ndarray:
        return permutation(len(lengths), lengths.tobytes(), epoch, grouped, size)

    of_steps = [(step, np.array(each, np.int64)) for step, each in removed or []]
    return RowOrder(order, lengths_of(rows), [Attempt(*each) for each in attempts], of_steps)


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the model of a run: its record, and the rows of each of its steps."""

    attempts: tuple[Attempt, ...] = ()
    removed: list[tuple[int, list[int]]] = field(default_factory=list)
    trained: list[list[int]] = field(default_factory=list)


def train(
    dice: random.Random, saved: Saved, rows: int, *, grouped: bool, steps: int, skips: bool
) -> tuple[RowOrder, list[Saved]]:
    """One attempt from a checkpoint. Returns its order and the checkpoints that it writes, one a step."""
    step = len(saved.trained)
    attempts = continued(saved.attempts, step, dice.randint(1, 6))
    gone = {row for _, each in saved.removed for row in each}
    removed = list(saved.removed)
    if skips and dice.random() < 0.3 and len(gone) + 1 < rows:
        removed.append((step, [dice.choice([row for row in range(rows) if row not in gone])]))
    order = order_of(
        rows, *((each.step, each.global_batch_size) for each in attempts), grouped=grouped, removed=removed
    )
    found, trained = [saved], saved.trained
    for at in range(step, step + steps):
        trained = [*trained, order.batch_after(at).tolist()]
        found.append(Saved(attempts, removed, trained))
    return order, found


def check_epochs(order: RowOrder, last: Saved, rows: int, batches: set[int]) -> None:
    """The oracle: a list of the rows of each epoch, which has each row that is not left out."""
    done = len(last.trained)
    for epoch in range(order.locate(done)[0]):
        first, end = order.first_step(epoch), order.first_step(epoch + 1)
        seen = [row for step in last.trained[first:end] for row in step]
        assert len(seen) == len(set(seen)), "no row twice"
        lost = set(range(rows)) - set(seen)
        assert lost <= {row for step, each in last.removed if step <= end for row in each}, "no row never"
        assert not set(seen) & {row for step, each in last.removed if step <= first for row in each}
        assert all(last.trained[first:end]), "no step without rows"
        assert all(len(step) in batches for step in last.trained[first : end - 1])
    assert [order.batch_after(step).tolist() for step in range(done)] == last.trained, (
        "the rows of any step of any attempt"
    )
    epochs = [order.epochs_after(step) for step in range(done + 1)]
    assert epochs == sorted(set(epochs))


def sequence(seed: int) -> None:
    dice = random.Random(seed)
    rows, grouped, skips = dice.randint(1, 14), dice.random() < 0.7, dice.random() < 0.3
    saved = Saved()
    for _ in range(dice.randint(1, 3)):
        _, written = train(dice, saved, rows, grouped=grouped, steps=dice.randint(0, 5), skips=skips)
        saved = dice.choice(written[-2:])  # killed after its last save, or continued from an older checkpoint
    order, written = train(dice, saved, rows, grouped=grouped, steps=dice.randint(1, 8), skips=skips)
    check_epochs(order, written[-1], rows, {each.global_batch_size for each in written[-1].attempts})


@pytest.mark.parametrize(
    "seeds", [range(3_000), pytest.param(range(3_000, 40_000), marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_random_sequences_of_attempts_train_each_row_of_an_epoch_once(seeds: range) -> None:
    for seed in seeds:
        sequence(seed)


@pytest.mark.parametrize(("first", "then", "steps"), [(4, 8, 9), (8, 4, 13 - 4)])
def test_rest_of_an_epoch_is_cut_into_new_batches_in_its_order(first: int, then: int, steps: int) -> None:
    """50 rows, another global batch after step 4: rows 16 to 31 were never trained, or trained twice."""
    order, before = order_of(50, (0, first), (4, then)), order_of(50, (0, first))
    assert order.rows_of(0).tolist() == before.rows_of(0).tolist()
    trained = 4 * first
    batches = [order.batch_after(step).tolist() for step in range(4, order.steps(0))]
    assert [row for rows in batches for row in rows] == before.rows_of(0)[trained:].tolist()
    assert {len(rows) for rows in batches[:-1]} == {then}
    assert order.steps(0) == 4 + math.ceil((50 - trained) / then)
    assert order.rows_of(1).tolist() == order_of(50, (0, then)).rows_of(1).tolist(), (
        "the next epoch has batches of the new size only"
    )
    assert [order.epochs_after(step) for step in (4, 5, order.steps(0))] == [
        trained / 50,
        (trained + then) / 50,
        1.0,
    ]


def test_epochs_count_the_steps_of_each_attempt() -> None:
    order = order_of(50, (0, 4), (4, 8))
    assert [order.total_steps(epochs) for epochs in (1, 2, 3)] == [9, 9 + 7, 9 + 14]
    assert order.total_steps(1.5) == 9 + 4, "half of 7 steps, rounded up as the Trainer rounds"
    # 100 rows: 20 steps of one row, then of 40. A quarter is 25 rows, which step 21 completes; a quarter of
    # the 22 steps are 20 rows.
    assert [order_of(100, (0, 1), (20, 40)).total_steps(share) for share in (0.1, 0.15, 0.25, 0.5, 0.75)] == [
        10,
        15,
        21,
        21,
        22,
    ]


def test_attempt_at_the_border_of_an_epoch_orders_the_next_epoch() -> None:
    order = order_of(12, (0, 4), (3, 6))
    assert (order.steps(0), order.steps(1), order.locate(3)) == (3, 2, (1, 0))
    assert order.rows_of(1).tolist() == order_of(12, (0, 6)).rows_of(1).tolist()


def test_attempts_are_those_of_the_checkpoint_and_not_of_later_ones() -> None:
    first, second = Attempt(0, 4), Attempt(10, 8)
    assert continued((), 0, 4) == (first,)
    assert continued((first,), 10, 8) == (first, second)
    assert continued((first, second), 20, 8) == (first, second), "nothing has changed"
    assert continued((first, second), 5, 8) == (first, Attempt(5, 8)), "steps 6 to 10 are trained again"
    assert continued((first, second), 10, 2) == (first, Attempt(10, 2)), (
        "the attempt that started there trained nothing"
    )
    assert continued((first, second), 0, 2) == (Attempt(0, 2),)
    assert continued((), 7, 2) == (Attempt(0, 2),), "unknown steps are counted with the batch in force"
    for wrong in ([], [Attempt(1, 4)], [first, first], [first, second, Attempt(5, 2)]):
        with pytest.raises(ValueError, match="increasing"):
            order_of(5, *((each.step, each.global_batch_size) for each in wrong))
