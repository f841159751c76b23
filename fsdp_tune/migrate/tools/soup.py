"""Keys of Soup's configurations (`soup train`), whose sections have the names of a recipe's."""

from __future__ import annotations

from typing import Any, cast

from fsdp_tune.migrate.general import (
    TRAIN,
    UNSUPPORTED_SWITCH,
    Rules,
    by_synonym,
    chat_template,
    fine_or,
    implies,
    is_on,
    leave,
    lora_targets,
    off_or,
    question,
    same,
    section,
)
from fsdp_tune.migrate.ledger import Fate, Ledger, Path

TASKS = ("sft", "pretrain")
UNSUPPORTED = "preference tuning, classifier or other training"
"""The other values of `task`."""
_FORMATS = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "chatml": "messages",
    "tool-calling": "messages",
    "plaintext": "text",
    "pre_tokenized": "tokenized",
    "input_output": "segments",
}
_MEDIA = "models with images or sound are not trained here"


def has_adapter(values: dict[str, Any]) -> bool:
    """Return whether a file trains an adapter: it does unless its rank is 0."""
    training = values.get("training")
    lora = cast("dict[str, Any]", training).get("lora") if isinstance(training, dict) else None
    return not isinstance(lora, dict) or cast("dict[str, Any]", lora).get("r", 64) != 0


def _task(ledger: Ledger, path: Path, value: object) -> None:
    if value == "pretrain":
        ledger.write(path, {"data.loss_on": "all"}, Fate.CONVERTED, "pre-training: every token is trained")
    else:
        ledger.drop(path, "supervised fine-tuning is what `train` does")


def _rows(ledger: Ledger, path: Path, value: Any) -> None:
    names = cast("list[Any]", value) if isinstance(value, list) else [value]
    ledger.write(path, {(*TRAIN, index, "path"): name for index, name in enumerate(names)}, Fate.CONVERTED)


def _format(ledger: Ledger, path: Path, value: Any) -> None:
    if value == "auto":
        ledger.drop(path, "the columns of the rows decide here too")
    elif value in _FORMATS:
        ledger.write(path, {"data.format": _FORMATS[value]}, Fate.KEPT if _FORMATS[value] == value else Fate.CONVERTED)
    else:
        ledger.ask(path, f"rows of the format `{value}` are not trained here", ("data", "format"))


def _held_out(ledger: Ledger, path: Path, value: Any) -> None:
    if value == 0:
        ledger.drop(path, "nothing is evaluated, as it is here")
    else:
        ledger.write(path, {"data.eval.fraction": value}, Fate.CONVERTED)


def _responses(ledger: Ledger, path: Path, value: Any) -> None:
    if is_on(value):
        ledger.drop(path, "prompts are not trained here either")
    else:
        ledger.write(path, {"data.loss_on": "all"}, Fate.CONVERTED)


def _micro_batch(ledger: Ledger, path: Path, value: Any) -> None:
    if value == "auto":
        words = "`fsdp-tune plan` ranks the sizes that fit; 1 is the default"
        ledger.ask(path, words, ("training", "per_device_train_batch_size"))
    else:
        ledger.write(path, {"training.per_device_train_batch_size": value}, Fate.CONVERTED)


def _quantization(ledger: Ledger, path: Path, value: object) -> None:
    if value == "none":
        ledger.drop(path, "off, as it is here")
    elif value == "4bit":
        ledger.write(path, {"quantization.load": "nf4"}, Fate.CONVERTED)
    else:
        ledger.ask(path, f"{value} is not supported: 4 bits are `quantization: {{load: nf4}}`", ("quantization", "load"))


def _targets(ledger: Ledger, path: Path, value: Any) -> None:
    if value == "auto":
        words = "PEFT adapts a selection of its own for each architecture (Llama: q_proj and v_proj); here it is every linear layer"
        ledger.ask(path, words, ("lora", "target_modules"))
    else:
        lora_targets(ledger, path, value)


def _rank(ledger: Ledger, path: Path, value: Any) -> None:
    if value == 0:
        ledger.drop(path, "no adapter: every weight is trained")
    else:
        ledger.write(path, {"lora.r": value}, Fate.KEPT)


def _recomputation(ledger: Ledger, path: Path, value: Any) -> None:
    if value in ("selective", "medium", "auto"):
        words = "write `fsdp: {activation_checkpointing: full}`, or `activation_checkpointing_every: 2` for every other layer"
        ledger.ask(path, words, ("fsdp", "activation_checkpointing"))
    else:
        on = is_on(value) or value == "full"
        ledger.write(path, {"fsdp.activation_checkpointing": "full" if on else "none"}, Fate.CONVERTED)


