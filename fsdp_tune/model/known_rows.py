"""Avoid a device synchronisation: transformers checks position ids on the device to find packed rows, in each forward and flash layer.

Each such check waits until the device has finished all queued work, so that the host can never run ahead of a micro-batch. The host
already has this information.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from fsdp_tune.model.internals.transformers_internals import FIND_PACKED, IS_PACKED


@contextmanager
def packing_known(*, is_packed: bool) -> Iterator[None]:
    """Within the context, models use `is_packed` (whether position ids restart at 0 in some row of the batch) without a check."""
    with FIND_PACKED.replaced(example_numbers if is_packed else _none), nullcontext() if is_packed else IS_PACKED.replaced(_no):
        yield


def example_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """Return, for `position_ids` [batch, tokens], the index of each token's example in its row, from 0, in the same shape."""
    before_first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before_first, dim=-1) != 1).cumsum(-1)


def _none(_position_ids: torch.Tensor) -> None:
    return None


def _no(*_: object, **__: object) -> bool:
    return False
