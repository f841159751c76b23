"""Names of recipe keys in other trainers, for the hint of an unknown key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Synonym:
    tool: str | None
    """None: a common name of several tools."""
    key: str
    """Dotted, without list indexes; under `training.` also a field of TrainingArguments."""
    example: str | None = None
    """Example to write, if the form of the value differs too."""


_TRAIN = "data: {train: [{path: NAME}]}"
_HELD_OUT = "data: {eval: {fraction: 0.05}}"
_MICRO_BATCH = "training.per_device_train_batch_size"
_ALL_LINEAR = "lora: {target_modules: all-linear}"
_SMALL_SCALES = "quantization: {load: nf4, scales: bf16}"
_NF4 = "quantization: {load: nf4}"
_SLICED_MLP = "kernels: {mlp_slice_tokens: 16384}"
_YARN = "model: {rope_scaling: {rope_type: yarn, factor: 4.0}}"
_PROMPTS = "data: {loss_on: completion}"

_BY_TOOL: dict[str | None, dict[str, tuple[str, str | None]]] = {
    "axolotl": {
        "base_model": ("model.name_or_path", None),
        "micro_batch_size": (_MICRO_BATCH, None),
        "num_epochs": ("training.num_train_epochs", None),
        "sequence_len": ("data.max_length", None),
        "sample_packing": ("data.packing", None),
        "eval_sample_packing": ("data.eval_packing", None),
        "val_set_size": ("data.eval", _HELD_OUT),
        "test_datasets": ("data.eval", "data: {eval: [{path: NAME}]}"),
        "train_on_inputs": ("data.loss_on", "data: {loss_on: all}` (the prompt too) or `data: {loss_on: completion}"),
        "roles_to_train": ("data.loss_on", "data: {loss_on: assistant}"),
        "datasets": ("data.train", _TRAIN),
        "dataset_prepared_path": ("data.cache_dir", None),
        "dataset_processes": ("data.num_proc", None),
        "optimizer": ("training.optim", None),
        "lr_scheduler": ("training.lr_scheduler_type", None),
        "flash_attention": ("model.attn_implementation", "model: {attn_implementation: flash_attention_2}"),
        "sdp_attention": ("model.attn_implementation", "model: {attn_implementation: sdpa}"),
        "tiled_mlp": ("kernels.mlp_slice_tokens", _SLICED_MLP),
        "tiled_mlp_num_shards": ("kernels.mlp_slice_tokens", _SLICED_MLP),
        "special_tokens": ("model.tokens", "model: {tokens: {pad: …, eos: …}}"),
        "overrides_of_model_config": ("model.config_overrides", None),
        "revision_of_model": ("model.revision", None),
        "evals_per_epoch": ("training.eval_steps", None),
        "saves_per_epoch": ("training.save_steps", None),
        "adapter": ("lora", f"lora: {{r: 16}}`, and for qlora `{_NF4}"),
        "lora_target_linear": ("lora.target_modules", _ALL_LINEAR),
        "lora_layers_to_transform": ("lora.layers_to_transform", None),
        "lora_model_dir": ("lora.adapter", None),
        "merge_lora": ("merge.adapter", "merge: {adapter: merged}"),
        "peft_layers_to_transform": ("lora.layers_to_transform", None),
        "peft_init_lora_weights": ("lora.init_lora_weights", None),
        "peft_use_dora": ("lora.use_dora", None),
        "peft_use_rslora": ("lora.use_rslora", None),
    },
    "TRL": {
        "model_name_or_path": ("model.name_or_path", None),
        "model_revision": ("model.revision", None),
        "dataset_name": ("data.train", _TRAIN),
        "dataset_config": ("data.train.name", None),
        "dataset_train_split": ("data.train.split", None),
        "dataset_test_split": ("data.eval", "data: {eval: [{path: NAME, split: test}]}"),
        "dataset_text_field": ("data.train.rename_columns", "data: {train: [{path: NAME, rename_columns: {FIELD: text}}]}"),
        "dataset_num_proc": ("data.num_proc", None),
        "completion_only_loss": ("data.loss_on", _PROMPTS),
        "assistant_only_loss": ("data.loss_on", "data: {loss_on: assistant}"),
        "eos_token": ("model.tokens.eos", None),
        "pad_token": ("model.tokens.pad", None),
        "chat_template_path": ("data.chat_template", None),
        "attn_impl": ("model.attn_implementation", None),
        "use_peft": ("lora", "lora: {r: 16}"),
        "bnb_4bit_compute_dtype": ("precision.mixed_precision", None),
        "bnb_4bit_quant_type": ("quantization.load", None),
        "use_bnb_nested_quant": ("quantization.scales", _SMALL_SCALES),
    },
    "LLaMA-Factory": {
        "cutoff_len": ("data.max_length", None),
        "template": ("data.chat_template", None),
        "dataset": ("data.train", _TRAIN),
        "eval_dataset": ("data.eval", "data: {eval: [{path: NAME}]}"),
        "val_size": ("data.eval", _HELD_OUT),
        "train_on_prompt": ("data.loss_on", "data: {loss_on: all}` (the prompt too) or `data: {loss_on: completion}"),
        "mask_history": ("data.loss_on", "data: {loss_on: last_assistant}"),
        "neat_packing": ("data.packing", None),
        "preprocessing_num_workers": ("data.num_proc", None),
        "max_samples": ("data.train.max_rows", None),
        "mix_strategy": ("data.mixture", None),
        "flash_attn": ("model.attn_implementation", None),
        "enable_liger_kernel": ("kernels.liger", None),
        "resize_vocab": ("model.resize_embeddings", None),
        "new_special_tokens": ("model.tokens.add", None),
        "finetuning_type": ("lora", "lora: {r: 16}"),
        "lora_target": ("lora.target_modules", f"{_ALL_LINEAR}` (all) or `lora: {{target_modules: [q_proj, v_proj]}}"),
        "pissa_init": ("lora.init_lora_weights", None),
        "additional_target": ("lora.modules_to_save", None),
        "adapter_name_or_path": ("lora.adapter", None),
        "quantization_bit": ("quantization.load", _NF4),
        "quantization_type": ("quantization.load", None),
        "double_quantization": ("quantization.scales", _SMALL_SCALES),
        "disable_gradient_checkpointing": ("fsdp.activation_checkpointing", None),
    },
    "torchtune": {
        "batch_size": (_MICRO_BATCH, None),
        "epochs": ("training.num_train_epochs", None),
        "max_steps_per_epoch": ("training.max_steps", None),
        "clip_grad_norm": ("training.max_grad_norm", None),
        "enable_activation_checkpointing": ("fsdp.activation_checkpointing", "fsdp: {activation_checkpointing: full}"),
        "fsdp_cpu_offload": ("fsdp.offload_params", None),
        "fsdp_reshard_after_forward": ("fsdp.reshard_after_forward", None),
        "log_every_n_steps": ("training.logging_steps", None),
        "max_seq_len": ("data.max_length", None),
        "packed": ("data.packing", None),
        "lora_attn_modules": ("lora.target_modules", "lora: {target_modules: [q_proj, v_proj]}"),
        "apply_lora_to_mlp": ("lora.target_modules", _ALL_LINEAR),
        "apply_lora_to_output": ("lora.target_modules", "lora: {target_modules: [q_proj, v_proj, lm_head]}"),
        "save_adapter_weights_only": ("merge.adapter", "merge: {adapter: adapter}"),
        "quantize_base": ("quantization.load", _NF4),
        "checkpointer": ("model.name_or_path", None),
    },
    None: {
        **dict.fromkeys(("lora_r", "lora_rank", "rank"), ("lora.r", None)),
        "lora_target_modules": ("lora.target_modules", None),
        "lora_modules_to_save": ("lora.modules_to_save", None),
        **dict.fromkeys(
            ("trainable_token_indices", "peft_trainable_token_indices"),
            ("lora.modules_to_save", "lora: {modules_to_save: [embed_tokens, lm_head]}"),
        ),
        "loraplus_lr_ratio": ("lora.lr_ratio", None),
        "load_in_4bit": ("quantization.load", _NF4),
        "bnb_4bit_use_double_quant": ("quantization.scales", _SMALL_SCALES),
        "lora_target_parameters": ("lora.target_parameters", None),
        **dict.fromkeys(("num_gpus", "n_gpus", "gpus", "nproc_per_node", "world_size", "devices"), ("launch.num_processes", None)),
        **dict.fromkeys(("nnodes", "num_nodes", "n_nodes", "nodes"), ("launch.num_machines", None)),
        "master_addr": ("launch.main_process_ip", None),
        "master_port": ("launch.main_process_port", None),
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "per_gpu_train_batch_size"), (_MICRO_BATCH, None)),
        **dict.fromkeys(("train_batch_size", "total_batch_size", "effective_batch_size"), ("training.global_batch_size", None)),
        **dict.fromkeys(("lr", "max_lr", "peak_lr"), ("training.learning_rate", None)),
        **dict.fromkeys(("gradient_clipping", "grad_clip", "max_norm"), ("training.max_grad_norm", None)),
        **dict.fromkeys(
            ("accumulate_grad_batches", "grad_accum_steps", "accumulation_steps"), ("training.gradient_accumulation_steps", None)
        ),
        **dict.fromkeys(("num_warmup_steps",), ("training.warmup_steps", None)),
        **dict.fromkeys(("seq_len", "seq_length", "sequence_length", "block_size", "context_length"), ("data.max_length", None)),
        **dict.fromkeys(("model_name", "model_id", "model_path", "pretrained_model_name_or_path"), ("model.name_or_path", None)),
        **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path", "tokenizer_path"), ("model.tokenizer", None)),
        **dict.fromkeys(("train_file", "train_files", "train_data", "train_path", "data_path", "dataset_path"), ("data.train", _TRAIN)),
        **dict.fromkeys(("eval_file", "validation_file", "val_file", "test_size"), ("data.eval", _HELD_OUT)),
        **dict.fromkeys(("save_dir", "out_dir", "output_path", "checkpoint_dir"), ("output_dir", None)),
        **dict.fromkeys(("rope_scaling", "rope_parameters"), ("model.rope_scaling", _YARN)),
        "experiment_name": ("name", None),
        **dict.fromkeys(("mixed_precision_dtype", "amp"), ("precision.mixed_precision", None)),
        **dict.fromkeys(("zero_stage", "sharding"), ("fsdp.sharding_strategy", None)),
        **dict.fromkeys(("wandb", "logger", "loggers", "tracker"), ("training.report_to", None)),
    },
}
SYNONYMS = {name: Synonym(tool, key, example) for tool, names in _BY_TOOL.items() for name, (key, example) in names.items()}


def synonym_hint(name: str) -> str | None:
    """Return a hint for the name of a key of another trainer: the key of the recipe, and an example if the form of the value differs."""
    found = SYNONYMS.get(name.lower())
    if found is None:
        return None
    known = f"`{name}` of {found.tool} is `{found.key}` here" if found.tool else f"it is `{found.key}` here"
    return f"{known}: write `{found.example}`" if found.example else known
