"""Properties of CUDA kernels that fake tensors do not show: the attention kernel, scratch memory, FLOPs and
memory traffic."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import library
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.shard.local import wraps_others
from fsdp_tune.planner.predict.roofline import TILE_TOKENS
from fsdp_tune.planner.trace.fake_gpu import replaced
from fsdp_tune.planner.trace_format import COLLECTIVES, DTYPES, GROUPS

_DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
    torch.uint8: "uint8",
}
# Tensors of one foreach operation that one launch of multi_tensor_apply takes (`depth_to_max_tensors` of
# MultiTensorApply.cuh).
_TENSORS_PER_LAUNCH = 30
_GROUPED = "_grouped_mm"
# What transformers calls where torch's grouped product cannot be used, and how many products of each expert
# it holds.
_GROUPED_ONE_BY_ONE = {"grouped_mm_fallback": 1, "grouped_mm_fallback_backward": 2}
# Run on the host or read metadata: no work on the device.
_NO_WORK = {
    "device",
    "detach",
    "lift_fresh",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "resize_",
    "record_grad_output_stream",
}


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    dtype: int
    flops: float
    moved_bytes: int
    batch_bytes: int
    slice_bytes: int
    launches: int
    scratch_bytes: tuple[int, ...]


# Elementwise or reducing operators without torch's tag, of which Inductor makes loops.
_LOOPS = {
    "_to_copy",
    "cat",
    "constant_pad_nd",
    "copy_",
    "fill_",
    "full",
    "native_dropout",
    "native_dropout_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "new_zeros",
    "select_backward",
    "slice_backward",
    "zero_",
    "zeros",
    "zeros_like",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "_softmax",
    "_softmax_backward_data",
}


def operator_name(func: Any) -> str:
    """Return the name of an operator without its namespace and overload: `add` of `aten::add.Tensor`."""
    return str(func.overloadpacket.__name__)


def can_fuse(func: Any) -> bool:
    """Return whether Inductor fuses an operator with others."""
    tags = func.tags
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags or operator_name(func) in _LOOPS


def is_separate(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Return whether an operator reduces other dimensions than the last one, which needs a pass of its own
    over the inputs."""
    return torch.Tag.reduction in func.tags and outputs[0].numel() * inputs[0].shape[-1] != inputs[0].numel()


@functools.cache
def is_made_of_others(kind: type) -> bool:
    """Return whether tensors of this class wrap others (DTensor, torchao's blocks), on which each operation
    is then dispatched."""
    return wraps_others(kind)


def dtype_index(dtype: torch.dtype) -> int:
    return DTYPES.index(_DTYPE_NAMES.get(dtype, "fp8"))


def device_type(tensor: torch.Tensor) -> str:
    """Return the type of a tensor's device. Reading `device` of a fake tensor would dispatch an operation."""
    device: torch.device | None = getattr(tensor, "fake_device", None)
    return (tensor.device if device is None else device).type


def _sizes(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.numel() * tensor.element_size() for tensor in tensors]


def work(
    func: Any,
    args: Any,
    kwargs: Any,
    out: Any,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    micro_batch: int,
    slice_tokens: int,
    window: int | None = None,
) -> Work | None:
    """Return the work of an operation; None if it starts nothing on the device. `window` is that of the
    layer's flash attention."""
    name = operator_name(func)
    if name in _NO_WORK or not (inputs or outputs):
        return None
    crossing = {device_type(tensor) for tensor in (*inputs, *outputs)}
    if name in ("_to_copy", "copy_") and len(crossing) > 1:
        target = device_type((outputs or inputs)[0])
        inputs = inputs[1:] if name == "copy_" else inputs  # the target is written, not read
        name = "copy_to_host" if target == "cpu" else "copy_to_device"
    elif crossing == {"cpu"}:
        name = f"host {name}"
    flops = _flops(func, name, args, kwargs, out)
    if "flash_attention" in name:
        flops = flash_flops(flops, micro_batch, inputs[0].shape[2], window)
    kind = (inputs if flops and inputs else outputs or inputs)[0].dtype
    written = outputs or inputs[:1]  # an in-place foreach operation returns nothing
    if name.startswith("_foreach") and not outputs:
        written = [leaf for leaf in args[0] if isinstance(leaf, torch.Tensor)]
    scratch = _SCRATCH.get(name)
    sizes = _sizes(inputs) + _sizes(written)
    of_batch = sum(size for size in sizes if size % micro_batch == 0)
    of_slice = sum(size for size in sizes if size % slice_tokens == 0) if slice_tokens else 0
    held = scratch(*args) if scratch is not None else ()
    return Work(name, dtype_index(kind), flops, sum(sizes), of_batch, of_slice, _launches(name, inputs), held)


