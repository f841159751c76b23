"""Tools that compute their own side of a comparison: their packages, the options of a configuration that they
never get, and those whose value is fixed."""

from __future__ import annotations

TOOLS = {"TRL": "trl", "axolotl": "axolotl"}
"""Tools that compute their own side → their package. `comparison/tool_side.py` runs their trainers."""
_NOT_SENT_TO_TRL = (
    *("env", "config", "trust_remote_code", "code_revision"),
    *(
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "accelerator_config",
        "parallelism_config",
        "tf32",
        "local_rank",
        "ddp_backend",
    ),
    *(
        "dataset_num_proc",
        "eval_steps",
        "save_steps",
        "logging_steps",
        "resume_from_checkpoint",
        "output_dir",
        "run_name",
    ),
    *(
        "gradient_checkpointing_kwargs",
        "liger_kernel_config",
        "torch_compile_backend",
        "torch_compile_mode",
        "dataloader_prefetch_factor",
    ),
    *(
        "dataloader_persistent_workers",
        "hub_model_id",
        "hub_token",
        "hub_strategy",
        "metric_for_best_model",
        "greater_is_better",
    ),
)
_NOT_SENT_TO_AXOLOTL = (
    *(
        "env",
        "trust_remote_code",
        "plugins",
        "deepspeed",
        "test_datasets",
        "gradient_checkpointing_kwargs",
        "auto_find_batch_size",
    ),
    *(
        "hub_model_id",
        "hub_strategy",
        "push_dataset_to_hub",
        "wandb_project",
        "wandb_entity",
        "wandb_name",
        "wandb_run_id",
        "wandb_watch",
    ),
    *(
        "mlflow_tracking_uri",
        "comet_api_key",
        "save_steps",
        "saves_per_epoch",
        "save_strategy",
        "eval_steps",
        "evals_per_epoch",
    ),
    *(
        "eval_strategy",
        "logging_steps",
        "output_dir",
        "dataset_prepared_path",
        "resume_from_checkpoint",
        "torch_compile_backend",
    ),
    *(
        "dataset_processes",
        "dataloader_prefetch_factor",
        "ddp",
        "ddp_timeout",
        "ddp_find_unused_parameters",
        "lora_model_dir",
    ),
    *(
        "early_stopping_patience",
        "tensor_parallel_size",
        "context_parallel_size",
        "sequence_parallel_degree",
        "dp_shard_size",
    ),
    *(
        "dp_replicate_size",
        "load_best_model_at_end",
        "metric_for_best_model",
        "profiler_steps",
        "loss_watchdog_threshold",
    ),
    *("use_tensorboard", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"),
)
NOT_SENT = {"TRL": _NOT_SENT_TO_TRL, "axolotl": _NOT_SENT_TO_AXOLOTL}
"""Options that a tool never gets: variables of its process, trust (which the request has), machines, and what
is logged or saved."""


_OFF_IN_TRL = (
    *(
        "do_eval",
        "push_to_hub",
        "use_liger_kernel",
        "use_liger",
        "gradient_checkpointing",
        "activation_offloading",
        "torch_compile",
    ),
    *("load_best_model_at_end", "dataloader_drop_last", "shuffle_dataset", "dataset_streaming"),
)
_SETTINGS_OF_TRL: dict[str, object] = {
    **dict.fromkeys(_OFF_IN_TRL, False),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy"), "no"),
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_num_workers": 0,
}
_SETTINGS_OF_AXOLOTL: dict[str, object] = {
    **dict.fromkeys(
        ("use_wandb", "use_mlflow", "use_comet", "gradient_checkpointing", "torch_compile", "tf32"), False
    ),
    **dict.fromkeys(
        (
            "activation_offloading",
            "shuffle_merged_datasets",
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
        ),
        False,
    ),
    **dict.fromkeys(("dataset_num_proc", "val_set_size", "dataloader_num_workers"), 0),
    "curriculum_sampling": True,
}
SETTINGS = {"TRL": _SETTINGS_OF_TRL, "axolotl": _SETTINGS_OF_AXOLOTL}
"""Options that change no number on the CPU, or that end a run there. The order of the rows is observed
apart."""
