"""What a step is made of, as shares of one bar."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdp_tune.pages.run_record import RunRecord


@dataclass(frozen=True, slots=True)
class StepPart:
    name: str
    seconds: float
    share: float
    """Of the step and its waiting for data, 0 to 1."""


def step_parts(run: RunRecord) -> list[StepPart]:
    """Return the mean parts of a run's steps; [] if its lines do not have them. The first line, which
    allocates and compiles, is left out.

    Communication is what the compute stream waits for; where it cannot be observed (DDP, FSDP1), it is in the
    first part.
    """
    steps = run.metrics.curve("last_step_seconds").finite()
    kept = steps.steps[steps.values > 0]
    kept = kept[1:] if len(kept) > 1 else kept
    if not len(kept):
        return []
    names = ("data_wait_seconds", "exposed_communication_seconds", "optimizer_seconds", "last_step_seconds")
    found = {name: run.metrics.curve(name).finite() for name in names}
    data, communication, optimizer, step = (
        float(curve.values[np.isin(curve.steps, kept)].sum()) / len(kept) for curve in found.values()
    )
    is_observed = len(found["exposed_communication_seconds"]) > 0
    first = "forward and backward" if is_observed else "forward, backward and communication"
    parts = {
        first: max(0.0, step - communication - optimizer),
        "waiting for communication": communication,
        "optimizer": optimizer,
        "waiting for data": data,
    }
    total = sum(parts.values())
    return [StepPart(name, seconds, seconds / total) for name, seconds in parts.items() if seconds > 0]
