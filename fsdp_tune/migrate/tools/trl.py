"""Options of TRL that mean something of their own, and mixtures of data sets as TRL and the alignment
handbook have them."""

from __future__ import annotations

from fsdp_tune.migrate.dataset_entries import sources
from fsdp_tune.migrate.general import DFT
from fsdp_tune.migrate.ledger import LedgerView
from fsdp_tune.migrate.rules import (
    TRAIN,
    UNSUPPORTED_SWITCH,
    Also,
    FileKey,
    Inside,
    Outcome,
    Rule,
    Rules,
    by_synonym,
    each,
    fine_or,
    in_source,
    off_or,
    outcome_of,
    renamed,
    same,
    section,
    steps,
)
from fsdp_tune.migrate.tool import Tool
from fsdp_tune.migrate.tools.long_rows import CUT_BY_TRL, packing_strategy
from fsdp_tune.migrate.tools.run_clm import OF_SCRIPTS
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.outcome import Ask, Drop, Weight, Write
from fsdp_tune.recipe.read.tool_detection import TRL
from fsdp_tune.recipe.synonyms import SYNONYMS

FIRST: KeyPath = (*TRAIN, 0)

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
"""By name; see `settle_keys.settle_key`."""
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
