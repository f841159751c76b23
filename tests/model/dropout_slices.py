"""Dropout in an MLP that is computed in slices, on a device."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_tune.model.kernels.mlp_slices import _in_slices


def check_masks(device: str, *, tokens: int, slice_tokens: int) -> None:
    """The gradient of a module that is dropout alone is zero exactly where its output is, and the backward
    advances no generator."""
    hidden = torch.ones(1, tokens, 64, device=device, requires_grad=True)
    output = _in_slices(nn.Sequential(nn.Dropout(0.5)), slice_tokens)(hidden)
    torch.rand(3, device=device)
    generators = torch if device == "cpu" else torch.get_device_module(device)
    before = generators.get_rng_state()
    with torch.autograd.set_multithreading_enabled(False):  # in this thread, which coverage.py watches
        output.sum().backward()
    assert torch.equal(generators.get_rng_state(), before)
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, output)
    assert 0.4 < float((output == 0).float().mean()) < 0.6
