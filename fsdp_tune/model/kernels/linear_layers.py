"""How the linear layers of a decoder are computed: in fp8, and MLPs a slice of the row at a time.

`precision.mixed_precision: fp8` replaces Linears of the decoder layers by torchao's, which multiply in fp8; all else stays in bf16.
Parameters keep their names, values and storage dtype. A weight is cast to fp8 where it is used or, with one scale for the full
weight (`tensorwise`) under FSDP2, before it is gathered. Accelerate's implementation is not used: it converts everything between
the first and the last Linear, pads every operand, and refuses to load shard by shard.

With MLPs in slices, inner activations exist for one slice only, as in Arctic's long-sequence training (ALST, arXiv:2506.13996, TiledMLP).
The forward keeps the input of the MLP alone. The backward computes each slice again, differentiates it, and adds its weight gradients in
fp32: under bf16 they are rounded once, as in one product over all tokens. It happens inside the layer's `forward`, so FSDP gathers and
reduces the layer's parameters once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdp_tune.core.errors import Notice, Where, usage_error
from fsdp_tune.core.families import is_in_experts, is_router
from fsdp_tune.model.internals.torch_internals import DISABLE_MODES
from fsdp_tune.model.model_files import KernelChoice
from fsdp_tune.model.shard.fsdp_units import decoder_layers, ignored_module_names, plan_units
from fsdp_tune.model.shard.local import is_fp8, require_torchao
from fsdp_tune.recipe.rules.limits import FP8_MULTIPLE, computes_in_fp8, fp8_gpu_problem, gathers_in_fp8
from fsdp_tune.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

KEY = "precision.mixed_precision"
_UNITS_OF_ANY_SIZE = ("SIZE_BASED_WRAP", "MODULE_NAMES_WRAP")


@dataclass(frozen=True, slots=True)
class Float8Plan:
    """The modules of a model that compute in fp8, by name."""

    converted: tuple[str, ...]
    gathered: frozenset[str]
    """The converted modules whose weights are gathered in fp8."""
    left: dict[str, str]
    """Linears of the decoder layers that are not converted, with the reason."""
    layers: int
    parameters: int
    """Number of elements of the converted weights."""
    of_layers: int
    """Number of parameters of all decoder layers."""
    of_experts: int
    """Number of parameters in stacked experts, which are not Linears."""


def plan_fp8(recipe: Recipe, model: PreTrainedModel) -> Float8Plan:
    """Return the plan for a bare model, which is the same before and after conversion. Raises: usage error if nothing can be converted."""
    layers = decoder_layers(model, recipe.layer_classes)
    ignored = ignored_module_names(recipe, model) if recipe.is_sharded else set[str]()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    converted: dict[str, nn.Linear] = {}
    left: dict[str, str] = {}
    for prefix, layer in layers:
        for name, module in layer.named_modules(prefix=prefix):
            if not isinstance(module, nn.Linear) or module in (head, embedding):
                continue
            why = _why_not(model, name, module, ignored)
            if why is None:
                converted[name] = module
            else:
                left[name] = why
    if not converted:
        raise _nothing(model, left)
    shards = recipe.topology.copy_size if gathers_in_fp8(recipe) else 0
    stacked = {id(p): p.numel() for _, layer in layers for p in layer.parameters() if p.ndim == 3}
    # FSDP pads uneven shards of plain tensors only; for other tensors, ranks would send buffers of different sizes.
    even = {f"{name}.weight" for name, module in converted.items() if shards and module.out_features % shards == 0}
    return Float8Plan(
        converted=tuple(converted),
        gathered=frozenset(name.removesuffix(".weight") for name in even - _alone_on_gloo(recipe, model, even)),
        left=left,
        layers=len(layers),
        parameters=sum(module.weight.numel() for module in converted.values()),
        of_layers=sum({id(p): p.numel() for _, layer in layers for p in layer.parameters()}.values()),
        of_experts=sum(stacked.values()),
    )


def _alone_on_gloo(recipe: Recipe, model: PreTrainedModel, weights: set[str]) -> set[str]:
    """Return the `weights` whose unit contains only such weights. FSDP sends it as fp8 and not as bytes, which gloo (CPU) cannot do."""
    if not weights or recipe.launch.device != "cpu":
        return set()
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    found: set[str] = set()
    taken: set[str] = set()
    for group in (*plan_units(recipe, model).groups, ("",)):
        own = {name_of[id(p)] for name in group for p in model.get_submodule(name).parameters()} - taken
        taken |= own
        found |= own if own <= weights else set()
    return found


def _inside_ignored(name: str, ignored: set[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in ignored)


def _why_not(model: PreTrainedModel, name: str, module: nn.Linear, ignored: set[str]) -> str | None:
    """Return why a Linear is not converted; None if it is."""
    if _inside_ignored(name, ignored):
        return "it is in fsdp.ignored_modules"
    if type(module) is not nn.Linear and not is_fp8(module):
        return f"it is a {type(module).__name__}, which may compute something else"
    if is_router(model.config, module.out_features):
        return "it is a router, whose few outputs need precision"
    if is_in_experts(name):
        return "it is an expert, which gets any number of tokens, and kernels need multiples of 16"
    if module.in_features % FP8_MULTIPLE or module.out_features % FP8_MULTIPLE:
        return f"its sizes are not multiples of {FP8_MULTIPLE}"
    return None


def _nothing(model: PreTrainedModel, left: dict[str, str]) -> Exception:
    name, why = next(iter(left.items()), ("", ""))
    reason = (
        f"`{name}`: {why}; none of its {len(left)} Linears is usable"
        if name
        else "its decoder layers have no nn.Linear (GPT-2, for example, has Conv1D)"
    )
    message = f"`{KEY}: fp8` finds nothing to convert in {type(model).__name__}: {reason}"
    return usage_error("fp8-nothing-to-convert", message, hint="write `precision.mixed_precision: bf16`")


def choose_fp8(recipe: Recipe, model: PreTrainedModel) -> dict[str, KernelChoice]:
    """Return the choice by recipe key, in the format of `choose_kernels`; empty unless the recipe sets fp8."""
    if not computes_in_fp8(recipe):
        return {}
    require_torchao(f"{KEY}: fp8")
    plan = plan_fp8(recipe, model)
    words = [f"{recipe.precision.fp8_recipe}: {len(plan.converted)} Linears of {plan.layers} layers"]
    words += [f"{count} left, {why}" for why, count in Counter(plan.left.values()).items()]
    words.append(_gathering(recipe, plan))
    if not tokens_are_aligned(recipe):
        multiple = _aligned_tokens(recipe)
        words.append(f"operands are padded, since `data.max_length` or `data.pad_to_multiple_of` is not a multiple of {multiple}")
    return {KEY: KernelChoice("fp8", "; ".join(words))}


def _gathering(recipe: Recipe, plan: Float8Plan) -> str:
    if not recipe.is_sharded:
        return "nothing is gathered"
    if not gathers_in_fp8(recipe):
        return "gathered in bf16"
    if len(plan.gathered) == len(plan.converted):
        return "gathered in fp8"
    rest = len(plan.converted) - len(plan.gathered)
    why = f"whose rows are not divisible by {recipe.topology.copy_size} ranks"
    if recipe.launch.device == "cpu" and recipe.fsdp.auto_wrap_policy in _UNITS_OF_ANY_SIZE:
        why += ", or which are units by themselves (gloo cannot send fp8)"
    return f"{len(plan.gathered)} gathered in fp8, {rest} in bf16, {why}"


def fp8_notices(recipe: Recipe, model: PreTrainedModel, device_type: str) -> list[Notice]:
    """Return notices about consequences of fp8 that a user may not expect. The model may be on the meta device."""
    if not computes_in_fp8(recipe):
        return []
    found: list[Notice] = []
    if device_type == "cpu":
        message = "fp8 is emulated on the CPU: values are rounded as on a GPU and multiplied in fp32, without its speed"
        found.append(Notice("fp8-emulated", message))
    elif not recipe.kernels.compile:
        message = "fp8 without `kernels.compile: true` may be slower than bf16: each cast is a pass over memory that the compiler fuses"
        found.append(Notice("fp8-not-compiled", message, hint="write `kernels: {compile: true}`"))
    plan = plan_fp8(recipe, model)
    if plan.of_experts:
        share = plan.parameters / plan.of_layers
        message = f"fp8 computes with {share:.0%} of the parameters of the layers: stacked experts ({plan.of_experts:,}) are not Linears"
        found.append(Notice("fp8-without-experts", message))
    return found


def require_gpu(recipe: Recipe, device: torch.device) -> None:
    """Check that this rank's GPU supports fp8. Raises: usage error (exit 2)."""
    if not computes_in_fp8(recipe) or device.type != "cuda":
        return
    found = fp8_gpu_problem(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    if found is not None:
        raise usage_error(found.code, found.message, hint=found.hint)


def convert_to_fp8(recipe: Recipe, model: PreTrainedModel, device_type: str) -> dict[str, KernelChoice]:
    """Convert the planned modules of the bare model, except those already converted, and return the choice."""
    chosen = choose_fp8(recipe, model)
    if chosen:
        from torchao.float8 import convert_to_float8_training

        plan = plan_fp8(recipe, model)
        fresh = {name for name in plan.converted if not is_fp8(model.get_submodule(name))}
        for names, gathered in ((fresh - plan.gathered, False), (fresh & plan.gathered, True)):
            if names:
                config = _config(recipe, gathered=gathered, emulate=device_type == "cpu")
                convert_to_float8_training(model, module_filter_fn=lambda _, name, names=names: name in names, config=config)
        if not recipe.is_sharded:
            for name in fresh:
                model.get_submodule(name).register_forward_pre_hook(cast_as_autocast)
    return chosen


def _config(recipe: Recipe, *, gathered: bool, emulate: bool) -> Float8LinearConfig:
    from torchao.float8 import Float8LinearConfig

    known = Float8LinearConfig.from_recipe_name(recipe.precision.fp8_recipe)
    return replace(known, enable_fsdp_float8_all_gather=gathered, emulate=emulate, pad_inner_dim=not tokens_are_aligned(recipe))


def tokens_are_aligned(recipe: Recipe) -> bool:
    """Return whether a rank's token counts are multiples of 16, as a weight's gradient sums over them. If not, operands are padded."""
    multiple = _aligned_tokens(recipe)
    return recipe.data.pad_to_multiple_of % multiple == 0 and recipe.data.max_length % multiple == 0


def _aligned_tokens(recipe: Recipe) -> int:
    """Return the number of which a row's tokens must be a multiple: 16 for each rank that shares it."""
    return FP8_MULTIPLE * recipe.topology.row_parts


def cast_as_autocast(_module: nn.Module, args: tuple[torch.Tensor, *tuple[object, ...]]) -> tuple[object, ...] | None:
    """Cast the input as autocast would. Under DDP torchao only checks CUDA's autocast; the CPU and the planner's device need it too."""
    kind = args[0].device.type
    return (args[0].to(torch.get_autocast_dtype(kind)), *args[1:]) if torch.is_autocast_enabled(kind) else None


_KEY = "kernels.mlp_slice_tokens"
_WIDE = 64
_NARROW = 8
"""The probe has `_NARROW` dimensions for the common divisor of those from `_WIDE` on; smaller ones (ranks of adapters) are kept."""


def choose_mlp_slices(recipe: Recipe, model: PreTrainedModel) -> KernelChoice:
    """Choose `kernels.mlp_slice_tokens`. Raises: usage error if no MLP of the model can be computed in slices."""
    tokens = recipe.kernels.mlp_slice_tokens
    if tokens is None:
        return KernelChoice("null", "not requested")
    found, layers = find_mlps(recipe, model), decoder_layers(model, recipe.layer_classes)
    if not found:
        message = f"`{_KEY}: {tokens}`: no decoder layer of {type(model).__name__} has a dense MLP as a module of its own"
        raise usage_error("mlp-not-sliceable", message, where=Where(key=_KEY), hint=f"leave `{_KEY}` out")
    prefixes = tuple(found)
    groups = plan_units(recipe, model).groups if recipe.is_sharded else ()
    if inside := next((name for group in groups for name in group if name.startswith(prefixes)), None):
        message = f"`{_KEY}: {tokens}` computes an MLP again in the backward pass, and `{inside}` in it is an FSDP unit of its own"
        raise usage_error(
            "mlp-not-sliceable", message, where=Where(key=_KEY), hint="write `fsdp: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}`"
        )
    which = "the MLPs of all layers" if len(found) == len(layers) else f"the dense MLPs of {len(found)} of {len(layers)} layers"
    return KernelChoice(str(tokens), f"{which}, {tokens:,} tokens at a time")


def install_mlp_slices(mlps: Iterable[nn.Module], tokens: int) -> None:
    """Make MLPs of decoder layers compute in slices. Call it before recomputation is installed, and before wrapping."""
    for mlp in mlps:
        mlp.forward = _in_slices(mlp, tokens)  # type: ignore[method-assign]
        mlp.slice_tokens = tokens  # type: ignore[assignment]  # for the read-back


def mlp_slices_of(model: nn.Module) -> dict[str, int]:
    """Return the tokens of a slice by the name of the MLP, for a live model."""
    return {name: vars(module)["slice_tokens"] for name, module in model.named_modules() if "slice_tokens" in vars(module)}


def find_mlps(recipe: Recipe, model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the MLPs of the decoder layers by name: children with two linear layers and more that compute each token by itself."""
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
    return any(isinstance(each, nn.ModuleList) for each in module.modules()) or any(p.ndim > 2 for p in module.parameters())


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    return isinstance(module, Conv1D) or (hasattr(module, "in_features") and hasattr(module, "out_features"))


def _is_position_wise(module: nn.Module) -> bool:
    """Return whether slices of the tokens give the slices of the output, measured with a narrow copy of the module on random values."""
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
    """Return a copy on the CPU with narrow random weights in the same ratios, in evaluation mode, and the width of its input."""
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
    """Return a forward of one tensor [..., tokens, width], by position or by whatever name the module gives it."""
    compute = mlp.forward

    @functools.wraps(compute)
    def forward(*args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        (hidden,) = (*args, *named.values())
        if hidden.shape[-2] <= tokens:
            return compute(hidden)  # type: ignore[no-any-return]
        return _Sliced.apply(hidden, compute, mlp, tokens, *_trained(mlp))  # type: ignore[no-any-return, no-untyped-call]

    return forward


def _trained(mlp: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained, which under FSDP2 are the gathered ones while the layer runs."""
    return [parameter for parameter in mlp.parameters() if parameter.requires_grad]


def _slices(hidden: torch.Tensor, tokens: int) -> list[tuple[EllipsisType, slice, slice]]:
    """Return the indexes of the slices of `hidden` [..., tokens, width]. Their number does not depend on the number of rows."""
    return [(..., slice(start, start + tokens), slice(None)) for start in range(0, hidden.shape[-2], tokens)]


class _Sliced(torch.autograd.Function):
    """`compute(hidden)` a slice at a time; `hidden` is [..., tokens, width].

    The trained parameters are inputs, so that autograd takes their gradients from here.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, compute: Callable[..., torch.Tensor], mlp: nn.Module, tokens: int, *_trained: nn.Parameter
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
        sums = [torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device) for parameter in trained]
        with ctx.context.restored():
            for part in _slices(hidden, ctx.tokens):
                x = hidden[part].detach().contiguous().requires_grad_(of_hidden is not None)
                with torch.enable_grad(), ctx.context.autocast():
                    output = ctx.compute(x)
                wanted = [*([x] if of_hidden is not None else []), *trained]
                gradients = list(
                    torch.autograd.grad(output, wanted, upstream[0][part].contiguous(), allow_unused=True, materialize_grads=True)
                )
                if of_hidden is not None:
                    of_hidden[part] = gradients.pop(0)
                for total, gradient in zip(sums, gradients, strict=True):
                    total += gradient
        return of_hidden, None, None, None, *(total.to(parameter.dtype) for total, parameter in zip(sums, trained, strict=True))


class _ForwardContext:
    """State of autocast and of the random generators in a forward, for the same slices in the backward."""

    def __init__(self, hidden: torch.Tensor, mlp: nn.Module) -> None:
        self._device = hidden.device
        self._autocast = (torch.is_autocast_enabled(hidden.device.type), torch.get_autocast_dtype(hidden.device.type))
        draws = mlp.training and any(isinstance(module, nn.Dropout) and module.p > 0 for module in mlp.modules())
        self._random = (torch.get_rng_state(), self._generator_state()) if draws else None

    def _generator_state(self) -> torch.Tensor | None:
        return None if self._device.type == "cpu" else torch.get_device_module(self._device).get_rng_state(self._device)

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
        with torch.random.fork_rng([] if on_cpu else [self._device.index], device_type="cuda" if on_cpu else self._device.type):
            torch.set_rng_state(self._random[0])
            if self._random[1] is not None:
                torch.get_device_module(self._device).set_rng_state(self._random[1], self._device)
            yield
