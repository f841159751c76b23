"""Rules for keys that have no effect with the rest of the recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_tune.core.topology import DATA_KEYS
from fsdp_tune.recipe.schema.keys import Finding, given
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.row_formats import ROW_FORMATS
from fsdp_tune.recipe.schema.training_fields import training_value


@dataclass(frozen=True, slots=True)
class Inactive:
    keys: tuple[str, ...]
    when: Callable[[Recipe], bool]
    because: str


def _policy_is_not(name: str) -> Callable[[Recipe], bool]:
    return lambda recipe: recipe.fsdp.auto_wrap_policy != name


def _is_weighted_mixture(recipe: Recipe) -> bool:
    weighted = recipe.data.mixture.temperature != 1.0 or any(source.weight for source in recipe.data.train)
    return weighted and len(recipe.data.train) > 1


def _has_one_micro_batch(recipe: Recipe) -> bool:
    """Return whether a step has one micro-batch on any number of ranks."""
    training = recipe.training
    if training.per_device_train_batch_tokens is not None or training.global_batch_size is not None:
        return False
    return training.gradient_accumulation_steps in (None, 1)


def _saves_by_steps(recipe: Recipe) -> bool:
    return training_value(recipe.training, "save_strategy") in {"steps", "best"}


def _formats_hold(*kinds: str) -> Callable[[Recipe], bool]:
    """Return the condition that the formats of all sources are given, and hold only `kinds`."""
    formats = {name for name, each in ROW_FORMATS.items() if each.holds in kinds}
    return lambda recipe: {entry.format or recipe.data.format for _, entry in recipe.data.sources} <= formats


INACTIVE = (
    Inactive(("fsdp.min_num_params",), _policy_is_not("SIZE_BASED_WRAP"), "only SIZE_BASED_WRAP reads it"),
    Inactive(
        ("fsdp.modules_to_wrap",), _policy_is_not("MODULE_NAMES_WRAP"), "only MODULE_NAMES_WRAP reads it"
    ),
    Inactive(
        ("fsdp.transformer_layer_cls_to_wrap",),
        lambda recipe: (
            recipe.fsdp.auto_wrap_policy != "TRANSFORMER_BASED_WRAP"
            and recipe.fsdp.activation_checkpointing == "none"
        ),
        "only TRANSFORMER_BASED_WRAP and activation checkpointing read it",
    ),
    Inactive(
        ("fsdp.activation_checkpointing_every", "fsdp.activation_checkpointing_offload"),
        lambda recipe: recipe.fsdp.activation_checkpointing == "none",
        "`fsdp.activation_checkpointing` is none",
    ),
    Inactive(
        (
            *(
                "fsdp.version",
                "fsdp.auto_wrap_policy",
                "fsdp.ignored_modules",
                "fsdp.forward_prefetch",
                "fsdp.backward_prefetch",
            ),
            *(
                "fsdp.cpu_ram_efficient_loading",
                *(f"parallelism.{key}" for key in DATA_KEYS),
                "fsdp.reshard_after_backward",
            ),
        ),
        lambda recipe: not recipe.is_sharded,
        "`fsdp.sharding_strategy` is NO_SHARD, which is plain DDP",
    ),
    Inactive(
        ("fsdp.reshard_after_backward",),
        lambda recipe: recipe.is_sharded and _has_one_micro_batch(recipe),
        "a step has one micro-batch (`training.gradient_accumulation_steps`)",
    ),
    Inactive(
        ("data.roles",),
        _formats_hold("text", "chat with a template", "ids"),
        "no format of the data has roles",
    ),
    Inactive(("data.special_tokens_in_content",), _formats_hold("ids"), "all data are token ids"),
    Inactive(
        ("data.max_bad_share",),
        lambda recipe: recipe.data.on_bad_row == "error",
        "`data.on_bad_row` is error",
    ),
    Inactive(
        ("data.packing_strategy",),
        lambda recipe: not (recipe.data.packing or recipe.data.eval_packing),
        "`data.packing` is false",
    ),
    Inactive(("data.eval_packing",), lambda recipe: recipe.data.eval is None, "there is no `data.eval`"),
    Inactive(
        ("data.shuffle_buffer_size", "data.stream_lanes", "data.curriculum"),
        lambda recipe: not recipe.data.streaming,
        "`data.streaming` is false",
    ),
    Inactive(("data.mixture.temperature",), lambda recipe: len(recipe.data.train) < 2, "there is one source"),
    Inactive(
        ("data.mixture.stopping_strategy", "data.mixture.weight_by"),
        lambda recipe: not _is_weighted_mixture(recipe),
        "no source is weighted against another",
    ),
    Inactive(
        ("data.mixture.stopping_strategy",),
        lambda recipe: recipe.data.streaming and _is_weighted_mixture(recipe),
        "`data.streaming` is true, and a stream ends with its steps, or with the `repeats` of its sources",
    ),
    Inactive(("training.data_seed",), lambda recipe: not recipe.data.shuffle, "`data.shuffle` is false"),
    Inactive(
        ("precision.fp8_recipe",),
        lambda recipe: recipe.precision.mixed_precision != "fp8",
        "`precision.mixed_precision` is not fp8",
    ),
    Inactive(
        ("training.num_train_epochs",),
        lambda recipe: training_value(recipe.training, "max_steps") > 0,
        "`training.max_steps` decides",
    ),
    Inactive(
        ("training.save_steps",),
        lambda recipe: not _saves_by_steps(recipe),
        "`training.save_strategy` is not steps",
    ),
    Inactive(
        ("training.eval_steps",),
        lambda recipe: recipe.training.eval_strategy in {"no", "epoch"} or recipe.data.eval is None,
        "there is no evaluation by steps",
    ),
    Inactive(
        ("data.eval",), lambda recipe: recipe.training.eval_strategy == "no", "`training.eval_strategy` is no"
    ),
    Inactive(
        ("training.per_device_eval_batch_size",),
        lambda recipe: recipe.data.eval is None,
        "there is no `data.eval`",
    ),
    Inactive(
        (
            "training.hub_model_id",
            "training.hub_private_repo",
            "training.hub_strategy",
            "training.hub_revision",
            "training.hub_always_push",
        ),
        lambda recipe: not recipe.training.push_to_hub,
        "`training.push_to_hub` is false",
    ),
    Inactive(
        ("launch.main_process_ip",), lambda recipe: recipe.launch.num_machines == 1, "there is one machine"
    ),
    Inactive(
        ("launch.min_machines",), lambda recipe: recipe.launch.num_machines == 1, "there is one machine"
    ),
    Inactive(
        ("launch.shared_directory",), lambda recipe: recipe.launch.num_machines == 1, "there is one machine"
    ),
    Inactive(
        ("launch.min_machines",), lambda recipe: recipe.launch.max_restarts == 0, "`launch.max_restarts` is 0"
    ),
    Inactive(
        ("launch.replacement_timeout",),
        lambda recipe: recipe.launch.min_machines is None,
        "there is no `launch.min_machines`",
    ),
    Inactive(
        ("launch.enable_cpu_affinity",),
        lambda recipe: recipe.launch.device not in {"auto", "cuda"},
        "only CUDA ranks are bound",
    ),
    Inactive(("quantization.scales",), lambda recipe: recipe.nf4 is None, "`quantization.load` is not nf4"),
    Inactive(
        ("quantization.group_size", "quantization.modules_to_not_convert"),
        lambda recipe: recipe.quantised_training is None,
        "`quantization.train` is not set",
    ),
    Inactive(
        ("merge.quantise",),
        lambda recipe: recipe.quantised_training is None,
        "there is no `quantization.train`",
    ),
    Inactive(("merge.adapter",), lambda recipe: recipe.lora is None, "there is no `lora:`"),
    Inactive(
        ("model.revision",),
        lambda recipe: recipe.model.name_or_path is None,
        "there is no `model.name_or_path`",
    ),
)


def inactive_keys(recipe: Recipe) -> list[Finding]:
    return [
        Finding("inactive-key", (key,), f"`{key}` has no effect: {row.because}")
        for row in INACTIVE
        for key in row.keys
        if given(recipe, key) and row.when(recipe)
    ]
