"""Recognise the tool whose configuration a file is, by its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

AXOLOTL, TRL, LLAMA_FACTORY, SWIFT = "axolotl", "TRL", "LLaMA-Factory", "ms-swift"
TORCHTUNE, ACCELERATE, DEEPSPEED, EXAMPLES = "torchtune", "Accelerate", "DeepSpeed", "transformers examples"
UNSLOTH, AUTOMODEL, SOUP, FMS = "unsloth", "NeMo Automodel", "Soup", "fms-hf-tuning"

SCRIPTS = (".py", ".ipynb")
"""Names of scripts and notebooks, which are read for the calls of a trainer."""

OptionName = Literal[
    "axolotl",
    "trl",
    "llama-factory",
    "ms-swift",
    "torchtune",
    "accelerate",
    "deepspeed",
    "transformers",
    "unsloth",
    "automodel",
    "soup",
    "fms-hf-tuning",
]
OPTION_NAMES: dict[OptionName, str] = {
    "axolotl": AXOLOTL,
    "trl": TRL,
    "llama-factory": LLAMA_FACTORY,
    "ms-swift": SWIFT,
    "torchtune": TORCHTUNE,
    "accelerate": ACCELERATE,
    "deepspeed": DEEPSPEED,
    "transformers": EXAMPLES,
    "unsloth": UNSLOTH,
    "automodel": AUTOMODEL,
    "soup": SOUP,
    "fms-hf-tuning": FMS,
}
"""`--from NAME` → the tool."""

_TELLING: dict[str, frozenset[str]] = {
    tool: frozenset(names.split())
    for tool, names in {
        AXOLOTL: (
            "base_model sequence_len num_epochs val_set_size sample_packing eval_sample_packing "
            "lora_target_linear evals_per_epoch saves_per_epoch dataset_prepared_path lora_model_dir "
            "train_on_inputs pad_to_sequence_len wandb_watch wandb_log_model lora_mlp_kernel lora_qkv_kernel "
            "flash_attention load_in_8bit micro_batch_size datasets special_tokens tokenizer_type "
            "pretraining_dataset loss_watchdog_threshold"
        ),
        LLAMA_FACTORY: (
            "stage finetuning_type cutoff_len template dataset_dir lora_target plot_loss overwrite_cache "
            "mask_history neat_packing quantization_bit max_samples flash_attn train_on_prompt "
            "new_special_tokens enable_liger_kernel additional_target mix_strategy preprocessing_num_workers "
            "val_size double_quantization dataset"
        ),
        TRL: (
            "dataset_config dataset_train_split dataset_test_split use_peft dataset_text_field "
            "assistant_only_loss completion_only_loss lora_target_modules lora_r dataset_num_proc "
            "attn_implementation max_seq_length packing packing_strategy load_in_4bit eos_token "
            "model_init_kwargs dataset_streaming use_bnb_nested_quant model_revision dataset_mixture beta "
            "max_prompt_length max_completion_length num_generations reward_funcs"
        ),
        SWIFT: (
            "train_type tuner_type split_dataset_ratio quant_bits model_author attn_impl target_modules "
            "load_from_cache_file val_dataset loss_scale truncation_strategy freeze_vit use_hf "
            "use_chat_template add_version"
        ),
        TORCHTUNE: (
            "checkpointer metric_logger enable_activation_checkpointing enable_activation_offloading "
            "max_steps_per_epoch clip_grad_norm log_every_n_steps log_peak_memory_stats optimizer_in_bwd "
            "custom_sharded_layers"
        ),
        ACCELERATE: (
            "compute_environment distributed_type main_training_function machine_rank same_network "
            "downcast_bf16 rdzv_backend tpu_use_cluster tpu_use_sudo dynamo_config dynamo_backend "
            "deepspeed_config fsdp_config"
        ),
        DEEPSPEED: (
            "zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer "
            "wall_clock_breakdown steps_per_print train_batch_size communication_data_type prescale_gradients"
        ),
        EXAMPLES: (
            "dataset_config_name train_file validation_file block_size validation_split_percentage "
            "config_name tokenizer_name do_train do_eval use_fast_tokenizer max_train_samples "
            "max_eval_samples overwrite_cache"
        ),
        FMS: (
            "training_data_path validation_data_path dataset_text_field response_template "
            "instruction_template data_formatter_template data_config_path peft_method use_flash_attn "
            "tokenizer_name_or_path dataset_conversation_field save_model_dir trackers "
            "embedding_size_multiple_of padding_free fast_kernels fused_lora auto_gptq fast_moe multipack"
        ),
        SOUP: "base task modality backend output experiment_name",
        AUTOMODEL: "step_scheduler dist_env rng packed_sequence loss_fn validation_dataset "
        "validation_dataloader clip_grad_norm peft",
    }.items()
}
"""Keys that tell a tool, some of them with one another."""
_ALONE = {
    "zero_optimization": DEEPSPEED,
    "distributed_type": ACCELERATE,
    "compute_environment": ACCELERATE,
    "training_data_path": FMS,
    "data_config_path": FMS,
    "step_scheduler": AUTOMODEL,
    "dataset_mixture": TRL,
    "dataset_mixer": TRL,
}
"""Keys that tell a tool alone."""
_REFUSED: dict[str, frozenset[str]] = {
    tool: frozenset(names.split())
    for tool, names in {
        TRL: (
            "use_lora use_qlora use_flash_attn exp_name with_tracking checkpointing_steps use_slow_tokenizer "
            "sequence_len num_epochs micro_batch_size adapter train_type tuner_type lora_rank lora_target "
            "finetuning_type cutoff_len tokenizer_name"
        ),
        LLAMA_FACTORY: (
            "use_lora use_qlora use_flash_attn exp_name with_tracking checkpointing_steps use_slow_tokenizer "
            "sequence_len num_epochs micro_batch_size adapter train_type tuner_type use_peft lora_r "
            "lora_target_modules dataset_name"
        ),
        EXAMPLES: "use_lora use_qlora use_flash_attn exp_name with_tracking checkpointing_steps "
        "use_slow_tokenizer lora_rank cutoff_len",
    }.items()
}
"""Keys with which a tool, whose parser refuses names that it does not know, does not start: a file that has
one is not its file."""
_LEAST = 2
_OBJECTS = {"_component_", "_target_"}
"""Keys that name a Python object, whose arguments are the rest of its section."""


def tool_of(values: Mapping[str, object]) -> str | None:
    """Return the tool whose keys a file has; None if it is none, or if two fit equally well."""
    if any(isinstance(value, dict) and "_component_" in value for value in values.values()):
        return TORCHTUNE
    if any(isinstance(value, dict) and "_target_" in value for value in values.values()):
        return AUTOMODEL
    if _is_soup(values):
        return SOUP
    for name, tool in _ALONE.items():
        if name in values:
            return tool
    fits = {
        tool: names for tool, names in _TELLING.items() if not _REFUSED.get(tool, frozenset()) & values.keys()
    }
    hits = sorted(((len(names & values.keys()), tool) for tool, names in fits.items()), reverse=True)
    (best, tool), (second, _) = hits[:2]
    if best >= _LEAST and best > second:
        return tool
    is_short = best <= 1 and "model_name_or_path" in values and values.keys() & {"dataset_name", "datasets"}
    return TRL if is_short and TRL in fits else None


def _is_soup(values: Mapping[str, object]) -> bool:
    """Return whether a file has Soup's keys: its sections have the names of a recipe's."""
    data = values.get("data")
    return (
        isinstance(values.get("base"), str)
        and (isinstance(data, dict) or "task" in values)
        and "recipe_version" not in values
    )


def foreign_tool(values: Mapping[str, object]) -> str | None:
    """Return the tool of a file that is given as a recipe; None for a recipe, which may have a few keys of
    another tool."""
    sections = [
        cast("dict[str, object]", values[name])
        for name in ("data", "training", "model")
        if isinstance(values.get(name), dict)
    ]
    is_nested = _is_soup(values) or "step_scheduler" in values
    if "recipe_version" in values or (
        not is_nested and any(section and not section.keys() & _OBJECTS for section in sections)
    ):
        return None
    return tool_of(values)


def tried(values: Mapping[str, object]) -> str:
    """Return, for a file that is not recognised, how many telling keys of each tool it has."""
    found = {tool: len(names & values.keys()) for tool, names in _TELLING.items()}
    return ", ".join(f"{tool} {count}" for tool, count in found.items())
