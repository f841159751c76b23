"""Avoid a device synchronisation: transformers checks position ids on the device to find packed rows, in each forward and flash layer.

Each such check waits until the device has finished all queued work, so that the host can never run ahead of a micro-batch. The host
already has this information.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import masking_utils, modeling_flash_attention_utils


@contextmanager
def packing_known(*, is_packed: bool) -> Iterator[None]:
    """Within the context, models use `is_packed` (whether position ids restart at 0 in some row of the batch) without a check."""
    find, ask = masking_utils.find_packed_sequence_indices, modeling_flash_attention_utils._is_packed_sequence
    masking_utils.find_packed_sequence_indices = example_numbers if is_packed else _none
    if not is_packed:
        modeling_flash_attention_utils._is_packed_sequence = _no
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices, modeling_flash_attention_utils._is_packed_sequence = find, ask


def example_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """Return, for `position_ids` [batch, tokens], the index of each token's example in its row, from 0, in the same shape."""
    before_first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before_first, dim=-1) != 1).cumsum(-1)


def _none(_position_ids: torch.Tensor) -> None:
    return None


def _no(*_: Any, **__: Any) -> bool:
    return False
