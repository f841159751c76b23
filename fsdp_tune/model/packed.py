"""Whether a batch holds packed rows is known on the host; transformers asks the device, in each forward (and each flash-attention layer).

Each such question waits until the device has done all that was queued, so that the host can never run ahead of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import masking_utils, modeling_flash_attention_utils


@contextmanager
def packing_known(*, is_packed: bool) -> Iterator[None]:
    """Inside, a model takes `is_packed` for the answer: whether position ids begin again at 0 in some row of the batch."""
    find, ask = masking_utils.find_packed_sequence_indices, modeling_flash_attention_utils._is_packed_sequence
    masking_utils.find_packed_sequence_indices = example_numbers if is_packed else _none
    if not is_packed:
        modeling_flash_attention_utils._is_packed_sequence = _no
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices, modeling_flash_attention_utils._is_packed_sequence = find, ask


def example_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """`position_ids` [batch, tokens] → which example of its row each token belongs to, counted from 0, in the same shape."""
    before_first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before_first, dim=-1) != 1).cumsum(-1)


def _none(_position_ids: torch.Tensor) -> None:
    return None


def _no(*_: Any, **__: Any) -> bool:
    return False
