"""A resumed schedule is at the step of the run, with the values of the current recipe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR, ReduceLROnPlateau

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.worker.checkpoint.restore import restore_schedule


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)


def test_schedule_continues_at_the_step() -> None:
    straight, resumed = (LambdaLR(optimizer(), lambda step: 1 / (step + 1)) for _ in range(2))
    for _ in range(3):
        straight.optimizer.step()
        straight.step()
    restore_schedule(resumed, 3)
    assert (resumed.last_epoch, resumed.get_last_lr()) == (straight.last_epoch, straight.get_last_lr())
    assert resumed.optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize(
    "other", [lambda of: MultiplicativeLR(of, lambda _: 0.5), ReduceLROnPlateau], ids=["factors", "plateau"]
)
def test_schedule_that_is_no_function_of_the_step_is_refused(
    other: Callable[[torch.optim.Optimizer], object],
) -> None:
    with pytest.raises(FsdpTuneError, match="is not a function of the step") as caught:
        restore_schedule(other(optimizer()), 3)
    assert caught.value.problems[0].code == "schedule-not-a-function"
