"""Read from the live modules what computes and is gathered in fp8, and compare it with the recipe."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp_tune.model.internals.torch_internals import MODULE_INFO, PARAM_NAME
from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.model.shard.wrap import fsdp_groups
from fsdp_tune.model.torchao_tensors import gathered_in_fp8, is_fp8
from fsdp_tune.recipe.schema import Recipe

# By hand, of torchao's recipes: one scale for a row and a column of the operands, or one for each operand.
_SCALES = {"rowwise": "axiswise", "tensorwise": "tensorwise"}
_FP8, _BF16 = "float8_e4m3fn", "bfloat16"


def read_fp8(loaded: Loaded) -> dict[str, Any]:
    """Return the number of torchao's Linears in this rank's model, their settings, and the weights gathered in fp8."""
    converted: list[Any] = [module for module in loaded.model.modules() if is_fp8(module)]
    return {
        "linears": len(converted),
        "scales": sorted({module.config.cast_config_weight.scaling_granularity.value for module in converted}),
        "emulated": sorted({bool(module.config.emulate) for module in converted}),
        "gathered": sum(1 for _ in gathered_in_fp8(loaded.wrapped)),
    }


def fp8_differences(recipe: Recipe, loaded: Loaded, found: dict[str, Any]) -> list[str]:
    """Return one sentence for each difference to the recipe, before the first step."""
    if recipe.precision.mixed_precision != "fp8":
        return [f"fp8: the recipe means none, the run has {found['linears']} Linears of it"] if found["linears"] else []
    inside = {id(module) for _, layer in loaded.layers for module in layer.modules()}
    may_be_left = recipe.fsdp.ignored_modules is not None or _has_experts(loaded.model)
    differences: list[str] = []
    for name, module in loaded.model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        allowed = id(module) in inside and module.in_features % 16 == 0 and module.out_features % 16 == 0
        if is_fp8(module) and not allowed:
            differences.append(f"fp8: {name} computes in fp8, and is outside the decoder layers or of a size that does not allow it")
        elif allowed and not is_fp8(module) and not may_be_left:
            differences.append(f"fp8: {name} does not compute in fp8")
    return differences + _settings(recipe, loaded, found)


def _has_experts(model: Any) -> bool:
    """Their routers, and experts that are Linears, stay as they are."""
    return any("expert" in name for name, _ in model.named_modules())


def _settings(recipe: Recipe, loaded: Loaded, found: dict[str, Any]) -> list[str]:
    wanted: dict[str, Any] = {
        "scales": [_SCALES[recipe.precision.fp8_recipe]],
        "emulated": [recipe.launch.device == "cpu"],
        "gathered": len(_to_gather(recipe, loaded)),
    }
    differences = [
        f"fp8 {key}: the recipe means {value!r}, the run has {found[key]!r}" for key, value in wanted.items() if found[key] != value
    ]
    return differences if found["linears"] else ["fp8: the recipe means it, and no Linear computes in it"]


def _to_gather(recipe: Recipe, loaded: Loaded) -> list[Any]:
    """Return the modules whose weight is gathered in fp8: one scale for the full weight, and as many rows on each rank."""
    if recipe.precision.fp8_recipe != "tensorwise" or not recipe.is_sharded:
        return []
    shards = recipe.topology.copy_size
    converted: list[Any] = [module for module in loaded.model.modules() if is_fp8(module)]
    even = [module for module in converted if module.out_features % shards == 0]
    if recipe.launch.device == "cpu":  # gloo sends fp8 only as bytes, which is how a unit goes that holds something else as well
        alone = {id(owner) for owners in _owners_by_unit(loaded) if all(map(is_fp8, owners)) for owner in owners}
        even = [module for module in even if id(module) not in alone]
    return even


def _owners_by_unit(loaded: Loaded) -> list[list[nn.Module]]:
    """Return, for each unit, the modules that own its parameters."""
    return [[MODULE_INFO.of(parameter).module for parameter in group.fsdp_params] for group in fsdp_groups(loaded.model)]


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
