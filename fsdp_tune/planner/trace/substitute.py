"""Replace attributes of torch and of this package while a step is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fsdp_tune.model.internals.torch_internals import HOST_VALUES


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or class for the duration of the block."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def nothing(*_args: Any, **_options: Any) -> None:
    """Do nothing, in place of a function whose effect a trace must not have."""


@contextlib.contextmanager
def values_of_host() -> Iterator[None]:
    """Let lists, numbers and arrays become tensors of the fake device and indices of its tensors; enter it before the fake mode.

    Below the modes, where nothing is fake, torch would allocate such a tensor on the device itself. Now it makes one on the host, and an
    operation copies it.
    """
    get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def selected(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        return get(tensor, _by_position(index))

    def assigned(tensor: torch.Tensor, index: Any, value: Any) -> None:
        put(tensor, _by_position(index), value)

    with (
        HOST_VALUES.replaced(True),
        replaced(torch.Tensor, "__getitem__", selected),
        replaced(torch.Tensor, "__setitem__", assigned),
    ):
        yield


def _by_position(index: Any) -> Any:
    """Replace masks (lists and arrays of booleans) by the positions that they select, since a mask on the fake device has no values."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_mask, parts)):
        return index
    return tuple(each for part in parts for each in (np.asarray(part).nonzero() if _is_mask(part) else (part,)))


def _is_mask(part: Any) -> bool:
    if isinstance(part, np.ndarray):
        return part.dtype == np.bool_
    return isinstance(part, list) and bool(part) and all(isinstance(each, bool) for each in part)
