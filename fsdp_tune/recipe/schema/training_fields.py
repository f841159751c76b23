"""The fields of transformers' TrainingArguments, from a generated table: which of them `training:` passes on,
and which it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fsdp_tune.core.package_versions import installed_versions
from fsdp_tune.core.units import enumerated
from fsdp_tune.recipe.schema.key_effects import (
    FREE,
    MEMORY,
    NOTHING,
    NUMBERS,
    REFUSED,
    RESULT,
    TIME,
    TRAJECTORY,
    Effect,
)
from fsdp_tune.recipe.schema.recipe import Training


@dataclass(frozen=True, slots=True)
class TrainingField:
    types: tuple[str, ...]
    """Of str, int, float, bool, null, dict, list, any, false, and names in `TrainingTable.enums`."""
    default: object
    versions: tuple[str, ...]
    """The tested versions of transformers that have the field."""


@dataclass(frozen=True, slots=True)
class TrainingTable:
    versions: tuple[str, ...]
    enums: dict[str, tuple[str, ...]]
    fields: dict[str, TrainingField]


OWN_VALUES = {"OptimizerNames": ("muon",)}
"""Values that transformers does not have, by the name of its enum."""


def _read_table() -> TrainingTable:
    raw = json.loads(resources.files("fsdp_tune.recipe").joinpath("training_fields.json").read_bytes())
    fields = {
        name: TrainingField(tuple(row["types"]), row["default"], tuple(row["versions"]))
        for name, row in raw["fields"].items()
    }
    enums = {
        name: tuple(sorted({*values, *OWN_VALUES.get(name, ())})) for name, values in raw["enums"].items()
    }
    return TrainingTable(tuple(raw["versions"]), enums, fields)


TRAINING_FIELDS = _read_table()


_OWNED: dict[str, str] = {
    "output_dir": "it is `output_dir` at the top of the recipe",
    "run_name": "it is `name` at the top of the recipe",
    "bf16": "write `precision.mixed_precision: bf16`",
    "fp16": "write `precision.mixed_precision: fp16`",
    "bf16_full_eval": "evaluation computes in `precision.mixed_precision` too",
    "fp16_full_eval": "evaluation computes in `precision.mixed_precision` too",
    "activation_checkpointing": "it is `fsdp.activation_checkpointing`",
    "activation_checkpointing_kwargs": "`fsdp.activation_checkpointing` is always non-reentrant and keeps "
    "the random state",
    "gradient_checkpointing": "it is `fsdp.activation_checkpointing`",
    "gradient_checkpointing_kwargs": "`fsdp.activation_checkpointing` is always non-reentrant and keeps "
    "the random state",
    "torch_compile": "it is `kernels.compile`",
    "torch_compile_backend": "it is `kernels.compile`",
    "torch_compile_mode": "it is `kernels.compile`",
    "use_liger_kernel": "it is `kernels.liger`",
    "liger_kernel_config": "it is `kernels.liger`",
    "fsdp": "it is the section `fsdp:`",
    "fsdp_config": "it is the section `fsdp:`",
    "deepspeed": "sharding is by FSDP: ZeRO-3 is `fsdp.sharding_strategy: FULL_SHARD`, ZeRO-2 is "
    "SHARD_GRAD_OP",
    "use_cpu": "write `launch.device: cpu`",
    "accelerator_config": "the package sets Accelerate up from `fsdp:`, `parallelism:` and `data:`",
    "parallelism_config": "it is the section `parallelism:`",
    "ddp_backend": "the backend follows from `launch.device`",
    "ddp_timeout": "it is `launch.hang_timeout`",
    "resume_from_checkpoint": "it is `train --resume`",
    "local_rank": "the launcher sets it for every rank",
    "do_train": "`train` trains; leave it out",
    "do_eval": "it follows from `data.eval` and `training.eval_strategy`",
    "do_predict": "there is no prediction; leave it out",
    "remove_unused_columns": "columns are chosen in `data:` (`columns`, `rename_columns`)",
    "label_names": "labels are made by `data.loss_on`",
    "train_sampling_strategy": "`data.shuffle` and `training.data_seed` set the order; without packing, "
    "rows of similar length "
    "are batched",
    "length_column_name": "lengths are known from the prepared data",
    "dataloader_drop_last": "the package orders the rows itself and drops none",
    "dataloader_in_order": "the package orders the rows itself",
    "hub_token": "a recipe never contains a token: set HF_TOKEN, or log in with `hf auth login`",
    "auto_find_batch_size": "the batch size in the recipe is never changed; `plan` reports which one fits",
    "average_tokens_across_devices": "the loss is always weighted by tokens over all ranks",
    "logging_nan_inf_filter": "it is `training.on_nonfinite`",
    "save_only_model": "a checkpoint always contains everything that resume needs",
    "save_on_each_node": "every rank saves its shards, in `output_dir`; see `launch.shared_directory`",
    "enable_jit_checkpoint": "after a signal all ranks save a checkpoint before the run stops",
    "ignore_data_skip": "resume always continues the order of the rows",
    "restore_callback_states_from_checkpoint": "resume always restores them",
    "disable_tqdm": "the package prints its own progress line",
    "log_level": "each rank writes its own log file",
    "log_level_replica": "each rank writes its own log file",
    "log_on_each_node": "each rank writes its own log file",
    "skip_memory_metrics": "memory is in every line of metrics.jsonl",
    "torch_empty_cache_steps": "the allocator keeps its memory; `plan` reports what fits",
    "use_cache": "training needs no cache of keys and values",
    "dataloader_pin_memory": "memory is pinned where the device is a GPU",
    "dataloader_persistent_workers": "workers always persist; `dataloader_num_workers` sets their number",
    "dataloader_multiprocessing_context": "workers are started with the default method of the platform",
    "ddp_find_unused_parameters": "NO_SHARD sets DDP up itself",
    "ddp_bucket_cap_mb": "NO_SHARD sets DDP up itself",
    "ddp_broadcast_buffers": "NO_SHARD sets DDP up itself",
    "ddp_static_graph": "NO_SHARD sets DDP up itself",
    "include_num_input_tokens_seen": "`tokens` in metrics.jsonl is always written",
    "include_for_metrics": "evaluation is by loss",
    "batch_eval_metrics": "evaluation is by loss",
    "prediction_loss_only": "evaluation is by loss",
    "eval_do_concat_batches": "evaluation is by loss",
    "eval_use_gather_object": "evaluation is by loss",
    "eval_accumulation_steps": "evaluation is by loss, and no logits are kept",
}


PASSED_EFFECTS: dict[str, Effect] = {
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), Effect(NUMBERS, REFUSED)),
    **dict.fromkeys(
        ("optim", "optim_args", "optim_target_modules"), Effect(MEMORY | TIME | NUMBERS, REFUSED)
    ),
    **dict.fromkeys(
        ("label_smoothing_factor", "max_grad_norm", "neftune_noise_alpha", "weight_decay"),
        Effect(MEMORY | TIME | NUMBERS, TRAJECTORY),
    ),
    **dict.fromkeys(
        ("lr_scheduler_kwargs", "lr_scheduler_type", "max_steps", "num_train_epochs"),
        Effect(NUMBERS, TRAJECTORY),
    ),
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_prefetch_factor", "debug", "full_determinism"),
        Effect(MEMORY | TIME, FREE),
    ),
    "tf32": Effect(MEMORY | TIME | NUMBERS, FREE),  # 10 bits of the mantissa, in place of 23
    **dict.fromkeys(
        (
            *("eval_delay", "eval_on_start", "eval_steps", "save_strategy"),
            *("greater_is_better", "load_best_model_at_end", "metric_for_best_model"),
        ),
        Effect(RESULT, FREE),
    ),
    **dict.fromkeys(
        (
            *(
                "hub_always_push",
                "hub_model_id",
                "hub_private_repo",
                "hub_revision",
                "hub_strategy",
                "logging_first_step",
            ),
            *(
                "logging_strategy",
                "project",
                "trackio_bucket_id",
                "trackio_space_id",
                "trackio_static_space_id",
            ),
        ),
        Effect(NOTHING, FREE),
    ),
}
"""The effects of the fields that `training:` passes on; a field of a newer transformers affects everything
until it has a row."""


CHOOSING = tuple(
    f"training.{name}"
    for name in ("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "save_steps", "save_strategy")
)
"""Keys that affect the result only of a run in which evaluations choose a checkpoint or end the run
(`chooses_by_evaluation`)."""


_RANGES: dict[str, tuple[float, bool]] = {
    # name: (least value, whether that value itself is allowed)
    "num_train_epochs": (0, False),
    "weight_decay": (0, True),
    "adam_beta1": (0, True),
    "adam_beta2": (0, True),
    "adam_epsilon": (0, False),
    "max_grad_norm": (0, True),
    "max_steps": (-1, True),
    "eval_steps": (0, False),
    "eval_delay": (0, True),
    "dataloader_num_workers": (0, True),
    "label_smoothing_factor": (0, True),
}


_BELOW_ONE = {"adam_beta1", "adam_beta2", "label_smoothing_factor"}


_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "false": "`false`",
}


def owner_of(name: str) -> str | None:
    """Return why `training.NAME` is refused, as a clause that names the replacement; None if it is passed
    on."""
    return _OWNED.get(name)


def owned_names() -> frozenset[str]:
    return frozenset(_OWNED)


def describe_field(field: TrainingField) -> str:
    parts: list[str] = []
    for kind in field.types:
        if kind in TRAINING_FIELDS.enums:
            parts.extend(f"`{value}`" for value in TRAINING_FIELDS.enums[kind])
        else:
            parts.append(_WORDS.get(kind, f"a {'mapping' if kind == 'dict' else kind}"))
    return enumerated(parts)


def mismatch(name: str, value: object) -> str | None:
    """Return a description of the values of `training.NAME` if `value` is not among them; None if it is
    valid."""
    field = TRAINING_FIELDS.fields[name]
    if not any(_is_a(value, kind) for kind in field.types):
        return describe_field(field)
    if isinstance(value, int | float) and name in _RANGES:
        least, inclusive = _RANGES[name]
        if value < least or (value == least and not inclusive):
            return f"a number {'from' if inclusive else 'above'} {least:g}"
        if name in _BELOW_ONE and value >= 1:
            return "a number below 1"
        if name == "max_steps" and value == 0:
            return "a whole number above 0, or -1 for none"
    return None


def _is_a(value: object, kind: str) -> bool:
    if kind in TRAINING_FIELDS.enums:
        return isinstance(value, str) and value in TRAINING_FIELDS.enums[kind]
    if isinstance(value, bool):
        return kind in {"bool", "any"} or (kind == "false" and not value)
    python_types: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "float": (int, float),
        "dict": (dict,),
        "list": (list,),
        "null": (type(None),),
        "any": (object,),
    }
    return isinstance(value, python_types.get(kind, ()))


def version_gap(name: str, installed: str | None) -> str | None:
    """Return why the installed transformers cannot take a field; None if it can, or if that version is not a
    tested one."""
    versions = TRAINING_FIELDS.fields[name].versions
    if installed not in TRAINING_FIELDS.versions or installed in versions:
        return None
    return f"transformers {installed} has no such field; it is in {' and '.join(versions)}"


def installed_transformers() -> str | None:
    return installed_versions(["transformers"])["transformers"]


def training_value(training: Training, name: str) -> Any:
    """Return the value of a passed field, as given or transformers' default (`max_steps`, `num_train_epochs`
    …)."""
    extra = training.model_extra or {}
    return extra[name] if name in extra else TRAINING_FIELDS.fields[name].default


def chooses_by_evaluation(training: Training) -> bool:
    """Return whether evaluations choose the delivered checkpoint, or end the run."""
    return bool(training_value(training, "load_best_model_at_end")) or training.early_stopping is not None
