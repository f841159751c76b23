"""The recipe's model on the fake device: all layers, or one of each run of equal ones."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.families import layer_types
from fsdp_tune.model.internals.transformers_internals import SUPPORTS_FLASH, SUPPORTS_SDPA
from fsdp_tune.model.kernels.attention import has_variable_lengths
from fsdp_tune.model.kernels.fake_quantised import plan_quantised
from fsdp_tune.model.kernels.linear_layers import plan_fp8
from fsdp_tune.model.loading.construct import attention, build_empty
from fsdp_tune.model.loading.positions import beyond_table_of_positions
from fsdp_tune.model.shard.expert_parallel import require_divisible_experts
from fsdp_tune.model.shard.fsdp_units import decoder_layers, ignored_module_names
from fsdp_tune.model.shard.recompute import checkpointed_layers
from fsdp_tune.planner.predict.depth import Repeated
from fsdp_tune.planner.trace.fake_gpu import replaced
from fsdp_tune.recipe.rules.limits import computes_in_fp8
from fsdp_tune.recipe.schema.recipe import Recipe


def build_traced(
    recipe: Recipe, config: PreTrainedConfig, vocabulary: int | None
) -> tuple[Recipe, PreTrainedModel]:
    """Return the recipe to trace and its model on the meta device.

    A FlashAttention package is replaced by torch's own kernel, which allocates the same: a planning machine
    rarely has the package. Divided experts are traced undivided (`planner.predict.mixture`).
    Raises: FsdpTuneError (exit 2) for a model that does not support FlashAttention, whose positions do not
    cover the recipe's rows, that computes its attention in compiled code or its experts in kernels that are
    not traced, or whose experts `fsdp.ep_size` ranks cannot divide.
    """
    written = recipe
    if recipe.fsdp.ep_size > 1 and recipe.kernels.experts == "batched_mm":
        message = "`kernels.experts: batched_mm` is not predicted with `fsdp.ep_size`"
        raise usage_error(
            "trace-failed",
            message,
            hint="with `grouped_mm` the step is predicted; it computes the same products",
        )
    recipe, model = _build(_undivided(recipe), config, vocabulary)
    require_divisible_experts(written, model)
    # indexing a fake tensor does not check bounds
    if (problem := beyond_table_of_positions(recipe, model)) is not None:
        raise FsdpTuneError(problem)
    return recipe, model


NOT_TRACED = {
    "eager": "starts a product for each expert that a token chose",
    "sonicmoe": "runs kernels that it downloads",
}


def _undivided(recipe: Recipe) -> Recipe:
    """Return the recipe with each rank gathering all experts, otherwise with the kernels that divided experts
    have."""
    if recipe.fsdp.ep_size == 1:
        return recipe
    without = {"fsdp": {"ep_size": 1}, "kernels": {"liger": False}}
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=keys) for name, keys in without.items()}
    )


def _build(
    recipe: Recipe, config: PreTrainedConfig, vocabulary: int | None
) -> tuple[Recipe, PreTrainedModel]:
    kernel = attention(recipe, config)
    if kernel == "flex_attention":
        message = f"`model.attn_implementation: {kernel}` computes only in compiled code, which is not traced"
        raise usage_error(
            "trace-failed",
            message,
            hint="with `sdpa` the step is predicted, with a mask where rows are packed",
        )
    if recipe.kernels.experts in NOT_TRACED:
        message = (
            f"`kernels.experts: {recipe.kernels.experts}` {NOT_TRACED[recipe.kernels.experts]}, which is "
            "not traced"
        )
        raise usage_error(
            "trace-failed",
            message,
            hint="with `grouped_mm` the step is predicted; it computes the same products",
        )
    if not has_variable_lengths(kernel):
        return recipe, build_empty(recipe, config, vocabulary=vocabulary)
    recipe = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"attn_implementation": "sdpa"})}
    )
    with _taking_sdpa(config):
        model = build_empty(recipe, config, vocabulary=vocabulary)
    if not SUPPORTS_FLASH.of(model):
        message = f"`model.attn_implementation`: {type(model).__name__} does not support FlashAttention"
        raise usage_error("model-refused", message, hint="--set model.attn_implementation=auto")
    return recipe, model


@contextlib.contextmanager
def _taking_sdpa(config: PreTrainedConfig) -> Iterator[None]:
    """Build a model whose class takes flash kernels but not sdpa (gpt-oss: sdpa has no sinks), of which a
    trace shows only the work."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), PreTrainedModel)
    declares = next(each for each in found.__mro__ if SUPPORTS_SDPA.last in vars(each))
    with replaced(declares, SUPPORTS_SDPA.last, value=True):
        yield


