"""Keys of Soup's configurations (`soup train`), whose sections have the names of a recipe's."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_tune.core.values import as_mapping, is_mapping
from fsdp_tune.migrate.general import chat_template
from fsdp_tune.migrate.rules import (
    TRAIN,
    UNSUPPORTED_SWITCH,
    FileKey,
    Outcome,
    Rule,
    Rules,
    by_synonym,
    cases,
    each,
    fine_or,
    implies,
    is_on,
    lora_targets,
    off_or,
    same,
    section,
    switch,
)
from fsdp_tune.migrate.tool import Method, Tool
from fsdp_tune.migrate.tools.long_rows import CUT_BY_TRL
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Write
from fsdp_tune.recipe.read.tool_detection import SOUP

_FORMATS = {
    "auto": Drop("the columns of the rows decide here too"),
    "alpaca": Write({"data.format": "alpaca"}, fate=Fate.KEPT),
    "sharegpt": Write({"data.format": "sharegpt"}, fate=Fate.KEPT),
    "chatml": "messages",
    "tool-calling": "messages",
    "plaintext": "text",
    "pre_tokenized": "tokenized",
    "input_output": "segments",
}
_MICRO_BATCH = "training.per_device_train_batch_size"
_MEDIA = "models with images or sound are not trained here"


def has_adapter(values: Mapping[str, object]) -> bool:
    """Return whether a file trains an adapter: it does unless its rank is 0."""
    lora = as_mapping(values.get("training")).get("lora")
    return not is_mapping(lora) or lora.get("r", 64) != 0


def _off_at_0(target: str, reason: str, fate: Fate = Fate.CONVERTED) -> Rule:
    return lambda key: Drop(reason) if key.value == 0 else Write({target: key.value}, fate=fate)


def _quantization(key: FileKey) -> Outcome:
    if key.value == "none":
        return Drop("off, as it is here")
    if key.value == "4bit":
        return Write({"quantization.load": "nf4"})
    return Ask(f"{key.value} is not supported: 4 bits are `quantization: {{load: nf4}}`", "quantization.load")


def _targets(key: FileKey) -> Outcome:
    if key.value != "auto":
        return lora_targets(key)
    words = (
        "PEFT adapts a selection of its own for each architecture (Llama: q_proj and v_proj); here it is "
        "every linear layer"
    )
    return Ask(words, "lora.target_modules")


def _recomputation(key: FileKey) -> Outcome:
    if key.value in ("selective", "medium", "auto"):
        words = (
            "write `fsdp: {activation_checkpointing: full}`, or `activation_checkpointing_every: 2` for "
            "every other layer"
        )
        return Ask(words, "fsdp.activation_checkpointing")
    return Write(
        {"fsdp.activation_checkpointing": "full" if is_on(key.value) or key.value == "full" else "none"}
    )


_SWITCHES = (
    *(
        "use_galore",
        "use_mod",
        "use_longlora",
        "lisa_enabled",
        "stream_layers",
        "curriculum",
        "quantization_aware",
        "warmup_auto",
    ),
    *(
        "forgetting_detection",
        "checkpoint_intelligence",
        "early_stop_on_regression",
        "convergence_detection",
        "loss_spike_recovery",
    ),
)
_LORA: Rules = {
    "r": _off_at_0("lora.r", "no adapter: every weight is trained", Fate.KEPT),
    "alpha": same("lora.lora_alpha"),
    "dropout": same("lora.lora_dropout"),
    "target_modules": _targets,
    **{name: same(f"lora.{name}") for name in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern")},
    **each(
        ("use_vera", "use_olora"),
        off_or("off", "adapters that are not LoRA, or that change the base, are not supported"),
    ),
    "init_strategy": fine_or(
        ("random",),
        "as it is here",
        "adapters that change the base are not supported",
        "lora.init_lora_weights",
    ),
    **each(("loftq_iter", "loftq_bits"), Drop("no effect without LoftQ")),
}
_DATA: Rules = {
    "train": lambda key: Write({(*TRAIN, index, "path"): name for index, name in enumerate(key.items)}),
    "format": cases(
        "data.format",
        _FORMATS,
        lambda key: Ask(f"rows of the format `{key.value}` are not trained here", "data.format"),
    ),
    "val_split": _off_at_0("data.eval.fraction", "nothing is evaluated, as it is here"),
    "max_length": same("data.max_length"),
    "train_on_responses_only": switch(
        Drop("prompts are not trained here either"), Write({"data.loss_on": "all"})
    ),
    "train_on_messages_with_train_field": off_or(
        "off", "messages with a `train` of false are not trained here: leave it in the rows"
    ),
    "chat_template": chat_template,
    "streaming": same("data.streaming"),
    "buffer_size": same("data.shuffle_buffer_size"),
    **{
        name: by_synonym(name)
        for name in ("mask_history", "train_on_prompt", "new_special_tokens", "resize_vocab")
    },
    **each(("image_dir", "audio_dir", "video_dir", "video_fps", "video_maxlen"), Drop(_MEDIA)),
    **each(
        ("remove_unused_columns", "skip_prepare_dataset"),
        Drop("rows are tokenised once; other columns are ignored"),
    ),
}
_TRAINING: Rules = {
    "epochs": same("training.num_train_epochs"),
    "lr": same("training.learning_rate"),
    "batch_size": lambda key: (
        Ask("`fsdp-tune plan` ranks the sizes that fit; 1 is the default", _MICRO_BATCH)
        if key.value == "auto"
        else Write({_MICRO_BATCH: key.value})
    ),
    "auto_batch_size_strategy": Drop("`fsdp-tune plan` ranks the sizes that fit"),
    "lora": section(_LORA),
    "quantization": _quantization,
    "scheduler": same("training.lr_scheduler_type"),
    "use_flash_attn": implies({"model.attn_implementation": "flash_attention_2"}),
    "use_liger": same("kernels.liger"),
    "use_cut_ce": implies({"kernels.loss": "chunked"}),
    "gradient_checkpointing": _recomputation,
    "use_ring_attention": off_or("off", "write `parallelism: {sp_size: N}`, the ranks that share a row"),
    "rope_scaling_type": Ask(
        "write `model: {rope_scaling: {rope_type: …, factor: …}}`", "model.rope_scaling"
    ),
    "yarn_factor": same("model.rope_scaling.factor"),
    **each(("packing", "multipack"), same("data.packing")),
    "packing_cross_doc_attn_mask": Drop("examples in one row never see each other here"),
    "neftune_alpha": same("training.neftune_noise_alpha"),
    "loraplus_lr_ratio": same("lora.loraplus_lr_ratio"),
    "moe_lora": off_or("off", "experts are adapted by `lora: {target_parameters: […]}`"),
    "moe_aux_loss_coeff": same("model.config_overrides.router_aux_loss_coef"),
    "activation_offloading": implies({"fsdp.activation_checkpointing_offload": True}),
    "use_fsdp2_compile": same("kernels.compile"),
    "bnb_4bit_use_double_quant": by_synonym("bnb_4bit_use_double_quant"),
    **each(_SWITCHES, UNSUPPORTED_SWITCH),
    "early_stop_patience": Drop("no effect without `early_stop_on_regression`"),
    "loss_watchdog": Drop("a loss that is not finite ends the run; spikes are events of it"),
    **each(
        ("loss_watchdog_threshold", "loss_watchdog_patience"),
        Drop("spikes are found against the run's own losses"),
    ),
    "hub": fine_or(
        ("hf",), "as it is here", "models are those of the Hugging Face hub", "model.name_or_path"
    ),
}
RULES: Rules = {
    "base": same("model.name_or_path"),
    "task": lambda key: (
        Write({"data.loss_on": "all"}, "pre-training: every token is trained")
        if key.value == "pretrain"
        else Drop("supervised fine-tuning is what `train` does")
    ),
    "modality": fine_or(("text",), "text is what is trained", _MEDIA),
    "backend": Drop("kernels are chosen in `kernels:`"),
    "data": section(_DATA),
    "training": section(_TRAINING),
    "output": same("output_dir"),
    "experiment_name": same("name"),
    **each(("eval", "advise", "ship"), Drop("`fsdp-tune evaluate` measures the result")),
}
"""By name; see `settle_keys.settle_key`."""
TOOL = Tool(
    SOUP,
    RULES,
    defaults={
        "training.gradient_accumulation_steps": 4,
        "training.warmup_steps": 0.03,
        "training.weight_decay": 0.01,
        "training.lr_scheduler_type": "cosine",
        "training.save_steps": 100,
        "data.eval.fraction": 0.1,
    },
    adapter_defaults={
        "lora.r": 64,
        "lora.lora_alpha": 16,
        "lora.lora_dropout": 0.05,
        "quantization.load": "nf4",
    },
    has_adapter=has_adapter,
    long_rows=CUT_BY_TRL,
    method=Method("task", ("sft", "pretrain"), "preference tuning, classifier or other training"),
)
