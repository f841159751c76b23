"""The arithmetic of an optimizer step besides the model itself: parameter groups, optimizer, norm, clipping, fp16 scale.

The planner traces these same functions, so what they allocate is what it predicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from fsdp_tune.model.build import TORCH_DTYPE
from fsdp_tune.recipe.schema import Recipe


def compute_context(recipe: Recipe, device_type: str) -> AbstractContextManager[Any]:
    """FSDP casts its units itself; plain DDP keeps fp32 parameters and needs autocast to compute in another dtype."""
    mixed = recipe.precision.mixed_precision
    if recipe.fsdp.sharding_strategy != "NO_SHARD" or mixed == "no" or recipe.compute_dtype == recipe.model.dtype:
        return nullcontext()
    return torch.autocast(device_type, dtype=TORCH_DTYPE[recipe.compute_dtype])


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Weight decay acts on matrices: not on norms, biases and other vectors, wherever they are called what."""
    return parameter.ndim >= 2 and "norm" not in name.lower()


def plain_name(name: str) -> str:
    """A parameter's name in the bare model, whatever DDP and FSDP1 put before and into it."""
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")


def decayed_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that decay, asked of the bare model: FSDP1's pieces of a matrix are vectors."""
    return frozenset(name for name, parameter in model.named_parameters() if decays(name, parameter))


def parameter_groups(wrapped: nn.Module, weight_decay: float, decayed: frozenset[str]) -> list[dict[str, Any]]:
    """Trained parameters in two groups, decayed and not; empty groups are left out."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            groups[plain_name(name) in decayed].append(parameter)
    return [{"params": params, "weight_decay": weight_decay if decay else 0.0} for decay, params in groups.items() if params]


def flat_shard_group(wrapped: nn.Module) -> dist.ProcessGroup | None:
    """The ranks over which FSDP1 splits its flat parameters; None where gradients are DTensors or whole."""
    return wrapped.process_group if isinstance(wrapped, FullyShardedDataParallel) else None


def total_norm(parameters: Iterable[nn.Parameter], flat_group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """L2 norm of all gradients over all ranks: a plain fp32 scalar, the same on every rank.

    Gradients on different meshes (sharded ones beside replicated ones) cannot be stacked; each mesh gives its own norm,
    reduced over itself, and the squares add up. Under FSDP1 a gradient is a plain tensor that holds this rank's piece;
    `flat_group` are the ranks that hold the others.
    """
    by_mesh: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter.grad)
    norms: list[torch.Tensor] = []
    for mesh, gradients in by_mesh.items():
        norm = get_total_norm(gradients)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).float()
        norms.append(_over_ranks(norm, flat_group) if mesh is None and flat_group is not None else norm)
    if not norms:
        norms = [torch.zeros(())] if flat_group is None else [_over_ranks(torch.zeros(()), flat_group)]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def _over_ranks(norm: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    square = norm.square()
    dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiplies every gradient in place."""
    by_kind: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            by_kind[local.device, local.dtype].append(local)
    for (device, _), gradients in by_kind.items():
        torch._foreach_mul_(gradients, factor.to(device) if isinstance(factor, torch.Tensor) else factor)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What the gradients are multiplied with so that their norm is at most `max_norm`, as in torch's clip_grad_norm_."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class LossScale:
    """Dynamic loss scaling for fp16 under any sharding, on any device (Micikevicius et al., arXiv:1710.03740).

    torch's GradScaler looks for infinities on each rank by itself. The gradient norm is reduced over all ranks anyway,
    and it is not finite exactly when some gradient is not: every rank decides the same from one number.
    """

    growth, backoff, growth_interval_steps = 2.0, 0.5, 2000

    def __init__(self, scale: float = 65536.0) -> None:
        self.scale = scale
        self.good_steps = 0
        self.skipped_steps = 0
        self.skipped_in_a_row = 0

    def update(self, *, finite: bool) -> None:
        """Called once a step with the verdict on the norm of the scaled gradients."""
        if finite:
            self.skipped_in_a_row = 0
            self.good_steps += 1
            if self.good_steps % self.growth_interval_steps == 0:
                self.scale *= self.growth
        else:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            self.good_steps = 0
            self.scale *= self.backoff

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.good_steps, self.skipped_steps = int(state["good_steps"]), int(state["skipped_steps"])
