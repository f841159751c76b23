"""What `precision.mixed_precision: fp8` is taken with; what it is refused with stands in `test_rules.py`."""

from __future__ import annotations

import pytest

from fsdp_tune.recipe.fp8_rules import gathers_in_fp8
from tests.recipe.loading import load_with

FP8 = "precision: {mixed_precision: fp8}\n"
TENSORWISE = "precision: {mixed_precision: fp8, fp8_recipe: tensorwise}\n"


@pytest.mark.parametrize(
    "extra",
    [
        FP8 + "fsdp: {offload_params: true}",
        FP8 + "fsdp: {reshard_after_forward: 2}",
        TENSORWISE + "fsdp: {sharding_strategy: NO_SHARD}",
        TENSORWISE + "fsdp: {sharding_strategy: HYBRID_SHARD}\nkernels: {compile: true, loss: chunked}",
    ],
)
def test_what_works_is_taken(extra: str) -> None:
    assert load_with(extra).recipe.compute_dtype == "bf16", "all but the converted layers computes in it"


@pytest.mark.parametrize(
    ("extra", "wanted"), [(TENSORWISE, True), (FP8, False), (TENSORWISE + "fsdp: {sharding_strategy: NO_SHARD}", False), ("", False)]
)
def test_one_scale_for_a_weight_is_gathered_in_fp8(extra: str, wanted: bool) -> None:
    assert gathers_in_fp8(load_with(extra).recipe) is wanted
