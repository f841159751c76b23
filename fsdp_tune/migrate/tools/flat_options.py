"""Options of TRL, of ms-swift and of transformers' `run_clm.py` that mean something of their own: all take one flat list."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from fsdp_tune.migrate.general import (
    DFT,
    TRAIN,
    UNSUPPORTED_SWITCH,
    Rule,
    Rules,
    SourceRule,
    by_synonym,
    chat_template,
    dtype,
    fine_or,
    implies,
    leave,
    lora_targets,
    off_or,
    question,
    same,
    section,
    settle_all,
    settle_by_name,
    settle_source,
)
from fsdp_tune.migrate.ledger import Fate, Ledger, Path, Weight
from fsdp_tune.migrate.read.command_line import COMMAND
from fsdp_tune.migrate.tools.experts import experts_kernel
from fsdp_tune.migrate.tools.long_rows import packing_strategy
from fsdp_tune.recipe.schema.keys import dotted
from fsdp_tune.recipe.synonyms import SYNONYMS

MEDIA = "models with images or sound are not trained here"
"""Said of an option."""


def method(ledger: Ledger, path: Path, value: Any) -> None:
    if value == "lora":
        ledger.write(path, {"lora": {}}, Fate.CONVERTED)
    else:
        by_synonym("finetuning_type" if path[-1] == "finetuning_type" else "tuner_type")(ledger, path, value)


_NAME = re.compile(r"(?P<path>[^:#]+|.*?)(?::(?P<subset>[^:#]+))?(?:#(?P<rows>\d+))?")


def _named_datasets(place: Path) -> Rule:
    """`org/name:subset#rows`, or files; several with spaces between them."""

    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        names = [str(name) for name in (cast("list[Any]", value) if isinstance(value, list) else [value])]
        settings: dict[Path, Any] = {}
        for index, name in enumerate(names):
            match = _NAME.fullmatch(name)
            assert match is not None
            settings[(*place, index, "path")] = match["path"].removeprefix("HF::").removeprefix("MS::")
            settings |= {(*place, index, "name"): match["subset"]} if match["subset"] else {}
            if match["rows"]:
                settings[(*place, index, "max_rows")] = int(match["rows"])
                words = f"ms-swift draws {match['rows']} rows, and repeats those of a smaller set; here it is the most, from the first on"
                ledger.decide((*place, index, "max_rows"), words)
        from_hub = any("/" in name and not name.startswith((".", "/")) for name in names)
        ledger.write(path, settings, Fate.CONVERTED, "ids are of ModelScope there, of the Hugging Face hub here" if from_hub else "")

    return rule


def _model(ledger: Ledger, path: Path, value: Any) -> None:
    is_local = str(value).startswith((".", "/"))
    reason = "" if is_local else "an id of ModelScope there, of the Hugging Face hub here"
    ledger.write(path, {"model.name_or_path": value}, Fate.CONVERTED, reason)


def _pretraining(ledger: Ledger, path: Path, value: object) -> None:
    """`swift pt` trains every token of rows without a chat template, whatever the options say."""
    ledger.write(path, {"data.loss_on": "all"}, Fate.CONVERTED, f"`swift {value}` trains every token")
    words = "`swift pt` joins the messages of a row without a chat template: write such rows as `text`, or train them by the template"
    ledger.decide(("data", "chat_template"), words)


def unless_pretraining(rule: Rule, key: str, words: str) -> Rule:
    """Return a rule for a key that is not read in pre-training. `key`: of the method, which is `pt` then."""
    return lambda ledger, path, value: ledger.drop(path, words) if ledger.value(key) == "pt" else rule(ledger, path, value)


def _unless_pretraining(rule: Rule) -> Rule:
    return unless_pretraining(rule, COMMAND, "`swift pt` sets it: every token of rows without a chat template")


def _loss_scale(ledger: Ledger, path: Path, value: Any) -> None:
    """Which tokens are trained."""
    names = {"default": "assistant", "last_round": "last_assistant", "all": "all"}
    if value in names:
        ledger.write(path, {"data.loss_on": names[value]}, Fate.CONVERTED)
    else:
        ledger.ask(path, "tokens have one weight here: write `data: {loss_on: …}`", ("data", "loss_on"))


def _new_tokens(ledger: Ledger, path: Path, value: Any) -> None:
    """Tokens, or files of words."""
    names = [str(each) for each in cast("list[Any]", value)] if isinstance(value, list) else str(value).split()
    if any(name.endswith(".txt") for name in names):
        ledger.ask(path, "write the words of the file: `model: {tokens: {add: […]}}`", ("model", "tokens", "add"))
    else:
        ledger.write(path, {"model.tokens.add": names}, Fate.CONVERTED)


def _interleaved(ledger: Ledger, path: Path, value: Any) -> None:
    shares = cast("list[Any]", value) if isinstance(value, list) else [value]
    ledger.write(path, {(*TRAIN, index, "weight"): float(share) for index, share in enumerate(shares)}, Fate.CONVERTED)


def _torch_dtype(ledger: Ledger, path: Path, value: object) -> None:
    dtype("model.dtype")(ledger, path, value)
    computed = "bf16" if value in ("bfloat16", "bf16") else "fp16"
    ledger.set(("precision", "mixed_precision"), computed, f"{path[-1]}: ms-swift computes in half precision", Weight.IMPLIED)


def _truncation(ledger: Ledger, path: Path, value: Any) -> None:
    names = {"delete": "drop", "right": "truncate", "split": "split", "raise": "error"}
    if value in names:
        ledger.write(path, {"data.overlong": names[value]}, Fate.CONVERTED)
    else:
        ledger.ask(path, "rows are cut at their end: `data: {overlong: truncate}`, or `drop`", ("data", "overlong"))


def _sharding(ledger: Ledger, path: Path, value: Any) -> None:
    """`zero2`, `zero3_offload` …, or a file."""
    match = re.fullmatch(r"zero([0-3])(_offload)?", str(value))
    if match is None:
        settle_by_name(ledger, path, value)
        return
    strategy = {"0": "NO_SHARD", "1": "SHARD_GRAD_OP", "2": "SHARD_GRAD_OP", "3": "FULL_SHARD"}[match[1]]
    settings: dict[str, Any] = {"fsdp.sharding_strategy": strategy} | ({"fsdp.offload_params": True} if match[2] else {})
    ledger.write(path, settings, Fate.CONVERTED)


SWIFT_RULES: Rules = {
    **dict.fromkeys(("model", "model_id_or_path"), _model),
    "dataset": _named_datasets(("data", "train")),
    "val_dataset": _named_datasets(("data", "eval")),
    **dict.fromkeys(("train_type", "tuner_type", "sft_type"), method),
    "target_modules": lora_targets,
    "torch_dtype": _torch_dtype,
    "new_special_tokens": _new_tokens,
    "interleave_prob": _interleaved,
    "stopping_strategy": same("data.mixture.stopping_strategy"),
    "enable_dft_loss": implies({"training.loss": "dft"}, DFT),
    "lorap_lr_ratio": same("lora.loraplus_lr_ratio"),
    "init_weights": same("lora.init_lora_weights"),
    "experts_impl": experts_kernel,
    "lora_bias": fine_or(("none",), "off, as it is here", "`lora: {bias: …}` trains biases", "lora", "bias"),
    **dict.fromkeys(("lazy_tokenize", "use_logits_to_keep", "acc_strategy"), leave("a matter of ms-swift's own code")),
    **dict.fromkeys(("use_ray", "device_groups"), leave("ranks are started by `fsdp-tune train`")),
    COMMAND: _pretraining,
    "loss_scale": _unless_pretraining(_loss_scale),
    "truncation_strategy": _truncation,
    "deepspeed": _sharding,
    "template": _unless_pretraining(chat_template("data.chat_template")),
    "sequence_parallel_size": same("parallelism.sp_size"),
    "attn_impl": lambda ledger, path, value: ledger.write(
        path, (SYNONYMS["flash_attn"].advice(value).tree or {"model.attn_implementation": value}), Fate.CONVERTED
    ),
    "streaming": same("data.streaming"),
    "shuffle_buffer_size": same("data.shuffle_buffer_size"),
    "dataset_shuffle": same("data.shuffle"),
    "train_dataloader_shuffle": same("data.shuffle"),
    **dict.fromkeys(("load_from_cache_file", "add_version", "use_hf", "check_model"), leave("a matter of ms-swift's own code")),
    **dict.fromkeys(("freeze_vit", "freeze_aligner", "vit_lr", "aligner_lr", "max_pixels"), leave(MEDIA)),
    "freeze_llm": off_or("off", "the language model is what is trained; `model: {freeze: [PATTERN]}` freezes parts"),
    "use_chat_template": _unless_pretraining(off_or("rows of text have no template", "chats are rendered by the chat template")),
    **dict.fromkeys(("model_author", "model_name"), question("write the name into the rows", "data", "train")),
    "system": question("add the system message to the rows", "data", "train"),
    "task_type": fine_or(("causal_lm",), "the models are causal language models", "classifiers and embeddings are not trained here"),
    "model_type": leave("classes follow from the files of the model"),
    "quant_method": leave("4 bits are NF4 here, as in bitsandbytes"),
    "merge_lora": by_synonym("merge_lora"),
}
"""By name; see `general.settle_key`."""
SWIFT_UNSUPPORTED = {"rlhf_type": "preference tuning"}


# ---- run_clm.py of transformers, and the options that TRL has too

FIRST: Path = (*TRAIN, 0)


def of_the_set(name: str, place: Path = FIRST) -> Rule:
    """Return a rule for a key of the only data set, or of the one at `place`."""
    return lambda ledger, path, value: ledger.write(path, {(*place, name): value}, Fate.CONVERTED)


def _optional_adapter(ledger: Ledger, path: Path, value: Any) -> None:
    advice = SYNONYMS["use_peft"].advice(value)
    if advice.tree:
        ledger.write(path, {"lora": {}}, Fate.CONVERTED)
    else:
        ledger.drop(path, "off, as it is here")


def _share_held_out(ledger: Ledger, path: Path, value: Any) -> None:
    """A percentage of the training rows; a file or a split of its own comes first."""
    if ledger.value("validation_file") is not None:
        ledger.drop(path, "`validation_file` is evaluated")
    elif not isinstance(value, int | float):
        ledger.ask(path, "write a share: `data: {eval: {fraction: 0.05}}`", ("data", "eval"))
    elif not ledger.value("do_eval") and ledger.value("eval_strategy") in (None, "no"):
        ledger.drop(path, "nothing is evaluated")
    else:
        ledger.write(path, {"data.eval.fraction": float(value) / 100}, Fate.CONVERTED, "a percentage there, a share here")


OF_SCRIPTS: dict[str, Rule] = {
    "model_name_or_path": same("model.name_or_path"),
    "dataset_name": of_the_set("path"),
    **dict.fromkeys(("dataset_config", "dataset_config_name"), of_the_set("name")),
    "dataset_train_split": of_the_set("split"),
    "use_peft": _optional_adapter,
    "lora_task_type": leave("the models are causal language models"),
}
"""Options of `trl sft` and `run_clm.py`."""
EXAMPLE_RULES: Rules = {
    **OF_SCRIPTS,
    "train_file": of_the_set("path"),
    "validation_file": of_the_set("path", ("data", "eval", 0)),
    "validation_split_percentage": _share_held_out,
    "max_train_samples": of_the_set("max_rows"),
    "max_eval_samples": question("write a number of rows: `data: {eval: {rows: …}}`", "data", "eval"),
    "keep_linebreaks": leave("rows of a text keep their line ends"),
    "config_name": lambda ledger, path, value: (
        ledger.drop(path, "it is that of the model")
        if value == ledger.value("model_name_or_path")
        else ledger.ask(path, "a model of random weights is `model: {from_config: …}`", ("model", "from_config"))
    ),
    "config_overrides": question("write a mapping: `{n_layer: 2}`", "model", "config_overrides"),
    "model_type": leave("classes follow from the files of model and tokenizer"),
    "streaming": same("data.streaming"),
}
"""By name; see `general.settle_key`."""


def pack_texts(ledger: Ledger) -> None:
    """`run_clm.py` joins all texts and cuts them into full blocks, of 1,024 tokens unless it is told otherwise."""
    origin = "run_clm.py joins texts and fills every block"
    ledger.set(("data", "packing"), True, origin, Weight.DEFAULT)
    ledger.set(("data", "packing_strategy"), "wrapped", origin, Weight.DEFAULT)
    ledger.set(("data", "max_length"), 1024, "default of run_clm.py", Weight.DEFAULT)


# ---- Mixtures of TRL and of the alignment handbook


def listed_sources(named: Mapping[str, SourceRule] | None = None) -> Rule:
    """Return a rule for a mixture. `named`: as in `settle_source`."""

    def rule(ledger: Ledger, path: Path, value: object) -> None:
        if not isinstance(value, list):
            ledger.ask(path, "write the data sets as `data: {train: [{path: NAME}]}`", TRAIN)
            return
        for index in range(len(cast("list[Any]", value))):
            settle_source(ledger, (*path, index), (*TRAIN, index), named)

    return rule


def _kept_share(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    if value == 1:
        ledger.drop(path, "all rows are used here too")
    else:
        ledger.ask(path, "a share of the rows, drawn once, is used: write their number, `max_rows: N`", (*place, "max_rows"))


MIXED: dict[str, SourceRule] = {  # of the alignment handbook and its descendants
    "id": lambda ledger, path, place, value: ledger.write(path, {(*place, "path"): value}, Fate.CONVERTED),
    "config": lambda ledger, path, place, value: ledger.write(path, {(*place, "name"): value}, Fate.CONVERTED),
    "weight": _kept_share,
}


def mixer(ledger: Ledger, path: Path, value: object) -> None:
    """{data set: share of its training rows}, of the older alignment handbook."""
    for index, (name, share) in enumerate(cast("dict[str, Any]", value).items() if isinstance(value, dict) else ()):
        inner = (*path, name)
        if share == 1:
            ledger.write(inner, {(*TRAIN, index, "path"): name}, Fate.CONVERTED)
        else:
            ledger.set((*TRAIN, index, "path"), name, dotted(inner), Weight.GIVEN)
            _kept_share(ledger, inner, (*TRAIN, index), share)
    if ledger.is_open(path):
        ledger.ask(path, "write the data sets as `data: {train: [{path: NAME}]}`", TRAIN)


# ---- TRL


_MIXTURES = ("datasets", "dataset_mixture", "dataset_mixer")


def is_mixed(ledger: Ledger, path: Path = ("",)) -> bool:
    """Return whether there is a mixture beside a key: the single data set is ignored then."""
    return any(ledger.value(*path[:-1], name) for name in _MIXTURES)


def _single(rule: Rule) -> Rule:
    """Return a rule for a key of the single data set."""
    words = "the mixture is read, and not the single data set"
    return lambda ledger, path, value: ledger.drop(path, words) if is_mixed(ledger, path) else rule(ledger, path, value)


def _train_split(ledger: Ledger, path: Path, value: Any) -> None:
    if not is_mixed(ledger, path):
        ledger.write(path, {(*FIRST, "split"): value}, Fate.CONVERTED)
    elif value == "train":
        ledger.drop(path, "a mixture has this one")
    else:
        ledger.ask(path, "a mixture has the split `train` alone: the splits of its data sets are theirs", TRAIN)


def _eval_split(ledger: Ledger, path: Path, value: Any) -> None:
    """TRL reads it only if it evaluates; of a mixture it is the rows that are held out."""
    if ledger.value("eval_strategy") in (None, "no"):
        ledger.drop(path, "`eval_strategy` evaluates nothing")
        return
    if is_mixed(ledger, path):
        size = ledger.value(*path[:-1], "test_split_size") or ledger.value(*path[:-1], "dataset_mixture", "test_split_size")
        if size and value == "test":
            ledger.drop(path, "the rows that `test_split_size` holds out")
        else:
            ledger.ask(path, "a mixture has the split `test` alone, by `test_split_size`", ("data", "eval"))
        return
    settings: dict[Path, Any] = {("data", "eval", 0, "path"): ledger.value("dataset_name") or "NAME", ("data", "eval", 0, "split"): value}
    if (config := ledger.value("dataset_config")) is not None:
        settings[("data", "eval", 0, "name")] = config
    ledger.write(path, settings, Fate.CONVERTED)


def _text_field(ledger: Ledger, path: Path, value: object) -> None:
    if value == "text":
        ledger.drop(path, "`text` is the name of that column here too")
    else:
        ledger.write(path, {(*FIRST, "rename_columns", str(value)): "text"}, Fate.CONVERTED)


def _held_out(ledger: Ledger, path: Path, value: Any) -> None:
    """Of all rows of a mixture: a number, or a share below 1."""
    if not is_mixed(ledger, path):
        ledger.drop(path, "TRL holds out rows of a mixture (`datasets`) alone")
        return
    ledger.write(path, {f"data.eval.{'rows' if isinstance(value, int) else 'fraction'}": value}, Fate.CONVERTED)


def _init_kwargs(ledger: Ledger, path: Path, value: object) -> None:
    """Arguments of `from_pretrained`."""
    if isinstance(value, dict):
        settle_all(ledger, path, {})
    else:
        ledger.ask(path, "write its keys under `model:`", ("model",))


def _only(loss_on: str) -> Rule:
    """Return a rule for a switch of what is trained: off, it is left to the format of the rows."""

    def rule(ledger: Ledger, path: Path, value: Any) -> None:
        if value is False and loss_on == "assistant":
            ledger.drop(path, "off: `data.loss_on` says which tokens are trained")
        else:
            by_synonym(str(path[-1]))(ledger, path, value)

    return rule


_OTHER_LOSS = fine_or(("nll", "chunked_nll"), "it is the loss here too", "the loss is `cross_entropy` or `dft`", "training", "loss")


def _loss_type(ledger: Ledger, path: Path, value: object) -> None:
    if value == "dft":
        ledger.write(path, {"training.loss": "dft"}, Fate.CONVERTED, DFT)
    else:
        _OTHER_LOSS(ledger, path, value)


TRL_RULES: Rules = {
    **OF_SCRIPTS,
    **{name: _single(OF_SCRIPTS[name]) for name in ("dataset_name", "dataset_config", "dataset_config_name")},
    "dataset_train_split": _train_split,
    "dataset_test_split": _eval_split,
    "dataset_text_field": _text_field,
    "dataset_streaming": _single(same("data.streaming")),
    "datasets": listed_sources(),
    "dataset_mixer": mixer,
    "dataset_configs": question("write `name` of each data set", "data", "train"),
    "dataset_splits": question("write `split` of each data set; those with `test` in their names are evaluated", "data", "eval"),
    "test_split_size": _held_out,
    "dataset_mixture": section(
        {"datasets": listed_sources(MIXED), "test_split_size": _held_out, "seed": leave("see `training.data_seed`")}
    ),
    "model_init_kwargs": _init_kwargs,
    "assistant_only_loss": _only("assistant"),
    "completion_only_loss": _only("completion"),
    "packing_strategy": packing_strategy,
    "padding_free": leave("packed rows have no padding; `data.packing` packs"),
    "dataset_kwargs": question("arguments of TRL's preparation of the rows", "data"),
    **dict.fromkeys(("use_unsloth", "ignore_bias_buffers"), UNSUPPORTED_SWITCH),
    "activation_offloading": off_or("off", "with recomputed layers it is `fsdp: {activation_checkpointing_offload: true}`"),
    "loss_type": _loss_type,
    "shuffle_dataset": leave("rows are shuffled in each epoch"),
    "truncation_mode": fine_or(("keep_start",), "rows are cut at their end here too", "rows are cut at their end", "data", "overlong"),
}
"""By name; see `general.settle_key`."""
TRL_UNSUPPORTED = dict.fromkeys(
    (
        *("reward_funcs", "reward_model_path", "sft_model_path", "num_generations", "ref_model_init_kwargs", "beta"),
        *("max_prompt_length", "max_completion_length", "precompute_ref_log_probs", "reference_free", "desirable_weight", "cpo_alpha"),
    ),
    "preference tuning",
) | {"teacher_model_name_or_path": "distillation"}
