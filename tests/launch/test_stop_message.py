"""The message of a command right after a signal."""

from __future__ import annotations

import pytest

from fsdp_tune.launch.supervise.stop_message import stop_line
from fsdp_tune.run.rank_files import Heartbeat


@pytest.mark.parametrize(
    ("phases", "step", "step_seconds", "line"),
    [
        (
            ["backward", "forward"],
            7,
            10.0,
            "stopping after step 9 (2 more steps, about 20.0s) and saving a checkpoint there",
        ),
        (["training", "training"], 7, None, "saving a checkpoint within 2 more steps, then stopping"),
        (["forward", "forward"], 7, 0.1, "saving a checkpoint within 2 more steps, then stopping"),
        (
            ["evaluating", "evaluating"],
            7,
            10.0,
            "after the evaluation in progress, stopping after step 9 (2 more steps, about 20.0s) and "
            "saving a checkpoint there",
        ),
        (
            ["saving", "saving"],
            7,
            0.1,
            "after the save in progress, saving a checkpoint within 2 more steps, then stopping",
        ),
        (
            ["training", "saving"],
            20,
            10.0,
            "step 20 is the last one; saving a checkpoint there, then stopping",
        ),
        (
            ["training", "importing"],
            0,
            10.0,
            "stopping; no step has been trained in this launch, so there is nothing to save",
        ),
        ([], 0, 10.0, "stopping; no step has been trained in this launch, so there is nothing to save"),
    ],
)
def test_stop_message_names_the_last_step(
    phases: list[str], step: int, step_seconds: float | None, line: str
) -> None:
    beats = [Heartbeat(rank, 1, step - rank, phase, 0.0, 0.0, 0.0) for rank, phase in enumerate(phases)]
    assert stop_line(beats, 20, step_seconds) == line
