"""The trace of a step with emulated quantisation: products of as many operations, and the values that the
rounding keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.trace_format import Trace
from tests.planner.trace.test_traced_step_fp8 import gathers, products, traced

BF16 = {"mixed_precision": "bf16"}


def peak_bytes(trace: Trace) -> int:
    return int(np.cumsum(trace.events["bytes"]).max())


@pytest.mark.slow
@pytest.mark.parametrize("train", ["int4", "int8-int4"])
@pytest.mark.parametrize(
    "sections", [{}, {"fsdp": {"activation_checkpointing": "full"}}], ids=["kept", "full"]
)
def test_trace_counts_what_rounding_keeps(train: str, sections: dict[str, Any]) -> None:
    plain, rounded = traced(BF16, **sections), traced(BF16, quantization={"train": train}, **sections)
    assert products(rounded) == products(plain)
    assert gathers(rounded) == gathers(plain)
    assert peak_bytes(rounded) > peak_bytes(plain)
    exact, shallow = (
        traced(BF16, 9, exact=exact, quantization={"train": train}, **sections) for exact in (True, False)
    )
    assert shallow.traced_layers < 9
    assert peak_bytes(full_depth(shallow)) == pytest.approx(peak_bytes(exact), rel=1e-3)
