"""Options of ms-swift that mean something of their own."""

from __future__ import annotations

import re

from fsdp_tune.migrate.general import DFT, by_name
from fsdp_tune.migrate.read.command_line import COMMAND
from fsdp_tune.migrate.rules import (
    TRAIN,
    Also,
    Decide,
    FileKey,
    Outcome,
    Rule,
    Rules,
    Step,
    by_synonym,
    cases,
    each,
    fine_or,
    implies,
    is_on,
    lora_targets,
    off_or,
    outcome_of,
    remarked,
    same,
    steps,
)
from fsdp_tune.migrate.tool import Tool
from fsdp_tune.migrate.tools.experts import experts_kernel
from fsdp_tune.migrate.tools.long_rows import DROPPED
from fsdp_tune.migrate.tools.swift_templates import said_of_model, template
from fsdp_tune.migrate.training_arguments import dtype
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Drop, Write
from fsdp_tune.recipe.read.tool_detection import SWIFT
from fsdp_tune.recipe.synonyms import SYNONYMS

MEDIA = "models with images or sound are not trained here"
"""Said of an option."""
JOINED = "a row's `input` follows its `instruction` after an empty line here, after one line end there"
"""Said of rows of Alpaca's format, whose own prompt has an empty line. LLaMA-Factory joins the two in its
data/converter.py, ms-swift in dataset/preprocessor/core.py."""


def method(key: FileKey) -> Outcome:
    name = "finetuning_type" if key.name == "finetuning_type" else "tuner_type"
    return Write({"lora": {}}) if key.value == "lora" else SYNONYMS[name].outcome(key.value)


_HUB = re.compile("(?:HF|MS)::")
_NAME = re.compile(r"(?P<path>[^:#]+|.*?)(?::(?P<subset>[^:#]+))?(?:#(?P<rows>\d+))?")


def _named_datasets(place: KeyPath) -> Rule:
    """`org/name:subset#rows`, with or without its hub before it, or files."""

    def rule(key: FileKey) -> Outcome:
        names = [str(name) for name in key.items]
        settings: dict[KeyPath, object] = {}
        decisions: list[Step] = []
        for index, name in enumerate(names):
            match = _NAME.fullmatch(_HUB.sub("", name, count=1))
            assert match is not None
            settings[(*place, index, "path")] = match["path"]
            settings |= {(*place, index, "name"): match["subset"]} if match["subset"] else {}
            if match["rows"]:
                settings[(*place, index, "max_rows")] = int(match["rows"])
                words = (
                    f"ms-swift draws {match['rows']} rows, and repeats those of a smaller set; here it "
                    "is the most, from the first on"
                )
                decisions.append(Decide((*place, index, "max_rows"), words))
        from_hub = any("/" in name and not name.startswith((".", "/", "HF::")) for name in names)
        said = ["ids are of ModelScope there, of the Hugging Face hub here"] if from_hub else []
        said += [] if key.of_file(COMMAND) == "pt" else [JOINED]
        return [*decisions, Write(settings, "; ".join(said))]

    return rule


def _model(key: FileKey) -> Outcome:
    is_id = re.fullmatch(r"[^/.~][^/]*/[^/]+", str(key.value)) is not None
    written = Write(
        {"model.name_or_path": key.value},
        "an id of ModelScope there, of the Hugging Face hub here" if is_id else "",
    )
    return remarked(written, said_of_model(key))


def _pretraining(key: FileKey) -> Outcome:
    """`swift pt` trains every token of rows without a chat template, whatever the options say."""
    words = (
        "`swift pt` joins the messages of a row without a chat template: write such rows as `text`, or "
        "train them by the template"
    )
    return [
        Write({"data.loss_on": "all"}, f"`swift {key.value}` trains every token"),
        Decide("data.chat_template", words),
    ]


def _unless_pretraining(rule: Rule) -> Rule:
    """Return a rule for a key that `swift pt` does not read."""
    words = "`swift pt` sets it: every token of rows without a chat template"
    return lambda key: Drop(words) if key.of_file(COMMAND) == "pt" else outcome_of(rule, key)


_loss_scale = cases(
    "data.loss_on",
    {"default": "assistant", "last_round": "last_assistant", "all": "all"},
    Ask("tokens have one weight here: write `data: {loss_on: …}`", "data.loss_on"),
)
_truncation = cases(
    "data.overlong",
    {"delete": "drop", "right": "truncate", "split": "split", "raise": "error"},
    Ask("rows are cut at their end: `data: {overlong: truncate}`, or `drop`", "data.overlong"),
)


def _new_tokens(key: FileKey) -> Outcome:
    """Tokens, or files of words."""
    names = [str(each) for each in key.items] if isinstance(key.value, list) else str(key.value).split()
    if any(name.endswith(".txt") for name in names):
        return Ask("write the words of the file: `model: {tokens: {add: […]}}`", "model.tokens.add")
    return Write({"model.tokens.add": names})


def _interleaved(key: FileKey) -> Outcome:
    return Write({(*TRAIN, index, "weight"): float(share) for index, share in enumerate(key.items)})


def _half_of(dtype_name: object) -> str:
    """Return the half precision that ms-swift switches on for weights of a dtype, unless its key says
    something."""
    return "bf16" if dtype_name in ("bfloat16", "bf16") else "fp16"


