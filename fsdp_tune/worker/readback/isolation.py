"""Check on the live model, before step 1, that a token sees neither later tokens nor other examples of a
packed batch.

A model may take position ids and still ignore where examples end (recurrent layers, attention of its own), an
attention kernel may take them into account for single rows only, and an encoder sees every token of its row.
The loss then looks fine and is wrong. So some tokens of a batch are replaced, and the logits of the others
must not move.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.errors import FailedError, failed_error
from fsdp_tune.core.families import CAUSAL_SWITCHES, expert_count
from fsdp_tune.data.store import Int32, Int64, Row, RowStore
from fsdp_tune.model.internals.transformers_internals import attention_of
from fsdp_tune.model.loading.packing import leak_problem
from fsdp_tune.model.packed_documents import packing_known
from fsdp_tune.model.sequence_parallel import attention_disabled, rows_known, sequence_group_of, shared_rows
from fsdp_tune.model.shard.gathered import outside_step
from fsdp_tune.model.shard.local import bare_class, bare_model
from fsdp_tune.model.step import compute_context, model_inputs
from fsdp_tune.recipe.rules.limits import computes_in_fp8
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.worker.rows.batches import Collator

ROWS_READ = 64


BATCH_TOKENS = 2048
"""Tokens of the probe batch: training may never materialise the logits of long rows, and they may not fit."""


MIN_ROW_TOKENS = 8


# Of the logits' norm. Same shapes, same kernels: the difference is zero, but for experts whose groups change
# in size.
ALLOWED = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}


# One scale for all tokens of a micro-batch: the largest value of one example moves how the others are rounded
# (measured: 5 %).
ALLOWED_WITH_ONE_SCALE = 0.2


@dataclass(frozen=True, slots=True)
class Deviations:
    """Relative L2 distance that logits moved, the largest of all rows."""

    later: float
    """When later tokens of their example changed."""
    packed: float | None
    """The change when other examples of the batch change; None if every row is one example."""
    shared: float | None = None
    """The change when a sequence group shares the rows, at the first tokens of each rank; None if each rank
    has its own rows."""
    elsewhere: float | None = None
    """The change of any later token when the first token changes and attention is disabled; None as for
    `shared`."""


def allowed_deviation(recipe: Recipe) -> float:
    """Return the deviation above which tokens are taken to see each other."""
    one_scale = computes_in_fp8(recipe) and recipe.precision.fp8_recipe == "tensorwise"
    return ALLOWED_WITH_ONE_SCALE if one_scale else ALLOWED[recipe.compute_dtype]


def rows_to_check(store: RowStore, micro_batch: int) -> list[Row]:
    """Return as many rows as a micro-batch has, at least two, cut to two examples of unequal lengths; empty
    if no row is suitable.

    Kernels with variable lengths may be right for one row and wrong for several, or for rows that end where
    others end.
    """
    read = [store[index] for index in range(min(len(store), ROWS_READ))]
    long = [row for row in read if row.lengths and row.lengths[0] > 1]  # a skipped row is empty
    usable = [row for row in long if len(row.lengths) > 1] or long
    count = max(2, micro_batch) if usable else 0
    tokens = max(MIN_ROW_TOKENS, BATCH_TOKENS // max(1, count))
    return [
        _cut(usable[index % len(usable)], tokens, first=tokens * (2 if index % 2 else 1) // 3)
        for index in range(count)
    ]


def packed_row(store: RowStore) -> Row | None:
    """Return the first row of several examples, complete; None if none of the first rows has several.

    A layer may keep apart the first examples of a row alone, or short ones alone, which no cut row shows.
    """
    read = (store[index] for index in range(min(len(store), ROWS_READ)))
    return next((row for row in read if len(row.lengths) > 1), None)


def _cut(row: Row, tokens: int, *, first: int) -> Row:
    """Return the first `first` tokens of the first example, and as many of the second as fit into
    `tokens`."""
    whole, *others = row.lengths
    lengths = [min(whole, first if others else tokens)]
    lengths += [min(length, tokens - lengths[0]) for length in others[:1]]
    starts = (0, whole)
    kept = np.concatenate(
        [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    )
    return Row(row.input_ids[kept], row.labels[kept], tuple(lengths), row.row_id)


def deviations(
    recipe: Recipe,
    wrapped: nn.Module,
    rows: Sequence[Row],
    collator: Collator,
    device: torch.device,
    packed: Row | None = None,
) -> Deviations:
    """Run the live model on `rows` and on changed copies of them, and measure how far the logits of unchanged
    tokens move; collective.

    `packed`: a complete row, over each of whose borders it is measured too, in three forwards of this row.
    """
    ids, was_training = _token_ids(rows, collator.pad_token_id), wrapped.training
    wrapped.eval()
    found = _in_rows(recipe, wrapped, rows, ids, collator, device)
    if packed is not None and packed.lengths != rows[0].lengths:
        over_borders = _moved_over_borders(recipe, wrapped, packed, ids, collator, device)
        found = replace(found, packed=max([found.packed or 0.0, *over_borders]))
    wrapped.train(was_training)
    return found


def _in_rows(
    recipe: Recipe,
    wrapped: nn.Module,
    rows: Sequence[Row],
    ids: Int32,
    collator: Collator,
    device: torch.device,
) -> Deviations:
    """Return the deviations in `rows`, in three forwards."""

    def logits(batch_rows: Sequence[Row], *, complete: bool = False) -> torch.Tensor:
        """`complete`: each rank computes the rows alone, also if it shares them."""
        batch = collator(list(batch_rows))
        tensors = {name: tensor.to(device) for name, tensor in batch.tensors.items()}
        kernel = attention_of(bare_model(wrapped).config)
        known = (
            packing_known(tensors.get("position_ids"), kernel) if complete else rows_known(wrapped, tensors)
        )
        with outside_step(wrapped, device), known, compute_context(recipe, device.type):
            found: torch.Tensor = wrapped(**model_inputs(tensors), use_cache=False).logits
            return found if (shared := shared_rows()) is None else shared.all_tokens(found)

    def moved(
        start_of_changes: Sequence[int], end_of_changes: Sequence[int], watched: Sequence[slice]
    ) -> list[float]:
        spans = zip(rows, start_of_changes, end_of_changes, strict=True)
        changed = logits([_replaced(row, ids, start, end) for row, start, end in spans])
        pairs = [
            (before[index, part].float(), changed[index, part].float()) for index, part in enumerate(watched)
        ]
        return [float((one - other).norm() / one.norm()) for one, other in pairs]

    first, ends = [row.lengths[0] for row in rows], [len(row.input_ids) for row in rows]
    middle = [length // 2 for length in first]
    is_packed = [end > length for length, end in zip(first, ends, strict=True)]
    before = logits(rows)
    after_later = moved(middle, ends, [slice(0, each) for each in middle])
    of_first = (
        moved([0] * len(rows), first, [slice(*span) for span in zip(first, ends, strict=True)])
        if all(is_packed)
        else []
    )
    shared = elsewhere = None
    if (group := sequence_group_of(wrapped)) is not None:
        shared = _moved_at_borders(before, logits(rows, complete=True), group.size(), ends)
        with attention_disabled(wrapped):
            one, other = (
                logits(rows, complete=True),
                logits([_replaced(row, ids, 0, 1) for row in rows], complete=True),
            )
        elsewhere = max(_most_moved(one[index, 1:end], other[index, 1:end]) for index, end in enumerate(ends))
    if not of_first:
        return Deviations(max(after_later), None, shared, elsewhere)
    # What is replaced before the watched tokens of a row is in the rows before it, and the first row has none
    # before it.
    return Deviations(after_later[0], max(*of_first, *after_later[1:]), shared, elsewhere)


def _moved_over_borders(
    recipe: Recipe, wrapped: nn.Module, row: Row, ids: Int32, collator: Collator, device: torch.device
) -> list[float]:
    """Return how far logits move in every second example of a row when those between change, and the other
    way round: over each border of the row.

    One number for each example, or for half of them where an example that changes may move others a little:
    a router's choices, and one scale of fp8 for all tokens. Of ranks that share rows each measures its own
    tokens.
    """
    batch = collator([row])
    width = batch.tensors["input_ids"].shape[1]
    own = _own_tokens(wrapped, width)
    watched = [tokens[(tokens >= own.start) & (tokens < own.stop)] for tokens in _watched(row)]
    at = torch.from_numpy(np.concatenate(watched) - own.start).to(device)
    parts = np.split(np.arange(len(at)), np.cumsum([len(tokens) for tokens in watched])[:-1])
    is_exact = expert_count(bare_model(wrapped).config.get_text_config()) <= 1  # type: ignore[union-attr]
    is_exact = is_exact and not computes_in_fp8(recipe)

    def logits(given: Row) -> torch.Tensor:
        tensors = {name: tensor.to(device) for name, tensor in collator([given]).tensors.items()}
        with (
            outside_step(wrapped, device),
            rows_known(wrapped, tensors),
            compute_context(recipe, device.type),
            _head_only_at(wrapped, at),
        ):
            found: torch.Tensor = wrapped(**model_inputs(tensors), use_cache=False).logits
        return (found if found.shape[1] == len(at) else found[:, at])[0].float()

    before, moved = logits(row), list[float]()
    for first in (0, 1):
        distance = logits(_with_others(row, ids, first)) - before
        kept = [part for part in parts[1 - first :: 2] if len(part)]
        for part in kept if is_exact or not kept else [np.concatenate(kept)]:
            moved.append(float(distance[part].norm() / before[part].norm()))
    return moved


def _own_tokens(wrapped: nn.Module, width: int) -> slice:
    """Return the tokens of rows of this width that this rank computes: all, unless a sequence group shares
    rows."""
    group = sequence_group_of(wrapped)
    if group is None:
        return slice(0, width)
    part = width // group.size()
    return slice(group.rank() * part, (group.rank() + 1) * part)


def _watched(row: Row) -> list[Int64]:
    """Return the indices of the tokens of each example whose logits are compared: all, or as many as
    `BATCH_TOKENS` allows, half of them directly after the border and the others evenly up to its end."""
    starts = np.cumsum([0, *row.lengths[:-1]])
    most = max(2, BATCH_TOKENS // len(row.lengths))
    offsets = [
        np.arange(length)
        if length <= most
        else np.append(np.arange(most // 2), np.linspace(most // 2, length - 1, most - most // 2).astype(int))
        for length in row.lengths
    ]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


@contextlib.contextmanager
def _head_only_at(wrapped: nn.Module, tokens: torch.Tensor) -> Iterator[None]:
    """Within the context the head computes the logits of these tokens of each row: all of them may not
    fit."""
    head: Any = bare_model(wrapped).get_output_embeddings()  # type: ignore[operator]
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda _, given: (given[0][:, tokens], *given[1:]))
    try:
        yield
    finally:
        hook.remove()


def _with_others(row: Row, ids: Int32, first: int) -> Row:
    """`row` with other tokens in every second example, from the example `first` on."""
    starts = np.cumsum([0, *row.lengths])
    for start, end in list(itertools.pairwise(starts.tolist()))[first::2]:
        row = _replaced(row, ids, start, end)
    return row


def _most_moved(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest deviation of a token. `one` and `other`: logits [tokens, vocabulary]."""
    return float(((one - other).float().norm(dim=-1) / one.float().norm(dim=-1)).max())


