"""Convert a recipe to transformers' TrainingArguments: its fields pass through; what the ranks do themselves
is switched off."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from fsdp_tune.recipe.fsdp_arguments import plugin_kwargs
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import OWN_VALUES, TRAINING_FIELDS
from fsdp_tune.run.directory import RunDir


def training_arguments(recipe: Recipe, run: RunDir) -> TrainingArguments:
    """The arguments of a resolved recipe. Needs the process group and Accelerate's configured state."""
    ours = type(recipe.training).model_fields.keys() - TRAINING_FIELDS.fields.keys()
    fields: dict[str, Any] = {
        name: value for name, value in recipe.training.model_dump().items() if name not in ours
    }
    fields |= {
        "output_dir": str(run.path),
        "run_name": recipe.name,
        "use_cpu": recipe.launch.device == "cpu",
        "accelerator_config": {
            "use_configured_state": True,
            # Reducing after every micro-batch is about sharded gradients; under DDP it would only cost
            # traffic.
            "gradient_accumulation_kwargs": {
                "sync_each_batch": recipe.fsdp.sync_each_batch and recipe.is_sharded
            },
        },
        "fsdp": recipe.is_sharded,
        "fsdp_config": {"version": recipe.fsdp.version},
        # it hides a NaN as the mean of the losses before it, and syncs every micro-batch
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        # lanes go on where they were; there are no batches to skip
        "ignore_data_skip": recipe.data.streaming,
        "log_level": "warning",
        "push_to_hub": False,  # merged/ is pushed once, after the merge
        "dataloader_pin_memory": recipe.launch.device == "cuda",
    }
    # another process measures it; `run.checkpoint_scores` and the merge choose by it
    if recipe.best_by_score:
        fields |= dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"))
    fields = {name: value for name, value in fields.items() if value is not None or name == "data_seed"}
    # Only `worker.checkpoint.save` deletes checkpoints: with a limit of 1, `Trainer._finalize_training`
    # removes all but the best.
    fields["save_total_limit"] = None
    own_optimizer = fields.pop("optim") if fields.get("optim") in OWN_VALUES["OptimizerNames"] else None
    arguments = TrainingArguments(**fields)
    # for trackers: the trainer creates the optimizer from the recipe
    arguments.optim = own_optimizer or arguments.optim
    if arguments.fsdp:
        # TrainingArguments translates `fsdp_config` and drops unknown fields: pass the plugin its own
        # arguments.
        arguments.fsdp_plugin_args = plugin_kwargs(recipe)
    return arguments
