"""All-to-all between the ranks of a group, with a backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Counts = Sequence[int] | None
"""Rows of the first dimension for each rank, or from each rank; None: as many for each."""


class _Exchange(torch.autograd.Function):
    """The gradient of a row returns to the rank that sent it."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, sent: Counts, received: Counts
    ) -> torch.Tensor:
        ctx.route = group, sent, received
        return exchanged(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group, sent, received = ctx.route
        return exchanged(gradients[0], group, received, sent), None, None, None


def exchange(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: Counts = None, received: Counts = None
) -> torch.Tensor:
    """Send the next rows to each rank of a group in turn, and return what arrives, by rank. Collective, also
    in the backward."""
    arrived: torch.Tensor = _Exchange.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return arrived


def exchanged(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: Counts = None, received: Counts = None
) -> torch.Tensor:
    """`exchange` without a backward."""
    rows = rows.contiguous()  # `empty_like` keeps strides, and the collective ignores them
    arrived = torch.empty_like(rows) if received is None else rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows, received, sent, group=group)
    return arrived
