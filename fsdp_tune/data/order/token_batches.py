"""A global batch cut into micro-batches by the token slots that each takes: its rows × its longest row, padded.

Only who computes which row when is decided here; the rows of a step, and so what it learns, are those of `data/order/permutation.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fsdp_tune.data.order.collate import padded_length
from fsdp_tune.data.order.permutation import order_of
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.store import Int64, RowStore
from fsdp_tune.recipe.schema import Recipe

STEPS_LOOKED_AT = 1000
"""By `filling_lines`: each takes some tenths of a millisecond, and more of them move no digit that is shown."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    slots: int
    """Of one micro-batch on one rank, padding included: a multiple of `max_length`, which no row exceeds."""
    multiple_of: int
    max_length: int

    def widths(self, lengths: Int64) -> list[int]:
        return [padded_length(length, self.multiple_of, self.max_length) for length in lengths.tolist()]


def budget_of(recipe: Recipe) -> TokenBudget | None:
    """None where micro-batches are counted in rows."""
    slots = recipe.training.per_device_train_batch_tokens
    return None if slots is None else TokenBudget(slots, recipe.data.pad_to_multiple_of, recipe.data.max_length)


def token_micro_batches(lengths: Int64, budget: TokenBudget, dp_size: int) -> list[list[Int64]]:
    """[micro-step][rank] → indexes into `lengths`, the rows of one global batch; each index once.

    Longest first, each micro-batch as many of the next rows as it holds: no cut of the rows into micro-batches that keep the budget
    has fewer of them, because one that holds the longest row can hold no more than that many. They are rounded up to whole
    micro-steps of `dp_size`; then the least size that needs no more micro-steps is the one that cuts, so that ranks of a
    micro-step are about equally busy. What is left for the last micro-step is cut once more, by the least size for itself.
    A micro-batch is empty only where there are more of them than rows.
    """
    order = np.argsort(-lengths, kind="stable")
    widths = budget.widths(lengths[order])
    if widths[0] > budget.slots:
        raise ValueError(f"a row of {widths[0]} token slots is beyond a budget of {budget.slots}")
    wanted = -(-len(_starts(widths, budget.slots)) // dp_size) * dp_size
    starts = _evened(widths, budget.slots, wanted)
    last = starts[wanted - dp_size]  # it is there: fewer micro-batches than the fewest, which were rounded up, there cannot be
    starts[wanted - dp_size :] = [last + start for start in _evened(widths[last:], budget.slots, dp_size)]
    cut = _split_largest(list(pairwise([*starts, len(widths)])), widths, wanted)
    taken = [order[start:end] for start, end in cut] + [order[:0]] * (wanted - len(cut))
    return [taken[at : at + dp_size] for at in range(0, wanted, dp_size)]


def _starts(widths: list[int], slots: int) -> list[int]:
    """Where micro-batches of at most `slots` begin; `widths` fall, and the first is the width of all that join it."""
    found: list[int] = []
    at = 0
    while at < len(widths):
        found.append(at)
        at += slots // widths[at]
    return found


def _evened(widths: list[int], enough: int, micro_batches: int) -> list[int]:
    """Where micro-batches begin, of the smallest size that makes at most so many; `enough` slots do."""
    low, high = widths[0], enough
    while low < high:
        middle = (low + high) // 2
        if len(_starts(widths, middle)) <= micro_batches:
            high = middle
        else:
            low = middle + 1
    return _starts(widths, high)


def _split_largest(cut: list[tuple[int, int]], widths: list[int], wanted: int) -> list[tuple[int, int]]:
    """Halves the largest until there are as many as are wanted anyway, or each is one row; in the order of `widths`."""
    largest = [(-(end - start) * widths[start], start, end) for start, end in cut if end - start > 1]
    heapq.heapify(largest)
    done = [(start, end) for start, end in cut if end - start == 1]
    while largest and len(largest) + len(done) < wanted:
        _, start, end = heapq.heappop(largest)
        middle = start + (end - start) // 2
        for part in ((start, middle), (middle, end)):
            if part[1] - part[0] > 1:
                heapq.heappush(largest, (-(part[1] - part[0]) * widths[part[0]], *part))
            else:
                done.append(part)
    return sorted([*done, *((start, end) for _, start, end in largest)])


@dataclass(frozen=True, slots=True)
class Filling:
    """How full the micro-batches of an epoch's steps are."""

    micro_steps: tuple[int, ...]
    """Of each step that was looked at."""
    tokens: int
    slots: int
    held_slots: int
    """Slots if every rank had the most of any in its micro-step: what the others wait for counts."""

    def __str__(self) -> str:
        least, most = min(self.micro_steps), max(self.micro_steps)
        mean = sum(self.micro_steps) / len(self.micro_steps)
        told = f"{least} micro-batch{'' if least == 1 else 'es'} a step and rank"
        if most > least:
            told = f"{least} to {most} micro-batches a step and rank, {mean:.1f} on average"
        return f"{told}; {self.tokens / self.slots:.1%} of the slots are real tokens"


def filling(batches: Iterator[list[list[Int64]]], budget: TokenBudget) -> Filling:
    """`batches`: of each step the lengths in each micro-batch, by [micro-step][rank]; an empty one is a row of padding."""
    micro_steps: list[int] = []
    tokens = slots = held = 0
    for step in batches:
        micro_steps.append(len(step))
        for ranks in step:
            sizes = [max(1, len(rows)) * budget.widths(rows.max(initial=1, keepdims=True))[0] for rows in ranks]
            tokens += sum(int(rows.sum()) for rows in ranks)
            slots, held = slots + sum(sizes), held + max(sizes) * len(ranks)
    return Filling(tuple(micro_steps), tokens, slots, held)


def filling_lines(recipe: Recipe, prepared: Prepared) -> list[str]:
    """What a budget makes of the first epoch, said before it trains; nothing where the recipe has none."""
    budget = budget_of(recipe)
    if budget is None:
        return []
    lengths, size = RowStore(prepared.train).lengths, recipe.global_batch_size
    order = order_of(recipe, lengths, epoch=0)
    steps = max(1, len(order) // size)
    looked_at = np.unique(np.linspace(0, steps - 1, min(steps, STEPS_LOOKED_AT)).astype(np.int64))
    of_steps = (lengths[order[step * size : (step + 1) * size]] for step in looked_at.tolist())
    cut = ([[rows[taken] for taken in ranks] for ranks in token_micro_batches(rows, budget, recipe.data_size)] for rows in of_steps)
    return [f"{budget.slots:,} token slots at most: {filling(cut, budget)}"]