def attention_windows(recipe: Recipe, model: PreTrainedModel) -> list[int | None]:
    """Return the sliding window of each decoder layer, as transformers passes it to a flash kernel; None for
    full attention."""
    default = getattr(model.config, "sliding_window", None)
    windows: list[int | None] = []
    for _, layer in decoder_layers(model, recipe.layer_classes):
        own = [module.sliding_window for module in layer.modules() if hasattr(module, "sliding_window")]
        found = own[0] if own else default
        windows.append(found if isinstance(found, int) else None)
    return windows


def on_fake_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Give every parameter and buffer of a meta model fake storage on `device`, in place; ties are kept.
    Needs a FakeTensorMode."""
    made: dict[int, Any] = {}

    def materialised(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            fake: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            made[id(tensor)] = (
                nn.Parameter(fake, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else fake
            )
        return made[id(tensor)]

    for module in model.modules():
        own = [
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in [*itertools.chain(*own)]:
            setattr(module, name, materialised(tensor))
    return model


def layer_signatures(
    recipe: Recipe, model: PreTrainedModel, groups: Sequence[tuple[str, ...]]
) -> list[Hashable]:
    """Return a signature of each decoder layer of the full model; layers with equal signatures do the same
    work.

    It contains shapes, dtypes and `requires_grad` of all tensors, classes and settings of all modules, and
    the recipe's changes to the layer: recomputation, FSDP units (`groups`), modules that FSDP ignores,
    modules in fp8, and quantised ones.
    """
    layers = decoder_layers(model, recipe.layer_classes)
    recomputed = {name for name, _ in checkpointed_layers(recipe, model)}
    marked = [
        frozenset(name for group in groups for name in group),
        frozenset(ignored_module_names(recipe, model)) if recipe.is_sharded else frozenset[str](),
        frozenset(plan_fp8(recipe, model).converted) if computes_in_fp8(recipe) else frozenset[str](),
        frozenset(plan_quantised(recipe, model).quantised)
        if recipe.quantised_training is not None
        else frozenset[str](),
    ]
    settings = [dict(_settings(layer)) for _, layer in layers]
    positions = (
        {key for key in settings[0] if all(each.get(key) == index for index, each in enumerate(settings))}
        if settings
        else set()
    )
    kinds = layer_types(model.config) or [None] * len(layers)
    signatures: list[Hashable] = []
    for index, (name, layer) in enumerate(layers):
        inside = tuple(
            frozenset(other[len(name) :] for other in names if f"{other}.".startswith(f"{name}."))
            for names in marked
        )
        own = frozenset((key, value) for key, value in settings[index].items() if key not in positions)
        signatures.append((tuple(_tensors(layer)), own, kinds[index], name in recomputed, inside))
    return signatures


def _tensors(layer: nn.Module) -> Iterator[Hashable]:
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        yield name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _settings(layer: nn.Module) -> Iterator[tuple[tuple[str, str], Hashable]]:
    """Yield class and plain attributes of each module (`sliding_window`, `use_rope`). Floats are skipped:
    they do not affect memory."""
    for name, module in layer.named_modules():
        yield (name, ""), type(module)
        for key, value in vars(module).items():
            if value is None or isinstance(value, bool | int | str):
                yield (name, key), value


def has_unit_of_several_layers(
    recipe: Recipe, model: PreTrainedModel, groups: Sequence[tuple[str, ...]]
) -> bool:
    """Return whether an FSDP unit holds parameters of several decoder layers, so that the size of its buffers
    depends on their number."""
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
    """Return the name of the ModuleList of exactly the decoder layers, in order; None if there is no such
    list."""
    names = [name for name, _ in decoder_layers(model, recipe.layer_classes)]
    container = names[0].rpartition(".")[0]
    is_list = isinstance(model.get_submodule(container), nn.ModuleList)
    return container if is_list and names == [f"{container}.{index}" for index in range(len(names))] else None


def shallow_recipe(
    recipe: Recipe,
    container: str,
    repeated: Repeated,
    model: PreTrainedModel,
    groups: Sequence[tuple[str, ...]],
) -> Recipe:
    """Return the recipe for `without_dropped`: patterns are replaced by the names that they match in the full
    model.

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
    for config in {
        id(config): config
        for module in model.modules()
        if (config := getattr(module, "config", None)) is not None
    }.values():
        if getattr(config, "num_hidden_layers", None) is None:
            continue  # a composite model's outer configuration
        config.num_hidden_layers -= repeated.missing
        if (kinds := getattr(config, "layer_types", None)) is not None:
            config.layer_types = [*kinds[: dropped.start], *kinds[dropped.stop :]]
    return model
