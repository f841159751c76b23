"""Options of TRL, of ms-swift and of transformers' `run_clm.py` that mean something of their own: all take
one flat list."""

from __future__ import annotations

import re

from fsdp_tune.migrate.general import DFT, by_name, dtype, sources
from fsdp_tune.migrate.ledger import Ledger, LedgerView
from fsdp_tune.migrate.read.command_line import COMMAND
from fsdp_tune.migrate.rules import (
    TRAIN,
    UNSUPPORTED_SWITCH,
    Also,
    Decide,
    FileKey,
    Inside,
    Outcome,
    Rule,
    Rules,
    Step,
    by_synonym,
    cases,
    each,
    fine_or,
    implies,
    in_source,
    is_on,
    lora_targets,
    of_the_set,
    off_or,
    outcome_of,
    remarked,
    renamed,
    same,
    section,
    steps,
)
from fsdp_tune.migrate.tool import TRAINER_DEFAULTS, Tool
from fsdp_tune.migrate.tools.experts import experts_kernel
from fsdp_tune.migrate.tools.long_rows import CUT_BY_TRL, DROPPED, SPLIT, packing_strategy
from fsdp_tune.migrate.tools.swift_templates import said_of_model, template
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.outcome import Ask, Drop, Weight, Write
from fsdp_tune.recipe.read.tool_detection import EXAMPLES, SWIFT, TRL
from fsdp_tune.recipe.synonyms import SYNONYMS

MEDIA = "models with images or sound are not trained here"
"""Said of an option."""
JOINED = "a row's `input` follows its `instruction` after an empty line here, after one line end there"
"""Said of rows of Alpaca's format, whose own prompt has an empty line. LLaMA-Factory joins the two in its
data/converter.py, ms-swift in dataset/preprocessor/core.py."""
FIRST: KeyPath = (*TRAIN, 0)


def method(key: FileKey) -> Outcome:
    name = "finetuning_type" if key.name == "finetuning_type" else "tuner_type"
    return Write({"lora": {}}) if key.value == "lora" else SYNONYMS[name].outcome(key.value)


_NAME = re.compile(r"(?P<path>[^:#]+|.*?)(?::(?P<subset>[^:#]+))?(?:#(?P<rows>\d+))?")


def _named_datasets(place: KeyPath) -> Rule:
    """`org/name:subset#rows`, or files; several with spaces between them."""

    def rule(key: FileKey) -> Outcome:
        names = [str(name) for name in key.items]
        settings: dict[KeyPath, object] = {}
        decisions: list[Step] = []
        for index, name in enumerate(names):
            match = _NAME.fullmatch(name)
            assert match is not None
            settings[(*place, index, "path")] = match["path"].removeprefix("HF::").removeprefix("MS::")
            settings |= {(*place, index, "name"): match["subset"]} if match["subset"] else {}
            if match["rows"]:
                settings[(*place, index, "max_rows")] = int(match["rows"])
                words = (
                    f"ms-swift draws {match['rows']} rows, and repeats those of a smaller set; here it "
                    "is the most, from the first on"
                )
                decisions.append(Decide((*place, index, "max_rows"), words))
        from_hub = any("/" in name and not name.startswith((".", "/")) for name in names)
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


def unless_pretraining(rule: Rule, name: str, words: str) -> Rule:
    """Return a rule for a key that is not read in pre-training. `name`: the key of the method, which is `pt`
    then."""
    return lambda key: Drop(words) if key.of_file(name) == "pt" else outcome_of(rule, key)


def _unless_pretraining(rule: Rule) -> Rule:
    return unless_pretraining(
        rule, COMMAND, "`swift pt` sets it: every token of rows without a chat template"
    )


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
"""By name; see `settling.settle_key`."""


# ---- run_clm.py of transformers, and the options that TRL has too


def _optional_adapter(key: FileKey) -> Outcome:
    return (
        Write({"lora": {}})
        if isinstance(SYNONYMS["use_peft"].outcome(key.value), Write)
        else Drop("off, as it is here")
    )


def _share_held_out(key: FileKey) -> Outcome:
    """A percentage of the training rows; a file or a split of its own comes first."""
    if key.of_file("validation_file") is not None:
        return Drop("`validation_file` is evaluated")
    if not isinstance(key.value, int | float):
        return Ask("write a share: `data: {eval: {fraction: 0.05}}`", "data.eval")
    if not key.of_file("do_eval") and key.of_file("eval_strategy") in (None, "no"):
        return Drop("nothing is evaluated")
    return Write({"data.eval.fraction": float(key.value) / 100}, "a percentage there, a share here")


def _config_name(key: FileKey) -> Outcome:
    if key.value == key.of_file("model_name_or_path"):
        return Drop("it is that of the model")
    return Ask("a model of random weights is `model: {from_config: …}`", "model.from_config")


