"""Scale a recipe down to CPU ranks: the same architecture class with fewer and narrower layers, and
everything else unchanged.

Pure: returns the document of another recipe, from the model's `config.json` and the resolved recipe. Every
change is listed and printed, so that a user can see what was not rehearsed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_tune.core import families
from fsdp_tune.core.errors import failed_error
from fsdp_tune.core.small_config import scale_down_config
from fsdp_tune.core.topology import DATA_KEYS
from fsdp_tune.recipe.schema.attention_kernels import needs_cuda
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import readers
from fsdp_tune.rehearsal.layer_patterns import (
    map_group_patterns,
    map_layer_patterns,
    map_layer_regex,
    map_lora_names,
)
from fsdp_tune.rehearsal.lifecycle_checks import run_torch_script
from fsdp_tune.rehearsal.scaled_data import ReadableInputs, scale_down_data
from fsdp_tune.rehearsal.scaled_recipe import ScaledRecipe

MICRO_BATCH_SIZE = 2
SMALL_RANK = 4
MOST_SHARING_RANKS = 2
"""Most ranks that share a row along a dimension: it divides the four heads, also where they are fewer in a
layer."""


def scale_down_recipe(
    recipe: Recipe,
    config: Mapping[str, object],
    folder: Path,
    *,
    ranks: int,
    device: str,
    steps: int,
    inputs: ReadableInputs,
) -> ScaledRecipe:
    """Return the recipe of a rehearsal. `recipe` is resolved; the result is not, and is loaded like any other
    recipe."""
    small = ScaledRecipe(recipe.model_dump(mode="json", by_alias=True))
    document = small.document
    document |= {"name": f"{recipe.name or 'recipe'}-rehearsal", "output_dir": str(folder / "run")}
    _model(small, recipe, config, inputs)
    if recipe.lora is not None:
        _adapters(small, folder)
    if device == "cpu":
        _kernels(small)
    scale_down_data(small, recipe, folder, inputs)
    sharing = _sharing_ranks(small, recipe, ranks)
    _slices_of_rows(small, recipe, sharing)
    _training(small, recipe, ranks, sharing, steps)
    _sharding(small, recipe, device)
    _experts(small, recipe, config, ranks)
    _merge(small)
    if recipe.evaluation.is_on:
        document["evaluation"] = {}
        small.changes.append("evaluation: none; NOT rehearsed")
    document["launch"] |= {
        "num_machines": 1,
        "num_processes": ranks,
        "device": device,
        "num_cpu_threads_per_process": "auto",
        "main_process_ip": None,
        "main_process_port": "auto",
        "max_restarts": 0,
        "max_runtime": None,
        "hang_timeout": "3m",
    }
    small.document = Recipe.model_validate(document).model_dump(
        mode="json", by_alias=True, exclude_defaults=True
    )
    return small


def _model(small: ScaledRecipe, recipe: Recipe, config: Mapping[str, object], inputs: ReadableInputs) -> None:
    model = small.document["model"]
    shrunk = scale_down_config(config)
    model |= {
        "name_or_path": None,
        "revision": "main",
        "from_config": shrunk,
        "config_overrides": {},
        "rope_scaling": None,
        "frozen_dtype": recipe.model.frozen_dtype,
    }
    of, to = families.LAYERS.of(config), families.LAYERS.of(shrunk)
    if of is not None and to is not None:
        _patterns(small, recipe, of, to)
    wide, narrow = families.HIDDEN_SIZE.of(config), families.HIDDEN_SIZE.of(shrunk)
    small.changes.append(
        f"model: random weights, {to} of {of} layers, hidden size {narrow} instead of {wide}"
    )
    if not inputs.tokenizer:
        model |= {"tokenizer": "builtin:arithmetic", "tokenizer_revision": None, "tokens": {}}
        small.changes.append(
            f"tokenizer: builtin:arithmetic, since `{recipe.model.tokenizer}` cannot be read here"
        )
    if needs_cuda(recipe.model.attn_implementation):
        model["attn_implementation"] = "auto"
        small.changes.append(
            f"attention: transformers' default, since {recipe.model.attn_implementation} needs a GPU"
        )


def _adapters(small: ScaledRecipe, folder: Path) -> None:
    """An adapter needs a model directory under it, and ranks that small matrices have. Raises:
    FailedError."""
    model, lora = small.document["model"], small.document["lora"]
    result = run_torch_script(
        "model_directories", {"config": model["from_config"], "folder": str(folder / "base")}
    )
    if result.exit_code != 0:
        raise failed_error("rehearsal-base", f"the small model cannot be written: {result.error}")
    model |= {"name_or_path": str(folder / "base"), "from_config": None}
    changed: dict[str, Any] = {
        "r": min(lora["r"], SMALL_RANK),
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "adapter": None,
    }
    small.changes += [
        f"lora.{key}: {json.dumps(value)}" for key, value in changed.items() if lora[key] != value
    ]
    lora |= changed


def _merge(small: ScaledRecipe) -> None:
    """Write the merged model at the end, which the checks compare."""
    merge = small.document["merge"]
    changed = {"at_end": True, "adapter": "both" if merge["adapter"] == "adapter" else merge["adapter"]}
    small.changes += [
        f"merge.{key}: {json.dumps(value)} instead of {json.dumps(merge[key])}"
        for key, value in changed.items()
        if merge[key] != value
    ]
    merge |= changed


def _patterns(small: ScaledRecipe, recipe: Recipe, of: int, to: int) -> None:
    """Map patterns that name layers to the layers of the small model, and list the changes."""
    fsdp, model = small.document["fsdp"], small.document["model"]
    model["freeze"] = map_layer_patterns(recipe.model.freeze, of, to)
    fsdp["modules_to_wrap"] = map_layer_patterns(recipe.fsdp.modules_to_wrap, of, to)
    if recipe.fsdp.ignored_modules is not None:
        fsdp["ignored_modules"] = map_layer_regex(recipe.fsdp.ignored_modules, of, to)
    lora: dict[str, Any] = small.document["lora"] or {}
    named = map_lora_names(lora, of, to)
    for key, old, new in (
        ("model.freeze", recipe.model.freeze, model["freeze"]),
        ("fsdp.modules_to_wrap", recipe.fsdp.modules_to_wrap, fsdp["modules_to_wrap"]),
        ("fsdp.ignored_modules", recipe.fsdp.ignored_modules, fsdp["ignored_modules"]),
        *_group_patterns(small, recipe, of, to),
        *((f"lora.{name}", lora[name], new) for name, new in named.items()),
    ):
        if new != old:
            small.changes.append(f"{key}: {json.dumps(new)}, the layers of the small model")
    lora |= named


class _MappedPatterns(NamedTuple):
    """Patterns of a key of the recipe, and those of the small model."""

    key: str
    old: list[str]
    new: list[str]


def _group_patterns(small: ScaledRecipe, recipe: Recipe, of: int, to: int) -> list[_MappedPatterns]:
    """Map the patterns of each entry of `training.parameter_groups`, and drop entries that have none left."""
    groups, training = recipe.training.parameter_groups, small.document["training"]
    mapped = map_group_patterns([group.match for group in groups], of, to)
    training["parameter_groups"] = [
        entry | {"match": match}
        for entry, match in zip(training["parameter_groups"], mapped, strict=True)
        if match
    ]
    return [
        _MappedPatterns(f"training.parameter_groups[{index}].match", group.match, match)
        for index, (group, match) in enumerate(zip(groups, mapped, strict=True))
    ]


_CPU_KERNELS = (
    ("liger", True, "auto"),
    ("loss", "liger", "chunked"),
    ("compile", True, False),
    ("experts", "sonicmoe", "auto"),
)
"""Key, the value that needs a GPU (or minutes of a C++ compiler), and the value in the rehearsal."""


def _kernels(small: ScaledRecipe) -> None:
    kernels = small.document["kernels"]
    for key, value, instead in _CPU_KERNELS:
        if kernels[key] == value:
            kernels[key] = instead
            small.changes.append(
                f"kernels.{key}: {str(instead).lower()} instead of {str(value).lower()} on the CPU"
            )


def _sharing_ranks(small: ScaledRecipe, recipe: Recipe, ranks: int) -> int:
    """Let few ranks share each row, and return their number."""
    sharing = 1
    for key, size in recipe.parallelism.of_row.row_keys().items():
        fewer = math.gcd(min(size, MOST_SHARING_RANKS), ranks // sharing)
        small.document["parallelism"][key.split(".")[1]] = fewer
        sharing *= fewer
        if fewer != size:
            small.changes.append(f"{key}: {fewer} instead of {size}")
    return sharing


def _slices_of_rows(small: ScaledRecipe, recipe: Recipe, sharing: int) -> None:
    """Make the length of rows divisible by the ranks that share them, and the slices of the MLP shorter than
    a rank's part of a row."""
    data, kernels = small.document["data"], small.document["kernels"]
    if rest := data["max_length"] % sharing:
        data["max_length"] -= rest
        small.changes.append(f"data.max_length: {data['max_length']}, which {sharing} ranks can share")
    given, part = recipe.kernels.mlp_slice_tokens, data["max_length"] // sharing
    if given is not None and given >= part:
        kernels["mlp_slice_tokens"] = max(1, part // 4)
        small.changes.append(
            f"kernels.mlp_slice_tokens: {kernels['mlp_slice_tokens']} instead of {given}, since rows "
            "are shorter"
        )


_LISTED_TRAINING = (
    *(
        "per_device_eval_batch_size",
        "report_to",
        "load_best_model_at_end",
        "early_stopping",
        "sample",
        "push_to_hub",
    ),
    *(
        "warmup_steps",
        "logging_steps",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "eval_strategy",
        "eval_steps",
    ),
)
"""Keys that a rehearsal sets itself and that its line on the batch does not show."""


def _training(small: ScaledRecipe, recipe: Recipe, ranks: int, sharing: int, steps: int) -> None:
    training = small.document["training"]
    training.pop("num_train_epochs", None)
    phases: dict[str, Any] | None = training.get("lr_scheduler_kwargs")
    if phases and "num_decay_steps" in phases:
        kept = {name: value for name, value in phases.items() if name != "num_stable_steps"}
        training["lr_scheduler_kwargs"] = kept | {
            "num_decay_steps": min(int(phases["num_decay_steps"]), steps // 2)
        }
    micro_batch = min(recipe.training.per_device_train_batch_size, MICRO_BATCH_SIZE)
    accumulation = 2 if (recipe.training.gradient_accumulation_steps or 1) > 1 else 1
    training |= {
        "global_batch_size": None,
        "per_device_train_batch_size": micro_batch,
        "per_device_eval_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "max_steps": steps,
        "warmup_steps": recipe.training.warmup_steps
        if recipe.training.warmup_steps < 1
        else min(int(recipe.training.warmup_steps), 2),
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": steps // 4,
        "save_total_limit": None,
        "eval_strategy": "no" if small.document["data"].get("eval") is None else "steps",
        "eval_steps": steps // 2,
        "load_best_model_at_end": False,
        "metric_for_best_model": None,
        "early_stopping": None,
        "sample": None,
        "report_to": [],
        "push_to_hub": False,
    }
    batch = micro_batch * ranks // sharing * accumulation
    if recipe.training.per_device_train_batch_tokens is not None:
        training |= {
            "global_batch_size": batch,
            "per_device_train_batch_tokens": micro_batch * small.document["data"]["max_length"],
        }
    small.changes.append(
        f"training: {steps} steps of {batch} sequences ({micro_batch} × {readers(ranks // sharing, sharing)} "
        f"× {accumulation} accumulation)"
    )
    written = recipe.model_dump(mode="json")["training"]
    for name in _LISTED_TRAINING:
        if name in written and written[name] != training[name]:
            small.changes.append(
                f"training.{name}: {json.dumps(training[name])} instead of {json.dumps(written[name])}"
            )


def _sharding(small: ScaledRecipe, recipe: Recipe, device: str) -> None:
    fsdp = small.document["fsdp"]
    small.document["parallelism"] |= dict.fromkeys(DATA_KEYS, "auto")
    if recipe.fsdp.activation_checkpointing == "auto":
        small.changes.append(
            "fsdp.activation_checkpointing: auto is resolved for the small model, which usually "
            "recomputes nothing"
        )
    if recipe.fsdp.reshard_after_backward == "auto":
        small.changes.append(
            "fsdp.reshard_after_backward: auto is resolved for the small model, which usually stays gathered"
        )
    given = recipe.fsdp.reshard_after_forward
    fsdp["reshard_after_forward"] = None
    if isinstance(given, int) and not isinstance(given, bool):
        small.changes.append(
            "fsdp.reshard_after_forward: the strategy's default, since the number of ranks differs"
        )
    if recipe.fsdp.auto_wrap_policy == "SIZE_BASED_WRAP" and recipe.fsdp.min_num_params != "auto":
        fsdp["min_num_params"] = "auto"
        small.changes.append("fsdp.min_num_params: auto, since the layers are smaller")
    if device != "cpu" or recipe.fsdp.version == 2:
        return
    if recipe.fsdp.offload_params:
        fsdp["offload_params"] = False
        small.changes.append("fsdp.offload_params: off, since FSDP1's needs an accelerator; NOT rehearsed")
    fsdp["cpu_ram_efficient_loading"] = False


def _experts(small: ScaledRecipe, recipe: Recipe, config: Mapping[str, Any], ranks: int) -> None:
    """Divide the experts over ranks that share a copy of the small model, as many as divide its few
    experts."""
    given = recipe.fsdp.ep_size
    copies = 2 if recipe.is_hybrid else 1  # on one machine
    fewer = math.gcd(given, max(1, ranks // copies), families.EXPERTS.of(scale_down_config(config)) or given)
    if fewer != given:
        small.document["fsdp"]["ep_size"] = fewer
        missing = "; the exchange of tokens is NOT rehearsed" if fewer == 1 else ""
        small.changes.append(f"fsdp.ep_size: {fewer} instead of {given}{missing}")
