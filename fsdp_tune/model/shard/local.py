"""Parameters of a sharded model: the part that a rank holds, dtypes by the names of recipes, and names and
class without wrappers.

Weights that are gathered in fp8 are in a subclass of torchao that the rest of the package unwraps. Its inner
shard is what is stored, saved and updated. The subclass makes FSDP2 send fp8 values, cast with one scale for
the full weight, which all ranks compute beforehand.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_tune.core.errors import usage_error
from fsdp_tune.model.internals.torch_internals import LOCAL_TENSOR
from fsdp_tune.model.internals.torchao_internals import GATHERED_DTYPE, OPERAND, SCALE, SHARD

PACKAGE = "torchao"


def require_torchao(what: str, oldest: tuple[int, int] = (0, 0)) -> None:
    """Check that torchao is installed, in version `oldest` or a later one. Raises: usage error (exit 2)."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise usage_error(
            "torchao-not-installed",
            f"`{what}` needs the package torchao, which is not installed",
            hint="`pip install torchao`",
        )
    found = importlib.metadata.version(PACKAGE)
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < oldest:
        needed = ".".join(map(str, oldest))
        message = f"`{what}` needs torchao {needed}, and {found} is installed"
        raise usage_error("torchao-not-installed", message, hint=f"`pip install 'torchao>={needed}'`")


def is_fp8(module: nn.Module) -> bool:
    """Return whether a module is torchao's Linear, possibly as the subclass that FSDP2 creates."""
    # Importing it takes a second; if it is not imported, no module is fp8.
    torchao = sys.modules.get("torchao.float8.float8_linear")
    return torchao is not None and isinstance(module, torchao.Float8Linear)


