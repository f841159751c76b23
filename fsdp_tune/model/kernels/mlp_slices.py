"""Compute the MLPs of decoder layers a slice of the row at a time.

Inner activations then exist for one slice only, as in Arctic's long-sequence training (ALST,
arXiv:2506.13996, TiledMLP). The forward keeps the input of the MLP alone. The backward computes each slice
again, differentiates it, and adds its weight gradients in fp32: under bf16 they are rounded once, as in one
product over all tokens. It happens inside the layer's `forward`, so FSDP gathers and reduces the layer's
parameters once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from types import EllipsisType
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.model.internals.torch_internals import DISABLE_MODES
from fsdp_tune.model.model_files import KernelChoice
from fsdp_tune.model.shard.fsdp_units import decoder_layers, plan_units
from fsdp_tune.recipe.schema.recipe import Recipe

_KEY = "kernels.mlp_slice_tokens"
_WIDE = 64
_NARROW = 8
"""The probe has `_NARROW` dimensions for the common divisor of those from `_WIDE` on; smaller ones (ranks of
adapters) are kept."""


def choose_mlp_slices(recipe: Recipe, model: PreTrainedModel) -> KernelChoice:
    """Choose `kernels.mlp_slice_tokens`. Raises: usage error if no MLP of the model can be computed in
    slices."""
    tokens = recipe.kernels.mlp_slice_tokens
    if tokens is None:
        return KernelChoice("null", "not requested")
    found, layers = find_mlps(recipe, model), decoder_layers(model, recipe.layer_classes)
    if not found:
        message = (
            f"`{_KEY}: {tokens}`: no decoder layer of {type(model).__name__} has a dense MLP as a module "
            "of its own"
        )
        raise usage_error("mlp-not-sliceable", message, where=Where(key=_KEY), hint=f"leave `{_KEY}` out")
    prefixes = tuple(f"{mlp}." for mlp in found)
    groups = plan_units(recipe, model).groups if recipe.is_sharded else ()
    if inside := next((name for group in groups for name in group if f"{name}.".startswith(prefixes)), None):
        message = (
            f"`{_KEY}: {tokens}` computes an MLP again in the backward pass, and `{inside}` in it is an "
            "FSDP unit of its own"
        )
        raise usage_error(
            "mlp-not-sliceable",
            message,
            where=Where(key=_KEY),
            hint="write `fsdp: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}`",
        )
    which = (
        "the MLPs of all layers"
        if len(found) == len(layers)
        else f"the dense MLPs of {len(found)} of {len(layers)} layers"
    )
    return KernelChoice(str(tokens), f"{which}, {tokens:,} tokens at a time")


def install_mlp_slices(mlps: Iterable[nn.Module], tokens: int) -> None:
    """Make MLPs of decoder layers compute in slices. Call it before recomputation is installed, and before
    wrapping."""
    for mlp in mlps:
        mlp.forward = _in_slices(mlp, tokens)  # type: ignore[method-assign]
        mlp.slice_tokens = tokens  # type: ignore[assignment]  # for the read-back


def mlp_slices_of(model: nn.Module) -> dict[str, int]:
    """Return the tokens of a slice by the name of the MLP, for a live model."""
    return {
        name: vars(module)["slice_tokens"]
        for name, module in model.named_modules()
        if "slice_tokens" in vars(module)
    }


def find_mlps(recipe: Recipe, model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the MLPs of the decoder layers by name: children with two linear layers and more that compute
    each token by itself."""
    known: dict[str, bool] = {}
    found: dict[str, nn.Module] = {}
    for layer_name, layer in decoder_layers(model, recipe.layer_classes):
        for name, child in layer.named_children():
            if sum(_is_linear(module) for module in child.modules()) < 2 or _has_experts(child):
                continue
            kind = repr(child)  # layers of one kind are probed once
            if kind not in known:
                known[kind] = _is_position_wise(child)
            if known[kind]:
                found[f"{layer_name}.{name}"] = child
    return found


def _has_experts(module: nn.Module) -> bool:
    """Return whether tokens may be routed: weights of stacked experts, or modules in a list."""
    return any(isinstance(each, nn.ModuleList) for each in module.modules()) or any(
        p.ndim > 2 for p in module.parameters()
    )


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    return isinstance(module, Conv1D) or (hasattr(module, "in_features") and hasattr(module, "out_features"))


def _is_position_wise(module: nn.Module) -> bool:
    """Return whether slices of the tokens give the slices of the output, measured with a narrow copy of the
    module on random values."""
    disabled_modes = DISABLE_MODES.get()()
    try:
        # The planner builds the model under a mode in which tensors have no values.
        with disabled_modes, torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            narrow, width = _narrow_copy(module)
            hidden = torch.randn(1, 7, width)
            output = narrow(hidden)
            parts = torch.cat([narrow(part) for part in hidden.split(3, dim=1)], dim=1)
            return output.shape == hidden.shape and torch.allclose(parts, output, rtol=1e-4, atol=1e-5)
    except Exception:  # noqa: BLE001  the module's own code runs here: one that needs other inputs is not an MLP
        return False


