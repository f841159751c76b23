"""Recognise the configurations of tools that have no importer, and name what their keys are in a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

_TELLING: dict[str, tuple[str, ...]] = {
    "LitGPT": (
        *(
            "train.global_batch_size",
            "train.lr_warmup_steps",
            "train.save_interval",
            "train.max_seq_length",
            "train.max_tokens",
        ),
        *(
            "lora_query",
            "lora_key",
            "lora_value",
            "lora_projection",
            "lora_mlp",
            "lora_head",
            "eval.max_iters",
            "eval.max_new_tokens",
        ),
        *("data.class_path", "checkpoint_dir", "initial_checkpoint_dir", "tokenizer_dir", "logger_name"),
    ),
    "LLM-Foundry": (
        *(
            "global_train_batch_size",
            "device_train_microbatch_size",
            "device_eval_batch_size",
            "max_duration",
            "train_loader",
        ),
        *(
            "eval_loader",
            "save_folder",
            "algorithms",
            "progress_bar",
            "log_to_console",
            "console_log_interval",
            "icl_tasks",
        ),
    ),
    "verl": (
        *(
            "model.partial_pretrain",
            "data.train_files",
            "data.val_files",
            "data.prompt_key",
            "data.response_key",
            "data.multiturn",
        ),
        *(
            "data.micro_batch_size_per_gpu",
            "data.balance_dp_token",
            "trainer.default_local_dir",
            "trainer.total_epochs",
        ),
        *(
            "trainer.total_training_steps",
            "trainer.project_name",
            "optim.warmup_steps_ratio",
            "optim.lr_warmup_steps_ratio",
        ),
        *(
            "ulysses_sequence_parallel_size",
            "use_remove_padding",
            "actor_rollout_ref",
            "critic",
            "reward_model",
        ),
    ),
    "nanotron": (
        *(
            "tokens.micro_batch_size",
            "tokens.batch_accumulation_per_replica",
            "tokens.sequence_length",
            "tokens.train_steps",
        ),
        *(
            "data_stages",
            "general.project",
            "optimizer.learning_rate_scheduler",
            "parallelism.dp",
            "parallelism.pp",
        ),
        *("model.ddp_bucket_cap_mb", "checkpoints.checkpoint_interval"),
    ),
    "torchtitan": (
        *(
            "training.local_batch_size",
            "training.seq_len",
            "training.steps",
            "training.max_norm",
            "job.dump_folder",
            "model.flavor",
        ),
        *(
            "parallelism.data_parallel_shard_degree",
            "parallelism.data_parallel_replicate_degree",
            "metrics.log_freq",
        ),
        *(
            "parallelism.tensor_parallel_degree",
            "activation_checkpoint.mode",
            "model.hf_assets_path",
            "profiling.enable_profiling",
        ),
    ),
    "prime-rl": (
        *(
            "ckpt",
            "data.seq_len",
            "data.batch_size",
            "data.pack_function",
            "optim.type",
            "deployment",
            "orchestrator",
            "inference",
        ),
        *(
            "trainer_gpu_ids",
            "inference_gpu_ids",
            "rollouts_per_example",
            "toml_files",
            "max_async_level",
            "model.ac",
        ),
    ),
    "open-instruct": (
        *(
            "dataset_mixer_list",
            "dataset_mixer_list_splits",
            "dataset_mix_dir",
            "dataset_transform_fn",
            "use_lora",
            "use_qlora",
        ),
        *(
            "use_slow_tokenizer",
            "checkpointing_steps",
            "with_tracking",
            "exp_name",
            "reduce_loss",
            "max_train_steps",
            "add_bos",
        ),
        *(
            "try_launch_beaker_eval_jobs",
            "try_auto_save_to_beaker",
            "chat_template_name",
            "fused_optimizer",
            "keep_last_n_checkpoints",
        ),
    ),
}
"""Keys that only one of these tools has; no importer of another tool knows them."""
_ALONE = {
    "actor_rollout_ref": "verl",
    "model.partial_pretrain": "verl",
    "data_stages": "nanotron",
    "tokens.batch_accumulation_per_replica": "nanotron",
    "device_train_microbatch_size": "LLM-Foundry",
    "dataset_mixer_list": "open-instruct",
    "model.flavor": "torchtitan",
}
"""Keys that tell a tool alone."""
_LEAST = 2
_MICRO, _STEPS, _EPOCHS = (
    "training.per_device_train_batch_size",
    "training.max_steps",
    "training.num_train_epochs",
)
_GLOBAL, _RATE, _CLIP = "training.global_batch_size", "training.learning_rate", "training.max_grad_norm"
_RECOMPUTE, _DECAY, _WARMUP = (
    "fsdp.activation_checkpointing",
    "training.weight_decay",
    "training.warmup_steps",
)
_SAVE, _LOG, _LENGTH, _MODEL = (
    "training.save_steps",
    "training.logging_steps",
    "data.max_length",
    "model.name_or_path",
)
COUNTERPARTS: dict[str, dict[str, str]] = {
    "LitGPT": {
        "checkpoint_dir": _MODEL,
        "out_dir": "output_dir",
        "lora_r": "lora.r",
        "lora_alpha": "lora.lora_alpha",
        "lora_dropout": "lora.lora_dropout",
        "train.global_batch_size": _GLOBAL,
        "train.micro_batch_size": _MICRO,
        "train.epochs": _EPOCHS,
        "train.max_steps": _STEPS,
        "train.max_seq_length": _LENGTH,
        "train.lr_warmup_steps": _WARMUP,
        "train.max_norm": _CLIP,
        "train.save_interval": _SAVE,
        "train.log_interval": _LOG,
        "eval.interval": "training.eval_steps",
        "optimizer.init_args.lr": _RATE,
        "optimizer.init_args.weight_decay": _DECAY,
        "precision": "precision.mixed_precision",
        "quantize": "quantization.load",
        "num_nodes": "launch.num_machines",
        "seed": "training.seed",
    },
    "LLM-Foundry": {
        "model.pretrained_model_name_or_path": _MODEL,
        "max_seq_len": _LENGTH,
        "variables.max_seq_len": _LENGTH,
        "global_train_batch_size": _GLOBAL,
        "device_train_microbatch_size": _MICRO,
        "device_eval_batch_size": "training.per_device_eval_batch_size",
        "optimizer.lr": _RATE,
        "optimizer.weight_decay": _DECAY,
        "train_loader.dataset.hf_name": "data.train.path",
        "train_loader.dataset.split": "data.train.split",
        "fsdp_config.sharding_strategy": "fsdp.sharding_strategy",
        "fsdp_config.activation_checkpointing": _RECOMPUTE,
        "precision": "precision.mixed_precision",
        "save_folder": "output_dir",
        "run_name": "name",
        "seed": "training.seed",
    },
    "verl": {
        "model.partial_pretrain": _MODEL,
        "model.path": _MODEL,
        "data.train_files": "data.train.path",
        "data.val_files": "data.eval.path",
        "data.prompt_key": "data.train.rename_columns",
        "data.response_key": "data.train.rename_columns",
        "data.train_batch_size": _GLOBAL,
        "data.micro_batch_size_per_gpu": _MICRO,
        "data.max_length": _LENGTH,
        "data.truncation": "data.overlong",
        "optim.lr": _RATE,
        "optim.weight_decay": _DECAY,
        "optim.warmup_steps_ratio": _WARMUP,
        "optim.lr_warmup_steps_ratio": _WARMUP,
        "optim.clip_grad": _CLIP,
        "model.lora_rank": "lora.r",
        "model.lora_alpha": "lora.lora_alpha",
        "model.target_modules": "lora.target_modules",
        "model.enable_gradient_checkpointing": _RECOMPUTE,
        "trainer.total_epochs": _EPOCHS,
        "trainer.total_training_steps": _STEPS,
        "trainer.default_local_dir": "output_dir",
        "trainer.experiment_name": "name",
        "trainer.seed": "training.seed",
        "ulysses_sequence_parallel_size": "parallelism.sp_size",
    },
    "nanotron": {
        "tokens.micro_batch_size": _MICRO,
        "tokens.batch_accumulation_per_replica": "training.gradient_accumulation_steps",
        "tokens.sequence_length": _LENGTH,
        "tokens.train_steps": _STEPS,
        "optimizer.learning_rate_scheduler.learning_rate": _RATE,
        "optimizer.learning_rate_scheduler.lr_warmup_steps": _WARMUP,
        "optimizer.weight_decay": _DECAY,
        "optimizer.clip_grad": _CLIP,
        "tokenizer.tokenizer_name_or_path": "model.tokenizer",
        "checkpoints.checkpoint_interval": _SAVE,
        "checkpoints.checkpoints_path": "output_dir",
        "general.run": "name",
        "general.seed": "training.seed",
    },
    "torchtitan": {
        "training.local_batch_size": _MICRO,
        "training.global_batch_size": _GLOBAL,
        "training.seq_len": _LENGTH,
        "training.steps": _STEPS,
        "training.max_norm": _CLIP,
        "training.dataset": "data.train.path",
        "optimizer.lr": _RATE,
        "lr_scheduler.warmup_steps": _WARMUP,
        "metrics.log_freq": _LOG,
        "checkpoint.interval": _SAVE,
        "job.dump_folder": "output_dir",
        "activation_checkpoint.mode": _RECOMPUTE,
        "parallelism.data_parallel_shard_degree": "parallelism.dp_shard_size",
        "parallelism.data_parallel_replicate_degree": "parallelism.dp_replicate_size",
    },
    "prime-rl": {
        "model.name": _MODEL,
        "model.lora.rank": "lora.r",
        "model.lora.alpha": "lora.lora_alpha",
        "data.name": "data.train.path",
        "data.seq_len": _LENGTH,
        "data.batch_size": _GLOBAL,
        "data.micro_batch_size": _MICRO,
        "optim.lr": _RATE,
        "optim.weight_decay": _DECAY,
        "scheduler.warmup_steps": _WARMUP,
        "ckpt.interval": _SAVE,
        "max_steps": _STEPS,
        "output_dir": "output_dir",
        "seed": "training.seed",
    },
    "open-instruct": {
        "model_name_or_path": _MODEL,
        "tokenizer_name": "model.tokenizer",
        "train_file": "data.train.path",
        "dataset_name": "data.train.path",
        "dataset_mixer_list": "data.train",
        "max_seq_length": _LENGTH,
        "per_device_train_batch_size": _MICRO,
        "gradient_accumulation_steps": "training.gradient_accumulation_steps",
        "learning_rate": _RATE,
        "lr_scheduler_type": "training.lr_scheduler_type",
        "warmup_ratio": _WARMUP,
        "weight_decay": _DECAY,
        "clip_grad_norm": _CLIP,
        "num_train_epochs": _EPOCHS,
        "max_train_steps": _STEPS,
        "use_lora": "lora",
        "lora_rank": "lora.r",
        "lora_alpha": "lora.lora_alpha",
        "lora_dropout": "lora.lora_dropout",
        "use_qlora": "quantization.load",
        "gradient_checkpointing": _RECOMPUTE,
        "use_flash_attn": "model.attn_implementation",
        "chat_template_name": "data.chat_template",
        "preprocessing_num_workers": "data.num_proc",
        "checkpointing_steps": _SAVE,
        "logging_steps": _LOG,
        "output_dir": "output_dir",
        "exp_name": "name",
        "seed": "training.seed",
    },
}
"""Keys with the same unit and scope in a recipe, by tool; under `data.train` and `data.eval` they are of an
entry."""


def other_tool(values: Mapping[str, object]) -> str | None:
    """Return the tool without an importer whose keys a file has; None if it is none of them."""
    alone = next((tool for key, tool in _ALONE.items() if _has(values, key)), None)
    hits = {tool: sum(_has(values, key) for key in keys) for tool, keys in _TELLING.items()}
    best = max(hits, key=lambda tool: hits[tool])
    return alone or (best if hits[best] >= _LEAST else None)


class NoImporter(NamedTuple):
    message: str
    hint: str


def no_importer(tool: str, values: Mapping[str, object]) -> NoImporter:
    """Return the refusal of a file of a tool without an importer; its hint is what each of its keys is in a
    recipe."""
    found = [f"`{key}` → `{here}`" for key, here in COUNTERPARTS[tool].items() if _has(values, key)]
    keys = (
        f"these keys have counterparts: {', '.join(found)}" if found else "none of its keys has a counterpart"
    )
    hint = f"{keys}; `fsdp-tune recipes show` prints a recipe to start from"
    return NoImporter(f"this is a configuration of {tool}, which has no importer", hint)


def _has(values: Mapping[str, object], key: str) -> bool:
    """Return whether a file has a value at a dotted key, as sections or, in a command, as `a.b=value`."""
    if values.get(key) is not None:
        return True
    found: Any = values
    for part in key.split("."):
        found = cast("Mapping[str, object]", found).get(part) if isinstance(found, Mapping) else None
    return found is not None
