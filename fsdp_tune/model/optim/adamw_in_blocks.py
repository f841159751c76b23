"""torchao's AdamW, whose moments are stored in blocks of 8 or 4 bits with one scale each (arXiv:2110.02861,
arXiv:2309.01507).

torchao does not quantise the moments of a part that has under 4,096 elements or is not a multiple of the
block size: they are in fp32. It compiles its update for each shape of a parameter; on the CPU, where
compiling takes longer than it saves, the update runs eagerly.
"""

from __future__ import annotations

import contextlib
import functools

import torch

from fsdp_tune.model.internals.torch_internals import DISABLE_MODES
from fsdp_tune.model.internals.torchao_internals import NEW_BUFFER
from fsdp_tune.model.optim.lean_adamw import restore_moments
from fsdp_tune.model.shard.local import local_part, require_torchao
from fsdp_tune.recipe.schema.optimizers import optimizer_name, state_bits
from fsdp_tune.recipe.schema.recipe import Recipe

SMALLEST = 4096
"""Smallest number of elements of a rank's part for which torchao uses blocks."""


_BLOCKS = {"OptimState8bit": "8-bit", "OptimState4bit": "4-bit"}


def require_optimizer(recipe: Recipe) -> None:
    if state_bits(recipe.training) is not None:
        require_torchao(f"training.optim: {optimizer_name(recipe.training)}")


@functools.cache
def torchao_class(bits: int) -> type[torch.optim.Optimizer]:
    from torchao import optim
    from torchao.optim import subclass_4bit, subclass_8bit

    with DISABLE_MODES.get()():  # torchao caches these tables, which must not be the planner's fake tensors
        for module in (subclass_4bit, subclass_8bit):
            module.get_qmap_signed()
            module.get_qmap_unsigned()
    return {8: optim.AdamW8bit, 4: optim.AdamW4bit}[bits]


@functools.cache
def with_plain_rates(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return torchao's class with learning rates as numbers, as in torch's optimizers, since schedules and
    resume set numbers.

    Moments that are in no blocks are in fp32: in bf16, the dtype of the parameter, a second moment would
    never change.
    """
    new_buffer = NEW_BUFFER.get()

    class PlainRates(kind):  # type: ignore[misc, valid-type]
        def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:  # noqa: FBT001  torchao's signature
            # A block's tensor is fp32 in torch's eyes: as bf16, DTensor refuses the update of a part in
            # blocks.
            buffer: torch.Tensor = new_buffer(self, torch.empty_like(p, dtype=torch.float32), signed)
            return buffer

        def load_state_dict(self, state_dict: dict[str, object]) -> None:
            super().load_state_dict(state_dict)
            restore_moments(self, state_dict, torch.float32)

        def add_param_group(self, param_group: dict[str, object]) -> None:
            rate = param_group.get("lr", self.defaults["lr"])
            super().add_param_group(param_group)
            self.param_groups[-1]["lr"] = rate

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
            rates = [group["lr"] for group in self.param_groups]
            on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
            for group in self.param_groups:
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
            try:
                with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
                    super().step()
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate

    PlainRates.__name__ = kind.__name__
    return PlainRates


def kept_as(tensor: torch.Tensor) -> str:
    """Return the storage of a tensor: `8-bit`, `4-bit`, or the name of a dtype."""
    local = local_part(tensor)
    return _BLOCKS.get(type(local).__name__, str(local.dtype).removeprefix("torch."))


def blocks_fit(tensor: torch.Tensor, block: int) -> bool:
    """Return whether torchao stores the moments of this rank's part of a parameter in blocks."""
    local = local_part(tensor)
    return local.numel() >= SMALLEST and local.numel() % block == 0