OF_SCRIPTS: Rules = {
    "model_name_or_path": same("model.name_or_path"),
    "dataset_name": of_the_set("path"),
    **each(("dataset_config", "dataset_config_name"), of_the_set("name")),
    "dataset_train_split": of_the_set("split"),
    "use_peft": _optional_adapter,
    "lora_task_type": Drop("the models are causal language models"),
}
"""Options of `trl sft` and `run_clm.py`."""
EXAMPLE_RULES: Rules = {
    **OF_SCRIPTS,
    "train_file": of_the_set("path"),
    "validation_file": of_the_set("path", ("data", "eval", 0)),
    "validation_split_percentage": _share_held_out,
    "max_train_samples": of_the_set("max_rows"),
    "max_eval_samples": Ask("write a number of rows: `data: {eval: {rows: …}}`", "data.eval"),
    "keep_linebreaks": Drop("rows of a text keep their line ends"),
    "config_name": _config_name,
    "config_overrides": Ask("write a mapping: `{n_layer: 2}`", "model.config_overrides"),
    "model_type": Drop("classes follow from the files of model and tokenizer"),
    "streaming": same("data.streaming"),
}
"""By name; see `settling.settle_key`."""


def pack_texts(ledger: Ledger) -> None:
    """`run_clm.py` joins all texts and cuts them into full blocks, of 1,024 tokens unless it is told
    otherwise."""
    origin = "run_clm.py joins texts and fills every block"
    ledger.set(("data", "packing"), True, origin, Weight.DEFAULT)
    ledger.set(("data", "packing_strategy"), "wrapped", origin, Weight.DEFAULT)
    ledger.set(("data", "max_length"), 1024, "default of run_clm.py", Weight.DEFAULT)


# ---- Mixtures of TRL and of the alignment handbook

_WRITE_SETS = "write the data sets as `data: {train: [{path: NAME}]}`"


def _kept_share(key: FileKey) -> Outcome:
    if key.value == 1:
        return Drop("all rows are used here too")
    return Ask(
        "a share of the rows, drawn once, is used: write their number, `max_rows: N`",
        (*key.place, "max_rows"),
    )


MIXED: Rules = {"id": in_source("path"), "config": in_source("name"), "weight": _kept_share}
"""Of the alignment handbook and its descendants."""


def _mixer(key: FileKey) -> Outcome:
    """{data set: share of its training rows}, of the older alignment handbook."""
    if not key.mapping:
        return Ask(_WRITE_SETS, TRAIN)
    return Inside({name: _mixed_set((*TRAIN, index)) for index, name in enumerate(key.mapping)}, nulls=True)


def _mixed_set(place: KeyPath) -> Rule:
    def rule(key: FileKey) -> Outcome:
        if key.value == 1:
            return Write({(*place, "path"): key.path[-1]})
        path = Also((*place, "path"), key.path[-1], dotted(key.path), Weight.GIVEN)
        return [path, *steps(_kept_share(FileKey(key.ledger, key.path, key.value, place)))]

    return rule


# ---- TRL


_MIXTURES = ("datasets", "dataset_mixture", "dataset_mixer")


def is_mixed(ledger: LedgerView, path: KeyPath = ("",)) -> bool:
    """Return whether there is a mixture beside a key: the single data set is ignored then."""
    return any(ledger.value(*path[:-1], name) for name in _MIXTURES)


def _single(rule: Rule) -> Rule:
    """Return a rule for a key of the single data set."""
    words = "the mixture is read, and not the single data set"
    return lambda key: Drop(words) if is_mixed(key.ledger, key.path) else outcome_of(rule, key)


def _train_split(key: FileKey) -> Outcome:
    if not is_mixed(key.ledger, key.path):
        return Write({(*FIRST, "split"): key.value})
    if key.value == "train":
        return Drop("a mixture has this one")
    return Ask("a mixture has the split `train` alone: the splits of its data sets are theirs", TRAIN)


def _eval_split(key: FileKey) -> Outcome:
    """TRL reads it only if it evaluates; of a mixture it is the rows that are held out."""
    if key.of_file("eval_strategy") in (None, "no"):
        return Drop("`eval_strategy` evaluates nothing")
    if is_mixed(key.ledger, key.path):
        size = key.beside("test_split_size") or key.beside("dataset_mixture", "test_split_size")
        if size and key.value == "test":
            return Drop("the rows that `test_split_size` holds out")
        return Ask("a mixture has the split `test` alone, by `test_split_size`", "data.eval")
    place: KeyPath = ("data", "eval", 0)
    config = key.of_file("dataset_config")
    settings: dict[KeyPath, object] = {
        (*place, "path"): key.of_file("dataset_name") or "NAME",
        (*place, "split"): key.value,
    }
    return Write(settings | ({(*place, "name"): config} if config is not None else {}))


