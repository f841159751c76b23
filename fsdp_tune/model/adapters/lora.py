"""Choose the modules and parameters that get LoRA adapters, and the modules that are trained in full, by the names in `lora:`.

Put PEFT's LoRA layers into a model before it is sharded, and give them the values that one process would draw.

The modules are PEFT's; the choice of targets, the first values and the files are ours: PEFT ignores a target that hits nothing,
draws from the generator of each rank, and saves what one rank holds.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.tensors.file_formats import PREFIX, pattern_matches, tensor_name, value_for
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.model.shard.local import copy_part, count_elements, local_part
from fsdp_tune.recipe.schema.recipe import Lora, Recipe
from fsdp_tune.run.directory import run_of
from fsdp_tune.run.manifest import digest_number

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

    Raises: usage error for a name that hits nothing or a module that LoRA does not adapt, for a tied embedding or head, for a rank that
    the matrix does not have, and for DoRA on anything but a linear layer.
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
    targets = {name: modules[name] for name in modules if name in set(chosen)}
    parameters = _chosen_parameters(recipe, model, saved)
    if not targets and not parameters:
        raise _no_module("lora.target_modules", str(lora.target_modules), modules)
    _refuse_tied(model, targets, "lora.target_modules")
    _refuse_tied(model, {owner: modules[owner] for name in parameters for owner in [name.rpartition(".")[0]]}, "lora.target_parameters")
    _check_sizes(lora, {name: tuple(module.weight.shape) for name, module in targets.items()})  # type: ignore[arg-type, union-attr]
    _check_sizes(lora, {name: tuple(parameter.shape[1:]) for name, parameter in parameters.items()})
    _check_dora(lora, targets)
    _check_patterns(lora, [*targets, *parameters])
    return Targets(targets, parameters)


def find_saved(recipe: Recipe, model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules of `lora.modules_to_save` by name. Raises: usage error for a name that hits nothing, and for tied weights."""
    assert recipe.lora is not None
    modules: dict[str, nn.Module] = dict(model.named_modules())
    saved: dict[str, nn.Module] = {}
    for wanted in recipe.lora.modules_to_save:
        found = {name: module for name, module in modules.items() if ends_with(name, wanted) and any(True for _ in module.parameters())}
        if not found:
            raise _no_module("lora.modules_to_save", wanted, modules)
        saved |= found
    if (outside := next((name for name in saved if _is_inside(name, parts_without_text(model))), None)) is not None:
        raise _without_text("lora.modules_to_save", outside, parts_without_text(model))
    _refuse_tied(model, saved, "lora.modules_to_save")
    return saved


def parts_without_text(model: PreTrainedModel) -> list[str]:
    """Return the modules of a model of several modalities that rows of text do not call, such as `model.vision_tower`."""
    if model.config.get_text_config() is model.config:
        return []
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    text = [names[module] for module in (model.get_decoder(), model.get_output_embeddings()) if module in names]
    if "" in text or not text:
        return []
    enclosing = {".".join(name.split(".")[:end]) for name in text for end in range(len(name.split(".")))}
    children = [f"{name}.{child}" if name else child for name in enclosing for child, _ in model.get_submodule(name).named_children()]
    return [child for child in children if child not in enclosing and child not in text]


def _without_text(key: str, name: str, others: Sequence[str]) -> FsdpTuneError:
    message = f"`{key}`: `{name}` is in a part of the model that rows of text do not call, so it would get no gradient"
    hint = f"name layers outside of {', '.join(others)}, or leave `target_modules` out"
    return usage_error("lora-target", message, where=Where(key=key), hint=hint)


def _chosen(lora: Lora, model: PreTrainedModel, modules: dict[str, nn.Module]) -> list[str]:
    if lora.target_modules == ALL_LINEAR:
        head = model.get_output_embeddings()
        return [name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D) and module is not head]
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
                    f"`lora.target_modules`: `{name}` is a {type(modules[name]).__name__}; LoRA adapts linear layers and embeddings",
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
                f"its stacked matrices are {', '.join(names)}" if names else "the model has no stacked matrices: name its linear layers"
            )
            raise _hits_nothing(key, wanted, "parameter", stacks, others)
        if (other := next((name for name in found if name not in stacks), None)) is not None:
            message = f"`{key}`: `{other}` is {list(parameters[other].shape)}, not a stack of matrices"
            raise usage_error("lora-target", message, where=Where(key=key), hint="name linear layers in `lora.target_modules`")
        chosen |= set(_in_layers(recipe, model, found))
    return {name: parameter for name, parameter in parameters.items() if name in chosen and not _is_inside(name, saved)}


