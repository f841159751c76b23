"""Tensors are found wherever the arguments of a call hold them."""

from __future__ import annotations

import torch

from fsdp_tune.model.nested_tensors import tensors_in


def test_tensors_of_nested_arguments_are_in_their_order() -> None:
    first, second, third, fourth = (torch.zeros(size) for size in range(4))
    found = tensors_in((first, [second, (None, 3)]), {"a": third, "b": {"c": [fourth]}}, "text")
    assert [tensor.shape[0] for tensor in found] == [0, 1, 2, 3]
    assert [tensor is one for tensor, one in zip(found, (first, second, third, fourth), strict=True)] == [
        True
    ] * 4
    assert tensors_in(first) == [first]
    assert tensors_in(None, {}, ()) == []
