"""Compare the emulated quantisation of a live model with `quantization.train` of the recipe, derived
independently of the plan."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from fsdp_tune.core.expert_names import is_router
from fsdp_tune.model.kernels.fake_quantised import is_quantised, weights_read_by_others
from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.model.shard.local import bare_class, kept_in_fp32
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.records import QuantisedTrainingState


def read_quantised(loaded: Loaded) -> QuantisedTrainingState:
    """Return how many layers of this rank's model round their weights and inputs, and to which values."""
    layers: list[Any] = [module for module in loaded.model.modules() if is_quantised(module)]
    return QuantisedTrainingState(
        weights=_values(layer.weight_fake_quantizer for layer in layers),
        inputs=_values(layer.activation_fake_quantizer for layer in layers),
    )


def _values(quantisers: Iterable[object]) -> dict[str, int]:
    return dict(Counter(_described(each) for each in quantisers if each is not None))


def _described(quantiser: Any) -> str:
    config = quantiser.config
    dtype = str(config.dtype).rpartition(".")[2].removeprefix("TorchAODType.").lower()
    size = getattr(config.granularity, "group_size", None)
    return f"{dtype} by {'token' if size is None else size}{'' if quantiser.enabled else ', disabled'}"


def quantised_differences(recipe: Recipe, loaded: Loaded, found: QuantisedTrainingState) -> list[str]:
    """Return one sentence for each difference to the recipe, before the first step."""
    section = recipe.quantised_training
    if section is None:
        live = [name for name, module in loaded.model.named_modules() if is_quantised(module)]
        return [
            f"quantization.train: {name} computes with emulated quantisation, which the recipe does not mean"
            for name in live
        ]
    inside = {id(module) for _, layer in loaded.layers for module in layer.modules()}
    left = [
        pattern
        for each in section.modules_to_not_convert
        for pattern in (each, f"*.{each}", f"{each}.*", f"*.{each}.*")
    ]
    kept = kept_in_fp32(loaded.model) | {f"{name}.weight" for name in weights_read_by_others(loaded.model)}
    uses = Counter(id(parameter) for _, parameter in loaded.model.named_parameters(remove_duplicate=False))
    wanted, differences = 0, list[str]()
    for name, module in loaded.model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        is_meant = id(module) in inside and not any(fnmatch.fnmatchcase(name, pattern) for pattern in left)
        if is_quantised(module) and not is_meant:
            differences.append(
                f"quantization.train: {name} computes with emulated quantisation, which the recipe "
                "does not mean"
            )
        may_be_left = is_router(loaded.model.config, module.out_features) or module.out_features == 1
        may_be_left = may_be_left or f"{name}.weight" in kept or uses[id(module.weight)] > 1
        if is_meant and not may_be_left and bare_class(module) is nn.Linear:
            differences.append(f"quantization.train: {name} computes with its own weights")
        wanted += is_quantised(module)
    if differences:
        return differences
    expected = (
        {f"int4 by {section.group_size}": wanted},
        {"int8 by token": wanted} if section.train == "int8-int4" else {},
    )
    if (found.weights, found.inputs) != expected:
        differences.append(
            f"quantization.train: the recipe means {expected}, the run has {(found.weights, found.inputs)}"
        )
    return (
        differences
        if wanted
        else ["quantization.train: the recipe means it, and no linear layer computes with it"]
    )
