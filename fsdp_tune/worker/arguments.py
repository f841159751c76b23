"""Recipe → transformers' TrainingArguments: the recipe's names pass through, and what the ranks do themselves is switched off."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from fsdp_tune.fsdp import plugin_kwargs
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.run_dir import RunDir

# Keys of `training:` that are ours alone; TrainingArguments has no such fields.
_OURS = {"global_batch_size", "per_device_train_batch_tokens", "on_nonfinite", "witness", "early_stopping"}


def training_arguments(recipe: Recipe, run: RunDir) -> TrainingArguments:
    """The arguments of a resolved recipe. Needs the process group and Accelerate's configured state."""
    fields: dict[str, Any] = {name: value for name, value in recipe.training.model_dump().items() if name not in _OURS}
    fields |= {
        "output_dir": str(run.path),
        "run_name": recipe.name,
        "use_cpu": recipe.launch.device == "cpu",
        "accelerator_config": {
            "use_configured_state": True,
            # Reducing after every micro-batch is about sharded gradients; under DDP it would only cost traffic.
            "gradient_accumulation_kwargs": {
                "sync_each_batch": recipe.fsdp.sync_each_batch and recipe.fsdp.sharding_strategy != "NO_SHARD"
            },
        },
        "fsdp": recipe.fsdp.sharding_strategy != "NO_SHARD",
        "fsdp_config": {"version": recipe.fsdp.version},
        "logging_nan_inf_filter": False,  # it hides a NaN as the mean of the losses before it, and syncs every micro-batch
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "log_level": "warning",
        "push_to_hub": False,  # merged/ is pushed once, after the merge
        "dataloader_pin_memory": recipe.launch.device == "cuda",
    }
    fields = {name: value for name, value in fields.items() if value is not None or name == "data_seed"}
    # `worker.rotation` is the only one that deletes: with a limit of 1, `Trainer._finalize_training` removes every checkpoint but the best.
    fields["save_total_limit"] = None
    arguments = TrainingArguments(**fields)
    if arguments.fsdp:
        # TrainingArguments translates `fsdp_config` and drops what it does not know (DESIGN §7, 1): give the plugin its own words.
        arguments.fsdp_plugin_args = plugin_kwargs(recipe)
    return arguments
