"""CPU kernels of torch's variable-length attention, which torch has for CUDA only; registered when this
module is imported.

They compute one example at a time and check what the CUDA kernel requires of its arguments. Everything above
them is torch's own: the autograd formula, the operator that recomputation and compilation see.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward

Tensor = torch.Tensor


def _examples(ends: Tensor, max_length: int, query: Tensor, key: Tensor, value: Tensor) -> Iterator[slice]:
    assert ends.dtype == torch.int32
    assert int(ends[-1]) == len(query) == len(key) == len(value)
    assert int(ends.diff().max()) <= max_length
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    for start, end in itertools.pairwise(ends.tolist()):
        yield slice(start, end)


def _probabilities(query: Tensor, key: Tensor, scale: float, window: list[int]) -> Tensor:
    """Return attention probabilities [heads, tokens, tokens] of one example."""
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double().repeat_interleave(groups, 1)) * scale
    at = torch.arange(len(query))
    behind = at[:, None] - at[None, :]
    left, right = window
    hidden = (behind > left if left >= 0 else torch.zeros_like(behind, dtype=torch.bool)) | (
        right >= 0 and behind < -right
    )
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


@_varlen_attn.register_kernel("cpu")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float,
    window_size: list[int],
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    assert is_causal == (list(window_size) == [-1, 0])
    groups = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for part in _examples(cu_seq_q, max_q, query, key, value):
        probabilities = _probabilities(query[part], key[part], scale, window_size)
        out[part] = torch.einsum(
            "hqk,khd->qhd", probabilities, value[part].double().repeat_interleave(groups, 1)
        ).to(out.dtype)
    return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


@_varlen_attn_backward.register_kernel("cpu")
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _out: Tensor,
    _lse: Tensor,
    cu_seq_q: Tensor,
    _cu_seq_k: Tensor,
    max_q: int,
    _max_k: int,
    _is_causal: bool,
    _rng: Tensor,
    scale: float,
    window_size: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for part in _examples(cu_seq_q, max_q, query, key, value):
        probabilities, upper = (
            _probabilities(query[part], key[part], scale, window_size),
            gradient[part].double(),
        )
        of_probabilities = torch.einsum(
            "qhd,khd->hqk", upper, value[part].double().repeat_interleave(groups, 1)
        )
        of_scores = (
            probabilities
            * (of_probabilities - (of_probabilities * probabilities).sum(-1, keepdim=True))
            * scale
        )
        found = (
            torch.einsum("hqk,khd->qhd", of_scores, key[part].double().repeat_interleave(groups, 1)),
            torch.einsum("hqk,qhd->khd", of_scores, query[part].double()),
            torch.einsum("hqk,qhd->khd", probabilities, upper),
        )
        for target, values in zip(gradients, found, strict=True):
            heads = target.shape[1]
            target[part] = values.unflatten(1, (heads, -1)).sum(2).to(target.dtype)
    return gradients


@contextlib.contextmanager
def varlen_allowed() -> Iterator[None]:
    """Within the context, recipes for CPU ranks may set `attn_implementation: torch_varlen`."""
    with patch("fsdp_tune.model.kernels.attention._against_flash", lambda *_: None):
        yield
