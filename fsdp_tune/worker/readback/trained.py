"""Compare what a run trains with the recipe: frozen parameters, adapters, their scales and dtypes, and
fp8."""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdp_tune.core.expert_names import have_experts
from fsdp_tune.core.tensors.peft_config import value_for
from fsdp_tune.model.adapters.lora import ADAPTER_NAME, adapters_of, is_of_adapter, name_in_base
from fsdp_tune.model.adapters.nf4 import SCALE_DTYPE, Nf4Linear, layers_in_4_bits, plan_nf4
from fsdp_tune.model.adapters.targets import ALL_LINEAR, ends_with, parts_without_text, rank_of
from fsdp_tune.model.internals.torch_internals import MODULE_INFO, PARAM_NAME
from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.model.loading.construct import frozen_by_its_code
from fsdp_tune.model.shard.local import (
    NF4_PACKED,
    NF4_SCALES,
    TORCH_DTYPE,
    gathered_in_fp8,
    is_fp8,
    plain_name,
)
from fsdp_tune.model.shard.wrap import fsdp_groups
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import Lora
from fsdp_tune.run.records import Fp8State

# By hand, of torchao's recipes: one scale for a row and a column of the operands, or one for each operand.
_SCALES = {"rowwise": "axiswise", "tensorwise": "tensorwise"}
_FP8, _BF16 = "float8_e4m3fn", "bfloat16"


def read_fp8(loaded: Loaded) -> Fp8State:
    """Return the number of torchao's Linears in this rank's model, their settings, and the weights gathered
    in fp8."""
    converted: list[Any] = [module for module in loaded.model.modules() if is_fp8(module)]
    return Fp8State(
        linears=len(converted),
        scales=sorted({module.config.cast_config_weight.scaling_granularity.value for module in converted}),
        emulated=sorted({bool(module.config.emulate) for module in converted}),
        gathered=sum(1 for _ in gathered_in_fp8(loaded.wrapped)),
    )


def fp8_differences(recipe: Recipe, loaded: Loaded, found: Fp8State) -> list[str]:
    """Return one sentence for each difference to the recipe, before the first step."""
    if recipe.precision.mixed_precision != "fp8":
        return (
            [f"fp8: the recipe means none, the run has {found.linears} Linears of it"]
            if found.linears
            else []
        )
    inside = {id(module) for _, layer in loaded.layers for module in layer.modules()}
    may_be_left = recipe.fsdp.ignored_modules is not None or have_experts(
        name for name, _ in loaded.model.named_modules()
    )
    differences: list[str] = []
    for name, module in loaded.model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        allowed = id(module) in inside and module.in_features % 16 == 0 and module.out_features % 16 == 0
        if is_fp8(module) and not allowed:
            differences.append(
                f"fp8: {name} computes in fp8, and is outside the decoder layers or of a size that "
                "does not allow it"
            )
        elif allowed and not is_fp8(module) and not may_be_left:
            differences.append(f"fp8: {name} does not compute in fp8")
    return differences + _settings(recipe, loaded, found)


def _settings(recipe: Recipe, loaded: Loaded, found: Fp8State) -> list[str]:
    wanted: dict[str, object] = {
        "scales": [_SCALES[recipe.precision.fp8_recipe]],
        "emulated": [recipe.launch.device == "cpu"],
        "gathered": len(_to_gather(recipe, loaded)),
    }
    differences = [
        f"fp8 {key}: the recipe means {value!r}, the run has {live!r}"
        for key, value in wanted.items()
        if (live := getattr(found, key)) != value
    ]
    return differences if found.linears else ["fp8: the recipe means it, and no Linear computes in it"]


def _to_gather(recipe: Recipe, loaded: Loaded) -> list[nn.Linear]:
    """Return the modules whose weight is gathered in fp8: one scale for the full weight, and as many rows on
    each rank."""
    if recipe.precision.fp8_recipe != "tensorwise" or not recipe.is_sharded:
        return []
    shards = recipe.topology.copy_size
    converted = [
        module for module in loaded.model.modules() if isinstance(module, nn.Linear) and is_fp8(module)
    ]
    even = [module for module in converted if module.out_features % shards == 0]
    # gloo sends fp8 only as bytes, which is how a unit goes that holds something else as well
    if recipe.launch.device == "cpu":
        alone = {
            id(owner) for owners in _owners_by_unit(loaded) if all(map(is_fp8, owners)) for owner in owners
        }
        even = [module for module in even if id(module) not in alone]
    return even


