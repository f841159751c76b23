"""torchao's tensors: whether it is installed, and weights that are gathered in fp8, in a subclass that the rest of the package unwraps.

The inner shard is what is stored, saved and updated. The subclass makes FSDP2 send fp8 values, cast with one scale for the full
weight, which all ranks compute beforehand.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_tune.core.errors import usage_error
from fsdp_tune.model.internals.torch_internals import LOCAL_TENSOR
from fsdp_tune.model.internals.torchao_internals import GATHERED_DTYPE, OPERAND, SCALE, SHARD

PACKAGE = "torchao"


def require_torchao(what: str) -> None:
    """Check that torchao is installed. Raises: usage error (exit 2)."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise usage_error(
            "torchao-not-installed", f"`{what}` needs the package torchao, which is not installed", hint="`pip install torchao`"
        )


def is_fp8(module: nn.Module) -> bool:
    """Return whether a module is torchao's Linear, possibly as the subclass that FSDP2 creates."""
    torchao: Any = sys.modules.get("torchao.float8.float8_linear")  # importing it takes a second; if it is not imported, no module is fp8
    return torchao is not None and isinstance(module, torchao.Float8Linear)


def multiplied_as(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of a matrix operand: fp8 for torchao's operands, whose own dtype is bf16."""
    dtype: torch.dtype = OPERAND.of(tensor).dtype if type(tensor).__name__ == "Float8TrainingTensor" else tensor.dtype
    return dtype


def plain(tensor: Any) -> Any:
    """Return the shard inside torchao's tensor subclass, sharing its memory; any other tensor is returned unchanged."""
    if isinstance(tensor, DTensor):
        local = LOCAL_TENSOR.of(tensor)
        if (inner := plain(local)) is local:
            return tensor
        size, stride = tensor.size(), tensor.stride()
        return DTensor.from_local(inner, tensor.device_mesh, tensor.placements, run_check=False, shape=size, stride=stride)
    return SHARD.of(tensor) if type(tensor).__name__ == "WeightWithDynamicFloat8CastTensor" else tensor


def gathered_in_fp8(wrapped: nn.Module) -> Iterator[nn.Module]:
    """Yield the converted modules whose shards are cast before they are gathered."""
    for module in wrapped.modules():
        weight = module.weight if is_fp8(module) else None
        if isinstance(weight, DTensor) and plain(weight) is not weight:
            yield module


@torch.no_grad()
def refresh_scales(wrapped: nn.Module) -> None:
    """Recompute the scale of each weight that is gathered in fp8, with one collective for all. Call it after weights have changed.

    Bitwise equal to torchao's `precompute_float8_dynamic_scale_for_fsdp`, and also correct for shards of any dtype and empty shards.
    """
    weights: list[Any] = [module.weight for module in gathered_in_fp8(wrapped)]
    if not weights:
        return
    from torchao.float8.float8_utils import amax_to_scale

    wrapped_shards = [LOCAL_TENSOR.of(weight) for weight in weights]
    shards = [plain(shard) for shard in wrapped_shards]
    largest = torch.stack([shard.abs().max().float() if shard.numel() else torch.zeros((), device=shard.device) for shard in shards])
    mesh, placements = weights[0].device_mesh, weights[0].placements
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    for shard, scale in zip(wrapped_shards, amax_to_scale(largest, GATHERED_DTYPE.of(wrapped_shards[0])).unbind(), strict=True):
        SCALE.set(shard, scale)
