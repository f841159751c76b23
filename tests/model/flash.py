"""A flash kernel of the hub for the CPU: transformers' own flash path, with torch's attention for each
example of a row."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_flash_attention_utils import (
    _is_packed_sequence,
    prepare_fa_kwargs_from_position_ids,
)

FLASH_STAND_IN = "kernels-community/flash-stand-in@main"


def by_lengths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int], scaling: float | None = None
) -> torch.Tensor:
    """Causal attention inside each stretch of the batch laid out as one line: what a kernel with variable
    lengths computes."""
    rows, heads, width, size = query.shape
    lines = [
        each.transpose(1, 2).reshape(1, rows * width, -1, size).transpose(1, 2)
        for each in (query, key, value)
    ]
    lines[1:] = [each.repeat_interleave(heads // key.shape[1], dim=1) for each in lines[1:]]
    assert ends[-1] == rows * width
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(each[:, :, start:end] for each in lines), is_causal=True, scale=scaling
        )
        for start, end in itertools.pairwise(ends)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).reshape(rows, width, heads, size)


def _forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The cases of `_flash_attention_forward`."""
    assert attention_mask is None
    rows, _, width, _ = query.shape
    ends = list(range(0, rows * width + 1, width))
    if cu_seq_lens_q is not None:
        ends = cu_seq_lens_q.tolist()
    elif _is_packed_sequence(position_ids, rows):
        ends = prepare_fa_kwargs_from_position_ids(position_ids)[0][0].tolist()
    return by_lengths(query, key, value, ends, scaling), None


@contextlib.contextmanager
def flash_stand_in(*, in_place_of: str | None = None) -> Iterator[None]:
    """Inside, models take FLASH_STAND_IN, also where `in_place_of` is requested: what transformers does
    without that package."""
    AttentionInterface.register(FLASH_STAND_IN, _forward)
    AttentionMaskInterface.register(FLASH_STAND_IN, flash_attention_mask)

    def adjusted(_model: Any, kernel: str | None, *_: Any, **__: Any) -> str | None:
        return FLASH_STAND_IN if kernel == in_place_of else kernel

    try:
        with patch(
            "transformers.modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation", adjusted
        ):
            yield
    finally:
        del AttentionInterface._global_mapping[FLASH_STAND_IN]
        del AttentionMaskInterface._global_mapping[FLASH_STAND_IN]