def _owners_by_unit(loaded: Loaded) -> list[list[nn.Module]]:
    """Return, for each unit, the modules that own its parameters."""
    return [
        [MODULE_INFO.of(parameter).module for parameter in group.fsdp_params]
        for group in fsdp_groups(loaded.model)
    ]


def gathered_difference(recipe: Recipe, loaded: Loaded) -> str | None:
    """Check, after step 1, in which dtype FSDP2 sent the weights of converted modules."""
    if recipe.precision.mixed_precision != "fp8" or not recipe.is_sharded:
        return None
    expected = {id(module): _FP8 for module in _to_gather(recipe, loaded)}
    for parameter in (parameter for group in fsdp_groups(loaded.model) for parameter in group.fsdp_params):
        info = MODULE_INFO.of(parameter)
        owner = info.module
        if is_fp8(owner) and info.param_name == "weight" and parameter.all_gather_outputs:
            sent = str(parameter.all_gather_outputs[0].dtype).removeprefix("torch.")
            if sent != (wanted := expected.get(id(owner), _BF16)):
                return f"fp8: {PARAM_NAME.of(parameter)} is to be gathered in {wanted}, and was in {sent}"
    return None


def read_trained(wrapped: nn.Module) -> dict[str, int]:
    """Return the number of trained tensors by dtype, which is the same on every rank, also where FSDP1 leaves
    a rank an empty part."""
    found: Counter[str] = Counter()
    for _, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            found[str(parameter.dtype).removeprefix("torch.")] += 1
    return dict(sorted(found.items()))


def training_differences(recipe: Recipe, loaded: Loaded) -> list[str]:
    """Return a sentence for the first parameter whose training is not what the recipe means, and for each
    difference of an adapter."""
    return _frozen(recipe, loaded) + (
        _adapters(recipe, recipe.lora, loaded) if recipe.lora is not None else []
    )


def _frozen(recipe: Recipe, loaded: Loaded) -> list[str]:
    """Frozen are the parameters that match `model.freeze` and those that the model's own code froze; with
    `lora:`, all of the base."""
    own = frozen_by_its_code(loaded.model)
    for wrapped_name, parameter in loaded.wrapped.named_parameters():
        name = plain_name(wrapped_name)
        if recipe.lora is None:
            wanted = name in own or any(fnmatch.fnmatchcase(name, pattern) for pattern in recipe.model.freeze)
        else:
            wanted = name_in_base(name) in own or not _is_trained_by(recipe.lora, name)
        if wanted == parameter.requires_grad:
            state = "frozen" if wanted else "trained"
            return [
                f"frozen: the recipe means {name} to be {state}, and the run has it "
                f"{'trained' if wanted else 'frozen'}"
            ]
    return []


def _is_trained_by(lora: Lora, name: str) -> bool:
    if is_of_adapter(name) or _is_in_saved_module(lora, name):
        return True
    is_bias = name.rpartition(".")[2] == "bias"
    return is_bias and (lora.bias == "all" or (lora.bias == "lora_only" and ".base_layer." in name))


def _adapters(recipe: Recipe, lora: Lora, loaded: Loaded) -> list[str]:
    """Return the differences of the adapters from the recipe: layers that have none, other dtypes, scales or
    rates of dropout."""
    adapted = adapters_of(loaded.model)
    others = tuple(f"{name}." for name in parts_without_text(loaded.model))  # rows of text do not call them
    linears = [name for name in _linears(loaded.model) if not name.startswith(others)]
    bare = [name for name in linears if _is_meant(lora, name, loaded) and not _is_in_saved_module(lora, name)]
    found = [f"adapters: `{bare[0]}` has none ({len(bare)} linear layers)"] if bare else []
    stacks = [name for name in _meant_parameters(lora, loaded) if name not in adapted]
    found += [f"adapters: `{stacks[0]}` has none ({len(stacks)} parameters)"] if stacks else []
    for name, module in adapted.items():
        rank, alpha = rank_of(lora, name), value_for(name, lora.alpha_pattern, lora.lora_alpha)
        wanted = alpha / (math.sqrt(rank) if lora.use_rslora else rank)
        if (live := module.scaling[ADAPTER_NAME]) != wanted:
            return [
                *found,
                f"adapters: the recipe means {name} to be scaled by {wanted:g}, the run scales it by "
                f"{live:g}",
            ]
        if (rate := getattr(module.lora_dropout[ADAPTER_NAME], "p", 0.0)) != lora.lora_dropout:
            return [
                *found,
                f"adapters: the recipe means a dropout of {lora.lora_dropout:g} for {name}, the run "
                f"has {rate:g}",
            ]
    return found + _dtypes(recipe, loaded) + _in_4_bits(recipe, loaded)


