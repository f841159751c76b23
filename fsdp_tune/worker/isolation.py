"""Whether packed examples really do not see each other, asked of the live model on a row of the run's own data.

A model may take position ids and ignore the seams all the same (recurrent layers, attention of its own); its loss then
looks fine and is wrong. So the first example of a packed row is changed, and the next one must not notice.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fsdp_tune.data.store import Row, RowStore
from fsdp_tune.errors import FailedError, failed_error
from fsdp_tune.model.gathering import outside_step
from fsdp_tune.model.loss import model_inputs
from fsdp_tune.model.step import compute_context
from fsdp_tune.recipe.fp8_rules import computes_in_fp8
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.worker.dataset import Collator

ROWS_LOOKED_AT = 64
EXAMPLE_TOKENS = 1024
"""Of each of the two examples that are looked at: the logits of a long row, which training never makes whole, may not fit."""
# Of the logits' norm. Same shapes, same kernels: the difference is zero, but for experts whose groups change in size.
ALLOWED = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}
# One scale for all tokens of a micro-batch: the largest value of one example moves how the others are rounded (measured: 5 %).
ALLOWED_WITH_ONE_SCALE = 0.2


def allowed_deviation(recipe: Recipe) -> float:
    """Beyond it, examples of a packed row see each other."""
    one_scale = computes_in_fp8(recipe) and recipe.precision.fp8_recipe == "tensorwise"
    return ALLOWED_WITH_ONE_SCALE if one_scale else ALLOWED[recipe.compute_dtype]


def packed_row(store: RowStore) -> Row | None:
    """The first of the first rows that holds several examples, cut to its first two, and those to their first tokens."""
    for index in range(min(len(store), ROWS_LOOKED_AT)):
        row = store[index]
        if len(row.lengths) > 1:
            begins = (0, row.lengths[0])
            lengths = tuple(min(length, EXAMPLE_TOKENS) for length in row.lengths[:2])
            kept = np.concatenate([np.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)])
            return Row(row.input_ids[kept], row.labels[kept], lengths, row.row_id)
    return None


def packing_deviation(recipe: Recipe, wrapped: nn.Module, row: Row, collator: Collator, device: torch.device) -> float:
    """Relative L2 distance that the second example's logits move when every token of the first becomes another; collective."""
    first = row.lengths[0]
    changed_ids = row.input_ids.copy()
    changed_ids[:first] = np.where(changed_ids[:first] == changed_ids[-1], changed_ids[first], changed_ids[-1])
    was_training = wrapped.training
    wrapped.eval()
    logits: list[torch.Tensor] = []
    for input_ids in (row.input_ids, changed_ids):
        batch = collator([Row(input_ids, row.labels, row.lengths, row.row_id)])
        tensors = {name: tensor.to(device) for name, tensor in batch.tensors.items()}
        with outside_step(wrapped, device), compute_context(recipe, device.type):
            logits.append(wrapped(**model_inputs(tensors), use_cache=False).logits[0, first : len(input_ids)].float())
    wrapped.train(was_training)
    return float((logits[0] - logits[1]).norm() / logits[0].norm())


def not_isolated(deviation: float, model_name: str) -> FailedError:
    return failed_error(
        "packing-not-isolated",
        f"{model_name} lets packed examples see each other: an example's logits move by {deviation:.2%} when the one before it changes",
        hint="--set data.packing=false",
    )
