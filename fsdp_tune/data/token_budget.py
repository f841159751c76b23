"""Divide a global batch into micro-batches by token slots: the rows of a micro-batch × its longest row,
padded.

This only assigns rows to ranks and micro-steps. The rows of a step, and so its update, follow from
`data/batches.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from fsdp_tune.data.batches import order_of
from fsdp_tune.data.collate import padded_length
from fsdp_tune.data.store import Int64, RowStore
from fsdp_tune.recipe.schema.recipe import Recipe

SAMPLED_STEPS = 1000
"""Largest number of steps that `filling_lines` samples: each takes tenths of a millisecond, and more do not
change the shown digits."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    slots: int
    """Token slots of one micro-batch on one rank, padding included: a multiple of `max_length`, which no row
    exceeds."""
    multiple_of: int
    max_length: int

    def widths(self, lengths: Int64) -> list[int]:
        return [padded_length(length, self.multiple_of, self.max_length) for length in lengths.tolist()]


def budget_of(recipe: Recipe) -> TokenBudget | None:
    """Return the token budget of a recipe; None if it sets micro-batches in rows."""
    slots = recipe.training.per_device_train_batch_tokens
    return (
        None if slots is None else TokenBudget(slots, recipe.data.pad_to_multiple_of, recipe.data.max_length)
    )


def token_micro_batches(lengths: Int64, budget: TokenBudget, dp_size: int) -> list[list[Int64]]:
    """Return, for [micro-step][rank], indices into `lengths`, the rows of one global batch; each index occurs
    once.

    Rows are taken longest first, and each micro-batch takes as many of the next rows as fit. No division
    within the budget has fewer micro-batches, because the one with the longest row cannot hold more rows.
    Their number is rounded up to a multiple of `dp_size`. Then the smallest size that needs no more
    micro-steps is used for the division, so that the ranks of a micro-step have about equal work. The rows of
    the last micro-step are divided again by the smallest size that suffices for them.
    A micro-batch is empty only if there are more micro-batches than rows.
    """
    order = np.argsort(-lengths, kind="stable")
    widths = budget.widths(lengths[order])
    if widths[0] > budget.slots:
        raise ValueError(f"a row of {widths[0]} token slots exceeds the budget of {budget.slots}")
    wanted = -(-len(_starts(widths, budget.slots)) // dp_size) * dp_size
    starts = _evened(widths, budget.slots, wanted)
    # in range: `wanted` is the smallest possible number of micro-batches, rounded up to a multiple of
    # `dp_size`
    last = starts[wanted - dp_size]
    starts[wanted - dp_size :] = [last + start for start in _evened(widths[last:], budget.slots, dp_size)]
    cut = _split_largest(list(pairwise([*starts, len(widths)])), widths, wanted)
    taken = [order[start:end] for start, end in cut] + [order[:0]] * (wanted - len(cut))
    return [taken[at : at + dp_size] for at in range(0, wanted, dp_size)]


def _starts(widths: list[int], slots: int) -> list[int]:
    """Return the first row of each micro-batch of at most `slots`. `widths` descend, so the first row sets
    the width of its micro-batch."""
    found: list[int] = []
    at = 0
    while at < len(widths):
        found.append(at)
        at += slots // widths[at]
    return found


def _evened(widths: list[int], enough: int, micro_batches: int) -> list[int]:
    """Return the first row of each micro-batch for the smallest size that gives at most `micro_batches`;
    `enough` slots suffice."""
    low, high = widths[0], enough
    while low < high:
        middle = (low + high) // 2
        if len(_starts(widths, middle)) <= micro_batches:
            high = middle
        else:
            low = middle + 1
    return _starts(widths, high)


def _split_largest(cut: list[tuple[int, int]], widths: list[int], wanted: int) -> list[tuple[int, int]]:
    """Halve the largest micro-batch until there are `wanted` of them or each has one row; return them in the
    order of `widths`."""
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
    """Fill of the micro-batches of an epoch."""

    micro_steps: tuple[int, ...]
    """Number of micro-steps, for each sampled step."""
    tokens: int
    slots: int
    held_slots: int
    """Slots if every rank had as many as the largest rank of its micro-step, so that waiting is counted."""

    def __str__(self) -> str:
        least, most = min(self.micro_steps), max(self.micro_steps)
        mean = sum(self.micro_steps) / len(self.micro_steps)
        text = f"{least} micro-batch{'' if least == 1 else 'es'} a step and rank"
        if most > least:
            text = f"{least} to {most} micro-batches a step and rank, {mean:.1f} on average"
        return f"{text}; {self.tokens / self.slots:.1%} of the slots are real tokens"


def filling(batches: Iterator[list[list[Int64]]], budget: TokenBudget) -> Filling:
    """Measure the fill. `batches` has the lengths of each micro-batch by step, [micro-step][rank]; an empty
    one is a row of padding."""
    micro_steps: list[int] = []
    tokens = slots = held = 0
    for step in batches:
        micro_steps.append(len(step))
        for ranks in step:
            sizes = [
                max(1, len(rows)) * budget.widths(rows.max(initial=1, keepdims=True))[0] for rows in ranks
            ]
            tokens += sum(int(rows.sum()) for rows in ranks)
            slots, held = slots + sum(sizes), held + max(sizes) * len(ranks)
    return Filling(tuple(micro_steps), tokens, slots, held)


def filling_lines(recipe: Recipe, train: Path | str) -> list[str]:
    """Describe the micro-batches of the first epoch under the token budget; no lines if it has none. `train`
    is a set of a store."""
    budget = budget_of(recipe)
    if budget is None:
        return []
    lengths, size = RowStore(train).lengths, recipe.global_batch_size
    order = order_of(recipe, 0, lengths)
    steps = max(1, len(order) // size)
    sampled = np.unique(np.linspace(0, steps - 1, min(steps, SAMPLED_STEPS)).astype(np.int64))
    of_steps = (lengths[order[step * size : (step + 1) * size]] for step in sampled.tolist())
    cut = (
        [[rows[taken] for taken in ranks] for ranks in token_micro_batches(rows, budget, recipe.data_size)]
        for rows in of_steps
    )
    return [f"{budget.slots:,} token slots at most: {filling(cut, budget)}"]
