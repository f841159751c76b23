"""The keys of a recipe that are declared without effect on data and numbers, each with another value in a run of two steps.

`CHANGES` has one or more other values of each key, and how far the run may differ: not in a bit, or by the rounding of sums in another
order. `NOT_RUN` has the keys that cannot be changed on this machine, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_tune.recipe.schema.keys import all_keys

BASE: dict[str, Any] = {
    "model": {"name_or_path": "base", "tokenizer": "builtin:arithmetic"},
    "data": {"train": [{"path": "rows.jsonl"}], "eval": {"rows": 4}, "max_length": 64},
    "precision": {"mixed_precision": "no"},
    "training": {
        "global_batch_size": 8,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "report_to": [],
        "optim": "adamw_torch",
    },
    "launch": {"device": "cpu", "num_processes": 1, "num_cpu_threads_per_process": 1},
}
BASES: dict[str, tuple[str, ...]] = {
    "one rank": (),
    "two ranks": ("launch.num_processes=2",),
    "two ranks, accumulated": ("launch.num_processes=2", "training.per_device_train_batch_size=1"),
    "hybrid": ("launch.num_processes=4", "training.per_device_train_batch_size=2", "fsdp.sharding_strategy=HYBRID_SHARD"),
    "two ranks, units by size": ("launch.num_processes=2", "fsdp.auto_wrap_policy=SIZE_BASED_WRAP", "fsdp.min_num_params=4000"),
    "two ranks, units by name": (
        "launch.num_processes=2",
        "fsdp.auto_wrap_policy=MODULE_NAMES_WRAP",
        "fsdp.modules_to_wrap=['model.layers.*']",
    ),
    "two ranks, FSDP1": ("launch.num_processes=2", "fsdp.version=1"),
    "two ranks, a frozen norm": ("launch.num_processes=2", "model.freeze=['model.norm.*']"),
    "recomputation": ("fsdp.activation_checkpointing=full",),
    "bad rows": ("data.on_bad_row=skip", "data.train=[{path: bad.jsonl}]", "data.max_bad_share=0.5"),
    "extra weights": ("model.name_or_path=extra",),
    "workers": ("training.dataloader_num_workers=1",),
    "samples": ("training.sample.every=1", "training.sample.prompts=['1 + 1 =']"),
    "best": ("training.load_best_model_at_end=true",),
    "lora": ("lora={r: 4, lora_alpha: 8}",),
    "qlora": ("lora={r: 4, lora_alpha: 8}", "quantization={}"),
    "mlp": ("kernels.mlp_slice_tokens=16",),
}
"""What a key needs in the recipe before its change has a meaning, as `--set`."""


@dataclass(frozen=True)
class Change:
    key: str
    value: str
    """As `--set` takes it."""
    base: str = "one rank"
    is_exact: bool = True
    """False: sums are computed in another order."""
    beside: tuple[str, ...] = ()
    """`--set` of what this value needs."""


def rounding(key: str, value: str, base: str = "one rank", *beside: str) -> Change:
    return Change(key, value, base, is_exact=False, beside=beside)


CHANGES: tuple[Change, ...] = (
    Change("name", "another"),
    Change("output_dir", "elsewhere"),
    Change("data.max_bad_share", "0.9", "bad rows"),
    Change("data.num_proc", "2"),
    Change("data.cache_dir", "cache"),
    Change("training.logging_steps", "2"),
    Change("training.save_total_limit", "1"),
    Change("training.report_to", "[tensorboard]"),
    Change("training.witness", "1"),
    Change("training.witness", "off"),
    Change("training.sample", "{every: 1, prompts: ['1 + 1 =']}"),
    Change("training.sample.every", "2", "samples"),
    Change("training.sample.prompts", "['2 + 2 =', '3 + 3 =']", "samples"),
    Change("training.sample.max_new_tokens", "3", "samples"),
    Change("training.eval_strategy", "no"),
    Change("training.eval_steps", "2"),
    Change("training.eval_delay", "1"),
    Change("training.eval_on_start", "true"),
    Change("training.save_steps", "2"),
    Change("training.save_strategy", "epoch"),
    Change("training.load_best_model_at_end", "true"),
    Change("training.metric_for_best_model", "loss", "best"),
    Change("training.greater_is_better", "false", "best"),
    Change("training.logging_first_step", "true"),
    Change("training.logging_strategy", "epoch"),
    Change("training.dataloader_num_workers", "2"),
    Change("training.dataloader_prefetch_factor", "4", "workers"),
    Change("training.full_determinism", "true"),
    Change("training.per_device_eval_batch_size", "2"),
    rounding("training.per_device_train_batch_size", "2"),
    rounding("training.per_device_train_batch_tokens", "128", "one rank", "training.per_device_train_batch_size=2"),
    rounding("training.gradient_accumulation_steps", "4", "one rank", "training.per_device_train_batch_size=2"),
    Change("checkpoint.async", "false"),
    Change("checkpoint.verify", "size"),
    Change("checkpoint.probe", "false"),
    Change("checkpoint.save_failure", "stop"),
    Change("checkpoint.mirror", "file://{folder}/mirror"),
    Change("merge.at_end", "false"),
    Change("merge.max_shard_size", "20KB"),
    Change("merge.verify", "full"),
    Change("merge.verify", "none"),
    Change("merge.adapter", "adapter", "lora"),
    Change("merge.adapter", "merged", "lora"),
    Change("merge.dtype", "bf16"),
    Change("merge.base", "original", "qlora"),
    Change("model.leave_out", "[extra]", "extra weights"),
    rounding("model.attn_implementation", "eager"),
    rounding("data.pad_to_multiple_of", "16"),
    rounding("kernels.loss", "chunked"),
    rounding("kernels.mlp_slice_tokens", "16"),
    Change("launch.num_cpu_threads_per_process", "2"),
    Change("launch.main_process_port", "{port}"),
    Change("launch.main_process_ip", "127.0.0.1"),
    Change("launch.env", "{NCCL_DEBUG: WARN}"),
    Change("launch.max_restarts", "1"),
    Change("launch.max_runtime", "1h"),
    Change("launch.hang_timeout", "10m"),
    rounding("launch.num_processes", "2"),
    rounding("parallelism.sp_size", "2", "two ranks"),
    Change("parallelism.dp_replicate_size", "2", "hybrid"),  # of four ranks no other value is a hybrid
    Change("parallelism.dp_shard_size", "2", "hybrid"),
    rounding("fsdp.sharding_strategy", "SHARD_GRAD_OP", "two ranks"),
    rounding("fsdp.sharding_strategy", "NO_SHARD", "two ranks"),
    rounding("fsdp.version", "1", "two ranks"),
    Change("fsdp.reshard_after_forward", "false", "two ranks"),
    rounding("fsdp.auto_wrap_policy", "NO_WRAP", "two ranks"),
    rounding("fsdp.transformer_layer_cls_to_wrap", "LlamaMLP", "two ranks"),
    rounding("fsdp.min_num_params", "9000", "two ranks, units by size"),
    rounding("fsdp.modules_to_wrap", "['model.layers.1']", "two ranks, units by name"),
    rounding("fsdp.ignored_modules", "model\\.norm", "two ranks, a frozen norm"),
    Change("fsdp.activation_checkpointing", "full"),
    Change("fsdp.activation_checkpointing", "selective"),
    Change("fsdp.activation_checkpointing_every", "2", "recomputation"),
    Change("fsdp.activation_checkpointing_offload", "true", "recomputation"),
    rounding("fsdp.offload_params", "true", "two ranks"),
    Change("fsdp.forward_prefetch", "true", "two ranks"),
    Change("fsdp.backward_prefetch", "2", "two ranks"),
    Change("fsdp.backward_prefetch", "NO_PREFETCH", "two ranks, FSDP1"),
    rounding("fsdp.sync_each_batch", "false", "two ranks", "training.per_device_train_batch_size=2"),
    Change("fsdp.reshard_after_backward", "false", "two ranks, accumulated"),
    Change("fsdp.reshard_after_backward", "auto", "two ranks, accumulated"),
    Change("fsdp.state_dict_type", "FULL_STATE_DICT", "two ranks"),
    Change("fsdp.cpu_ram_efficient_loading", "false", "two ranks"),
)
_MACHINES = "several machines: tests/launch/test_machine_real.py compares their losses"
NOT_RUN: dict[str, str] = {
    **{key.name: "is changed by tests/cli/test_train_evaluation.py" for key in all_keys() if key.path[0] == "evaluation" and key.path[1:]},
    "recipe_version": "has one value",
    "parallelism.tp_size": "has one value in this release",
    "parallelism.cp_size": "has one value in this release",
    "training.debug": "has one value in this release",
    "kernels.liger": "Triton kernels: tests/gpu/test_numbers.py",
    "kernels.compile": "the C++ compiler takes minutes: tests/parity/test_matrix.py",
    "fsdp.ep_size": "the model has no experts: tests/parity/test_expert_parallel.py",
    "kernels.experts": "the model has no experts: tests/model/test_expert_kernels.py",
    "merge.quantise": "only after `quantization.train`, which changes numbers: tests/cli/test_train_quantised.py",
    "launch.device": "this machine has one kind of device",
    "launch.enable_cpu_affinity": "CUDA with nvidia-ml-py",
    "extensions.metrics": "entry points of an installed package",
    **dict.fromkeys(("launch.num_machines", "launch.min_machines", "launch.replacement_timeout", "launch.shared_directory"), _MACHINES),
    **dict.fromkeys(
        (
            f"training.{name}"
            for name in ("hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "push_to_hub")
        ),
        "uploads: needs an account of the Hugging Face Hub",
    ),
    **dict.fromkeys(
        (f"training.{name}" for name in ("project", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id")),
        "the service of Trackio",
    ),
}
