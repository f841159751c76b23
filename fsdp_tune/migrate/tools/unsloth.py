"""The keys of unsloth that mean something of their own.

A call is a section of the account, named by its function: `SFTConfig.learning_rate`.
"""

from __future__ import annotations

import re
from typing import Any, cast

from fsdp_tune.migrate.general import (
    TRAIN,
    Rule,
    Rules,
    SourceRule,
    chat_template,
    dtype,
    is_on,
    leave,
    leave_here,
    lora_targets,
    off_or,
    question,
    same,
    section,
    settle_source,
)
from fsdp_tune.migrate.ledger import Fate, Ledger, Path, Weight
from fsdp_tune.migrate.read.python_script import ADAPTER, ANSWERS, ARGUMENTS, MAP, MODEL, PLAIN_ARGUMENTS, ROWS, TEMPLATE, TRAINER
from fsdp_tune.migrate.tools.long_rows import packing_strategy

_QUANTISED = re.compile(r"(-unsloth)?-bnb-4bit$")


def has_adapter(values: dict[str, Any]) -> bool:
    return ADAPTER in values and not is_on(cast("dict[str, Any]", values[MODEL]).get("full_finetuning", False))


def _model(ledger: Ledger, path: Path, value: object) -> None:
    name = _QUANTISED.sub("", str(value))
    reason = "the weights of 16 bits, which are quantised here when they are read" if name != value else ""
    ledger.write(path, {"model.name_or_path": name}, Fate.CONVERTED, reason)


def _full(ledger: Ledger, path: Path, value: Any) -> None:
    ledger.drop(path, "every weight is trained if there is no `lora:`" if is_on(value) else "off: the file trains an adapter")


def _four_bits(ledger: Ledger, path: Path, value: Any) -> None:
    if not is_on(value):
        ledger.drop(path, "off, as it is here")
    elif is_on(ledger.value(MODEL, "full_finetuning")):
        ledger.drop(path, "no effect: `full_finetuning` trains every weight")
    else:
        ledger.write(path, {"quantization.load": "nf4"}, Fate.CONVERTED)


def _recomputation(ledger: Ledger, path: Path, value: Any) -> None:
    settings: dict[str, Any] = {"fsdp.activation_checkpointing": "full" if value == "unsloth" or is_on(value) else "none"}
    settings |= {"fsdp.activation_checkpointing_offload": True} if value == "unsloth" else {}
    ledger.write(path, settings, Fate.CONVERTED, weight=Weight.IMPLIED)


def _length(ledger: Ledger, path: Path, value: Any) -> None:
    ledger.write(path, {"data.max_length": value}, Fate.CONVERTED)


def _answers(ledger: Ledger, path: Path, value: object) -> None:
    """The texts before a question and an answer; here the chat template marks the answers."""
    names = list(cast("dict[str, Any]", value)) if isinstance(value, dict) else []
    settings: dict[str, Any] = {"data.loss_on": "assistant"}
    if not names:
        ledger.write(path, settings, Fate.CONVERTED)
    for name in names:
        if ledger.is_open((*path, name)):
            ledger.write((*path, name), settings, Fate.CONVERTED, "the chat template marks the answers")


def _rows(ledger: Ledger, path: Path, value: object) -> None:
    for index in range(len(cast("list[Any]", value))):
        settle_source(ledger, (*path, index), (*TRAIN, index), _SET)


def _text_field(ledger: Ledger, path: Path, value: object) -> None:
    if value == "text" or ledger.value(MAP):
        ledger.drop(path, "the column of the rows that the script makes" if ledger.value(MAP) else "`text` is its name here too")
    else:
        ledger.write(path, {(*TRAIN, 0, "rename_columns", str(value)): "text"}, Fate.CONVERTED)


def _part(name: str) -> Rule:
    """Return a rule for a switch of the parts of a model that adapters are in."""
    fine = name != "finetune_vision_layers"

    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        if is_on(value) is fine:
            ledger.drop(path, "every linear layer of the language model is adapted, and nothing else")
        else:
            ledger.ask(path, "write the modules to adapt as `lora: {target_modules: […]}`", ("lora", "target_modules"))

    return rule


_OBJECT = leave("an object of the script")


_OWN = leave("a matter of unsloth's own code")


