"""Names of recipe keys in one other trainer each: the key here, an example and the conversion of a value."""

from __future__ import annotations

from fsdp_tune.recipe.conversions import (
    DTYPES,
    HELD_OUT,
    LINEAR,
    MICRO_BATCH,
    MIXES,
    NF4,
    NO_8_BIT,
    NO_ADAPTER,
    NO_DTYPE,
    NO_MIX,
    NOT_PISSA,
    QLORA,
    SMALL_SCALES,
    THE_SAME,
    TO_NF4,
    TO_SMALL_SCALES,
    TRAIN,
    Row,
    ask,
    attention,
    cases,
    changed,
    column,
    first_adapter,
    held_out,
    listed,
    per_epoch,
    roles,
    source,
    sources,
    switch,
    targets,
)
from fsdp_tune.recipe.outcome import Drop

_SLICED_MLP = "kernels: {mlp_slice_tokens: 16384}"
_PROMPTS = "data: {loss_on: completion}"
_ALL_TEXT = "data: {loss_on: all}` (the prompt too) or `data: {loss_on: completion}"
_RECOMPUTE = "fsdp.activation_checkpointing"
_SLICES = (
    "it counts tokens in a slice, that one slices of a row: write `kernels: {{mlp_slice_tokens: N}}` "
    "with N = `data.max_length` / {value}"
)
BY_TOOL: dict[str, dict[str, Row]] = {
    "axolotl": {
        "base_model": ("model.name_or_path", None),
        "micro_batch_size": (MICRO_BATCH, None),
        "num_epochs": ("training.num_train_epochs", None),
        "sequence_len": ("data.max_length", None),
        "sample_packing": ("data.packing", None),
        "eval_sample_packing": ("data.eval_packing", None),
        "val_set_size": ("data.eval", HELD_OUT, held_out),
        "test_datasets": ("data.eval", "data: {eval: [{path: NAME}]}", changed("data.eval", sources)),
        "train_on_inputs": ("data.loss_on", _ALL_TEXT, switch("data.loss_on", "all", "completion")),
        "roles_to_train": ("data.loss_on", "data: {loss_on: assistant}", roles),
        "datasets": ("data.train", TRAIN, changed("data.train", sources)),
        "dataset_prepared_path": ("data.cache_dir", None),
        "dataset_processes": ("data.num_proc", None),
        "optimizer": ("training.optim", None),
        "lr_scheduler": ("training.lr_scheduler_type", None),
        "flash_attention": (
            "model.attn_implementation",
            "model: {attn_implementation: flash_attention_2}",
            attention,
        ),
        "sdp_attention": (
            "model.attn_implementation",
            "model: {attn_implementation: sdpa}",
            switch("model.attn_implementation", "sdpa"),
        ),
        "tiled_mlp": ("kernels.mlp_slice_tokens", _SLICED_MLP, switch("kernels.mlp_slice_tokens", 16384)),
        "tiled_mlp_num_shards": ("kernels.mlp_slice_tokens", _SLICED_MLP, ask(_SLICES)),
        "special_tokens": ("model.tokens", "model: {tokens: {pad: …, eos: …}}"),
        "overrides_of_model_config": ("model.config_overrides", None),
        "revision_of_model": ("model.revision", None),
        "evals_per_epoch": (
            "training.eval_steps",
            "training: {eval_steps: 0.5}",
            per_epoch("training.eval_steps"),
        ),
        "saves_per_epoch": (
            "training.save_steps",
            "training: {save_steps: 0.5}",
            per_epoch("training.save_steps"),
        ),
        "adapter": (
            "lora",
            f"lora: {{r: 16}}`, and for qlora `{NF4}",
            cases("lora", {"lora": {"r": 16}, "qlora": QLORA}, NO_ADAPTER),
        ),
        "lora_target_linear": ("lora.target_modules", LINEAR, switch("lora.target_modules", "all-linear")),
        "lora_layers_to_transform": ("lora.layers_to_transform", None),
        "lora_model_dir": ("lora.adapter", None),
        "merge_lora": (
            "merge.adapter",
            "merge: {adapter: merged}",
            switch("merge.adapter", "merged", "adapter"),
        ),
        "peft_layers_to_transform": ("lora.layers_to_transform", None),
        "peft_init_lora_weights": ("lora.init_lora_weights", None),
        "peft_use_dora": ("lora.use_dora", None),
        "peft_use_rslora": ("lora.use_rslora", None),
    },
    "TRL": {
        "model_name_or_path": ("model.name_or_path", None),
        "model_revision": ("model.revision", None),
        "dataset_name": ("data.train", TRAIN, source("path")),
        "dataset_config": ("data.train.name", None, source("name")),
        "dataset_train_split": ("data.train.split", None, source("split")),
        "dataset_test_split": (
            "data.eval",
            "data: {eval: [{path: NAME, split: test}]}",
            changed("data.eval", lambda split: [{"path": "NAME", "split": split}]),
        ),
        "dataset_text_field": (
            "data.train.rename_columns",
            "data: {train: [{path: NAME, rename_columns: {FIELD: text}}]}",
            column("text"),
        ),
        "dataset_num_proc": ("data.num_proc", None),
        "completion_only_loss": ("data.loss_on", _PROMPTS, switch("data.loss_on", "completion", "all")),
        "assistant_only_loss": (
            "data.loss_on",
            "data: {loss_on: assistant}",
            switch("data.loss_on", "assistant", "all"),
        ),
        "eos_token": ("model.tokens.eos", None),
        "pad_token": ("model.tokens.pad", None),
        "chat_template_path": ("data.chat_template", None),
        "attn_impl": ("model.attn_implementation", None),
        "use_peft": ("lora", "lora: {r: 16}", switch("lora", {"r": 16})),
        "bnb_4bit_compute_dtype": (
            "precision.mixed_precision",
            None,
            cases("precision.mixed_precision", DTYPES, NO_DTYPE),
        ),
        "bnb_4bit_quant_type": (
            "quantization.load",
            None,
            cases("quantization.load", {"nf4": TO_NF4}, NO_8_BIT),
        ),
        "use_bnb_nested_quant": (
            "quantization.scales",
            SMALL_SCALES,
            switch("quantization.scales", TO_SMALL_SCALES),
        ),
    },
    "LLaMA-Factory": {
        "cutoff_len": ("data.max_length", None),
        "template": (
            "data.chat_template",
            None,
            ask(
                "leave it out for the tokenizer's own, or write a bundled one for `{value}`: "
                "`fsdp-tune templates` lists their names"
            ),
        ),
        "dataset": (
            "data.train",
            TRAIN,
            ask(
                "write the file or the hub id that `dataset_info.json` has for `{value}`: `data: "
                "{{train: [{{path: NAME}}]}}`"
            ),
        ),
        "eval_dataset": ("data.eval", "data: {eval: [{path: NAME}]}"),
        "val_size": ("data.eval", HELD_OUT, held_out),
        "train_on_prompt": ("data.loss_on", _ALL_TEXT, switch("data.loss_on", "all", "completion")),
        "mask_history": (
            "data.loss_on",
            "data: {loss_on: last_assistant}",
            switch("data.loss_on", "last_assistant"),
        ),
        "neat_packing": ("data.packing", None),
        "preprocessing_num_workers": ("data.num_proc", None),
        "max_samples": ("data.train.max_rows", None, source("max_rows")),
        "mix_strategy": (
            "data.mixture",
            "data: {mixture: {stopping_strategy: first_exhausted}}",
            cases("data.mixture", MIXES, NO_MIX),
        ),
        "flash_attn": ("model.attn_implementation", None, attention),
        "enable_liger_kernel": ("kernels.liger", None),
        "resize_vocab": ("model.resize_embeddings", None),
        "new_special_tokens": ("model.tokens.add", None, changed("model.tokens.add", listed)),
        "finetuning_type": (
            "lora",
            "lora: {r: 16}",
            cases("lora", {"lora": {"r": 16}, "full": THE_SAME}, NO_ADAPTER),
        ),
        "lora_target": (
            "lora.target_modules",
            f"{LINEAR}` (all) or `lora: {{target_modules: [q_proj, v_proj]}}",
            targets,
        ),
        "pissa_init": (
            "lora.init_lora_weights",
            None,
            cases("lora.init_lora_weights", {"false": THE_SAME}, NOT_PISSA),
        ),
        "additional_target": ("lora.modules_to_save", None, changed("lora.modules_to_save", listed)),
        "adapter_name_or_path": ("lora.adapter", None),
        "quantization_bit": (
            "quantization.load",
            NF4,
            cases("quantization.load", {"4": TO_NF4}, NO_8_BIT),
        ),
        "quantization_type": (
            "quantization.load",
            None,
            cases("quantization.load", {"nf4": TO_NF4}, NO_8_BIT),
        ),
        "double_quantization": (
            "quantization.scales",
            SMALL_SCALES,
            switch("quantization.scales", TO_SMALL_SCALES),
        ),
        "disable_gradient_checkpointing": (
            _RECOMPUTE,
            "fsdp: {activation_checkpointing: none}",
            switch(_RECOMPUTE, "none", "full"),
        ),
    },
    "ms-swift": {
        **dict.fromkeys(
            ("train_type", "tuner_type"),
            ("lora", "lora: {r: 16}", cases("lora", {"lora": {"r": 16}, "full": THE_SAME}, NO_ADAPTER)),
        ),
        "split_dataset_ratio": ("data.eval", HELD_OUT, held_out),
        "val_dataset": ("data.eval", "data: {eval: [{path: NAME}]}", changed("data.eval", sources)),
        "quant_bits": ("quantization.load", NF4, cases("quantization.load", {"4": TO_NF4}, NO_8_BIT)),
        "adapters": ("lora.adapter", None, first_adapter),
    },
    "torchtune": {
        "batch_size": (MICRO_BATCH, None),
        "epochs": ("training.num_train_epochs", None),
        "max_steps_per_epoch": (
            "training.max_steps",
            None,
            ask(
                "write `training: {{max_steps: {value}}}` for one epoch; for several, {value} × "
                "epochs: it counts all steps of the run"
            ),
        ),
        "clip_grad_norm": ("training.max_grad_norm", None),
        "enable_activation_checkpointing": (
            _RECOMPUTE,
            "fsdp: {activation_checkpointing: full}",
            switch(_RECOMPUTE, "full"),
        ),
        "fsdp_cpu_offload": ("fsdp.offload_params", None),
        "fsdp_reshard_after_forward": ("fsdp.reshard_after_forward", None),
        "log_every_n_steps": ("training.logging_steps", None),
        "max_seq_len": ("data.max_length", None),
        "packed": ("data.packing", None),
        "lora_attn_modules": (
            "lora.target_modules",
            "lora: {target_modules: [q_proj, v_proj]}",
            changed("lora.target_modules", listed),
        ),
        "apply_lora_to_mlp": ("lora.target_modules", LINEAR, switch("lora.target_modules", "all-linear")),
        "apply_lora_to_output": (
            "lora.target_modules",
            "lora: {target_modules: [q_proj, v_proj, lm_head]}",
            switch("lora.target_modules", ["q_proj", "v_proj", "lm_head"]),
        ),
        "save_adapter_weights_only": (
            "merge.adapter",
            "merge: {adapter: adapter}",
            switch("merge.adapter", "adapter", "both"),
        ),
        "quantize_base": ("quantization.load", NF4, switch("quantization.load", TO_NF4)),
        "checkpointer": ("model.name_or_path", None),
    },
    "Accelerate": dict.fromkeys(
        (
            *(
                "compute_environment",
                "distributed_type",
                "downcast_bf16",
                "machine_rank",
                "main_training_function",
                "rdzv_backend",
            ),
            *("same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
        ),
        ("launch", None, Drop("`fsdp-tune train` starts the ranks")),
    ),
}