_SWITCHES = (
    *("use_galore", "use_mod", "use_longlora", "lisa_enabled", "stream_layers", "curriculum", "quantization_aware", "warmup_auto"),
    *("forgetting_detection", "checkpoint_intelligence", "early_stop_on_regression", "convergence_detection", "loss_spike_recovery"),
)
_LORA: Rules = {
    "r": _rank,
    "alpha": same("lora.lora_alpha"),
    "dropout": same("lora.lora_dropout"),
    "target_modules": _targets,
    **{name: same(f"lora.{name}") for name in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern")},
    **dict.fromkeys(("use_vera", "use_olora"), off_or("off", "adapters that are not LoRA, or that change the base, are not supported")),
    "init_strategy": fine_or(("random",), "as it is here", "adapters that change the base are not supported", "lora", "init_lora_weights"),
    **dict.fromkeys(("loftq_iter", "loftq_bits"), leave("no effect without LoftQ")),
}
_DATA: Rules = {
    "train": _rows,
    "format": _format,
    "val_split": _held_out,
    "max_length": same("data.max_length"),
    "train_on_responses_only": _responses,
    "train_on_messages_with_train_field": off_or("off", "messages with a `train` of false are not trained here: leave it in the rows"),
    "chat_template": chat_template("data.chat_template"),
    "streaming": same("data.streaming"),
    "buffer_size": same("data.shuffle_buffer_size"),
    **{name: by_synonym(name) for name in ("mask_history", "train_on_prompt", "new_special_tokens", "resize_vocab")},
    **dict.fromkeys(("image_dir", "audio_dir", "video_dir", "video_fps", "video_maxlen"), leave(_MEDIA)),
    **dict.fromkeys(("remove_unused_columns", "skip_prepare_dataset"), leave("rows are tokenised once; other columns are ignored")),
}
_TRAINING: Rules = {
    "epochs": same("training.num_train_epochs"),
    "lr": same("training.learning_rate"),
    "batch_size": _micro_batch,
    "auto_batch_size_strategy": leave("`fsdp-tune plan` ranks the sizes that fit"),
    "lora": section(_LORA),
    "quantization": _quantization,
    "scheduler": same("training.lr_scheduler_type"),
    "use_flash_attn": implies({"model.attn_implementation": "flash_attention_2"}),
    "use_liger": same("kernels.liger"),
    "use_cut_ce": implies({"kernels.loss": "chunked"}),
    "gradient_checkpointing": _recomputation,
    "use_ring_attention": off_or("off", "write `parallelism: {sp_size: N}`, the ranks that share a row"),
    "rope_scaling_type": question("write `model: {rope_scaling: {rope_type: …, factor: …}}`", "model", "rope_scaling"),
    "yarn_factor": same("model.rope_scaling.factor"),
    **dict.fromkeys(("packing", "multipack"), same("data.packing")),
    "packing_cross_doc_attn_mask": leave("examples in one row never see each other here"),
    "neftune_alpha": same("training.neftune_noise_alpha"),
    "loraplus_lr_ratio": same("lora.loraplus_lr_ratio"),
    "moe_lora": off_or("off", "experts are adapted by `lora: {target_parameters: […]}`"),
    "moe_aux_loss_coeff": same("model.config_overrides.router_aux_loss_coef"),
    "activation_offloading": implies({"fsdp.activation_checkpointing_offload": True}),
    "use_fsdp2_compile": same("kernels.compile"),
    "bnb_4bit_use_double_quant": by_synonym("bnb_4bit_use_double_quant"),
    **dict.fromkeys(_SWITCHES, UNSUPPORTED_SWITCH),
    "early_stop_patience": leave("no effect without `early_stop_on_regression`"),
    "loss_watchdog": leave("a loss that is not finite ends the run; spikes are events of it"),
    **dict.fromkeys(("loss_watchdog_threshold", "loss_watchdog_patience"), leave("spikes are found against the run's own losses")),
    "hub": fine_or(("hf",), "as it is here", "models are those of the Hugging Face hub", "model", "name_or_path"),
}
RULES: Rules = {
    "base": same("model.name_or_path"),
    "task": _task,
    "modality": fine_or(("text",), "text is what is trained", _MEDIA),
    "backend": leave("kernels are chosen in `kernels:`"),
    "data": section(_DATA),
    "training": section(_TRAINING),
    "output": same("output_dir"),
    "experiment_name": same("name"),
    **dict.fromkeys(("eval", "advise", "ship"), leave("`fsdp-tune evaluate` measures the result")),
}
"""By name; see `general.settle_key`."""