def _narrow_copy(module: nn.Module) -> tuple[nn.Module, int]:
    """Return a copy on the CPU with narrow random weights in the same ratios, in evaluation mode, and the
    width of its input."""
    linears = [each for each in module.modules() if _is_linear(each)]
    widths = [_widths(linear) for linear in linears]
    divisor = math.gcd(*(width for pair in widths for width in pair if width >= _WIDE)) or 1

    def narrow(width: int) -> int:
        return width * _NARROW // divisor if width >= _WIDE and divisor > _NARROW else width

    replaced: dict[int, nn.Parameter | nn.Linear] = {
        id(p): nn.Parameter(torch.randn([narrow(size) for size in p.shape])) for p in module.parameters()
    }
    for linear, (inputs, outputs) in zip(linears, widths, strict=True):
        replaced[id(linear)] = nn.Linear(narrow(inputs), narrow(outputs))
    return copy.deepcopy(module, replaced).eval(), narrow(widths[0][0])


def _widths(linear: nn.Linear | Conv1D) -> tuple[int, int]:
    return (linear.nx, linear.nf) if isinstance(linear, Conv1D) else (linear.in_features, linear.out_features)


def _in_slices(mlp: nn.Module, tokens: int) -> Callable[..., torch.Tensor]:
    """Return a forward of one tensor [..., tokens, width], by position or by whatever name the module gives
    it."""
    compute = mlp.forward

    @functools.wraps(compute)
    def forward(*args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        (hidden,) = (*args, *named.values())
        if hidden.shape[-2] <= tokens:
            return compute(hidden)  # type: ignore[no-any-return]
        return _Sliced.apply(hidden, compute, mlp, tokens, *_trained(mlp))  # type: ignore[no-any-return, no-untyped-call]

    return forward


def _trained(mlp: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained, which under FSDP2 are the gathered ones while the layer
    runs."""
    return [parameter for parameter in mlp.parameters() if parameter.requires_grad]


def _slices(hidden: torch.Tensor, tokens: int) -> list[tuple[EllipsisType, slice, slice]]:
    """Return the indexes of the slices of `hidden` [..., tokens, width]. Their number does not depend on the
    number of rows."""
    return [(..., slice(start, start + tokens), slice(None)) for start in range(0, hidden.shape[-2], tokens)]


class _Sliced(torch.autograd.Function):
    """`compute(hidden)` a slice at a time; `hidden` is [..., tokens, width].

    The trained parameters are inputs, so that autograd takes their gradients from here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        compute: Callable[..., torch.Tensor],
        mlp: nn.Module,
        tokens: int,
        *_trained: nn.Parameter,
    ) -> torch.Tensor:
        ctx.compute, ctx.mlp, ctx.tokens = compute, mlp, tokens
        ctx.context = _ForwardContext(hidden, mlp)
        ctx.save_for_backward(hidden)
        output: torch.Tensor | None = None
        for part in _slices(hidden, tokens):
            result = compute(hidden[part].contiguous())
            output = result.new_empty(*hidden.shape[:-1], result.shape[-1]) if output is None else output
            output[part] = result
        assert output is not None, "there are more tokens than in one slice"
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,), trained = ctx.saved_tensors, _trained(ctx.mlp)
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        sums = [
            torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            for parameter in trained
        ]
        with ctx.context.restored():
            for part in _slices(hidden, ctx.tokens):
                x = hidden[part].detach().contiguous().requires_grad_(of_hidden is not None)
                with torch.enable_grad(), ctx.context.autocast():
                    output = ctx.compute(x)
                wanted = [*([x] if of_hidden is not None else []), *trained]
                gradients = list(
                    torch.autograd.grad(
                        output,
                        wanted,
                        upstream[0][part].contiguous(),
                        allow_unused=True,
                        materialize_grads=True,
                    )
                )
                if of_hidden is not None:
                    of_hidden[part] = gradients.pop(0)
                for total, gradient in zip(sums, gradients, strict=True):
                    total += gradient
        return (
            of_hidden,
            None,
            None,
            None,
            *(total.to(parameter.dtype) for total, parameter in zip(sums, trained, strict=True)),
        )


class _ForwardContext:
    """State of autocast and of the random generators in a forward, for the same slices in the backward."""

    def __init__(self, hidden: torch.Tensor, mlp: nn.Module) -> None:
        self._device = hidden.device
        self._autocast = (
            torch.is_autocast_enabled(hidden.device.type),
            torch.get_autocast_dtype(hidden.device.type),
        )
        draws = mlp.training and any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in mlp.modules()
        )
        self._random = (torch.get_rng_state(), self._generator_state()) if draws else None

    def _generator_state(self) -> torch.Tensor | None:
        return (
            None
            if self._device.type == "cpu"
            else torch.get_device_module(self._device).get_rng_state(self._device)
        )

    def autocast(self) -> torch.autocast:
        enabled, dtype = self._autocast
        return torch.autocast(self._device.type, dtype=dtype, enabled=enabled)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Draw the dropout masks of the forward again, and leave the generators as they were."""
        if self._random is None:
            yield
            return
        on_cpu = self._device.type == "cpu"
        with torch.random.fork_rng(
            [] if on_cpu else [self._device.index], device_type="cuda" if on_cpu else self._device.type
        ):
            torch.set_rng_state(self._random[0])
            if self._random[1] is not None:
                torch.get_device_module(self._device).set_rng_state(self._random[1], self._device)
            yield