def _moved_at_borders(shared: torch.Tensor, complete: torch.Tensor, ranks: int, ends: Sequence[int]) -> float:
    """Return the deviation at the first tokens of each rank but the first. A model that ignores other ranks'
    tokens shows it there."""
    width = shared.shape[1] // ranks
    watched = [
        (row, at)
        for row, end in enumerate(ends)
        for start in range(width, end, width)
        for at in range(start, min(start + 4, end))
    ]
    rows, tokens = [row for row, _ in watched], [at for _, at in watched]
    one, other = complete[rows, tokens].float(), shared[rows, tokens].float()
    return float((one - other).norm() / one.norm()) if watched else 0.0


def _token_ids(rows: Sequence[Row], pad_token_id: int) -> Int32:
    """Return two or more ids to replace tokens with, from the rows: the model may treat others (images,
    padding) in its own way."""
    found = np.unique(np.concatenate([row.input_ids for row in rows]))
    found = found[found != pad_token_id]
    return found if len(found) > 1 else np.unique(np.append(found, [0, 1]))


def _replaced(row: Row, ids: Int32, start: int, end: int) -> Row:
    """`row` with another token at each index from `start` to `end`."""
    changed = row.input_ids.copy()
    changed[start:end] = ids[np.searchsorted(ids, changed[start:end], side="right") % len(ids)]
    return Row(changed, row.labels, row.lengths, row.row_id)


