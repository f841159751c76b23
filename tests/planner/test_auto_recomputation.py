"""`fsdp.activation_checkpointing: auto`: the least that fits, the smallest if nothing fits, full if memory is
unknown.

`fsdp.reshard_after_backward: auto`, decided after it: false if it fits, true if it does not or if memory is
unknown.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.core.units import GIB
from fsdp_tune.planner.predict.depth import DepthError
from fsdp_tune.planner.search.auto_recomputation import RECOMPUTATION, RESHARDING, MemoryBudget, decide
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.planner.recipes import resolved
from tests.planner.test_search import ModelTracer

A100 = MemoryBudget.of(find_hardware("A100-40GB"))
OPEN = resolved(fsdp={"activation_checkpointing": "auto"})


@pytest.mark.parametrize(
    ("state_gib", "kind", "traced"), [(80, "none", 1), (240, "selective", 2), (270, "full", 3)]
)
def test_least_recomputation_that_fits_is_taken_and_no_more_is_traced(
    state_gib: int, kind: str, traced: int
) -> None:
    tracer = ModelTracer(state_gib)
    seen: list[str] = []

    def trace(recipe: Recipe) -> Trace:
        seen.append(recipe.fsdp.activation_checkpointing)
        return tracer.trace(recipe)

    found = decide(OPEN, A100, trace)
    assert found.recipe.fsdp.activation_checkpointing == kind
    assert seen == ["none", "selective", "full"][:traced]
    assert found.reasons[RECOMPUTATION].startswith("the least that fits A100-40GB: ")
    assert found.notices == ()
    assert found.recipe.model_copy(update={"fsdp": OPEN.fsdp}) == OPEN, "nothing else is decided"


def test_recomputation_that_contradicts_another_key_is_not_tried() -> None:
    tracer, seen = ModelTracer(270), list[str]()

    def trace(recipe: Recipe) -> Trace:
        seen.append(recipe.fsdp.activation_checkpointing)
        return tracer.trace(recipe)

    sliced = resolved(fsdp={"activation_checkpointing": "auto"}, kernels={"mlp_slice_tokens": 512})
    assert decide(sliced, A100, trace).recipe.fsdp.activation_checkpointing == "full"
    assert seen == ["none", "full"]


def test_smallest_option_is_chosen_with_notice_if_nothing_fits() -> None:
    found = decide(OPEN, A100, ModelTracer(1000).trace)
    assert found.recipe.fsdp.activation_checkpointing == "full"
    assert [notice.code for notice in found.notices] == ["recomputation-is-not-enough"]


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_value_in_the_recipe_is_kept_and_not_traced(kind: str) -> None:
    written = resolved(fsdp={"activation_checkpointing": kind})
    found = decide(written, A100, lambda _: pytest.fail("nothing is open"))
    assert (found.recipe, found.reasons, found.notices) == (written, {}, ())


@pytest.mark.parametrize("error", [usage_error("trace-failed", "it refuses"), DepthError("it refuses")])
def test_model_that_cannot_be_traced_recomputes_every_layer_with_a_notice(error: Exception) -> None:
    def refuse(_recipe: Recipe) -> Trace:
        raise error

    found = decide(OPEN, A100, refuse)
    assert found.recipe.fsdp.activation_checkpointing == "full"
    assert [notice.code for notice in found.notices] == ["recomputation-not-planned"]
    assert "it refuses" in found.notices[0].message


def test_what_was_learned_and_cannot_be_read_is_not_called_a_failed_trace() -> None:
    def damaged(_recipe: Recipe, _trace: Trace) -> float:
        raise usage_error("calibration-damaged", "calibration.json is damaged")

    found = decide(OPEN, replace(A100, reserved_factor=damaged), ModelTracer(80).trace)
    assert found.recipe.fsdp.activation_checkpointing == "full"
    assert found.notices[0].message.endswith("became full: calibration.json is damaged")


def test_unknown_memory_recomputes_everything_and_traces_nothing() -> None:
    found = decide(OPEN, None, lambda _: pytest.fail("there is nothing to compare with"))
    assert found.recipe.fsdp.activation_checkpointing == "full"
    assert "unknown" in found.notices[0].message


def test_byte_budget_decides_like_a_gpu() -> None:
    assert (
        decide(
            OPEN, MemoryBudget("half of it", 20 * GIB), ModelTracer(80).trace
        ).recipe.fsdp.activation_checkpointing
        == "selective"
    )


BOTH = resolved(
    fsdp={"activation_checkpointing": "auto", "reshard_after_backward": "auto"},
    training={"global_batch_size": 16},
)


@pytest.mark.parametrize(
    ("state_gib", "kind", "reshards"), [(32, "none", False), (80, "none", True), (240, "selective", True)]
)
def test_parameters_stay_gathered_where_they_fit_next_to_the_least_recomputation(
    state_gib: int, kind: str, reshards: bool
) -> None:
    """Of 8 × 40 GB: recomputation costs more than gathers, so memory goes to its absence first."""
    seen: list[tuple[str, object]] = []
    tracer = ModelTracer(state_gib)

    def trace(recipe: Recipe) -> Trace:
        seen.append((recipe.fsdp.activation_checkpointing, recipe.fsdp.reshard_after_backward))
        return tracer.trace(recipe)

    found = decide(BOTH, A100, trace)
    assert (found.recipe.fsdp.activation_checkpointing, found.recipe.fsdp.reshard_after_backward) == (
        kind,
        reshards,
    )
    assert seen[-1] == (kind, False), "tried last, with the recomputation that was chosen"
    assert all(resharding for _, resharding in seen[:-1])
    words = "stay gathered between micro-batches would take" if reshards else "it fits A100-40GB"
    assert words in found.reasons[RESHARDING]
    assert found.notices == ()


def test_resharding_is_decided_alone_where_recomputation_is_written() -> None:
    recipe = resolved(
        fsdp={"activation_checkpointing": "full", "reshard_after_backward": "auto"},
        training={"global_batch_size": 16},
    )
    found = decide(recipe, A100, ModelTracer(32).trace)
    assert found.recipe.fsdp.reshard_after_backward is False
    assert found.reasons.keys() == {RESHARDING}


def test_unknown_memory_frees_parameters_after_every_micro_batch() -> None:
    found = decide(BOTH, None, lambda _: pytest.fail("there is nothing to compare with"))
    assert (found.recipe.fsdp.activation_checkpointing, found.recipe.fsdp.reshard_after_backward) == (
        "full",
        True,
    )
    assert [notice.code for notice in found.notices] == [
        "recomputation-not-planned",
        "resharding-not-planned",
    ]


def test_learned_memory_decides_too() -> None:
    """A recipe that is `tight` with what was measured recomputes more."""
    learned = replace(A100, reserved_factor=lambda _recipe, _trace: 1.2)
    kinds = [
        decide(OPEN, each, ModelTracer(200).trace).recipe.fsdp.activation_checkpointing
        for each in (A100, learned)
    ]
    assert kinds == ["none", "selective"]