def multiplied_as(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of a matrix operand: fp8 for torchao's operands, whose own dtype is bf16."""
    dtype: torch.dtype = (
        OPERAND.of(tensor).dtype if type(tensor).__name__ == "Float8TrainingTensor" else tensor.dtype
    )
    return dtype


def plain(tensor: object) -> Any:
    """Return the shard inside torchao's tensor subclass, sharing its memory; any other tensor is returned
    unchanged."""
    if isinstance(tensor, DTensor):
        local = LOCAL_TENSOR.of(tensor)
        if (inner := plain(local)) is local:
            return tensor
        size, stride = tensor.size(), tensor.stride()
        return DTensor.from_local(
            inner, tensor.device_mesh, tensor.placements, run_check=False, shape=size, stride=stride
        )
    return SHARD.of(tensor) if type(tensor).__name__ == "WeightWithDynamicFloat8CastTensor" else tensor


def gathered_in_fp8(wrapped: nn.Module) -> Iterator[nn.Module]:
    """Yield the converted modules whose shards are cast before they are gathered."""
    for module in wrapped.modules():
        weight = module.weight if is_fp8(module) else None
        if isinstance(weight, DTensor) and plain(weight) is not weight:
            yield module


@torch.no_grad()
def refresh_scales(wrapped: nn.Module) -> None:
    """Recompute the scale of each weight that is gathered in fp8, with one collective for all. Call it after
    weights have changed.

    Bitwise equal to torchao's `precompute_float8_dynamic_scale_for_fsdp`, and also correct for shards of any
    dtype and empty shards.
    """
    weights: list[Any] = [module.weight for module in gathered_in_fp8(wrapped)]
    if not weights:
        return
    from torchao.float8.float8_utils import amax_to_scale

    wrapped_shards = [LOCAL_TENSOR.of(weight) for weight in weights]
    shards = [plain(shard) for shard in wrapped_shards]
    largest = torch.stack(
        [
            shard.abs().max().float() if shard.numel() else torch.zeros((), device=shard.device)
            for shard in shards
        ]
    )
    mesh, placements = weights[0].device_mesh, weights[0].placements
    for dim, placement in enumerate(placements):
        if placement.is_shard():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    for shard, scale in zip(
        wrapped_shards, amax_to_scale(largest, GATHERED_DTYPE.of(wrapped_shards[0])).unbind(), strict=True
    ):
        SCALE.set(shard, scale)


def local_part(tensor: torch.Tensor) -> Any:
    """Return this rank's part, unwrapped from DTensor and torchao's fp8 weights, sharing its memory. It may
    still be a tensor subclass of a library."""
    return plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def compute_device(tensor: torch.Tensor) -> torch.device:
    """Return where a tensor is computed with: with `offload_params` its part is in host memory, and the mesh
    is one of GPUs."""
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is divided: along one dimension, over the ranks of a group."""

    dim: int
    group: dist.ProcessGroup
    device: torch.device
    """Where the group communicates."""


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """Return how a tensor is divided; None if this rank has all of it."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for index, placement in enumerate(tensor.placements):
            if placement.is_shard() and mesh.size(index) > 1:
                return Sharding(placement.dim, mesh.get_group(index), compute_device(tensor))  # type: ignore[attr-defined]
    return None


def offset_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the index of the first element of this rank's part in the full tensor, one number for each
    dimension.

    As `Shard` divides, by `torch.chunk`: parts of equal length, then a shorter one and empty ones.
    """
    offset, lengths = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for index, placement in enumerate(tensor.placements):
            if placement.is_shard():
                dim: int = placement.dim  # type: ignore[attr-defined]
                part = -(-lengths[dim] // mesh.size(index))
                start = min(lengths[dim], mesh.get_local_rank(index) * part)
                offset[dim], lengths[dim] = offset[dim] + start, min(part, lengths[dim] - start)
    return tuple(offset)


def wraps_others(kind: type) -> bool:
    """Return whether tensors of a class consist of others (DTensor, torchao's blocks), by the protocol of
    torch's tensor subclasses."""
    return (
        issubclass(kind, torch.Tensor)
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
    )


def parts_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of this rank that a tensor consists of: the local one of a DTensor, those
    inside of torchao's. Of any other value, none."""
    if isinstance(value, DTensor):
        yield from parts_of(value.to_local())
    elif wraps_others(type(value)):
        for name in value.__tensor_flatten__()[0]:
            yield from parts_of(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


@torch.no_grad()
def copy_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of `whole` into `target`, without communication."""
    if isinstance(target, DTensor):
        parts = zip(offset_of(target), target.to_local().shape, strict=True)
        whole = whole[tuple(slice(start, start + length) for start, length in parts)]
    local_part(target).copy_(whole)


NF4_PACKED, NF4_SCALES = "weight_nf4", "weight_scales"
"""Names of the two parameters of a layer in 4 bits (`model.adapters.nf4`)."""


def elements(name: str, parameter: torch.Tensor) -> int:
    """Return the number of weights that a parameter holds: two a byte in 4 bits, and none in scales."""
    end = name.rpartition(".")[2]
    return 0 if end == NF4_SCALES else parameter.numel() * (2 if end == NF4_PACKED else 1)


def count_elements(named: Iterable[tuple[str, torch.Tensor]]) -> int:
    return sum(elements(name, parameter) for name, parameter in named)


TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def kept_in_fp32(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers that the model's class keeps in fp32
    (`model.loading.kept_precision`)."""
    names: frozenset[str] = vars(bare_model(model)).get("kept_in_fp32", frozenset())
    return names


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay acts on a parameter: a matrix whose name contains neither "norm" nor
    "bias".

    Stacked experts (gpt-oss) and attention heads (XLNet) have biases of two dimensions.
    """
    return parameter.ndim >= 2 and not any(word in name.lower() for word in ("norm", "bias"))


def plain_name(name: str) -> str:
    """Return a parameter's name in the bare model, without the parts that DDP and FSDP1 add."""
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")


def decayed_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters with weight decay. Needs the bare model, since FSDP1's parts of a
    matrix are vectors."""
    return frozenset(name for name, parameter in model.named_parameters() if decays(name, parameter))


class ModuleView:
    """A module as a kernel sees it, with some attributes replaced."""

    def __init__(self, module: nn.Module, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def bare_model(wrapped: nn.Module) -> nn.Module:
    """Return the model that DDP or FSDP1 wraps; FSDP2 has no wrapper."""
    return (
        wrapped.module if isinstance(wrapped, DistributedDataParallel | FullyShardedDataParallel) else wrapped
    )


def bare_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that `module` had before FSDP2 replaced it by a subclass of its own
    (`FSDPLlamaForCausalLM`)."""
    return next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
