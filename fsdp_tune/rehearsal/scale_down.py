"""Scale a recipe down to CPU ranks: the same architecture class with fewer and narrower layers, and everything else unchanged.

Pure: returns the document of another recipe, from the model's `config.json` and the resolved recipe. Every change is listed and
printed, so that a user can see what was not rehearsed.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_tune.core import families
from fsdp_tune.core.atomic import write_file
from fsdp_tune.core.errors import failed_error
from fsdp_tune.core.small_config import scale_down_config
from fsdp_tune.core.topology import DATA_KEYS
from fsdp_tune.recipe.schema.attention_kernels import needs_cuda
from fsdp_tune.recipe.schema.recipe import EvalFraction, EvalRows, Recipe
from fsdp_tune.recipe.world import readers
from fsdp_tune.rehearsal.lifecycle_checks import run_torch_script

MAX_LENGTH_TOKENS = 128
ROWS = 400
EVAL_ROWS = 16
MICRO_BATCH_SIZE = 2
SMALL_RANK = 4
MOST_SHARING_RANKS = 2
"""Most ranks that share a row along a dimension: it divides the four heads, also where they are fewer in a layer."""


@dataclass(frozen=True, slots=True)
class ReadableInputs:
    """Which inputs of the recipe can be read on this machine."""

    tokenizer: bool = True
    data: bool = True
    tokens: int = 0
    """The row length at which the recipe's data keep trained tokens (`data.preparation.length_with_targets`)."""


@dataclass(slots=True)
class ScaledRecipe:
    """The document of a rehearsal's recipe, and its differences from the user's."""

    document: dict[str, Any]
    changes: list[str] = field(default_factory=list[str])

    def write(self, folder: Path, name: str = "rehearsal.yaml") -> Path:
        """Write the document as a recipe that `fsdp-tune train` accepts."""
        import yaml

        path = folder / name
        write_file(path, yaml.safe_dump(self.document, sort_keys=False, allow_unicode=True))
        return path


def scale_down_recipe(
    recipe: Recipe, config: Mapping[str, object], folder: Path, *, ranks: int, device: str, steps: int, inputs: ReadableInputs
) -> ScaledRecipe:
    """Return the recipe of a rehearsal. `recipe` is resolved; the result is not, and is loaded like any other recipe."""
    small = ScaledRecipe(recipe.model_dump(mode="json", by_alias=True))
    document = small.document
    document |= {"name": f"{recipe.name or 'recipe'}-rehearsal", "output_dir": str(folder / "run")}
    _model(small, recipe, config, inputs)
    if recipe.lora is not None:
        _adapters(small, folder)
    if device == "cpu":
        _kernels(small)
    _data(small, recipe, folder, inputs)
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
    small.document = Recipe.model_validate(document).model_dump(mode="json", by_alias=True, exclude_defaults=True)
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
    small.changes.append(f"model: random weights, {to} of {of} layers, hidden size {narrow} instead of {wide}")
    if not inputs.tokenizer:
        model |= {"tokenizer": "builtin:arithmetic", "tokenizer_revision": None, "tokens": {}}
        small.changes.append(f"tokenizer: builtin:arithmetic, since `{recipe.model.tokenizer}` cannot be read here")
    if needs_cuda(recipe.model.attn_implementation):
        model["attn_implementation"] = "auto"
        small.changes.append(f"attention: transformers' default, since {recipe.model.attn_implementation} needs a GPU")


def _adapters(small: ScaledRecipe, folder: Path) -> None:
    """An adapter needs a model directory under it, and ranks that small matrices have. Raises: FailedError."""
    model, lora = small.document["model"], small.document["lora"]
    result = run_torch_script("model_directories", {"config": model["from_config"], "folder": str(folder / "base")})
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
    small.changes += [f"lora.{key}: {json.dumps(value)}" for key, value in changed.items() if lora[key] != value]
    lora |= changed


def _merge(small: ScaledRecipe) -> None:
    """Write the merged model at the end, which the checks compare."""
    merge = small.document["merge"]
    changed = {"at_end": True, "adapter": "both" if merge["adapter"] == "adapter" else merge["adapter"]}
    small.changes += [
        f"merge.{key}: {json.dumps(value)} instead of {json.dumps(merge[key])}" for key, value in changed.items() if merge[key] != value
    ]
    merge |= changed


