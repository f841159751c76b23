"""Frozen linear layers of the decoder in 4 bits: `quantization: {load: nf4}` (QLoRA, arXiv:2305.14314).

Weights are plain bytes (NF4). A weight [out, in] is two uint8 tensors, `packed` [out, in / 2] with two codes
a byte, the first in the high bits, and `scales` [out, in / 64 * bytes of a scale], the largest magnitude of
each block in fp32 or bf16. A row depends on no other row, so FSDP2 shards both tensors by rows like any
parameter, and a rank quantises its rows as one process would. They are integers because FSDP2 casts
floating-point parameters to the compute dtype when it gathers them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.core.errors import Notice, usage_error
from fsdp_tune.core.expert_names import is_router
from fsdp_tune.core.tensors.dtypes import NF4_BLOCK, NF4_SMALLEST_SCALE, NF4_VALUES
from fsdp_tune.core.units import format_bytes
from fsdp_tune.model.adapters.targets import is_stack
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.model.shard.local import NF4_PACKED, count_elements, elements, kept_in_fp32, local_part
from fsdp_tune.recipe.schema.recipe import Recipe

_PIECE = 4096
"""Blocks that are converted at a time on a CPU: intermediate values of 1 MiB stay in its cache, which is 8
times as fast."""


@torch.no_grad()
def quantise(rows: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (packed, scales) of rows [n, in] of any float dtype; `in` is a multiple of 64, n may be 0.

    With fp32 scales the bytes are those of bitsandbytes (`quantize_4bit`, blocks of 64).
    """
    blocks = rows.reshape(-1, NF4_BLOCK)
    packed = torch.empty(len(blocks), NF4_BLOCK // 2, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(len(blocks), dtype=scale_dtype, device=rows.device)
    values = torch.tensor(NF4_VALUES)
    edges = ((values[1:] + values[:-1]) / 2).tolist()
    at_once = _PIECE if rows.device.type == "cpu" else max(1, len(blocks))
    for first in range(0, len(blocks), at_once):
        piece = blocks[first : first + at_once].float()
        scales[first : first + at_once] = largest = piece.abs().amax(dim=1).to(scale_dtype)
        scaled = piece * (1.0 / largest.float().clamp(min=NF4_SMALLEST_SCALE))[:, None]
        codes = torch.zeros_like(scaled, dtype=torch.uint8)
        for edge in edges:  # a comparison with each is twice as fast as a search
            codes += scaled > edge
        packed[first : first + at_once] = codes[:, ::2] << 4 | codes[:, 1::2]
    columns = rows.shape[1]
    return packed.view(len(rows), columns // 2), scales.view(torch.uint8).view(
        len(rows), columns // NF4_BLOCK * scale_dtype.itemsize
    )


def dequantise(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [out, in]: value times scale in fp32, rounded to `dtype`, as bitsandbytes computes
    them."""
    weight: torch.Tensor = torch.ops.fsdp_tune.dequantise_nf4(packed, scales, dtype)
    return weight


# An operator of its own: torch.compile does not break at it, and the planner's trace sees no intermediate
# values.
_LIBRARY = torch.library.Library("fsdp_tune", "DEF")
_LIBRARY.define("dequantise_nf4(Tensor packed, Tensor scales, ScalarType dtype) -> Tensor")


def _blocks(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes [blocks, 32] and scales [blocks]."""
    blocks = packed.reshape(-1, NF4_BLOCK // 2)
    scale_dtype = torch.float32 if scales.numel() == 4 * len(blocks) else torch.bfloat16
    return blocks, scales.reshape(-1).view(scale_dtype)


@cache
def _pairs() -> torch.Tensor:
    """Return the two fp32 values of each byte, as one number of 8 bytes, so that one look-up finds both."""
    values, byte = torch.tensor(NF4_VALUES), torch.arange(256)
    return torch.stack((values[byte >> 4], values[byte & 15]), dim=1).view(torch.int64).view(-1)


def _on_cpu(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks, by_block = _blocks(packed, scales)
    weight = torch.empty(len(blocks), NF4_BLOCK, dtype=dtype)
    for first in range(0, len(blocks), _PIECE):
        piece = slice(first, first + _PIECE)
        values = (
            _pairs().index_select(0, blocks[piece].reshape(-1).int()).view(torch.float32).view(-1, NF4_BLOCK)
        )
        weight[piece] = values * by_block[piece, None].float()
    return weight.view(len(packed), 2 * packed.shape[1])


def in_one_formula(
    blocks: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights [blocks, 64]. Compiled, it is one kernel, which reads the bytes and writes the
    weights."""
    codes = torch.stack((blocks >> 4, blocks & 15), dim=-1).view(-1, NF4_BLOCK)
    return (values[codes.int()] * scales.float()[:, None]).to(dtype)


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(in_one_formula, dynamic=True, fullgraph=True)


@cache
def _values_on(device: torch.device) -> torch.Tensor:
    return torch.tensor(NF4_VALUES, device=device)


def _on_cuda(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks, by_block = _blocks(packed, scales)
    weight: torch.Tensor = _compiled()(blocks, by_block, _values_on(packed.device), dtype)
    return weight.view(len(packed), 2 * packed.shape[1])


def _elsewhere(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks, by_block = _blocks(packed, scales)
    return in_one_formula(blocks, by_block, _values_on(packed.device), dtype).view(
        len(packed), 2 * packed.shape[1]
    )


_LIBRARY.impl("dequantise_nf4", _on_cpu, "CPU")
_LIBRARY.impl("dequantise_nf4", _on_cuda, "CUDA")
_LIBRARY.impl("dequantise_nf4", _elsewhere, "CompositeExplicitAutograd")


@torch.library.register_fake("fsdp_tune::dequantise_nf4", lib=_LIBRARY)
def _shape(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG001  the operator's arguments
    return packed.new_empty((packed.shape[0], packed.shape[1] * 2), dtype=dtype)


NF4_KEY = "quantization.load"
SCALE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Product(torch.autograd.Function):
    """x @ weightᵀ + bias. Keeps the bytes for the backward, not the weight that is made from them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, scales)
        return nn.functional.linear(
            x, dequantise(packed, scales, x.dtype), None if bias is None else bias.to(x.dtype)
        )

    @staticmethod
    def backward(
        ctx: Any, *upstream: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, None, torch.Tensor | None]:
        (gradient,), (packed, scales) = upstream, ctx.saved_tensors
        of_x = gradient @ dequantise(packed, scales, gradient.dtype) if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[3] else None
        return of_x, None, None, of_bias


class Nf4Linear(nn.Module):
    """A linear layer whose frozen weight [out, in] is in 4 bits. Takes the place of an `nn.Linear`, also on
    the meta device."""

    def __init__(self, linear: nn.Linear, scale_dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scale_dtype = (
            linear.in_features,
            linear.out_features,
            scale_dtype,
        )
        self.bias = linear.bias
        weight = linear.weight
        if weight.device.type == "meta":
            packed = torch.empty(self.out_features, self.in_features // 2, dtype=torch.uint8, device="meta")
            scale_bytes = self.in_features // NF4_BLOCK * scale_dtype.itemsize
            scales = torch.empty(self.out_features, scale_bytes, dtype=torch.uint8, device="meta")
        else:
            packed, scales = quantise(weight, scale_dtype)
        self.weight_nf4 = nn.Parameter(packed, requires_grad=False)
        self.weight_scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        product: torch.Tensor = _Product.apply(x, self.weight_nf4, self.weight_scales, self.bias)
        return product

    @property
    def weight(self) -> torch.Tensor:
        """The weight in fp32, of a sharded layer this rank's rows: for DoRA and for models that read weights
        of their layers."""
        return dequantise(local_part(self.weight_nf4), local_part(self.weight_scales), torch.float32)

    def set_rows(self, first: int, rows: torch.Tensor) -> None:
        """Quantise rows [n, in] into this rank's part, from its row `first` on."""
        packed, scales = quantise(rows.to(self.weight_nf4.device), self.scale_dtype)
        local_part(self.weight_nf4)[first : first + len(rows)] = packed
        local_part(self.weight_scales)[first : first + len(rows)] = scales


def plan_nf4(
    model: PreTrainedModel, decoder: Iterable[tuple[str, nn.Module]]
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the frozen linear layers of the decoder that can be held in 4 bits and are not yet, and the
    others with a reason, by name."""
    chosen: dict[str, nn.Linear] = {}
    left: dict[str, str] = {}
    kept = kept_in_fp32(model)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for prefix, layer in decoder:
        for name, module in layer.named_modules(prefix=prefix):
            if not isinstance(module, nn.Linear) or module.weight.requires_grad:
                continue
            if type(module) is not nn.Linear:
                left[name] = f"it is a {type(module).__name__}, which may compute something else"
            elif uses[id(module.weight)] > 1:
                left[name] = "it shares its weight with another layer"
            elif f"{name}.weight" in kept:
                left[name] = "the model's class keeps it in fp32"
            elif is_router(model.config, module.out_features):
                left[name] = "it is a router, whose few outputs need precision"
            elif module.in_features % NF4_BLOCK:
                left[name] = f"its {module.in_features} columns are not a multiple of {NF4_BLOCK}"
            else:
                chosen[name] = module
    return chosen, left


def quantise_layers(recipe: Recipe, model: PreTrainedModel) -> None:
    """Replace the frozen linear layers of the decoder by layers in 4 bits, in place; those of adapters stay
    around them.

    The head, embeddings, norms, routers and fused experts keep their dtype. Raises: usage error if nothing
    can be replaced.
    """
    if recipe.nf4 is None:
        return
    chosen, left = plan_nf4(model, decoder_layers(model, recipe.layer_classes))
    if not chosen:
        name, why = next(
            iter(left.items()), ("", "its decoder layers have no nn.Linear (GPT-2, for example, has Conv1D)")
        )
        message = (
            f"`{NF4_KEY}: nf4` finds nothing to hold in 4 bits in {type(model).__name__}: "
            f"{f'`{name}`: ' if name else ''}{why}"
        )
        raise usage_error(
            "nf4-nothing-to-quantise",
            message,
            hint="leave `quantization` out, or train a model with other linear layers",
        )
    for name, linear in chosen.items():
        model.set_submodule(name, Nf4Linear(linear, SCALE_DTYPE[recipe.nf4.scales]))


def layers_in_4_bits(model: nn.Module) -> dict[str, Nf4Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Nf4Linear)}


def describe_nf4(recipe: Recipe, model: PreTrainedModel) -> str:
    """Return what is held in 4 bits, what is not, with the reason, and the bytes of all frozen parameters."""
    assert recipe.nf4 is not None
    bits = 4 + 8 * SCALE_DTYPE[recipe.nf4.scales].itemsize / NF4_BLOCK
    _, left = plan_nf4(model, decoder_layers(model, recipe.layer_classes))
    others = [f"{count} left, {why}" for why, count in Counter(left.values()).items()]
    frozen_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    layers = f"{len(layers_in_4_bits(model))} linear layers in {bits:g} bits a weight"
    return "; ".join([f"nf4, {layers}", *others, f"the base takes {format_bytes(frozen_bytes)}"])


def nf4_notices(recipe: Recipe, model: PreTrainedModel) -> list[Notice]:
    """Return a notice if much of the decoder stays in 16 bits: fused experts are not linear layers."""
    if recipe.nf4 is None:
        return []
    of_layers = [
        pair
        for name, layer in decoder_layers(model, recipe.layer_classes)
        for pair in layer.named_parameters(prefix=name)
    ]
    in_4_bits = sum(elements(name, p) for name, p in of_layers if name.endswith(NF4_PACKED))
    experts = sum(p.numel() for name, p in of_layers if is_stack(name, p))
    if not experts:
        return []
    share = in_4_bits / count_elements(of_layers)
    message = (
        f"{share:.0%} of the weights of the layers are in 4 bits: fused experts ({experts:,}) are not "
        "linear layers and stay in 16 bits"
    )
    return [Notice("nf4-without-experts", message)]
