"""Adapters of stacked experts that ranks divide: `lora.target_parameters` with `fsdp.ep_size`.

PEFT's layer adds B·A to a stack by a parametrization, which it registers on the module of the stack before it
calls that module. FSDP2 gathers divided experts in a hook of this call, and would put the gathered stack in
place of the parametrized one. So here PEFT's layer only calls the module, and the forward of the divided
experts adds the product for the experts of this rank.

PEFT keeps the factors of all experts in one A and one B, in which the columns of an expert are apart from
each other. They stay in the unit of the decoder layer: sharded over all ranks, and gathered in full, which is
a few per cent of the experts. The gradient of a rank is that of its experts, from the tokens of all ranks of
`ep`, and zero for the others, so that FSDP2's mean over all ranks is that of `ep_size: 1`. Optimizer state,
checkpoints and merges therefore do not depend on `ep_size`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from fsdp_tune.core.tensors.peft_names import unwrapped


def adapters_around(model: nn.Module, experts: str) -> dict[str, Any]:
    """Return PEFT's layers around the module of stacked experts with this name, by the parameter that each
    adapts."""
    layers: dict[str, Any] = {}
    while experts != unwrapped(experts):
        experts = experts.removesuffix(".base_layer")
        layer: Any = model.get_submodule(experts)
        layers[layer.parameter_name] = layer
    return layers


def leave_to_experts(layer: Any) -> None:
    """Make a layer of PEFT call what it encloses, without its adapter."""
    layer.forward = functools.partial(_call_enclosed, layer)


def _call_enclosed(layer: Any, *args: object, **kwargs: object) -> object:
    return layer.base_layer(*args, **kwargs)


def with_adapter(stack: torch.Tensor, layer: Any, own: slice) -> torch.Tensor:
    """Return the matrices of this rank's experts with the product of their adapter.

    `stack`: [own experts, rows, columns]. `layer`: PEFT's, whose factors are of all experts, gathered; `own`:
    which of them are this rank's.
    """
    name, count = layer.active_adapters[0], layer.num_experts
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    a = a.reshape(count, -1, a.shape[1])[own].to(stack.dtype)  # [own, rank, inputs]
    b = b.reshape(len(b), -1, count)[..., own].permute(2, 0, 1).to(stack.dtype)  # [own, outputs, rank]
    left, right = (a.mT, b.mT) if layer.get_base_layer().is_transposed else (b, a)
    return torch.baddbmm(stack, left, right, alpha=layer.scaling[name])  # as PEFT's parametrization
