"""The global batches of a run: the rows of each step, over all attempts of the run.

The position in the data follows from the record of the attempts and of the rows that were left out, not from
the step and the global batch in force. So a run that is resumed with another global batch trains each row of
the epoch exactly once.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from fsdp_tune.data.batches import order_of
from fsdp_tune.data.store import Int64
from fsdp_tune.recipe.schema.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start of a run with a global batch other than before."""

    step: int
    """Completed steps of the run when it started."""
    global_batch_size: int
    """Rows of each of its steps but the last of an epoch."""


def continued(attempts: Sequence[Attempt], step: int, global_batch_size: int) -> tuple[Attempt, ...]:
    """Return the attempts of a run that continues after `step` steps with this global batch.

    `attempts` are those before; later ones are left out, since their steps are trained again. If there are
    none, the steps before are counted with the same global batch.
    """
    before = [each for each in attempts if each.step < step]
    if before and before[-1].global_batch_size == global_batch_size:
        return tuple(before)
    return (*before, Attempt(step if before else 0, global_batch_size))


Removed = tuple[int, Int64]
"""(step, rows): rows that are left out of all global batches after this many steps."""


@dataclass(frozen=True, slots=True)
class EpochPart:
    """Consecutive steps of an epoch with the same global batch."""

    step: int
    """Steps of the epoch before it."""
    row: int
    """Rows of the epoch before it."""
    global_batch: int

    def steps(self, rows: int) -> int:
        """Return the number of its steps if it is the last part of an epoch of `rows`."""
        return math.ceil((rows - self.row) / self.global_batch)


@dataclass(frozen=True, slots=True)
class Epoch:
    """The rows of an epoch in the order in which they are trained, and how they are cut into steps."""

    rows: Int64
    parts: tuple[EpochPart, ...]

    @property
    def steps(self) -> int:
        return self.parts[-1].step + self.parts[-1].steps(len(self.rows))

    def rows_before(self, step: int) -> int:
        """Return the number of rows that the first `step` steps of the epoch train."""
        part = next(each for each in reversed(self.parts) if each.step <= step)
        return min(part.row + (step - part.step) * part.global_batch, len(self.rows))

    def batch(self, step: int) -> Int64:
        """Return the rows of a step, counted from 0 in the epoch."""
        return self.rows[self.rows_before(step) : self.rows_before(step + 1)]