_SET: dict[str, SourceRule] = {
    "streaming": lambda ledger, path, _place, value: ledger.write(path, {"data.streaming": bool(value)}, Fate.CONVERTED),
    **dict.fromkeys(("trust_remote_code", "token", "num_proc", "cache_dir"), leave_here("rows are read without code of their own")),
}


_MODEL: Rules = {
    "model_name": _model,
    "max_seq_length": _length,
    "dtype": dtype("model.dtype"),
    "load_in_4bit": _four_bits,
    "load_in_8bit": off_or("off, as it is here", "8 bits are not supported: 4 bits are `quantization: {load: nf4}`"),
    "load_in_16bit": leave("weights that are not quantised have 16 bits: `model.frozen_dtype`"),
    "full_finetuning": _full,
    "attn_implementation": same("model.attn_implementation"),
    "trust_remote_code": same("model.trust_remote_code"),
    "use_gradient_checkpointing": _recomputation,
    "max_lora_rank": leave("of generation with vLLM"),
    "gpu_memory_utilization": leave("of generation with vLLM"),
    "fast_inference": leave("of generation with vLLM"),
    "device_map": leave("ranks are placed by `launch:`"),
    **dict.fromkeys(("unsloth_force_compile", "offload_embedding", "auto_model", "fix_tokenizer", "return_logits"), _OWN),
}


_PARTS = ("finetune_vision_layers", "finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules")


_ADAPTER: Rules = {
    "r": same("lora.r"),
    "lora_alpha": same("lora.lora_alpha"),
    "lora_dropout": same("lora.lora_dropout"),
    "bias": same("lora.bias"),
    "target_modules": lora_targets,
    "use_rslora": same("lora.use_rslora"),
    "use_dora": same("lora.use_dora"),
    "modules_to_save": same("lora.modules_to_save"),
    "use_gradient_checkpointing": _recomputation,
    "random_state": leave("adapters are drawn from `training.seed`"),
    "loftq_config": question("adapters that change the base are not supported", "lora", "init_lora_weights"),
    "max_seq_length": leave("it is that of the model"),
    **{name: _part(name) for name in _PARTS},
    **dict.fromkeys(("model", "task_type"), _OBJECT),
}


_ARGUMENTS: Rules = {
    "dataset_text_field": _text_field,
    **dict.fromkeys(("max_seq_length", "max_length"), _length),
    "packing": same("data.packing"),
    "packing_strategy": packing_strategy,
    "padding_free": leave("packed rows have no padding; `data.packing` packs"),
    "dataset_kwargs": leave("rows are tokenised once; see `data:`"),
    "embedding_learning_rate": question("write `training: {parameter_groups: [{match: […], learning_rate: …}]}`", "training"),
    "eval_strategy": same("training.eval_strategy"),
}


_TRAINER: Rules = {
    **_ARGUMENTS,
    "eval_dataset": question("write the rows to evaluate on as `data: {eval: …}`", "data", "eval"),
    "formatting_func": question("rows are made by code: write them as messages, or as prompt and completion", "data", "train"),
    "compute_metrics": question("metrics are entry points: `fsdp-tune evaluate --metric`"),
    **dict.fromkeys(("model", "tokenizer", "processing_class", "args", "train_dataset", "data_collator"), _OBJECT),
    "peft_config": question("write its rank, scale and modules under `lora:`", "lora"),
    "callbacks": question("callbacks are extensions: `extensions: {callbacks: […]}`"),
}


RULES: Rules = {
    MODEL: section(_MODEL),
    ADAPTER: lambda ledger, path, value: (
        section(_ADAPTER)(ledger, path, value) if value else ledger.write(path, {"lora": {}}, Fate.CONVERTED)
    ),
    **dict.fromkeys((ARGUMENTS, PLAIN_ARGUMENTS), section(_ARGUMENTS)),
    TRAINER: section(_TRAINER),
    ROWS: _rows,
    MAP: question("rows are made by code: write them as messages, or as prompt and completion", "data", "train"),
    TEMPLATE: section(
        {
            "chat_template": chat_template("data.chat_template"),
            "mapping": leave("`from`, `value` and the usual roles are known here too"),
            **dict.fromkeys(("map_eos_token", "tokenizer", "system_message"), leave("the tokens of the template are kept")),
        }
    ),
    ANSWERS: _answers,
}
"""By name; see `general.settle_key`."""


OBJECTS = frozenset({"model", "tokenizer", "processing_class", "args", "train_dataset", "data_collator", "token"})
"""Arguments that are objects: their text is not a value that a person has to write."""
