"""Linear layers of a decoder that compute in fp8.

`precision.mixed_precision: fp8` replaces Linears of the decoder layers by torchao's, which multiply in fp8;
all else stays in bf16. Parameters keep their names, values and storage dtype. A weight is cast to fp8 where
it is used or, with one scale for the full weight (`tensorwise`) under FSDP2, before it is gathered.
Accelerate's implementation is not used: it converts everything between the first and the last Linear, pads
every operand, and refuses to load shard by shard.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.core.errors import Notice, usage_error
from fsdp_tune.core.expert_names import is_in_experts, is_router
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
    """Return the plan for a bare model, which is the same before and after conversion. Raises: usage error if
    nothing can be converted."""
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
    # FSDP pads uneven shards of plain tensors only; for other tensors, ranks would send buffers of different
    # sizes.
    even = {
        f"{name}.weight" for name, module in converted.items() if shards and module.out_features % shards == 0
    }
    return Float8Plan(
        converted=tuple(converted),
        gathered=frozenset(
            name.removesuffix(".weight") for name in even - _alone_on_gloo(recipe, model, even)
        ),
        left=left,
        layers=len(layers),
        parameters=sum(module.weight.numel() for module in converted.values()),
        of_layers=sum({id(p): p.numel() for _, layer in layers for p in layer.parameters()}.values()),
        of_experts=sum(stacked.values()),
    )


def _alone_on_gloo(recipe: Recipe, model: PreTrainedModel, weights: set[str]) -> set[str]:
    """Return the `weights` whose unit contains only such weights. FSDP sends it as fp8 and not as bytes,
    which gloo (CPU) cannot do."""
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
    """Return the choice by recipe key, in the format of `choose_kernels`; empty unless the recipe sets
    fp8."""
    if not computes_in_fp8(recipe):
        return {}
    require_torchao(f"{KEY}: fp8")
    plan = plan_fp8(recipe, model)
    words = [f"{recipe.precision.fp8_recipe}: {len(plan.converted)} Linears of {plan.layers} layers"]
    words += [f"{count} left, {why}" for why, count in Counter(plan.left.values()).items()]
    words.append(_gathering(recipe, plan))
    if not tokens_are_aligned(recipe):
        multiple = _aligned_tokens(recipe)
        words.append(
            "operands are padded, since `data.max_length` or `data.pad_to_multiple_of` is not a "
            f"multiple of {multiple}"
        )
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
    """Return notices about consequences of fp8 that a user may not expect. The model may be on the meta
    device."""
    if not computes_in_fp8(recipe):
        return []
    found: list[Notice] = []
    if device_type == "cpu":
        message = (
            "fp8 is emulated on the CPU: values are rounded as on a GPU and multiplied in fp32, without "
            "its speed"
        )
        found.append(Notice("fp8-emulated", message))
    elif not recipe.kernels.compile:
        message = (
            "fp8 without `kernels.compile: true` may be slower than bf16: each cast is a pass over "
            "memory that the compiler fuses"
        )
        found.append(Notice("fp8-not-compiled", message, hint="write `kernels: {compile: true}`"))
    plan = plan_fp8(recipe, model)
    if plan.of_experts:
        share = plan.parameters / plan.of_layers
        message = (
            f"fp8 computes with {share:.0%} of the parameters of the layers: stacked experts "
            f"({plan.of_experts:,}) are not Linears"
        )
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
    """Convert the planned modules of the bare model, except those already converted, and return the
    choice."""
    chosen = choose_fp8(recipe, model)
    if chosen:
        from torchao.float8 import convert_to_float8_training

        plan = plan_fp8(recipe, model)
        fresh = {name for name in plan.converted if not is_fp8(model.get_submodule(name))}
        for names, gathered in ((fresh - plan.gathered, False), (fresh & plan.gathered, True)):
            if names:
                config = _config(recipe, gathered=gathered, emulate=device_type == "cpu")
                convert_to_float8_training(
                    model, module_filter_fn=lambda _, name, names=names: name in names, config=config
                )
        if not recipe.is_sharded:
            for name in fresh:
                model.get_submodule(name).register_forward_pre_hook(cast_as_autocast)
    return chosen


def _config(recipe: Recipe, *, gathered: bool, emulate: bool) -> Float8LinearConfig:
    from torchao.float8 import Float8LinearConfig

    known = Float8LinearConfig.from_recipe_name(recipe.precision.fp8_recipe)
    return replace(
        known,
        enable_fsdp_float8_all_gather=gathered,
        emulate=emulate,
        pad_inner_dim=not tokens_are_aligned(recipe),
    )


def tokens_are_aligned(recipe: Recipe) -> bool:
    """Return whether a rank's token counts are multiples of 16, as a weight's gradient sums over them. If
    not, operands are padded."""
    multiple = _aligned_tokens(recipe)
    return recipe.data.pad_to_multiple_of % multiple == 0 and recipe.data.max_length % multiple == 0


def _aligned_tokens(recipe: Recipe) -> int:
    """Return the number of which a row's tokens must be a multiple: 16 for each rank that shares it."""
    return FP8_MULTIPLE * recipe.topology.row_parts


def cast_as_autocast(
    _module: nn.Module, args: tuple[torch.Tensor, *tuple[object, ...]]
) -> tuple[object, ...] | None:
    """Cast the input as autocast would. Under DDP torchao only checks CUDA's autocast; the CPU and the
    planner's device need it too."""
    kind = args[0].device.type
    return (
        (args[0].to(torch.get_autocast_dtype(kind)), *args[1:]) if torch.is_autocast_enabled(kind) else None
    )
