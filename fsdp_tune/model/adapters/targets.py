"""Choose the modules and parameters that get LoRA adapters, and the modules that are trained in full, by the
names in `lora:`."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.tensors.peft_config import pattern_matches, value_for
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import Lora

ALL_LINEAR = "all-linear"


_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Targets:
    """What gets adapters in the bare model, by name, in the order of the model."""

    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    """Stacks of matrices, [experts, rows, columns]."""


def find_targets(recipe: Recipe, model: PreTrainedModel) -> Targets:
    """Return what gets adapters.

    Raises: usage error for a name that hits nothing or a module that LoRA does not adapt, for a tied
    embedding or head, for a rank that the matrix does not have, and for DoRA on anything but a linear layer.
    """
    lora = recipe.lora
    assert lora is not None
    modules: dict[str, nn.Module] = dict(model.named_modules())
    saved, others = set(find_saved(recipe, model)), parts_without_text(model)
    chosen = [name for name in _chosen(lora, model, modules) if not _is_inside(name, saved)]
    if chosen and all(_is_inside(name, others) for name in chosen):
        raise _without_text("lora.target_modules", chosen[0], others)
    chosen = [name for name in chosen if not _is_inside(name, others)]
    chosen = _in_layers(recipe, model, chosen)
    wanted = set(chosen)
    targets = {name: module for name, module in modules.items() if name in wanted}
    parameters = _chosen_parameters(recipe, model, saved)
    if not targets and not parameters:
        raise _no_module("lora.target_modules", str(lora.target_modules), modules)
    _refuse_tied(model, targets, "lora.target_modules")
    _refuse_tied(
        model,
        {owner: modules[owner] for name in parameters for owner in [name.rpartition(".")[0]]},
        "lora.target_parameters",
    )
    shapes = {name: tuple(module.weight.shape) for name, module in targets.items()}  # type: ignore[arg-type, union-attr]
    _check_sizes(lora, shapes, "target_modules")
    shapes = {name: tuple(parameter.shape[1:]) for name, parameter in parameters.items()}
    _check_sizes(lora, shapes, "target_parameters")
    _check_dora(lora, targets)
    _check_patterns(lora, [*targets, *parameters])
    return Targets(targets, parameters)


def find_saved(recipe: Recipe, model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of `lora.modules_to_save` by name. Raises: usage error for a name that hits nothing,
    and for tied weights."""
    assert recipe.lora is not None
    modules: dict[str, nn.Module] = dict(model.named_modules())
    saved: dict[str, nn.Module] = {}
    for wanted in recipe.lora.modules_to_save:
        found = {
            name: module
            for name, module in modules.items()
            if ends_with(name, wanted) and any(True for _ in module.parameters())
        }
        if not found:
            raise _no_module("lora.modules_to_save", wanted, modules)
        saved |= found
    others = parts_without_text(model)
    if (outside := next((name for name in saved if _is_inside(name, others)), None)) is not None:
        raise _without_text("lora.modules_to_save", outside, others)
    _refuse_tied(model, saved, "lora.modules_to_save")
    return saved


def parts_without_text(model: PreTrainedModel) -> list[str]:
    """Return the modules of a model of several modalities that rows of text do not call, such as
    `model.vision_tower`."""
    if model.config.get_text_config() is model.config:
        return []
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    text = [
        names[module] for module in (model.get_decoder(), model.get_output_embeddings()) if module in names
    ]
    if "" in text or not text:
        return []
    enclosing = {".".join(name.split(".")[:end]) for name in text for end in range(len(name.split(".")))}
    children = [
        f"{name}.{child}" if name else child
        for name in enclosing
        for child, _ in model.get_submodule(name).named_children()
    ]
    return [child for child in children if child not in enclosing and child not in text]


