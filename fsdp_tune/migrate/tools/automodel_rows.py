"""Automodel's sets of rows, their tokenizer, packing and loaders."""

from __future__ import annotations

from fsdp_tune.core.values import is_mapping
from fsdp_tune.migrate.dataset_entries import source
from fsdp_tune.migrate.general import chat_template
from fsdp_tune.migrate.rules import (
    FileKey,
    Inside,
    Outcome,
    Rule,
    Rules,
    each,
    in_source,
    is_on,
    outcome_of,
    rename,
    same,
    switch,
)
from fsdp_tune.migrate.tools.named_objects import TARGET, class_named
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Drop, Write

_COLLATION = Drop("rows are padded to the longest of a batch, and packed rows are full")
_RENAMED = {
    "context": "instruction",
    "question": "instruction",
    "answer": "output",
    "instruction": "instruction",
}


def set_of_rows(place: KeyPath) -> Rule:
    """Return a rule for a set of rows. Its class decides: chats, columns, or prompts that code makes."""
    entry = source(place, _SET)
    asked = Ask("write the rows as `data: {train: [{path: NAME}]}`", place[:2])
    return lambda key: outcome_of(entry if is_mapping(key.value) else asked, key)


def _class_of_rows(key: FileKey) -> Outcome:
    name = class_named(key.value)
    if name == "ChatDataset" or name.startswith("ColumnMapped"):
        return Write({(*key.place, "format"): "messages" if name == "ChatDataset" else "alpaca"})
    return Ask(
        f"`{name}` makes its rows in code: write them as prompt and completion, or as messages", key.place
    )


def _columns(key: FileKey) -> Outcome:
    if not key.mapping:
        return Ask("rename the columns by `rename_columns`", key.place)
    names = _RENAMED | ({"question": "input"} if "context" in key.mapping else {})
    other = Ask("rename the column by `rename_columns`", key.place)
    return Inside({content: rename(names[content]) if content in names else other for content in key.mapping})


_CUT_TOO = Drop("rows of evaluations are cut at `data.max_length` too")


def _truncation(key: FileKey) -> Outcome:
    if key.place[1] != "train":
        return _CUT_TOO
    if key.value in (True, "longest_first", "only_first"):
        return Write({"data.overlong": "truncate"})
    return Ask(
        "longer rows are not cut there: `data: {overlong: truncate}`, `drop` or `error`", "data.overlong"
    )


def _length(key: FileKey) -> Outcome:
    if key.place[1] == "eval":
        return _CUT_TOO
    return (
        Write({"data.max_length": key.value})
        if isinstance(key.value, int)
        else Ask("write `data: {max_length: N}`", "data.max_length")
    )


def set_tokenizer(key: FileKey) -> Outcome:
    """The tokenizer of a set; a recipe has one for all rows."""
    name = key.mapping.get("pretrained_model_name_or_path")
    if name is None or name in (
        key.of_file("model", "pretrained_model_name_or_path"),
        key.of_recipe("model", "tokenizer"),
    ):
        return Drop("it is that of the model")
    if key.of_recipe("model", "tokenizer") is None:
        return Write({"model.tokenizer": name})
    return Ask("all rows have one tokenizer here", "model.tokenizer")


_SET: Rules = {
    TARGET: _class_of_rows,
    **each(("path_or_dataset", "path_or_dataset_id", "dataset_name", "paths"), in_source("path")),
    **each(("limit_dataset_samples", "num_samples_limit"), in_source("max_rows")),
    "column_mapping": _columns,
    **each(("seq_length", "seq_len"), _length),
    "answer_only_loss_mask": lambda key: Write(
        {(*key.place, "loss_on"): "completion" if is_on(key.value) else "all"}
    ),
    "mask_history": switch(
        lambda key: Write({(*key.place, "loss_on"): "last_assistant"}), Drop("off, as it is here")
    ),
    "chat_template": chat_template,
    "tokenizer": set_tokenizer,
    **each(
        ("padding", "pad_to_max_length", "unshifted", "align_to_bos"),
        Drop("rows are padded to the longest of a batch"),
    ),
    "truncation": _truncation,
    **each(
        ("shuffle_seed", "shuffle_files"), Drop("rows are shuffled in each epoch, by `training.data_seed`")
    ),
}


def _packed(key: FileKey) -> Outcome:
    if not isinstance(key.value, int) or key.value <= 0:
        return Drop("off, as it is here")
    return Write({"data.packing": True, "data.max_length": key.value})


PACKING: Rules = {
    **each(("packed_sequence_size", "pack_size"), _packed),
    **each(
        ("packing_strategy", "max_packs", "packing_ratio", "num_proc"), Drop("`data.packing` packs all rows")
    ),
    "split_across_pack": switch(
        Write({"data.packing_strategy": "wrapped"}), Write({"data.packing_strategy": "bfd"})
    ),
}
LOADER: Rules = {
    "shuffle": same("data.shuffle"),
    "num_workers": same("training.dataloader_num_workers"),
    **each(
        (TARGET, "collate_fn", "drop_last", "pin_memory", "prefetch_factor", "persistent_workers"), _COLLATION
    ),
    "batch_size": Drop("the micro-batch is `training.per_device_train_batch_size`"),
}
EVAL_LOADER: Rules = {
    **LOADER,
    "shuffle": _COLLATION,
    "num_workers": _COLLATION,
    "batch_size": same("training.per_device_eval_batch_size"),
}
