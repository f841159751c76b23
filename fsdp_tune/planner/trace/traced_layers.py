"""Select the decoder layers to trace: all except those in the middle of a run of equal layers."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.core.families import layer_types
from fsdp_tune.model.kernels.float8 import plan_fp8
from fsdp_tune.model.shard.fsdp_units import decoder_layers, ignored_module_names
from fsdp_tune.model.shard.recompute import checkpointed_layers
from fsdp_tune.planner.predict.depth import Repeated
from fsdp_tune.recipe.rules.precision import computes_in_fp8
from fsdp_tune.recipe.schema import Recipe


def layer_signatures(recipe: Recipe, model: PreTrainedModel, groups: Sequence[tuple[str, ...]]) -> list[Hashable]:
    """Return a signature of each decoder layer of the full model; layers with equal signatures do the same work.

    It contains shapes, dtypes and `requires_grad` of all tensors, classes and settings of all modules, and the recipe's changes to
    the layer: recomputation, FSDP units (`groups`), modules that FSDP ignores, and modules that compute in fp8.
    """
    layers = decoder_layers(model, recipe.layer_classes)
    recomputed = {name for name, _ in checkpointed_layers(recipe, model)}
    marked = [
        frozenset(name for group in groups for name in group),
        frozenset(ignored_module_names(recipe, model)) if recipe.is_sharded else frozenset[str](),
        frozenset(plan_fp8(recipe, model).converted) if computes_in_fp8(recipe) else frozenset[str](),
    ]
    settings = [dict(_settings(layer)) for _, layer in layers]
    positions = {key for key in settings[0] if all(each.get(key) == index for index, each in enumerate(settings))} if settings else set()
    kinds = layer_types(model.config) or [None] * len(layers)
    signatures: list[Hashable] = []
    for index, (name, layer) in enumerate(layers):
        inside = tuple(frozenset(other[len(name) :] for other in names if f"{other}.".startswith(f"{name}.")) for names in marked)
        own = frozenset((key, value) for key, value in settings[index].items() if key not in positions)
        signatures.append((tuple(_tensors(layer)), own, kinds[index], name in recomputed, inside))
    return signatures


def _tensors(layer: nn.Module) -> Iterator[Hashable]:
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        yield name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _settings(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Hashable]]:
    """Yield class and plain attributes of each module (`sliding_window`, `use_rope`). Floats are skipped: they do not affect memory."""
    for name, module in layer.named_modules():
        yield (name, ""), type(module)
        for key, value in vars(module).items():
            if value is None or isinstance(value, bool | int | str):
                yield (name, key), value


def has_unit_of_several_layers(recipe: Recipe, model: PreTrainedModel, groups: Sequence[tuple[str, ...]]) -> bool:
    """Return whether an FSDP unit holds parameters of several decoder layers, so that the size of its buffers depends on their number."""
    if not recipe.is_sharded:
        return False
    layers = [f"{name}." for name, _ in decoder_layers(model, recipe.layer_classes)]
    ignored = [model.get_submodule(name) for name in ignored_module_names(recipe, model)]
    taken = {id(parameter) for module in ignored for parameter in module.parameters()}
    for group in (*groups, ("",)):
        inside: set[str] = set()
        for root in group:
            for name, parameter in model.get_submodule(root).named_parameters(prefix=root):
                if id(parameter) not in taken:
                    taken.add(id(parameter))
                    inside.update(layer for layer in layers if name.startswith(layer))
        if len(inside) > 1:
            return True
    return False


def container_of(recipe: Recipe, model: PreTrainedModel) -> str | None:
    """Return the name of the ModuleList of exactly the decoder layers, in order; None if there is no such list."""
    names = [name for name, _ in decoder_layers(model, recipe.layer_classes)]
    container = names[0].rpartition(".")[0]
    is_list = isinstance(model.get_submodule(container), nn.ModuleList)
    return container if is_list and names == [f"{container}.{index}" for index in range(len(names))] else None


def shallow_recipe(recipe: Recipe, container: str, repeated: Repeated, model: PreTrainedModel, groups: Sequence[tuple[str, ...]]) -> Recipe:
    """Return the recipe for `without_dropped`: patterns are replaced by the names that they match in the full model.

    `model` is the full one. A pattern may match only dropped layers, and layers after them are renumbered.
    """

    def kept(names: Sequence[str]) -> list[str]:
        return [new for name in names if (new := _renamed(name, container, repeated)) is not None]

    fsdp: dict[str, Any] = {}
    if recipe.fsdp.auto_wrap_policy == "MODULE_NAMES_WRAP":
        fsdp["modules_to_wrap"] = kept([name for group in groups for name in group])
    if recipe.fsdp.ignored_modules is not None:
        ignored = kept(sorted(ignored_module_names(recipe, model)))
        fsdp["ignored_modules"] = "|".join(map(re.escape, ignored)) or None
    return recipe.model_copy(update={"fsdp": recipe.fsdp.model_copy(update=fsdp)})


def _renamed(name: str, container: str, repeated: Repeated) -> str | None:
    """Return the name of a module among the kept layers; None for one in a dropped layer."""
    inside = re.fullmatch(rf"{re.escape(container)}\.(\d+)(.*)", name)
    if inside is None:
        return name
    index = int(inside[1])
    if index in repeated.dropped:
        return None
    return f"{container}.{index if index < repeated.dropped.start else index - repeated.missing}{inside[2]}"


def without_dropped(model: PreTrainedModel, container: str, repeated: Repeated) -> PreTrainedModel:
    """Remove the dropped layers from a model, in place."""
    dropped = slice(repeated.dropped.start, repeated.dropped.stop)
    del model.get_submodule(container)[dropped]  # type: ignore[attr-defined]  # a ModuleList
    for config in {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}.values():
        if getattr(config, "num_hidden_layers", None) is None:
            continue  # a composite model's outer configuration
        kinds = getattr(config, "layer_types", None)
        config.num_hidden_layers -= repeated.missing
        if kinds is not None:
            config.layer_types = [*kinds[: dropped.start], *kinds[dropped.stop :]]
    return model