def _launches(name: str, inputs: list[torch.Tensor]) -> int:
    if name.startswith(("_foreach", "_fused")):
        return math.ceil(len(inputs) / _TENSORS_PER_LAUNCH)
    # One for each group, of which the last input has the ends (`_grouped_mm_fallback`).
    if name == _GROUPED and len(inputs) == 3 and inputs[0].dtype != torch.bfloat16:
        return inputs[2].numel()
    if name in _GROUPED_ONE_BY_ONE:
        return _GROUPED_ONE_BY_ONE[name] * inputs[2].numel()
    return 1


def _flops(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> float:
    if name == _GROUPED:
        return grouped_flops(*args[:2])
    if name in _GROUPED_ONE_BY_ONE:
        return _GROUPED_ONE_BY_ONE[name] * grouped_flops(*args[:2])
    counter = flop_registry.get(func.overloadpacket)
    if counter is None:
        return 0.0
    if not name.startswith("_scaled_dot_product_"):
        return float(counter(*args, **kwargs, out_val=out))
    # Before torch 2.12 the counters reject grouped-query attention, so keys and values are counted as if each
    # query head had its own.
    is_backward = name.endswith("_backward")
    count: Callable[..., int] = sdpa_backward_flop_count if is_backward else sdpa_flop_count
    *gradient, query, key, value = (tensor.shape for tensor in args[: 4 if is_backward else 3])
    heads = query[1]
    shared = ((shape[0], heads, *shape[2:]) for shape in (key, value))
    return float(count(*gradient, query, *shared))


def grouped_flops(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the FLOPs of a grouped product, which torch does not count: each row of the matrix without
    groups belongs to one group."""
    groups = len(first) if first.ndim == second.ndim == 3 else 1
    return 2.0 * groups * math.prod(first.shape[-2:]) * second.shape[-1]


def grouped_product(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,  # noqa: ARG001  torch's own signature
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the result of a grouped product as CUDA allocates it (`create_grouped_gemm_output_tensor`): rows
    of multiples of 16 bytes.

    Each of `first` [rows, inner] and `second` [inner, columns] has the groups as its first dimension, or
    divides one dimension by them.
    Raises: RuntimeError for rows of the inputs that are not multiples of 16 bytes, as CUDA does.
    """
    dtype = out_dtype or first.dtype
    aligned = 16 // dtype.itemsize
    if any(max(each.stride()[-2:]) % aligned for each in (first, second)):
        raise RuntimeError("strides should be multiple of 16 bytes")
    rows, columns = first.shape[-2], second.shape[-1]
    row = -(-columns // aligned) * aligned
    if first.ndim != second.ndim:
        return first.new_empty_strided((rows, columns), (row, 1), dtype=dtype)
    groups = len(first) if offs is None else len(offs)
    return first.new_empty_strided((groups, rows, columns), (rows * row, row, 1), dtype=dtype)


@functools.cache
def install() -> library.Library:
    """Give `grouped_product` to torch, whose own version refuses fp32 and fp16, once per process; the
    returned object must stay alive."""
    products = library.Library("aten", "FRAGMENT")
    library.register_fake(internals.GROUPED_PRODUCT.get(), grouped_product, lib=products, allow_override=True)
    return products


def flash_flops(square: float, micro_batch: int, tokens: int, window: int | None) -> float:
    """Return the FLOPs of a flash kernel, given those of all pairs of tokens.

    It is a multiple of the micro-batch, which `planner.predict.derive` replaces: a whole number for each
    sequence, of 32 bits and zeros, so that the product is exact.
    """
    of_sequence = square / micro_batch * flash_share(tokens, window)
    step = 2 ** max(0, math.frexp(of_sequence)[1] - 32)
    return float(round(of_sequence / step) * step * micro_batch)


def flash_share(tokens: int, window: int | None) -> float:
    """Return what a flash kernel computes of all pairs of tokens: those before a token and within its window,
    and `TILE_TOKENS`."""
    reached = min(tokens, window or tokens)
    attended = reached - reached * reached / (2 * tokens)
    return min(1.0, (attended + TILE_TOKENS) / tokens)


def _flash_backward_scratch(
    _gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_rest: object
) -> tuple[int, ...]:
    """Return the scratch memory of `mha_bwd` in torch's flash attention: an fp32 dq, row sums, and under GQA
    dk and dv per query head."""
    batch, heads, tokens, width = query.shape
    rows, columns = -(-tokens // 128) * 128, -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64
    scratch = [batch * heads * rows * 4, batch * heads * rows * columns * 4]
    if key.shape[1] != heads:
        scratch += [batch * heads * key.shape[2] * width * query.element_size()] * 2
    return tuple(scratch)


_SCRATCH: dict[str, Callable[..., tuple[int, ...]]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward_scratch
}


Rows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def packed_rows(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return states [batch, heads, tokens, width] as transformers flattens packed rows for flash-attn."""
    return tuple(each.transpose(1, 2).flatten(0, 1) for each in states)


class CudaAttention:
    """`scaled_dot_product_attention` as CUDA selects it: flash for half precision without a mask,
    memory-efficient with one, else plain matrix products (`sdp::select_sdp_backend`). torch's own code then
    decides what is saved for the backward.

    `rows`: what the kernel in whose place it is traced makes of its operands, [batch × tokens, heads, width]
    each; None for none.
    """

    def __init__(self, rows: Rows | None = None) -> None:
        self.used: set[str] = set()
        self.rows = rows

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the function: torch disables function modes in the backward, where recomputation calls it
        again."""
        with replaced(F, "scaled_dot_product_attention", self.choose):
            yield

    def choose(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002  torch's own signature
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> torch.Tensor:
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        width = query.shape[-1]
        grouped = key.shape[1] != query.shape[1]
        half = query.dtype in (torch.bfloat16, torch.float16)
        scale = scale if scale is not None else 1.0 / math.sqrt(width)
        # by `check_batch_size_and_num_heads_dense`; Falcon leaves its one key to broadcasting
        may_fuse = enable_gqa or not grouped
        if may_fuse and attn_mask is None and half and width <= 256 and width == value.shape[-1]:
            self.used.add("flash")
            if self.rows is not None:
                sizes = query.shape[0], query.shape[2]
                query, key, value = (
                    each.unflatten(0, sizes).transpose(1, 2) for each in self.rows(query, key, value)
                )
            padding = -query.shape[-1] % 8
            if padding:
                query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
            out = internals.FLASH_ATTENTION.get()(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return out[..., :width] if out.shape[-1] > width else out
        if not grouped:
            self.used.add("memory-efficient")
            bias = _as_bias(attn_mask, query, key)
            needs_backward = query.requires_grad or key.requires_grad or value.requires_grad
            kernel = internals.EFFICIENT_ATTENTION.get()
            return kernel(query, key, value, bias, needs_backward, dropout_p, is_causal, scale=scale)[0]
        self.used.add("math")
        kernel = internals.MATH_ATTENTION.get()
        return kernel(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]


def _as_bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return a boolean mask in the query's dtype with rows padded to 16, as `convert_boolean_attn_mask` and
    `pad_bias` do."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype, device=mask.device), float("-inf")).to(
            query.dtype
        )
    padding = -mask.shape[-1] % 16
    if padding:
        mask = F.pad(mask, (0, padding))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def collective(
    func: Any, args: Any, inputs: list[torch.Tensor], groups: dict[str, int]
) -> tuple[int, int, int, int] | None:
    """Return (kind, group, bytes of the full buffer, dtype) of a c10d operation; None for a barrier and the
    like."""
    name = operator_name(func)
    kind = next((kind for kind in COLLECTIVES if kind.replace("_", "") in name.replace("_", "")), None)
    if kind is None or not inputs:
        return None
    group = next((found for found in map(_group, args) if found is not None), None)
    largest = max(inputs, key=lambda tensor: tensor.numel() * tensor.element_size())
    index = groups.get("" if group is None else group.group_name, GROUPS.index("world"))
    return (
        COLLECTIVES.index(kind),
        index,
        largest.numel() * largest.element_size(),
        dtype_index(largest.dtype),
    )


def _group(argument: Any) -> dist.ProcessGroup | None:
    if isinstance(argument, dist.ProcessGroup):
        return argument
    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(
        internals.SCRIPT_TYPE.of(argument)()
    ):
        return dist.ProcessGroup.unbox(argument)
    return None
