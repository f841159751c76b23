"""The parameters of a mixture of experts that a token uses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedConfig

from fsdp_tune.core.expert_names import (
    is_in_experts,
    is_router_in_experts,
    is_shared_expert,
    number_of_expert,
)
from fsdp_tune.core.families import CHOSEN_EXPERTS, expert_count
from fsdp_tune.model.adapters.lora import is_of_adapter
from fsdp_tune.model.shard.local import elements


def active_parameters(config: PreTrainedConfig, named: Iterable[tuple[str, torch.Tensor]]) -> int | None:
    """Return the number of parameters that one token uses: those of its chosen experts, and all others.

    Return None if the configuration lacks the number of experts or of experts per token, or if the experts
    are not recognised among the parameters.
    """
    fields = config.to_dict()
    experts, chosen = expert_count(fields), CHOSEN_EXPERTS.of(fields)
    total = of_experts = 0
    for name, parameter in named:
        total += elements(name, parameter)
        belongs = _belongs_to_expert(name, parameter, experts)
        if belongs is None:
            return None
        of_experts += elements(name, parameter) if belongs else 0
    if experts == 1:
        return total
    if chosen is None or not of_experts:
        return None
    return total - of_experts + of_experts * chosen // experts


def _belongs_to_expert(name: str, parameter: torch.Tensor, experts: int) -> bool | None:
    """Return whether a parameter belongs to one expert or stacks all of them; None if its name or shape
    implies another number."""
    if (number := number_of_expert(name)) is not None:
        return True if number < experts else None
    is_stack = parameter.ndim >= 1 and parameter.shape[0] == experts
    if not is_in_experts(name):  # JetMoE's `mlp.input_linear.weight`
        return experts > 1 and is_stack and parameter.ndim >= 3 and not is_shared_expert(name)
    if parameter.ndim < 2 or is_router_in_experts(name):
        return False
    return True if is_stack or is_of_adapter(name) else None
