"""Predicts memory, time and cost of a recipe from a traced step, and ranks recipes. Pure: nothing here imports torch.

From Python: `plan(recipe, hardware, trace) -> Plan`, with a resolved recipe, `find_hardware("A100-40GB")`, and a trace of the recipe's
step (`fsdp_tune.planner.tracing.Tracing` has a child make one). What is planned is data; `Plan.as_dict` is what `plan --json` prints.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_tune.planner.hardware.gpus import Hardware, find_hardware
    from fsdp_tune.planner.predict.predict import Plan, plan
    from fsdp_tune.planner.trace_format import Trace

__all__ = ["Hardware", "Plan", "Trace", "find_hardware", "plan"]

_HOMES = {
    "Hardware": "hardware.gpus",
    "Plan": "predict.predict",
    "Trace": "trace_format",
    "find_hardware": "hardware.gpus",
    "plan": "predict.predict",
}


def __getattr__(name: str) -> Any:
    """At first use: who wants one figure of a module here does not wait for numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
