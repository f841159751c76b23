"""Keys of TRL and of transformers' `run_clm.py` that mean something of their own."""

from __future__ import annotations

from typing import Any, cast

from fsdp_tune.recipe.read.foreign.general import (
    TRAIN,
    Rule,
    Rules,
    by_synonym,
    fine_or,
    leave,
    off_or,
    question,
    same,
    settle_all,
    settle_source,
)
from fsdp_tune.recipe.read.foreign.ledger import Fate, Ledger, Path
from fsdp_tune.recipe.synonyms import SYNONYMS

_FIRST: Path = (*TRAIN, 0)


def _of_the_set(name: str, place: Path = _FIRST) -> Rule:
    """Return a rule for a key of the only data set, or of the one at `place`."""
    return lambda ledger, path, value: ledger.write(path, {(*place, name): value}, Fate.CONVERTED)


def _eval_split(ledger: Ledger, path: Path, value: Any) -> None:
    """TRL reads it only if it evaluates."""
    if ledger.value("eval_strategy") in (None, "no"):
        ledger.drop(path, "`eval_strategy` evaluates nothing")
        return
    settings: dict[Path, Any] = {("data", "eval", 0, "path"): ledger.value("dataset_name") or "NAME", ("data", "eval", 0, "split"): value}
    if (config := ledger.value("dataset_config")) is not None:
        settings[("data", "eval", 0, "name")] = config
    ledger.write(path, settings, Fate.CONVERTED)


def _text_field(ledger: Ledger, path: Path, value: Any) -> None:
    if value == "text":
        ledger.drop(path, "`text` is the name of that column here too")
    else:
        ledger.write(path, {(*_FIRST, "rename_columns", str(value)): "text"}, Fate.CONVERTED)


def _datasets(ledger: Ledger, path: Path, value: Any) -> None:
    """TRL's mixture."""
    if not isinstance(value, list):
        ledger.ask(path, "write the data sets as `data: {train: [{path: NAME}]}`", TRAIN)
        return
    for index in range(len(cast("list[Any]", value))):
        settle_source(ledger, (*path, index), (*TRAIN, index))


def _init_kwargs(ledger: Ledger, path: Path, value: Any) -> None:
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


def _adapter(ledger: Ledger, path: Path, value: Any) -> None:
    advice = SYNONYMS["use_peft"].advice(value)
    if advice.tree:
        ledger.write(path, {"lora": {}}, Fate.CONVERTED)
    else:
        ledger.drop(path, "off, as it is here")


def _share_held_out(ledger: Ledger, path: Path, value: Any) -> None:
    """A percentage of the training rows; a file or a split of its own comes first."""
    if ledger.value("validation_file") is not None:
        ledger.drop(path, "`validation_file` is evaluated")
    elif not ledger.value("do_eval") and ledger.value("eval_strategy") in (None, "no"):
        ledger.drop(path, "nothing is evaluated")
    else:
        ledger.write(path, {"data.eval.fraction": float(value) / 100}, Fate.CONVERTED, "a percentage there, a share here")


_SFT: dict[str, Rule] = {
    "model_name_or_path": same("model.name_or_path"),
    "dataset_name": _of_the_set("path"),
    **dict.fromkeys(("dataset_config", "dataset_config_name"), _of_the_set("name")),
    "dataset_train_split": _of_the_set("split"),
    "use_peft": _adapter,
    "lora_task_type": leave("the models are causal language models"),
}
TRL_RULES: Rules = {
    **_SFT,
    "dataset_test_split": _eval_split,
    "dataset_text_field": _text_field,
    "dataset_streaming": same("data.streaming"),
    "datasets": _datasets,
    "model_init_kwargs": _init_kwargs,
    "assistant_only_loss": _only("assistant"),
    "completion_only_loss": _only("completion"),
    "padding_free": leave("packed rows have no padding; `data.packing` packs"),
    "dataset_kwargs": question("arguments of TRL's preparation of the rows", "data"),
    **dict.fromkeys(("use_unsloth", "ignore_bias_buffers"), off_or("off", "there is no counterpart")),
    "activation_offloading": off_or("off", "with recomputed layers it is `fsdp: {activation_checkpointing_offload: true}`"),
    "loss_type": fine_or(("nll", "chunked_nll"), "it is the loss here too", "the loss is the negative log-likelihood", "kernels", "loss"),
    "shuffle_dataset": leave("rows are shuffled in each epoch"),
    "truncation_mode": fine_or(("keep_start",), "rows are cut at their end here too", "rows are cut at their end", "data", "overlong"),
}
"""By name; see `general.settle_key`."""
UNSUPPORTED = dict.fromkeys(
    ("reward_funcs", "reward_model_path", "sft_model_path", "num_generations", "ref_model_init_kwargs"), "preference tuning"
)
EXAMPLE_RULES: Rules = {
    **_SFT,
    "train_file": _of_the_set("path"),
    "validation_file": _of_the_set("path", ("data", "eval", 0)),
    "validation_split_percentage": _share_held_out,
    "max_train_samples": _of_the_set("max_rows"),
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