def _patterns(small: ScaledRecipe, recipe: Recipe, of: int, to: int) -> None:
    """Map patterns that name layers to the layers of the small model, and list the changes."""
    fsdp, model = small.document["fsdp"], small.document["model"]
    model["freeze"] = map_layer_patterns(recipe.model.freeze, of, to)
    fsdp["modules_to_wrap"] = map_layer_patterns(recipe.fsdp.modules_to_wrap, of, to)
    if recipe.fsdp.ignored_modules is not None:
        fsdp["ignored_modules"] = map_layer_regex(recipe.fsdp.ignored_modules, of, to)
    for key, old, new in (
        ("model.freeze", recipe.model.freeze, model["freeze"]),
        ("fsdp.modules_to_wrap", recipe.fsdp.modules_to_wrap, fsdp["modules_to_wrap"]),
        ("fsdp.ignored_modules", recipe.fsdp.ignored_modules, fsdp["ignored_modules"]),
        *_group_patterns(small, recipe, of, to),
    ):
        if new != old:
            small.changes.append(f"{key}: {json.dumps(new)}, the layers of the small model")


class _MappedPatterns(NamedTuple):
    """Patterns of a key of the recipe, and those of the small model."""

    key: str
    old: list[str]
    new: list[str]


def _group_patterns(small: ScaledRecipe, recipe: Recipe, of: int, to: int) -> list[_MappedPatterns]:
    """Map the patterns of each entry of `training.parameter_groups`.

    A small layer represents several layers, and belongs to the first entry with one of them.
    """
    changes: list[_MappedPatterns] = []
    entries: list[dict[str, Any]] = []
    for index, group in enumerate(recipe.training.parameter_groups):
        earlier = [pattern for entry in entries for pattern in entry["match"]]
        mapped = [
            pattern
            for pattern in map_layer_patterns(group.match, of, to)
            if pattern in group.match or not any(fnmatch.fnmatchcase(pattern, other) for other in earlier)
        ]
        entries += [small.document["training"]["parameter_groups"][index] | {"match": mapped}] if mapped else []
        changes.append(_MappedPatterns(f"training.parameter_groups[{index}].match", group.match, mapped))
    small.document["training"]["parameter_groups"] = entries
    return changes


_CPU_KERNELS = (("liger", True, "auto"), ("loss", "liger", "chunked"), ("compile", True, False), ("experts", "sonicmoe", "auto"))
"""Key, the value that needs a GPU (or minutes of a C++ compiler), and the value in the rehearsal."""


def _kernels(small: ScaledRecipe) -> None:
    kernels = small.document["kernels"]
    for key, value, instead in _CPU_KERNELS:
        if kernels[key] == value:
            kernels[key] = instead
            small.changes.append(f"kernels.{key}: {str(instead).lower()} instead of {str(value).lower()} on the CPU")