def _is_meant(lora: Lora, name: str, loaded: Loaded) -> bool:
    """Whether the recipe means a linear layer to be adapted, by its name in the bare model."""
    if not _is_in_layers(lora, name, loaded):
        return False
    if lora.target_modules == ALL_LINEAR:
        return loaded.model.get_submodule(name) is not loaded.model.get_output_embeddings()
    if isinstance(lora.target_modules, str):
        return re.fullmatch(lora.target_modules, name) is not None
    return any(ends_with(name, wanted) for wanted in lora.target_modules)


def _meant_parameters(lora: Lora, loaded: Loaded) -> list[str]:
    """Return the names in the bare model of the parameters that the recipe means to be adapted."""
    names = [base for name, _ in loaded.model.named_parameters() if (base := name_in_base(name)) is not None]
    names = [name for name in names if any(ends_with(name, wanted) for wanted in lora.target_parameters)]
    return [
        name for name in names if _is_in_layers(lora, name, loaded) and not _is_in_saved_module(lora, name)
    ]


def _is_in_layers(lora: Lora, name: str, loaded: Loaded) -> bool:
    indexes = lora.layers_to_transform
    return indexes is None or any(name.startswith(f"{loaded.layers[index][0]}.") for index in indexes)


def _linears(model: PreTrainedModel) -> list[str]:
    """Return the linear layers outside of PEFT's layers."""
    outer = tuple(f"{name}." for name, module in model.named_modules() if hasattr(module, "lora_A"))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D | Nf4Linear) and not name.startswith(outer)
    ]


def _is_in_saved_module(lora: Lora, name: str) -> bool:
    """Whether a module or parameter is, or is in, one of `modules_to_save`."""
    return any(re.search(rf"(^|\.){re.escape(saved)}(\.|$)", name) for saved in lora.modules_to_save)


def _dtypes(recipe: Recipe, loaded: Loaded) -> list[str]:
    frozen, trained = TORCH_DTYPE[recipe.model.frozen_dtype], TORCH_DTYPE[recipe.model.dtype]
    own, adapted = frozen_by_its_code(loaded.model), adapters_of(loaded.model)
    for name, parameter in loaded.model.named_parameters():
        if parameter.requires_grad and parameter.dtype != trained:
            return [
                f"adapters: the recipe means {name} to be trained in {trained}, the run has {parameter.dtype}"
            ]
        base = name_in_base(name)
        is_weight_of_adapted = (
            name.endswith(".base_layer.weight") and recipe.lora is not None and recipe.lora.bias == "none"
        )
        if (is_weight_of_adapted or base in adapted) and base not in own and parameter.dtype != frozen:
            return [
                f"adapters: the recipe means {name} to be kept in {frozen}, the run has {parameter.dtype}"
            ]
    return []


def _in_4_bits(recipe: Recipe, loaded: Loaded) -> list[str]:
    """Return the first layer that the recipe means to be in 4 bits and is not, or whose bytes or scales have
    another dtype."""
    layers = layers_in_4_bits(loaded.model)
    if recipe.nf4 is None:
        return [f"quantization: `{next(iter(layers))}` is in 4 bits ({len(layers)} layers)"] if layers else []
    if missed := list(plan_nf4(loaded.model, loaded.layers)[0]):
        return [
            f"quantization: the recipe means {missed[0]} to be in 4 bits, and the run has it in 16 "
            f"({len(missed)} layers)"
        ]
    wanted = SCALE_DTYPE[recipe.nf4.scales]
    for name, layer in layers.items():
        for part in (NF4_PACKED, NF4_SCALES):
            if (dtype := layer.get_parameter(part).dtype) != torch.uint8:
                return [f"quantization: {name}.{part} is meant to hold bytes, the run has {dtype}"]
        if layer.scale_dtype != wanted:
            return [
                f"quantization: the recipe means the scales of {name} to be in {wanted}, the run has "
                f"{layer.scale_dtype}"
            ]
    return []