# Each rank computes other shapes than for complete rows, so sums are rounded differently in every layer.
ALLOWED_WHEN_SHARED = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}


def not_shareable(found: Deviations, recipe: Recipe, model: PreTrainedModel) -> FailedError | None:
    """Return the error for a model whose rows cannot be shared; None if they can, or need not be."""
    name, why = bare_class(model).__name__, None
    # Same shapes, same kernels: the difference is zero, but for experts whose groups change in size.
    experts = expert_count(model.config.get_text_config()) > 1
    if (found.elsewhere or 0.0) > ALLOWED[recipe.compute_dtype if experts else "fp32"]:
        why = (
            f"{name} has layers besides attention that look across tokens (a convolution or a "
            "recurrence): with attention disabled, "
        )
        why += f"later logits move by {found.elsewhere:.2%} when the first token changes"
    elif (found.shared or 0.0) > ALLOWED_WHEN_SHARED[recipe.compute_dtype]:
        why = (
            f"shared rows change the logits of {name} by {found.shared:.2%}, so it has positions or "
            "masks of its own"
        )
    if why is None:
        return None
    message = f"`parallelism.sp_size: {recipe.topology.sequence}` does not support this model: {why}"
    return failed_error("model-not-shareable", message, hint="--set parallelism.sp_size=1")


def not_isolated(deviation: float, model_name: str, config: PreTrainedConfig) -> FailedError:
    return FailedError(leak_problem(deviation, model_name, attention_of(config)))


def not_causal(deviation: float, model_name: str, config: PreTrainedConfig) -> FailedError:
    field = next((name for name in CAUSAL_SWITCHES if getattr(config, name, None) is False), None)
    return failed_error(
        "model-not-causal",
        f"{model_name} sees later tokens: logits move by {deviation:.2%} when the tokens after them change, "
        "so that it would learn to copy and not to predict",
        hint="train a decoder"
        if field is None
        else f"--set model.config_overrides.{field}=true gives it a causal mask",
    )
