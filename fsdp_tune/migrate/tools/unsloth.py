"""The keys of unsloth that mean something of their own.

A call is a section of the account, named by its function: `SFTConfig.learning_rate`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fsdp_tune.core.values import as_mapping
from fsdp_tune.migrate.dataset_entries import sources
from fsdp_tune.migrate.general import chat_template
from fsdp_tune.migrate.read.python_script import (
    ADAPTER,
    ANSWERS,
    ARGUMENTS,
    MAP,
    MODEL,
    PLAIN_ARGUMENTS,
    ROWS,
    TEMPLATE,
    TRAINER,
)
from fsdp_tune.migrate.rules import (
    TRAIN,
    FileKey,
    Inside,
    Outcome,
    Rule,
    Rules,
    each,
    is_on,
    lora_targets,
    off_or,
    outcome_of,
    renamed,
    same,
    section,
    switch,
)
from fsdp_tune.migrate.tool import Tool
from fsdp_tune.migrate.tools.long_rows import CUT_BY_TRL, packing_strategy
from fsdp_tune.migrate.training_arguments import dtype
from fsdp_tune.recipe.outcome import Ask, Drop, Weight, Write
from fsdp_tune.recipe.read.tool_detection import UNSLOTH

_QUANTISED = re.compile(r"(-unsloth)?-bnb-4bit$")


def has_adapter(values: Mapping[str, object]) -> bool:
    return ADAPTER in values and not is_on(as_mapping(values[MODEL]).get("full_finetuning", False))


def _model(key: FileKey) -> Outcome:
    name = _QUANTISED.sub("", str(key.value))
    reason = (
        "the weights of 16 bits, which are quantised here when they are read" if name != key.value else ""
    )
    return Write({"model.name_or_path": name}, reason)


def _four_bits(key: FileKey) -> Outcome:
    if not is_on(key.value):
        return Drop("off, as it is here")
    if is_on(key.of_file(MODEL, "full_finetuning")):
        return Drop("no effect: `full_finetuning` trains every weight")
    return Write({"quantization.load": "nf4"})


def _recomputation(key: FileKey) -> Outcome:
    is_offloaded = key.value == "unsloth"
    settings: dict[str, object] = {
        "fsdp.activation_checkpointing": "full" if is_offloaded or is_on(key.value) else "none"
    }
    settings |= {"fsdp.activation_checkpointing_offload": True} if is_offloaded else {}
    return Write(settings, weight=Weight.IMPLIED)


def _answers(key: FileKey) -> Outcome:
    """The texts before a question and an answer; here the chat template marks the answers."""
    if not key.mapping:
        return Write({"data.loss_on": "assistant"})
    return Inside(
        each(tuple(key.mapping), Write({"data.loss_on": "assistant"}, "the chat template marks the answers"))
    )


def _text_field(key: FileKey) -> Outcome:
    if key.of_file(MAP):
        return Drop("the column of the rows that the script makes")
    return (
        Drop("`text` is its name here too")
        if key.value == "text"
        else renamed(str(key.value), "text", (*TRAIN, 0))
    )


def _part(name: str) -> Rule:
    """Return a rule for a switch of the parts of a model that adapters are in."""
    fine = Drop("every linear layer of the language model is adapted, and nothing else")
    other = Ask("write the modules to adapt as `lora: {target_modules: […]}`", "lora.target_modules")
    return switch(other, fine) if name == "finetune_vision_layers" else switch(fine, other)


_OBJECT = Drop("an object of the script")
_OWN = Drop("a matter of unsloth's own code")
_length = same("data.max_length")


_SET: Rules = {
    "streaming": lambda key: Write({"data.streaming": bool(key.value)}),
    **each(
        ("trust_remote_code", "token", "num_proc", "cache_dir"),
        Drop("rows are read without code of their own"),
    ),
}


_MODEL: Rules = {
    "model_name": _model,
    "max_seq_length": _length,
    "dtype": dtype,
    "load_in_4bit": _four_bits,
    "load_in_8bit": off_or(
        "off, as it is here", "8 bits are not supported: 4 bits are `quantization: {load: nf4}`"
    ),
    "load_in_16bit": Drop("weights that are not quantised have 16 bits: `model.frozen_dtype`"),
    "full_finetuning": switch(
        Drop("every weight is trained if there is no `lora:`"), Drop("off: the file trains an adapter")
    ),
    "attn_implementation": same("model.attn_implementation"),
    "trust_remote_code": same("model.trust_remote_code"),
    "use_gradient_checkpointing": _recomputation,
    "max_lora_rank": Drop("of generation with vLLM"),
    "gpu_memory_utilization": Drop("of generation with vLLM"),
    "fast_inference": Drop("of generation with vLLM"),
    "device_map": Drop("ranks are placed by `launch:`"),
    **each(
        ("unsloth_force_compile", "offload_embedding", "auto_model", "fix_tokenizer", "return_logits"), _OWN
    ),
}


_PARTS = (
    "finetune_vision_layers",
    "finetune_language_layers",
    "finetune_attention_modules",
    "finetune_mlp_modules",
)


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
    "random_state": Drop("adapters are drawn from `training.seed`"),
    "loftq_config": Ask("adapters that change the base are not supported", "lora.init_lora_weights"),
    "max_seq_length": Drop("it is that of the model"),
    **{name: _part(name) for name in _PARTS},
    **each(("model", "task_type"), _OBJECT),
}


_ARGUMENTS: Rules = {
    "dataset_text_field": _text_field,
    **each(("max_seq_length", "max_length"), _length),
    "packing": same("data.packing"),
    "packing_strategy": packing_strategy,
    "padding_free": Drop("packed rows have no padding; `data.packing` packs"),
    "dataset_kwargs": Drop("rows are tokenised once; see `data:`"),
    "embedding_learning_rate": Ask(
        "write `training: {parameter_groups: [{match: […], learning_rate: …}]}`", "training"
    ),
    "eval_strategy": same("training.eval_strategy"),
}


_TRAINER: Rules = {
    **_ARGUMENTS,
    "eval_dataset": Ask("write the rows to evaluate on as `data: {eval: …}`", "data.eval"),
    "formatting_func": Ask(
        "rows are made by code: write them as messages, or as prompt and completion", TRAIN
    ),
    "compute_metrics": Ask("metrics are entry points: `fsdp-tune evaluate --metric`"),
    **each(("model", "tokenizer", "processing_class", "args", "train_dataset", "data_collator"), _OBJECT),
    "peft_config": Ask("write its rank, scale and modules under `lora:`", "lora"),
    "callbacks": Ask("callbacks are extensions: `extensions: {callbacks: […]}`"),
}


RULES: Rules = {
    MODEL: section(_MODEL),
    ADAPTER: lambda key: outcome_of(section(_ADAPTER), key) if key.value else Write({"lora": {}}),
    **each((ARGUMENTS, PLAIN_ARGUMENTS), section(_ARGUMENTS)),
    TRAINER: section(_TRAINER),
    ROWS: sources(TRAIN, _SET),
    MAP: Ask("rows are made by code: write them as messages, or as prompt and completion", TRAIN),
    TEMPLATE: section(
        {
            "chat_template": chat_template,
            "mapping": Drop("`from`, `value` and the usual roles are known here too"),
            **each(
                ("map_eos_token", "tokenizer", "system_message"), Drop("the tokens of the template are kept")
            ),
        }
    ),
    ANSWERS: _answers,
}
"""By name; see `settle_keys.settle_key`."""


OBJECTS = frozenset(
    {"model", "tokenizer", "processing_class", "args", "train_dataset", "data_collator", "token"}
)
"""Arguments that are objects: their text is not a value that a person has to write."""
TOOL = Tool(
    UNSLOTH,
    RULES,
    defaults={
        "training.per_device_train_batch_size": 4,
        "training.gradient_accumulation_steps": 2,
        "training.learning_rate": 5e-5,
        "training.weight_decay": 0.001,
        "training.warmup_steps": 0.1,
        "training.optim": "adamw_torch_8bit",
        "training.seed": 3407,
        "data.max_length": 2048,
        "fsdp.activation_checkpointing": "full",
    },
    adapter_defaults={
        "lora.r": 16,
        "lora.lora_alpha": 16,
        "lora.lora_dropout": 0.0,
        "quantization.load": "nf4",
    },
    has_adapter=has_adapter,
    loads_as_stored=True,
    long_rows=CUT_BY_TRL,
)
