"""AdamW on this rank's shards: torch's own, its state sharded like the parameters, its kernel called with plain tensors.

Given DTensors, torch's fused kernel is dispatched anew at each step for every parameter, which takes longer than the update of a
small layer. The update is elementwise and all its operands are sharded alike, so each rank updates its own piece by itself.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_tune.model.local import local_part


class AdamW(torch.optim.AdamW):
    """`state` holds DTensors where parameters are DTensors, as in torch: checkpoints do not know the difference."""

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fills the lists that the kernel takes: parameters, gradients, moments, steps; torch gives them by position."""
        is_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return is_complex
