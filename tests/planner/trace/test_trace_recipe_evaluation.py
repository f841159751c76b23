"""An evaluation is part of the plan: its peak is named when it is the highest, and its loss is chunked where
it needs to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fsdp_tune.model.kernels.head import SLICE_ELEMENTS
from fsdp_tune.model.kernels.install import choose_loss
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.derive import at_micro_batch, prime_for
from fsdp_tune.planner.predict.memory import peak_memory
from fsdp_tune.planner.trace_format import EVALUATION
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.planner.trace.tracing import trace_of

EVAL = {"eval": [{"path": "y"}]}


def evaluating(rows: int, *, layers: int = 2, data: dict[str, Any] = EVAL, **training: Any) -> Recipe:
    model = {"from_config": FAMILIES["llama"] | {"num_hidden_layers": layers}}
    sections = {
        "precision": {"mixed_precision": "bf16"},
        "training": {"per_device_eval_batch_size": rows} | training,
    }
    return recipe_of(model, data={"train": [{"path": "x"}], "max_length": 64} | data, **sections)


def test_peak_is_named_evaluation_where_its_batch_is_larger() -> None:
    large, small = peak_memory(trace_of(evaluating(64))), peak_memory(trace_of(evaluating(1)))
    assert large.where.startswith("evaluation")
    assert small.where.startswith("step")
    logits = 64 * 64 * 257 * 4
    assert large.components["logits and loss"] >= logits
    assert set(large.timeline.phase) >= {"forward", "evaluation"}


def test_recipe_that_does_not_evaluate_traces_none() -> None:
    assert not (trace_of(evaluating(64, eval_strategy="no")).events["phase"] == EVALUATION).any()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_few_layers_represent_all_in_evaluation(strategy: str) -> None:
    recipe = evaluating(16, layers=9)
    recipe = recipe_of(
        {"from_config": recipe.model.from_config},
        fsdp={"sharding_strategy": strategy},
        precision={"mixed_precision": "bf16"},
        data={"train": [{"path": "x"}], "max_length": 64} | EVAL,
        training={"per_device_eval_batch_size": 16},
    )
    shallow, exact = trace_of(recipe), trace_of(recipe, exact=True)
    assert shallow.traced_layers < exact.traced_layers
    spliced, whole = peak_memory(full_depth(shallow)), peak_memory(exact)
    assert spliced.peak_allocated_bytes == whole.peak_allocated_bytes
    assert spliced.where == whole.where


@pytest.mark.slow
def test_evaluation_keeps_its_size_at_another_micro_batch() -> None:
    one = trace_of(evaluating(16))
    family = trace_of(evaluating(16, per_device_train_batch_size=prime_for(one)))
    three, made = trace_of(evaluating(16, per_device_train_batch_size=3)), at_micro_batch(family, 3, 1)
    assert np.array_equal(three.events["bytes"], made.events["bytes"])


@pytest.mark.parametrize(("data", "kernel"), [(EVAL, "chunked"), ({}, "full")], ids=["evaluates", "does not"])
def test_loss_is_chunked_where_the_evaluation_needs_it(data: dict[str, Any], kernel: str) -> None:
    rows = SLICE_ELEMENTS // (64 * 257) + 1
    recipe = evaluating(rows, data=data)
    choice = choose_loss(recipe, build_empty(recipe))
    assert choice.value == kernel
    assert ("of an evaluation" in choice.reason) == bool(data)
