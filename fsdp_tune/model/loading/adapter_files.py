"""Start the adapters of a run: with drawn values, or with those of the adapter that `lora.adapter` names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.core.config_changes import changed_fields
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where
from fsdp_tune.core.tensors.peft_config import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    initialisation_that_changes_base,
    is_trained_in_full,
    other_arithmetic,
    other_training,
    unknown_field_notices,
)
from fsdp_tune.core.tensors.peft_names import PREFIX, without_copies
from fsdp_tune.model.adapters.lora import draw_adapters, name_in_file
from fsdp_tune.model.loading.stored_tensors import Stored, tensors_of
from fsdp_tune.model.loading.tensor_account import names_in_model
from fsdp_tune.model.loading.weight_slices import WeightFiles, read_tensors
from fsdp_tune.model.shard.local import local_part
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BASE_FILE, common_prefixes, describe_base, open_base

_SAME = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Keys of `lora:` that must be those of the adapter's config, where they have the same names."""


def start_adapters(recipe: Recipe, model: nn.Module) -> None:
    """Fill the adapters of a (sharded) model whose base is loaded: each rank draws or reads its part."""
    if recipe.lora is None:
        return
    draw_adapters(recipe, model)
    if recipe.lora.adapter is not None:
        stored = _stored(recipe.lora.adapter, model)
        read_tensors(_targets(model), WeightFiles(stored))
        _compare_copies(recipe.lora.adapter, model, stored)


@torch.no_grad()
def _compare_copies(folder: str, model: nn.Module, stored: Mapping[str, Stored]) -> None:
    """Compare frozen weights of the base, which PEFT stores with an adapter of a resized or adapted
    embedding, with those loaded.

    Raises: usage error if they differ: PEFT would load them, and neither a checkpoint nor a merge of this run
    would have them.
    """
    frozen = {name: parameter for name, parameter in _frozen_embeddings(model).items() if name in stored}
    copies = {name: parameter.detach().clone() for name, parameter in frozen.items()}
    read_tensors(copies, WeightFiles(dict(stored)))
    for name, parameter in frozen.items():
        dtype = stored[name].dtype
        ours, theirs = local_part(parameter), local_part(copies[name])
        if not torch.equal(ours, theirs) and not torch.equal(ours.to(dtype), theirs.to(dtype)):
            raise _wrong(
                folder,
                f"its `{name}`, which is not trained, differs from the base's: the embedding was "
                "changed before its training",
                "name the changed base in `model.name_or_path`, or train on the merged adapter "
                "(`fsdp-tune merge-checkpoint`)",
            )


def check_adapter(recipe: Recipe, model: PreTrainedModel) -> None:
    """Compare the adapter that `lora.adapter` names with the recipe and with the bare model.

    Raises: usage error with all differences if it is missing, of another kind, of another base, or has other
    layers, shapes or scales.
    """
    if recipe.lora is None or recipe.lora.adapter is None:
        return
    folder = recipe.lora.adapter
    config = _config(folder)
    _refuse_other_kinds(folder, config)
    problems = [*_other_settings(folder, config, recipe), *_other_tensors(folder, config, model)]
    if problems:
        raise FsdpTuneError(*problems)