def _torch_dtype(key: FileKey) -> Outcome:
    half = _half_of(key.value)
    if (given := key.of_file(half)) is not None and not is_on(given):
        return [*steps(dtype(key)), Also("precision.mixed_precision", "no", f"{half}: off")]
    return [
        *steps(dtype(key)),
        Also("precision.mixed_precision", half, f"{key.name}: ms-swift computes in half precision"),
    ]


def _bf16(key: FileKey) -> Outcome:
    """Off, it leaves fp16 on that ms-swift switches on for weights in fp32 or fp16."""
    weights, fp16 = key.of_file("torch_dtype"), key.of_file("fp16")
    if weights is not None and _half_of(weights) == "fp16" and fp16 is None and not is_on(key.value):
        return Drop("off: ms-swift computes in fp16 unless `fp16` is off too")
    return by_name(key)


_STAGES = {"0": "NO_SHARD", "1": "SHARD_GRAD_OP", "2": "SHARD_GRAD_OP", "3": "FULL_SHARD"}


def _sharding(key: FileKey) -> Outcome:
    """`zero2`, `zero3_offload` …, or a file."""
    match = re.fullmatch(r"zero([0-3])(_offload)?", str(key.value))
    if match is None:
        return by_name(key)
    return Write(
        {"fsdp.sharding_strategy": _STAGES[match[1]], **({"fsdp.offload_params": True} if match[2] else {})}
    )


def _attention(key: FileKey) -> Outcome:
    outcome = SYNONYMS["flash_attn"].outcome(key.value)
    return outcome if isinstance(outcome, Write) else Write({"model.attn_implementation": key.value})


SWIFT_RULES: Rules = {
    **each(("model", "model_id_or_path"), _model),
    "dataset": _named_datasets(("data", "train")),
    "val_dataset": _named_datasets(("data", "eval")),
    **each(("train_type", "tuner_type", "sft_type"), method),
    "target_modules": lora_targets,
    "torch_dtype": _torch_dtype,
    "bf16": _bf16,
    "new_special_tokens": _new_tokens,
    "interleave_prob": _interleaved,
    "stopping_strategy": same("data.mixture.stopping_strategy"),
    "enable_dft_loss": implies({"training.loss": "dft"}, DFT),
    "lorap_lr_ratio": same("lora.loraplus_lr_ratio"),
    "init_weights": same("lora.init_lora_weights"),
    "experts_impl": experts_kernel,
    "lora_bias": fine_or(("none",), "off, as it is here", "`lora: {bias: …}` trains biases", "lora.bias"),
    **each(("lazy_tokenize", "use_logits_to_keep", "acc_strategy"), Drop("a matter of ms-swift's own code")),
    **each(("use_ray", "device_groups"), Drop("ranks are started by `fsdp-tune train`")),
    COMMAND: _pretraining,
    "loss_scale": _unless_pretraining(_loss_scale),
    "truncation_strategy": _truncation,
    "deepspeed": _sharding,
    "template": _unless_pretraining(template),
    "sequence_parallel_size": same("parallelism.sp_size"),
    "attn_impl": _attention,
    "streaming": same("data.streaming"),
    "shuffle_buffer_size": same("data.shuffle_buffer_size"),
    "dataset_shuffle": same("data.shuffle"),
    "train_dataloader_shuffle": same("data.shuffle"),
    **each(
        ("load_from_cache_file", "add_version", "use_hf", "check_model"),
        Drop("a matter of ms-swift's own code"),
    ),
    **each(("freeze_vit", "freeze_aligner", "vit_lr", "aligner_lr", "max_pixels"), Drop(MEDIA)),
    "freeze_llm": off_or(
        "off", "the language model is what is trained; `model: {freeze: [PATTERN]}` freezes parts"
    ),
    "use_chat_template": _unless_pretraining(
        off_or("rows of text have no template", "chats are rendered by the chat template")
    ),
    **each(("model_author", "model_name"), Ask("write the name into the rows", TRAIN)),
    "system": Ask("add the system message to the rows", TRAIN),
    "task_type": fine_or(
        ("causal_lm",),
        "the models are causal language models",
        "classifiers and embeddings are not trained here",
    ),
    "model_type": Drop("classes follow from the files of the model"),
    "quant_method": Drop("4 bits are NF4 here, as in bitsandbytes"),
    "merge_lora": by_synonym("merge_lora"),
}
"""By name; see `settle_keys.settle_key`."""
SWIFT_TOOL = Tool(
    SWIFT,
    SWIFT_RULES,
    defaults={
        "training.per_device_train_batch_size": 1,
        "training.weight_decay": 0.1,
        "training.adam_beta2": 0.95,
        "training.lr_scheduler_type": "cosine",
        "training.logging_steps": 5,
        "fsdp.activation_checkpointing": "full",
        "precision.mixed_precision": "bf16",
    },
    adapter_defaults={
        "lora.r": 8,
        "lora.lora_alpha": 32,
        "lora.lora_dropout": 0.05,
        "lora.target_modules": "all-linear",
        "training.learning_rate": 1e-4,
    },
    full_defaults={"training.learning_rate": 1e-5},
    adapter_switches=("tuner_type", "train_type", "sft_type"),
    trains_adapters=True,
    loads_as_stored=True,
    upcasts=True,
    long_rows=DROPPED,
    stream_buffer=1000,
    other_training={"rlhf_type": "preference tuning"},
)
