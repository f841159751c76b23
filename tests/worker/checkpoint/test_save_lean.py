"""Optimizer state in blocks, copied for a save in the background."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_tune.model.optim.adamw_in_blocks import kept_as, torchao_class, with_plain_rates
from fsdp_tune.model.shard.local import parts_of
from fsdp_tune.worker.checkpoint.snapshot import HostArena, Snapshot


def test_background_copy_shares_no_memory_with_training() -> None:
    """torchao's `to("cpu", copy=True)` of tensors in host memory does not copy: training would write into the
    checkpoint."""
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = with_plain_rates(torchao_class(8))([weight], lr=1e-2)

    def step() -> None:
        weight.grad = torch.randn(64, 64)
        optimizer.step()

    step()
    state = optimizer.state[weight]
    assert kept_as(state["exp_avg"]) == "8-bit"
    copy = HostArena().copy(Snapshot(1, {}, {"weight": dict(state)}, {}, "", {})).optimizer["weight"]
    assert kept_as(copy["exp_avg"]) == "8-bit"
    before = {kind: [part.clone() for part in parts_of(copy[kind])] for kind in copy}
    step()
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        assert all(map(torch.equal, parts_of(copy[kind]), before[kind]))
        assert not all(map(torch.equal, parts_of(state[kind]), before[kind]))
    assert optimizer.param_groups[0]["lr"] == 1e-2  # a number, as schedules and resuming expect