def _other_settings(folder: str, config: Mapping[str, object], recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each key of the recipe that contradicts the adapter's config."""
    assert recipe.lora is not None
    defaults: dict[str, object] = {
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    for key in _SAME:
        theirs, ours = config.get(key, defaults.get(key)) or defaults.get(key), getattr(recipe.lora, key)
        if theirs != ours:
            hint = (
                f"leave `lora.{key}` out, which then is the adapter's, or --set lora.{key}={_shown(theirs)}"
            )
            yield _problem(
                folder, f"its `{key}` is {_shown(theirs)}, and the recipe has {_shown(ours)}", hint
            )
    base, wanted = str(config.get("base_model_name_or_path") or ""), str(recipe.model.name_or_path)
    if base and Path(base).name != Path(wanted).name:
        hint = (
            f"--set model.name_or_path={base}, or correct `base_model_name_or_path` in {CONFIG_FILE} if "
            "they are the same weights"
        )
        yield _problem(folder, f"it was trained on {base}, and the recipe names {wanted}", hint)


def _shown(value: object) -> str:
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _other_tensors(folder: str, config: Mapping[str, object], model: nn.Module) -> Iterator[Problem]:
    """Yield a problem for the tensors that the adapter lacks, for those that are not trained, and for those
    of other shapes."""
    targets = _targets(model)
    stored, frozen = _stored(folder, model), _frozen_embeddings(model)
    frozen = {name: tensor for name, tensor in frozen.items() if not is_trained_in_full(config, name)}
    for name in stored.keys() & frozen.keys():
        if stored[name].shape != tuple(frozen[name].shape):
            sizes = f"{stored[name].shape[0]:,} rows, and that of the model has {frozen[name].shape[0]:,}"
            hint = "merge the adapter (`fsdp-tune merge-checkpoint`) and train on the result"
            yield _problem(folder, f"its `{name}`, which is not trained, has {sizes}", hint)
    stored = {name: tensor for name, tensor in stored.items() if name not in frozen}
    if lost := sorted(targets.keys() - stored.keys()):
        yield _problem(
            folder,
            f"it lacks `{lost[0]}`, which the recipe trains ({len(lost)} of {len(targets)} tensors)",
            _TARGETS,
        )
    if more := sorted(stored.keys() - targets.keys()):
        yield _problem(
            folder,
            f"it has `{more[0]}`, which the recipe does not train ({len(more)} of {len(stored)} tensors)",
            _TARGETS,
        )
    if wrong := [
        name for name in targets.keys() & stored.keys() if stored[name].shape != tuple(targets[name].shape)
    ]:
        name = min(wrong)
        sizes = (
            f"{list(stored[name].shape)}, and the model has {list(targets[name].shape)} for it "
            f"({len(wrong)} of {len(targets)} tensors)"
        )
        hint = (
            "name the model that it was trained on in `model.name_or_path`, with the rank that it was "
            "trained with"
        )
        yield _problem(folder, f"its `{name}` is {sizes}", hint)


def _refuse_other_kinds(folder: str, config: Mapping[str, object]) -> None:
    if config.get("peft_type") != "LORA":
        raise _wrong(folder, f"it is of the type {config.get('peft_type')}, and only LORA is supported", _NEW)
    if (field := other_arithmetic(config)) is not None:
        raise _wrong(folder, f"it was trained with `{field}`, which is not supported", _NEW)
    if (what := other_training(config)) is not None:
        raise _wrong(
            folder,
            f"it was trained with `{what}`, with which its training would not continue as plain LoRA",
            _NEW,
        )
    if (start := initialisation_that_changes_base(config)) is not None:
        raise _wrong(
            folder,
            f"it began with `init_lora_weights: {start}`, which changes the base under the adapter",
            "convert it with PEFT (`save_pretrained(…, path_initial_model_for_weight_conversion=…)`) "
            "and name the result",
        )


def check_base(recipe: Recipe, config_changes: Mapping[str, object]) -> list[Notice]:
    """Compare the base with that under which the adapter was trained, as far as it is recorded.
    `config_changes`: those of the recipe.

    Return notices if its precision or its configuration differs: weights in 4 bits are another base than
    those that they were made of, as are the same weights with other rotary frequencies. Raises: usage error
    if the weights differ.
    """
    if recipe.lora is None or recipe.lora.adapter is None:
        return []
    folder, name = recipe.lora.adapter, str(recipe.model.name_or_path)
    config = _config(folder)
    base = open_base(config, Path(folder) / BASE_FILE, given=name)
    notices = unknown_field_notices(config, Path(folder) / CONFIG_FILE)
    if base.trained is None:
        return notices
    now = describe_base(name, recipe.model.revision)
    if base.trained.differs_from(now):
        raise _wrong(
            folder,
            f"it was trained on other weights than those of {name}",
            "restore the weights that it was trained on",
        )
    scales = None if recipe.nf4 is None else recipe.nf4.scales
    if base.trained.nf4_scales != scales:
        before, held = (
            base.describe_precision(),
            replace(base, trained=replace(now, nf4_scales=scales)).describe_precision(),
        )
        message = (
            f"lora.adapter: {folder} was trained on a base in {before}, and the recipe holds it in {held}"
        )
        notices.append(Notice("adapter-precision-differs", message))
    if changed := changed_fields(config_changes, base.config_changes) | changed_fields(
        base.config_changes, config_changes
    ):
        message = (
            f"lora.adapter: {folder} was trained with {_fields(base.config_changes, changed)} in the "
            "base's configuration"
        )
        message += f", and the recipe has {_fields(config_changes, changed)}"
        hint = (
            "write the `model.rope_scaling` and `model.config_overrides` that it was trained with, "
            "unless the change is meant"
        )
        notices.append(Notice("adapter-config-differs", message, hint=hint))
    return notices


def _fields(changes: Mapping[str, object], names: Iterable[str]) -> str:
    """Return the fields of `names` that a run changes, as text."""
    return (
        ", ".join(f"`{name}: {json.dumps(changes[name])}`" for name in names if name in changes)
        or "the base's own values"
    )


_NEW = (
    "leave `lora.adapter` out to train a new adapter, or merge this one with PEFT (`merge_and_unload`) "
    "and train on the result"
)
_TARGETS = (
    "leave `lora.target_modules`, `target_parameters`, `layers_to_transform`, `modules_to_save` and "
    "`bias` out: they then are the adapter's"
)


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name_in_file(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _frozen_embeddings(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the frozen weights of embedding and head, which PEFT may save too (`save_embedding_layers`), by
    their names in the file."""
    found = {
        PREFIX + name: p for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad
    }
    own: Any = model
    modules = {own.get_input_embeddings(), own.get_output_embeddings()} - {None}
    weights = {id(p) for module in modules for p in module.parameters()}
    return {name: p for name, p in found.items() if id(p) in weights}


def _stored(folder: str, model: nn.Module) -> dict[str, Stored]:
    """Return the tensors of an adapter by the names that the model gives them: a base of several modalities
    publishes longer ones."""
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise _wrong(
            folder, f"there is no {WEIGHTS_FILE}", "give the directory that PEFT wrote, with safetensors"
        )
    stored = dict(tensors_of(path))
    tensors = {name: stored[key] for name, key in without_copies(stored).items()}
    known = _targets(model).keys() | _frozen_embeddings(model).keys()
    whole: Any = getattr(model, "module", model)
    renamed = names_in_model(
        whole, [name.removeprefix(PREFIX) for name in tensors if name not in known], {}, legacy=False
    )
    ours = {
        PREFIX + name: PREFIX + found.name for name, found in renamed.items() if PREFIX + found.name in known
    }
    return {ours.get(name, name): tensor for name, tensor in tensors.items()}


def published_prefixes(model: nn.Module, names: Iterable[str]) -> tuple[str, str] | None:
    """Return (prefix in an adapter's file, prefix in the model) of modules, if the file has the names that a
    base of several modalities publishes. `names`: those of the tensors, with PEFT's prefix."""
    bare = [name.removeprefix(PREFIX) for name in names]
    whole: Any = model
    return common_prefixes(
        {
            name: found.name
            for name, found in names_in_model(whole, bare, {}, legacy=False).items()
            if found.name != name
        }
    )


def _config(folder: str) -> dict[str, object]:
    try:
        config = json.loads((Path(folder) / CONFIG_FILE).read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
        return config
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(
            folder, f"its {CONFIG_FILE} cannot be read: {error}", "give the directory that PEFT wrote"
        ) from error


def _problem(folder: str, why: str, hint: str | None = None) -> Problem:
    return Problem("adapter-does-not-fit", f"lora.adapter: {folder}: {why}", Where(key="lora.adapter"), hint)


def _wrong(folder: str, why: str, hint: str | None = None) -> FsdpTuneError:
    return FsdpTuneError(_problem(folder, why, hint))
