"""torch's AdamW on this rank's shards: the state is sharded like the parameters, and the kernel gets plain
tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fsdp_tune.model.internals.torch_internals import INIT_GROUP
from fsdp_tune.model.shard.local import local_part


class AdamW(torch.optim.AdamW):
    """AdamW whose `state` holds DTensors where parameters are DTensors, as in torch, so that checkpoints are
    the same."""

    found_inf: torch.Tensor | None
    """fp32 scalar on the device. The fused kernel leaves parameters and state unchanged where it is not 0;
    torch reads it if it is set."""

    def __init__(self, params: ParamsT, **options: Any) -> None:
        INIT_GROUP.get()  # torch would update slowly, not wrongly, if it no longer called the method below
        super().__init__(params, **options)

    def _init_group(self, group: dict[str, object], *lists: list[torch.Tensor]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fill the lists for the kernel (parameters, gradients, moments, steps, by position) and replace
        DTensors by local tensors."""
        is_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return is_complex