def _data(small: ScaledRecipe, recipe: Recipe, folder: Path, inputs: ReadableInputs) -> None:
    """Read few and short rows, of the built-in data set if the recipe's cannot be read here."""
    small.document["data"] |= {"cache_dir": str(folder / "cache"), "num_proc": "auto"}
    if inputs.data and inputs.tokenizer:
        _own_data(small, recipe)
    else:
        _builtin_data(small, recipe, inputs)
    data = small.document["data"]
    shortest = MAX_LENGTH_TOKENS * max(1, -(-inputs.tokens // MAX_LENGTH_TOKENS))
    if recipe.data.max_length > shortest:
        data["max_length"] = shortest
        why = f", since prompts are longer than {MAX_LENGTH_TOKENS} tokens" if shortest > MAX_LENGTH_TOKENS else ""
        small.changes.append(f"data.max_length: {shortest} instead of {recipe.data.max_length}{why}")
        if recipe.data.overlong in ("drop", "error") and "overlong" in data:
            data["overlong"] = "truncate"  # rows that fit the real length must not be dropped at the small one
            small.changes.append(f"data.overlong: truncate instead of {recipe.data.overlong}, which is for the real length")


_KEPT_DATA = frozenset({"max_length", "packing", "packing_strategy", "pad_to_multiple_of", "shuffle", "cache_dir"})
"""Keys of `data` that rows of the built-in data set have too."""
_REPLACED_DATA = frozenset({"train", "eval", "eval_packing", "stream_lanes", "num_proc"})
"""Those that the rehearsal, or its resolution, sets itself."""


def _builtin_data(small: ScaledRecipe, recipe: Recipe, inputs: ReadableInputs) -> None:
    data = {name: value for name, value in small.document["data"].items() if name in _KEPT_DATA}
    data["train"] = [{"path": "builtin:arithmetic", "split": "train", "max_rows": ROWS}]
    data["eval"] = [{"path": "builtin:arithmetic", "split": "test", "max_rows": EVAL_ROWS, "label": "held_out"}]
    small.document["data"] = data
    why = "that tokenizer encodes nothing else" if inputs.data else "some of the recipe's data cannot be read here"
    small.changes.append(f"data: builtin:arithmetic, since {why}")
    written = recipe.data.model_dump(exclude_defaults=True)
    if others := [f"data.{name}" for name in written if name not in _KEPT_DATA | _REPLACED_DATA]:
        small.changes.append(f"{', '.join(others)}: the default; NOT rehearsed")


def _own_data(small: ScaledRecipe, recipe: Recipe) -> None:
    data = small.document["data"]
    if recipe.data.streaming:
        data |= {"stream_lanes": "auto", "shuffle_buffer_size": min(data["shuffle_buffer_size"], ROWS)}
        small.changes.append(f"data: streams as in the recipe, shuffled in windows of {data['shuffle_buffer_size']} rows")
    else:
        for source in data["train"]:
            source["max_rows"] = min(source["max_rows"] or ROWS, ROWS)
        small.changes.append(f"data: at most the first {ROWS} rows of each source")
    if recipe.data.on_bad_row == "skip":
        data["max_bad_share"] = 1.0
        small.changes.append(f"data.max_bad_share: 1 instead of {recipe.data.max_bad_share:g}, which is a share of all rows")
    wanted = recipe.data.eval
    if isinstance(wanted, EvalRows) and wanted.rows > EVAL_ROWS:
        data["eval"] = {"rows": EVAL_ROWS}
        small.changes.append(f"data.eval.rows: {EVAL_ROWS} instead of {wanted.rows}")
    elif isinstance(wanted, EvalFraction) and wanted.fraction < EVAL_ROWS / ROWS:  # a small part of few rows may be none
        data["eval"] = {"fraction": EVAL_ROWS / ROWS}
        small.changes.append(f"data.eval.fraction: {EVAL_ROWS / ROWS:g} instead of {wanted.fraction:g}")
    elif isinstance(wanted, list):
        for source in data["eval"]:
            source["max_rows"] = min(source["max_rows"] or EVAL_ROWS, EVAL_ROWS)
        small.changes.append(f"data.eval: at most the first {EVAL_ROWS} rows of each set")


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
    """Make the length of rows divisible by the ranks that share them, and the slices of the MLP shorter than a rank's part of a row."""
    data, kernels = small.document["data"], small.document["kernels"]
    if rest := data["max_length"] % sharing:
        data["max_length"] -= rest
        small.changes.append(f"data.max_length: {data['max_length']}, which {sharing} ranks can share")
    given, part = recipe.kernels.mlp_slice_tokens, data["max_length"] // sharing
    if given is not None and given >= part:
        kernels["mlp_slice_tokens"] = max(1, part // 4)
        small.changes.append(f"kernels.mlp_slice_tokens: {kernels['mlp_slice_tokens']} instead of {given}, since rows are shorter")


_LISTED_TRAINING = (
    *("per_device_eval_batch_size", "report_to", "load_best_model_at_end", "early_stopping", "sample", "push_to_hub"),
    *("warmup_steps", "logging_steps", "save_strategy", "save_steps", "save_total_limit", "eval_strategy", "eval_steps"),
)
"""Keys that a rehearsal sets itself and that its line on the batch does not show."""


def _training(small: ScaledRecipe, recipe: Recipe, ranks: int, sharing: int, steps: int) -> None:
    training = small.document["training"]
    training.pop("num_train_epochs", None)
    phases: dict[str, Any] | None = training.get("lr_scheduler_kwargs")
    if phases and "num_decay_steps" in phases:
        kept = {name: value for name, value in phases.items() if name != "num_stable_steps"}
        training["lr_scheduler_kwargs"] = kept | {"num_decay_steps": min(int(phases["num_decay_steps"]), steps // 2)}
    micro_batch = min(recipe.training.per_device_train_batch_size, MICRO_BATCH_SIZE)
    accumulation = 2 if (recipe.training.gradient_accumulation_steps or 1) > 1 else 1
    training |= {
        "global_batch_size": None,
        "per_device_train_batch_size": micro_batch,
        "per_device_eval_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "max_steps": steps,
        "warmup_steps": recipe.training.warmup_steps if recipe.training.warmup_steps < 1 else min(int(recipe.training.warmup_steps), 2),
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
        training |= {"global_batch_size": batch, "per_device_train_batch_tokens": micro_batch * small.document["data"]["max_length"]}
    small.changes.append(
        f"training: {steps} steps of {batch} sequences ({micro_batch} × {readers(ranks // sharing, sharing)} × {accumulation} accumulation)"
    )
    written = recipe.model_dump(mode="json")["training"]
    for name in _LISTED_TRAINING:
        if name in written and written[name] != training[name]:
            small.changes.append(f"training.{name}: {json.dumps(training[name])} instead of {json.dumps(written[name])}")


def _sharding(small: ScaledRecipe, recipe: Recipe, device: str) -> None:
    fsdp = small.document["fsdp"]
    small.document["parallelism"] |= dict.fromkeys(DATA_KEYS, "auto")
    if recipe.fsdp.activation_checkpointing == "auto":
        small.changes.append("fsdp.activation_checkpointing: auto is resolved for the small model, which usually recomputes nothing")
    if recipe.fsdp.reshard_after_backward == "auto":
        small.changes.append("fsdp.reshard_after_backward: auto is resolved for the small model, which usually stays gathered")
    given = recipe.fsdp.reshard_after_forward
    fsdp["reshard_after_forward"] = None
    if isinstance(given, int) and not isinstance(given, bool):
        small.changes.append("fsdp.reshard_after_forward: the strategy's default, since the number of ranks differs")
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
    """Divide the experts over ranks that share a copy of the small model, as many as divide its few experts."""
    given = recipe.fsdp.ep_size
    copies = 2 if recipe.is_hybrid else 1  # on one machine
    fewer = math.gcd(given, max(1, ranks // copies), families.EXPERTS.of(scale_down_config(config)) or given)
    if fewer != given:
        small.document["fsdp"]["ep_size"] = fewer
        missing = "; the exchange of tokens is NOT rehearsed" if fewer == 1 else ""
        small.changes.append(f"fsdp.ep_size: {fewer} instead of {given}{missing}")


_NUMBER_IN_REGEX = re.compile(r"(?<![\w{,\[-])\d+(?![\w},\]-])")
"""A literal number, outside repetition counts and character ranges."""


def map_layer_patterns(patterns: Sequence[str], of: int, to: int) -> list[str]:
    """Map patterns of names (`model.layers.12.*`) from a model of `of` layers to one of `to` layers.

    A small layer represents a block of layers, and is matched if all layers of its block were. If no block is matched entirely, one
    small layer is, so that every pattern still matches a layer and, unless it matched all layers, leaves one out.
    """
    layers: dict[tuple[str, str], set[int]] = {}
    order: list[str | tuple[str, str]] = []
    for pattern in patterns:
        found = _layers_of(pattern, of)
        if found is None:
            order.append(pattern)
            continue
        around = (found.before, found.after)
        if around not in layers:
            order.append(around)
        layers.setdefault(around, set()).update(found.indexes)
    mapped: list[str] = []
    for each in order:
        if isinstance(each, str):
            mapped.append(each)
        else:
            before, after = each
            mapped += [".".join(filter(None, (before, str(index), after))) for index in _blocks(layers[each], of, to)]
    return mapped


class _LayerPattern(NamedTuple):
    """A pattern of module names that names layers: its parts before and after the index, and the matching indexes."""

    before: str
    after: str
    indexes: set[int]


def _layers_of(pattern: str, of: int) -> _LayerPattern | None:
    """Return the layers that a pattern names; None if it has no layer index."""
    parts = pattern.split(".")
    for position, part in enumerate(parts):
        if re.fullmatch(r"[\d*?\[\]!-]+", part) and any(character.isdigit() or character == "?" for character in part):
            found = {index for index in range(of) if fnmatch.fnmatchcase(str(index), part)}
            if found:
                return _LayerPattern(".".join(parts[:position]), ".".join(parts[position + 1 :]), found)
    return None


def map_layer_regex(regex: str, of: int, to: int) -> str:
    """Map a regular expression of module names (`model\\.layers\\.(12|13)\\.mlp`) from a model of `of` layers to one of `to` layers."""
    numbers = {int(text) for text in _NUMBER_IN_REGEX.findall(regex)} & set(range(of))
    if not numbers:
        return regex
    chosen = _blocks(numbers, of, to)
    return _NUMBER_IN_REGEX.sub(lambda found: str(min(chosen, key=lambda index: abs(index - int(found[0]) * to // of))), regex)


def _blocks(indexes: Iterable[int], of: int, to: int) -> list[int]:
    """Return the small layers that represent the given layers."""
    given = set(indexes)
    blocks = {small: {index for index in range(of) if index * to // of == small} for small in range(to)}
    return [small for small, block in blocks.items() if block and block <= given] or [min(given) * to // of]