def _held_out(key: FileKey) -> Outcome:
    """Of all rows of a mixture: a number, or a share below 1."""
    if not is_mixed(key.ledger, key.path):
        return Drop("TRL holds out rows of a mixture (`datasets`) alone")
    return Write({f"data.eval.{'rows' if isinstance(key.value, int) else 'fraction'}": key.value})


def _init_kwargs(key: FileKey) -> Outcome:
    """Arguments of `from_pretrained`."""
    return Inside({}) if isinstance(key.value, dict) else Ask("write its keys under `model:`", "model")


def _assistant_only(key: FileKey) -> Outcome:
    """Off, what is trained is left to the format of the rows."""
    if key.value is False:
        return Drop("off: `data.loss_on` says which tokens are trained")
    return SYNONYMS["assistant_only_loss"].outcome(key.value)


_OTHER_LOSS = fine_or(
    ("nll", "chunked_nll"), "it is the loss here too", "the loss is `cross_entropy` or `dft`", "training.loss"
)


TRL_RULES: Rules = {
    **OF_SCRIPTS,
    **{name: _single(OF_SCRIPTS[name]) for name in ("dataset_name", "dataset_config", "dataset_config_name")},
    "dataset_train_split": _train_split,
    "dataset_test_split": _eval_split,
    "dataset_text_field": lambda key: renamed(str(key.value), "text", FIRST),
    "dataset_streaming": _single(same("data.streaming")),
    "datasets": sources(TRAIN, {}, hint=_WRITE_SETS),
    "dataset_mixer": _mixer,
    "dataset_configs": Ask("write `name` of each data set", TRAIN),
    "dataset_splits": Ask(
        "write `split` of each data set; those with `test` in their names are evaluated", "data.eval"
    ),
    "test_split_size": _held_out,
    "dataset_mixture": section(
        {
            "datasets": sources(TRAIN, MIXED, hint=_WRITE_SETS),
            "test_split_size": _held_out,
            "seed": Drop("see `training.data_seed`"),
        }
    ),
    "model_init_kwargs": _init_kwargs,
    "assistant_only_loss": _assistant_only,
    "completion_only_loss": by_synonym("completion_only_loss"),
    "packing_strategy": packing_strategy,
    "padding_free": Drop("packed rows have no padding; `data.packing` packs"),
    "dataset_kwargs": Ask("arguments of TRL's preparation of the rows", "data"),
    **each(("use_unsloth", "ignore_bias_buffers"), UNSUPPORTED_SWITCH),
    "activation_offloading": off_or(
        "off", "with recomputed layers it is `fsdp: {activation_checkpointing_offload: true}`"
    ),
    "loss_type": lambda key: (
        Write({"training.loss": "dft"}, DFT) if key.value == "dft" else outcome_of(_OTHER_LOSS, key)
    ),
    "shuffle_dataset": Drop("rows are shuffled in each epoch"),
    "truncation_mode": fine_or(
        ("keep_start",), "rows are cut at their end here too", "rows are cut at their end", "data.overlong"
    ),
}
"""By name; see `settling.settle_key`."""
TRL_UNSUPPORTED = dict.fromkeys(
    (
        *(
            "reward_funcs",
            "reward_model_path",
            "sft_model_path",
            "num_generations",
            "ref_model_init_kwargs",
            "beta",
        ),
        *(
            "max_prompt_length",
            "max_completion_length",
            "precompute_ref_log_probs",
            "reference_free",
            "desirable_weight",
            "cpo_alpha",
        ),
    ),
    "preference tuning",
) | {"teacher_model_name_or_path": "distillation"}
TRL_TOOL = Tool(
    TRL,
    TRL_RULES,
    defaults={
        "training.per_device_train_batch_size": 8,
        "data.max_length": 1024,
        "fsdp.activation_checkpointing": "full",
        "training.report_to": [],
    },
    adapter_defaults={"lora.r": 16, "lora.lora_alpha": 32, "lora.lora_dropout": 0.05},
    adapter_switches=("use_peft",),
    upcasts=True,
    long_rows=CUT_BY_TRL,
    other_training=TRL_UNSUPPORTED,
)
EXAMPLE_TOOL = Tool(
    EXAMPLES,
    EXAMPLE_RULES,
    defaults={**TRAINER_DEFAULTS, "precision.mixed_precision": "no"},
    adapter_switches=("use_peft",),
    loads_as_stored=True,
    upcasts=True,
    long_rows=SPLIT,  # run_clm.py joins all texts
)
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