class RowOrder:
    """The global batches of a run: which rows of each epoch, in which order. A pure function of its
    arguments, on every rank.

    An epoch starts with the rows that are not left out yet, in the order of `order` for the global batch at
    that step. Where another global batch starts within it, or more rows are removed, the rows of the steps
    before stay, and the other rows close up and are cut into the new global batches. So an epoch may have
    fewer or more steps than another.
    """

    def __init__(
        self,
        order: Callable[[int, Int64, int], Int64],
        lengths: Int64,
        attempts: Sequence[Attempt],
        removed: Sequence[Removed] = (),
    ) -> None:
        """`order(epoch, lengths, global_batch)` returns a permutation of the indices of `lengths`, the
        lengths of all rows of the store.

        `attempts` has increasing steps from 0 on; the last one is the current one.
        """
        if [each.step for each in attempts] != sorted({0, *(each.step for each in attempts)}):
            raise ValueError(f"the attempts of a run start at step 0 and at increasing steps: {attempts}")
        self._order, self._lengths, self._attempts = order, lengths, tuple(attempts)
        self._removed = sorted(removed, key=lambda each: each[0])
        self._changes = sorted({*(each.step for each in attempts), *(step for step, _ in removed)})
        self._first_steps = [0]
        self.epoch = lru_cache(maxsize=1)(self._epoch)  # sorting millions of rows takes seconds

    @property
    def global_batch(self) -> int:
        """Rows of each step of the current attempt."""
        return self._attempts[-1].global_batch_size

    def _batch_at(self, step: int) -> int:
        return next(each.global_batch_size for each in reversed(self._attempts) if each.step <= step)

    def _epoch(self, epoch: int) -> Epoch:
        first = self.first_step(epoch)
        parts = [EpochPart(0, 0, self._batch_at(first))]
        rows = self._rows_at(first, epoch, parts[0].global_batch)
        for change in self._changes:
            last = parts[-1]
            at = last.row + (change - first - last.step) * last.global_batch
            if change <= first or at >= len(rows):
                continue
            for step, removed in self._removed:
                if step == change:
                    rows = np.concatenate([rows[:at], rows[at:][~np.isin(rows[at:], removed)]])
            if at < len(rows) and (batch := self._batch_at(change)) != last.global_batch:
                parts.append(EpochPart(change - first, at, batch))
        return Epoch(rows, tuple(parts))

    def _rows_at(self, step: int, epoch: int, global_batch: int) -> Int64:
        """Return the rows of an epoch that starts after `step` steps, in their order."""
        if not self._removed:
            return self._order(epoch, self._lengths, global_batch)
        gone = np.zeros(len(self._lengths), bool)
        for at, removed in self._removed:
            if at <= step:
                gone[removed] = True
        kept = np.flatnonzero(~gone)
        return kept[self._order(epoch, self._lengths[kept], global_batch)]

    def rows_of(self, epoch: int) -> Int64:
        """Return the rows of an epoch in their order."""
        return self.epoch(epoch).rows

    def steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        return self.first_step(epoch + 1) - self.first_step(epoch)

    def first_step(self, epoch: int) -> int:
        """Return the number of steps before an epoch."""
        while len(self._first_steps) <= epoch:
            self._first_steps.append(self._first_steps[-1] + self._count(len(self._first_steps) - 1))
        return self._first_steps[epoch]

    def _count(self, epoch: int) -> int:
        first = self._first_steps[epoch]
        rows = len(self._lengths) - sum(len(removed) for at, removed in self._removed if at <= first)
        steps = math.ceil(rows / self._batch_at(first))
        if any(first < at < first + steps for at in self._changes):
            steps = self.epoch(epoch).steps
        return max(steps, 1)

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, steps of it) after `step` steps of the run."""
        while self._first_steps[-1] <= step:
            self.first_step(len(self._first_steps))
        epoch = bisect.bisect_right(self._first_steps, step) - 1
        return epoch, step - self._first_steps[epoch]

    def batch_after(self, step: int) -> Int64:
        """Return the rows of the global batch after `step` steps of the run."""
        epoch, index = self.locate(step)
        return self.epoch(epoch).batch(index)

    def epochs_after(self, step: int) -> float:
        """Return the epochs that `step` steps of the run train: complete ones, and the share of rows of the
        next."""
        epoch, index = self.locate(step)
        if not index:
            return float(epoch)
        found = self.epoch(epoch)
        return epoch + found.rows_before(index) / len(found.rows)

    def total_steps(self, epochs: float) -> int:
        """Return the steps of a number of epochs, which need not be whole, rounded as the Trainer rounds
        them."""
        whole = math.floor(epochs)
        first = self.first_step(whole)
        if epochs == whole:
            return first
        of_epoch = self.steps(whole)
        if not any(first < at < first + of_epoch for at in self._changes):
            return first + math.ceil(epochs * of_epoch) - whole * of_epoch
        # A share of steps that differ in their rows would not be that share of the rows.
        found = self.epoch(whole)
        last = found.parts[-1]
        wanted = (epochs - whole) * (last.row + last.steps(len(found.rows)) * last.global_batch)
        part = next(each for each in reversed(found.parts) if each.row < wanted)
        return first + part.step + math.ceil((wanted - part.row) / part.global_batch)


def row_order(
    recipe: Recipe, lengths: Int64, attempts: Sequence[Attempt] = (), removed: Sequence[Removed] = ()
) -> RowOrder:
    """Return the global batches of a resolved recipe. `lengths` are those of all rows of the store.

    `attempts` empty: all steps have the global batch of the recipe.
    """
    return RowOrder(
        partial(order_of, recipe), lengths, attempts or continued((), 0, recipe.global_batch_size), removed
    )
