"""The trace is of the converted model: multiplications in fp8, casts, and what is gathered of a layer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.divided_step import step_time
from fsdp_tune.planner.predict.efficiency import UnknownFigure
from fsdp_tune.planner.trace_format import COLLECTIVES, DTYPES, Trace
from tests.model.recipes import recipe_of
from tests.planner.trace.tracing import trace_of

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
OF_LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3


def traced(precision: dict[str, Any], layers: int = 2, *, exact: bool = False, **sections: Any) -> Trace:
    recipe = recipe_of(
        {"from_config": CONFIG | {"num_hidden_layers": layers}}, 2, precision=precision, **sections
    )
    return trace_of(recipe, exact=exact)


def products(trace: Trace) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for op in trace.steady(trace.ops):
        if trace.op_names[op["name"]] in ("mm", "_scaled_mm"):
            found[trace.op_names[op["name"]], DTYPES[op["dtype"]]] += int(op["flops"])
    return found


def gathers(trace: Trace) -> Counter[tuple[str, int]]:
    rows = trace.steady(trace.collectives)
    return Counter(
        (DTYPES[row["dtype"]], int(row["bytes"])) for row in rows if COLLECTIVES[row["kind"]] == "all_gather"
    )


@pytest.mark.parametrize("scaling", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_fp8_layers_compute_and_gather_in_recipe_dtypes(scaling: str) -> None:
    plain, converted = (
        traced({"mixed_precision": "bf16"}),
        traced({"mixed_precision": "fp8", "fp8_recipe": scaling}),
    )
    # layers; forward and two of the backward; multiply and add; tokens
    in_layers = 2 * 3 * 2 * OF_LAYER * 2048
    assert products(converted)["_scaled_mm", "fp8"] == in_layers
    assert products(plain)["mm", "bf16"] - products(converted)["mm", "bf16"] == in_layers, "the head stays"
    norms, width, kind = 2 * 64 * 2, *((1, "uint8") if scaling == "tensorwise" else (2, "bf16"))
    assert gathers(converted)[kind, OF_LAYER * width + norms] == 2 * 2, "two layers, forward and backward"
    (unit,) = {unit.gathered_bytes for unit in converted.units if unit.layer >= 0}
    assert unit == OF_LAYER * width + norms
    with pytest.raises(UnknownFigure, match="no known peak in fp8"):
        step_time(converted, find_hardware("A100-80GB"), 1)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    "sections", [{}, {"fsdp": {"activation_checkpointing": "selective"}}], ids=["kept", "selective"]
)
def test_few_layers_represent_all(scaling: str, sections: dict[str, Any]) -> None:
    precision = {"mixed_precision": "fp8", "fp8_recipe": scaling}
    exact, shallow = traced(precision, 9, exact=True, **sections), traced(precision, 9, **sections)
    spliced = full_depth(shallow)
    assert shallow.traced_layers < 9
    assert spliced.ops["flops"].sum() == exact.ops["flops"].sum()
    assert gathers(spliced) == gathers(exact)
    peaks = [int(np.cumsum(trace.events["bytes"]).max()) for trace in (spliced, exact)]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)
