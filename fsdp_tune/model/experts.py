"""Mixtures of experts: what of a model a token meets."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedConfig

from fsdp_tune.plan.mfu import expert_count


def active_parameters(config: PreTrainedConfig, named: Iterable[tuple[str, torch.Tensor]]) -> int | None:
    """Elements of those parameters that one token is multiplied with: of experts as many as its router chooses, of all else everything.

    None where the configuration says how many experts there are and not how many a token is sent to.
    """
    sizes = [(name, parameter.numel()) for name, parameter in named]
    total, fields = sum(size for _, size in sizes), config.to_dict()
    experts, chosen = expert_count(fields), fields.get("num_experts_per_tok")
    if experts == 1:
        return total
    if not isinstance(chosen, int):
        return None
    of_experts = sum(size for name, size in sizes if ".experts." in name)
    return total - of_experts + of_experts * chosen // experts
