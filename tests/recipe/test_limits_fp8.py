"""Accepted combinations with `precision.mixed_precision: fp8`; `test_contradictions.py` has the refused
ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.rules.limits import gathers_in_fp8
from tests.recipe.loading import MINIMAL, load, load_with

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
def test_valid_fp8_recipe_is_accepted(extra: str) -> None:
    assert load_with(extra).recipe.compute_dtype == "bf16", "all but the converted layers computes in it"


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        (TENSORWISE, True),
        (FP8, False),
        (TENSORWISE + "fsdp: {sharding_strategy: NO_SHARD}", False),
        ("", False),
    ],
)
def test_tensorwise_scale_gathers_in_fp8(extra: str, wanted: bool) -> None:
    assert gathers_in_fp8(load_with(extra).recipe) is wanted


@pytest.mark.parametrize(
    ("extra", "wanted"), [(FP8, 16), (FP8 + "data: {pad_to_multiple_of: 8}", 8), ("", 8)]
)
def test_rows_are_padded_to_sixteen_tokens_by_default(extra: str, wanted: int) -> None:
    text = (
        MINIMAL + extra if "data" not in extra else MINIMAL.replace("]}", "], pad_to_multiple_of: 8}") + FP8
    )
    resolution = resolve(load(text).recipe, Machine("cuda", 1, 8, None), cwd=Path("/"))
    assert resolution.recipe.data.pad_to_multiple_of == wanted
    assert ("data.pad_to_multiple_of" in resolution.reasons) is (wanted == 16)