def _without_text(key: str, name: str, others: Sequence[str]) -> FsdpTuneError:
    message = (
        f"`{key}`: `{name}` is in a part of the model that rows of text do not call, so it would get no "
        "gradient"
    )
    hint = f"name layers outside of {', '.join(others)}, or leave `{key.rpartition('.')[2]}` out"
    return usage_error("lora-target", message, where=Where(key=key), hint=hint)


def _chosen(lora: Lora, model: PreTrainedModel, modules: dict[str, nn.Module]) -> list[str]:
    if lora.target_modules == ALL_LINEAR:
        head = model.get_output_embeddings()
        return [
            name
            for name, module in modules.items()
            if isinstance(module, nn.Linear | Conv1D) and module is not head
        ]
    chosen: list[str] = []
    for wanted in [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules:
        if isinstance(lora.target_modules, str):
            try:
                found = [name for name in modules if re.fullmatch(wanted, name)]
            except re.error as error:
                message = f"`lora.target_modules: {wanted}` is not a valid regular expression: {error}"
                raise usage_error("lora-target", message, where=Where(key="lora.target_modules")) from error
        else:
            found = [name for name in modules if name and ends_with(name, wanted)]
        if not found:
            raise _no_module("lora.target_modules", wanted, modules)
        for name in found:
            if not isinstance(modules[name], nn.Linear | nn.Embedding | Conv1D):
                raise usage_error(
                    "lora-target",
                    f"`lora.target_modules`: `{name}` is a {type(modules[name]).__name__}; LoRA "
                    "adapts linear layers and embeddings",
                    where=Where(key="lora.target_modules"),
                    hint=_names_of_linears(modules),
                )
        chosen += found
    return chosen


def _chosen_parameters(recipe: Recipe, model: PreTrainedModel, saved: set[str]) -> dict[str, nn.Parameter]:
    assert recipe.lora is not None
    key = "lora.target_parameters"
    parameters = dict(model.named_parameters())
    stacks = [name for name, parameter in parameters.items() if is_stack(name, parameter)]
    chosen: set[str] = set()
    for wanted in recipe.lora.target_parameters:
        found = [name for name in parameters if ends_with(name, wanted)]
        if not found:
            names = dict.fromkeys(".".join(name.split(".")[-3:]) for name in stacks)
            others = (
                f"its stacked matrices are {', '.join(names)}"
                if names
                else "the model has no stacked matrices: name its linear layers"
            )
            raise _hits_nothing(key, wanted, "parameter", stacks, others)
        if (other := next((name for name in found if name not in stacks), None)) is not None:
            message = f"`{key}`: `{other}` is {list(parameters[other].shape)}, not a stack of matrices"
            raise usage_error(
                "lora-target",
                message,
                where=Where(key=key),
                hint="name linear layers in `lora.target_modules`",
            )
        chosen |= set(_in_layers(recipe, model, found))
    return {
        name: parameter
        for name, parameter in parameters.items()
        if name in chosen and not _is_inside(name, saved)
    }


def is_stack(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter stacks the matrices of experts, by its dimensions; those of a convolution
    have as many."""
    return parameter.ndim == 3 and "conv" not in name


def ends_with(name: str, wanted: str) -> bool:
    """Return whether the last parts of a name are `wanted`."""
    return name == wanted or name.endswith(f".{wanted}")


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in outer)


def _in_layers(recipe: Recipe, model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    assert recipe.lora is not None
    indexes = recipe.lora.layers_to_transform
    if indexes is None:
        return list(names)
    layers = [name for name, _ in decoder_layers(model, recipe.layer_classes)]
    if beyond := [index for index in indexes if index >= len(layers)]:
        raise usage_error(
            "lora-target",
            f"`lora.layers_to_transform`: layer {beyond[0]} does not exist; the model has the layers "
            f"0 to {len(layers) - 1}",
            where=Where(key="lora.layers_to_transform"),
        )
    return [name for name in names if _is_inside(name, [layers[index] for index in indexes])]


def _refuse_tied(model: PreTrainedModel, modules: dict[str, nn.Module], key: str) -> None:
    """Refuse modules that share a weight with another one: a tied embedding or head, Zamba2's shared blocks.
    Raises: usage error."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(name)
    for name, module in modules.items():
        sharing = (other for parameter in module.parameters() for other in owners[id(parameter)])
        other = next((other for other in sharing if not _is_inside(other, [name])), None)
        if other is not None:
            raise usage_error(
                "lora-tied",
                f"`{key}`: `{name}` shares its weight with `{other}`, and an adapter would change "
                "only one of them",
                where=Where(key=key),
                hint=f"leave `{name.rpartition('.')[2]}` out",
            )


def rank_of(lora: Lora, name: str) -> int:
    """Return the rank of the adapter of a module or parameter."""
    return value_for(name, lora.rank_pattern, lora.r)


def _check_sizes(lora: Lora, shapes: Mapping[str, tuple[int, ...]], chosen_by: str) -> None:
    """Refuse a rank above that of a matrix. `chosen_by`: the key of `lora:` that names it. Raises: usage
    error."""
    fitting = [name for name, shape in shapes.items() if rank_of(lora, name) <= min(shape)]
    for name, (rows, columns) in shapes.items():
        if (rank := rank_of(lora, name)) > min(rows, columns):
            key = "lora.r" if rank == lora.r else "lora.rank_pattern"
            raise usage_error(
                "lora-rank",
                f"`{key}`: the rank {rank} is above that of `{name}`, which is {rows} x {columns}",
                where=Where(key=key),
                hint=f"a rank of at most {min(rows, columns)}"
                + (f", or `{chosen_by}: [{last_parts(fitting)}]`" if fitting else ""),
            )


def _check_dora(lora: Lora, targets: dict[str, nn.Module]) -> None:
    for name, module in targets.items():
        if lora.use_dora and not isinstance(module, nn.Linear):
            raise usage_error(
                "lora-dora",
                f"`lora.use_dora: true`: `{name}` is a {type(module).__name__}, and DoRA is "
                "supported for linear layers only",
                where=Where(key="lora.use_dora"),
                hint="write `use_dora: false`, or name linear layers in `lora.target_modules`",
            )


def last_parts(names: Iterable[str]) -> str:
    """Return the different last parts of module names, as a list in a message."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _check_patterns(lora: Lora, targets: Sequence[str]) -> None:
    for key, patterns in (
        ("lora.rank_pattern", lora.rank_pattern),
        ("lora.alpha_pattern", lora.alpha_pattern),
    ):
        for pattern in patterns:
            try:
                hits = any(pattern_matches(pattern, name) for name in targets)
            except re.error as error:
                message = f"`{key}`: `{pattern}` is not a valid regular expression: {error}"
                raise usage_error("lora-target", message, where=Where(key=key)) from error
            if not hits:
                raise _hits_nothing(
                    key, pattern, "adapted module", targets, f"adapted are {last_parts(targets)}"
                )


def _no_module(key: str, wanted: str, modules: dict[str, nn.Module]) -> FsdpTuneError:
    return _hits_nothing(
        key, wanted, "module", [name for name in modules if name], _names_of_linears(modules)
    )


def _hits_nothing(key: str, wanted: str, kind: str, names: Iterable[str], others: str) -> FsdpTuneError:
    parts = {name.rpartition(".")[2] for name in names}
    near = difflib.get_close_matches(wanted.rpartition(".")[2], sorted(parts), n=3)
    hint = f"did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else others
    return usage_error(
        "lora-target", f"`{key}`: `{wanted}` matches no {kind} of the model", where=Where(key=key), hint=hint
    )


def _names_of_linears(modules: dict[str, nn.Module]) -> str:
    names = dict.fromkeys(
        name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)
    )
    return (
        f"its linear layers are {', '.join(list(names)[:_SHOWN])}"
        if names
        else "the model has no linear layers (fused experts?)"
    )