def is_stack(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter stacks the matrices of experts, by its dimensions; those of a convolution have as many."""
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
            f"`lora.layers_to_transform`: layer {beyond[0]} does not exist; the model has the layers 0 to {len(layers) - 1}",
            where=Where(key="lora.layers_to_transform"),
        )
    return [name for name in names if _is_inside(name, [layers[index] for index in indexes])]


def _refuse_tied(model: PreTrainedModel, modules: dict[str, nn.Module], key: str) -> None:
    """Refuse modules that share a weight with another one: a tied embedding or head, Zamba2's shared blocks. Raises: usage error."""
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
                f"`{key}`: `{name}` shares its weight with `{other}`, and an adapter would change only one of them",
                where=Where(key=key),
                hint=f"leave `{name.rpartition('.')[2]}` out",
            )


def rank_of(lora: Lora, name: str) -> int:
    """Return the rank of the adapter of a module or parameter."""
    return value_for(name, lora.rank_pattern, lora.r)


def _check_sizes(lora: Lora, shapes: Mapping[str, tuple[int, ...]]) -> None:
    fitting = [name for name, shape in shapes.items() if rank_of(lora, name) <= min(shape)]
    for name, (rows, columns) in shapes.items():
        if (rank := rank_of(lora, name)) > min(rows, columns):
            raise usage_error(
                "lora-rank",
                f"`lora.r: {rank}` is above the rank of `{name}`, which is {rows} x {columns}",
                where=Where(key="lora.r"),
                hint=f"a rank of at most {min(rows, columns)}" + (f", or `target_modules: [{last_parts(fitting)}]`" if fitting else ""),
            )


def _check_dora(lora: Lora, targets: dict[str, nn.Module]) -> None:
    for name, module in targets.items():
        if lora.use_dora and not isinstance(module, nn.Linear):
            raise usage_error(
                "lora-dora",
                f"`lora.use_dora: true`: `{name}` is a {type(module).__name__}, and DoRA is supported for linear layers only",
                where=Where(key="lora.use_dora"),
                hint="write `use_dora: false`, or name linear layers in `lora.target_modules`",
            )


def last_parts(names: Iterable[str]) -> str:
    """Return the different last parts of module names, as a list in a message."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _check_patterns(lora: Lora, targets: Sequence[str]) -> None:
    for key, patterns in (("lora.rank_pattern", lora.rank_pattern), ("lora.alpha_pattern", lora.alpha_pattern)):
        for pattern in patterns:
            try:
                hits = any(pattern_matches(pattern, name) for name in targets)
            except re.error as error:
                message = f"`{key}`: `{pattern}` is not a valid regular expression: {error}"
                raise usage_error("lora-target", message, where=Where(key=key)) from error
            if not hits:
                raise _hits_nothing(key, pattern, "adapted module", targets, f"adapted are {last_parts(targets)}")


def _no_module(key: str, wanted: str, modules: dict[str, nn.Module]) -> FsdpTuneError:
    return _hits_nothing(key, wanted, "module", [name for name in modules if name], _names_of_linears(modules))


def _hits_nothing(key: str, wanted: str, kind: str, names: Iterable[str], others: str) -> FsdpTuneError:
    parts = {name.rpartition(".")[2] for name in names}
    near = difflib.get_close_matches(wanted.rpartition(".")[2], sorted(parts), n=3)
    hint = f"did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else others
    return usage_error("lora-target", f"`{key}`: `{wanted}` matches no {kind} of the model", where=Where(key=key), hint=hint)


def _names_of_linears(modules: dict[str, nn.Module]) -> str:
    names = dict.fromkeys(name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D))
    return f"its linear layers are {', '.join(list(names)[:_SHOWN])}" if names else "the model has no linear layers (fused experts?)"


ADAPTER_NAME = "default"
"""PEFT's name of the only adapter, a part of its parameters' names."""
_BASE_LAYER = re.compile(r"\.base_layer(?=\.)")
"""In the names of what PEFT's layers enclose: once for a module, once for each adapted parameter of a module."""
_OWN = re.compile(rf"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\.{ADAPTER_NAME}(\.weight)?$")


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter of the live model belongs to an adapter, by its name."""
    return _OWN.search(name) is not None


def name_in_base(name: str) -> str | None:
    """Return the name that a parameter or buffer has in the model without adapters; None for a parameter of an adapter."""
    return None if is_of_adapter(name) else _BASE_LAYER.sub("", name)


def name_in_file(name: str) -> str:
    """Return the name that a trained parameter has in PEFT's `adapter_model.safetensors` (`get_peft_model_state_dict`, PEFT 0.21)."""
    found = _OWN.search(name)
    return PREFIX + name if found is None else tensor_name(name[: found.start()], f"lora_{found[1]}")


