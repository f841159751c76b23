"""Attention that scales its queries by the index of a token in the call: on packed and shared rows by the
position in the example.

Llama 4 scales them in its layers without rotary embedding (`attn_temperature_tuning`, arXiv:2501.19399): from
`floor_scale` tokens on, they grow with the logarithm of the position. These layers get no position ids, and
count the tokens of the call. So the second example of a packed row would continue the first one, and each
rank of a sequence group would start from 0.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from fsdp_tune.model.packed_documents import known_documents
from fsdp_tune.model.sequence_parallel import shared_rows

_FIELDS = ("attn_temperature_tuning", "use_rope", "floor_scale", "attn_scale", "q_proj")


def scale_queries_by_position(model: nn.Module) -> list[str]:
    """Make such attention follow positions while they are known: of packed rows, and of rows that ranks
    share. Return its names."""
    found = {name: module for name, module in model.named_modules() if _counts_tokens(module)}
    for attention in found.values():
        _follow_positions(attention)
    return list(found)


def _counts_tokens(module: Any) -> bool:
    return (
        all(hasattr(module, name) for name in _FIELDS)
        and bool(module.attn_temperature_tuning)
        and not module.use_rope
    )


def _positions() -> torch.Tensor | None:
    """Return the position of each token of the call in its example, [rows, tokens]; None if it is its index
    in the call."""
    if (documents := known_documents()) is not None:
        return documents.position_ids
    rows = shared_rows()
    return None if rows is None else rows.own_tokens(rows.position_ids)


def _follow_positions(attention: Any) -> None:
    """Multiply queries by the scale of their position over that of their index, by which the attention
    multiplies them afterwards."""
    project = attention.q_proj.forward

    def scale(positions: torch.Tensor) -> torch.Tensor:
        """As in `Llama4TextAttention.forward` of transformers 5.24."""
        steps = torch.floor((positions.float() + 1.0) / attention.floor_scale)
        return torch.log1p(steps) * attention.attn_scale + 1.0

    @functools.wraps(project)
    def scaled(*args: Any, **kwargs: Any) -> torch.Tensor:
        query: torch.Tensor = project(*args, **kwargs)
        if (positions := _positions()) is None:
            return query
        ratio = scale(positions) / scale(torch.arange(query.shape[1], device=query.device))
        return (query * ratio.unsqueeze(-1)).to(query.dtype)

    attention.q_proj.forward = scaled