def inject_lora(recipe: Recipe, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace the targets of `lora:` by PEFT's layers, in place, with adapters in `dtype`, and say which parameters are trained.

    Raises: usage error.

    Modules of `modules_to_save` are trained where they are: PEFT would keep, shard and gather their frozen original too.
    """
    lora = recipe.lora
    assert lora is not None
    if (run := run_of(Path(str(recipe.model.name_or_path)))) is not None:
        merged = "" if (run.merged / "config.json").is_file() else f"`fsdp-tune merge-checkpoint {run.path}`, then "
        raise usage_error(
            "lora-on-run",
            f"`lora:` needs a model directory, and {recipe.model.name_or_path} is a run of fsdp-tune",
            where=Where(key="model.name_or_path"),
            ways_out=(
                f"new adapters on the model that it trained: {merged}`--set model.name_or_path={run.merged}`",
                *([f"continue its adapter: its base as `model.name_or_path`, and `lora.adapter: {run.path}`"] * run.base_json.exists()),
            ),
        )
    targets, saved = find_targets(recipe, model), find_saved(recipe, model)
    frozen_by_its_code = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    biases = set(_trained_biases(lora, model, targets.modules))
    _inject(lora, model, targets)
    in_full = tuple(f"{name}." for name in saved)
    for name, parameter in model.named_parameters():
        base = name_in_base(name)
        if base is None:
            parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(base is None or ((name.startswith(in_full) or base in biases) and base not in frozen_by_its_code))


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """Return PEFT's layers by the name that the adapted module, or parameter, has in the bare model."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            parameter = getattr(module, "parameter_name", None)  # of a ParamWrapper
            found[_BASE_LAYER.sub("", f"{name}.")[:-1] + (f".{parameter}" if parameter else "")] = module
    return found


def _inject(lora: Lora, model: PreTrainedModel, targets: Targets) -> None:
    """Replace the targets by PEFT's layers. Raises: usage error if PEFT refuses one, or adapts other modules than these.

    In mixtures of experts PEFT (`convert_peft_config_for_transformers`) takes `gate_proj`, `up_proj` and `down_proj` of any layer for the
    experts of transformers 4, and adapts the fused experts instead; it would do the same when it loads the adapter.
    """
    inject_adapter_in_model = _peft().inject_adapter_in_model
    where = Where(key="lora.target_modules")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of `fan_in_fan_out`, which PEFT sets for each layer by its kind
            inject_adapter_in_model(peft_config(lora, targets), model, adapter_name=ADAPTER_NAME)
    except ValueError as error:
        hint = f"name other layers: {last_parts(targets.modules)}"
        raise usage_error("lora-target", f"PEFT does not adapt these modules: {error}", where=where, hint=hint) from error
    adapted = adapters_of(model).keys()
    if lost := [name for name in targets.modules if name not in adapted]:
        message = (
            f"`lora.target_modules`: PEFT adapts the fused experts of {type(model).__name__} instead of `{lost[0]}`, which is not supported"
        )
        left = [name for name in targets.modules if name not in lost]
        raise usage_error("lora-target", message, where=where, hint=f"write `target_modules: [{last_parts(left)}]`" if left else None)
    assert adapted == {*targets.modules, *targets.parameters}, "a full name matches one module or parameter alone"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise usage_error("lora-needs-peft", "`lora:` needs PEFT, which is not installed", hint="pip install peft") from error
    return peft


def _trained_biases(lora: Lora, model: nn.Module, targets: dict[str, nn.Module]) -> list[str]:
    if lora.bias == "all":
        return [name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"]
    return [f"{name}.bias" for name, module in targets.items() if getattr(module, "bias", None) is not None] if lora.bias != "none" else []


def peft_config(lora: Lora, targets: Targets) -> Any:
    """Return the `LoraConfig` for the targets, by their full names."""
    return _peft().LoraConfig(
        r=lora.r,
        lora_alpha=_number(lora.lora_alpha),
        lora_dropout=lora.lora_dropout,
        target_modules=list(targets.modules),
        target_parameters=list(targets.parameters) or None,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern={pattern: _number(alpha) for pattern, alpha in lora.alpha_pattern.items()},
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        init_lora_weights=lora.init_lora_weights,
        task_type="CAUSAL_LM",
    )


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def adapter_config(recipe: Recipe, model: PreTrainedModel) -> dict[str, Any]:
    """Return the content of `adapter_config.json` for a model with adapters, so that PEFT, vLLM and a merge can read the adapter."""
    lora = recipe.lora
    assert lora is not None
    config = model.peft_config[ADAPTER_NAME].to_dict()  # type: ignore[index, union-attr]  # set by PEFT
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return values | {
        "base_model_name_or_path": _place_of(str(recipe.model.name_or_path)),
        "revision": recipe.model.revision,
        # Full names: PEFT matches the ends of names, so that `norm` would be `input_layernorm` too.
        "modules_to_save": list(find_saved(recipe, model)) or None,
        "bias": lora.bias,
        "inference_mode": True,
    }


def _place_of(name: str) -> str:
    """Return the full path of a directory, since an adapter is used from other places than it was trained in."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def stacks_without_adapters(model: nn.Module) -> dict[str, float]:
    """Return the stacked matrices that have no adapters, by name in the base, with their shares of the base's parameters."""
    base = {name: p for wrapped_name, p in model.named_parameters() if (name := name_in_base(wrapped_name)) is not None}
    total, adapted = count_elements(base.items()), adapters_of(model)
    return {name: p.numel() / total for name, p in base.items() if is_stack(name, p) and name not in adapted}


# ---- First values


@torch.no_grad()
def draw_adapters(recipe: Recipe, model: nn.Module) -> None:
    """Fill the adapters of a (sharded) model whose base is loaded.

    A parameter's values follow from `training.seed` and its name alone, so they are the same on any number of ranks.
    """
    lora = recipe.lora
    assert lora is not None
    for name, parameter in model.named_parameters():
        found = _OWN.search(name)
        if found is not None and found[1] != "magnitude_vector":
            rank: int = model.get_submodule(name[: found.start()]).r[ADAPTER_NAME]  # type: ignore[index, assignment, union-attr]
            values = first_values(lora, found[1], tuple(parameter.shape), rank, f"{recipe.training.seed} {name}")
            copy_part(parameter, values)
    for module in model.modules():
        for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
            # Of a linear layer, whose rows lie on the same rank as the elements of the magnitude.
            weight: Any = local_part(module.base_layer.weight)  # type: ignore[union-attr]
            local_part(magnitude.weight).copy_(torch.linalg.norm(weight.float(), dim=1))


def first_values(lora: Lora, part: str, shape: tuple[int, ...], rank: int, key: str) -> torch.Tensor:
    """Return the values of a full tensor in fp32, as PEFT's `reset_lora_parameters` draws them. `key` seeds the generator."""
    generator = torch.Generator().manual_seed(digest_number(key, size=7))
    values = torch.empty(shape, dtype=torch.float32)
    if part == "embedding_B":
        return values.normal_(generator=generator)
    if part == "embedding_A" or (part == "B" and lora.init_lora_weights is not False):
        return values.zero_()
    if lora.init_lora_weights == "gaussian":
        return values.normal_(std=1 / rank, generator=generator)
    bound = 1 / math.sqrt(shape[1])  # of a linear layer: kaiming_uniform_ with a = √5
    return values.uniform_(-bound, bound, generator=generator)
