"""LLaMA-Factory's data sets: the entries of `dataset_info.json` that a file names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath

from fsdp_tune.core.values import as_mapping, is_list
from fsdp_tune.migrate.dataset_entries import source
from fsdp_tune.migrate.ledger import Ledger
from fsdp_tune.migrate.read.foreign_file import read_mapping
from fsdp_tune.migrate.rules import (
    TRAIN,
    Also,
    At,
    Decide,
    FileKey,
    Inside,
    Outcome,
    Rule,
    Rules,
    Step,
    each,
    in_source,
    renamed,
    switch,
)
from fsdp_tune.migrate.tools.llama_factory_templates import OF_TOKENIZER, is_template_of_tokenizer
from fsdp_tune.migrate.tools.swift import JOINED
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Drop, Weight, Write, in_words
from fsdp_tune.recipe.synonyms import SYNONYMS

INFO = "dataset_info.json"
_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "messages": "conversations",
    "system": "system",
    "tools": "tools",
}
"""Contents of a column in LLaMA-Factory, and the name of that column here."""


def include_info(ledger: Ledger, directory: FilePath) -> None:
    """Put the entries of `dataset_info.json` that the file names into its account. `directory` is that of the
    file."""
    named = [name for key in ("dataset", "eval_dataset") for name in names_of(ledger.value(key))]
    found = _find_info(directory, str(ledger.value("dataset_dir") or "data")) if named else None
    if found is None:
        return
    known = read_mapping(found)
    entries = {name: dict(known[name]) for name in named if isinstance(known.get(name), dict)}
    for entry in entries.values():
        if entry.get("file_name"):
            entry["file_name"] = str(found.parent / str(entry["file_name"]))
    if entries:
        ledger.include((INFO,), entries)


def _find_info(directory: FilePath, data: str) -> FilePath | None:
    """Return the file beside the configuration, or in `dataset_dir`, which is relative to the directory of
    the command: one above."""
    above = [directory, *list(directory.resolve().parents)[:3], FilePath()]
    places = [directory / INFO, FilePath(data) / INFO, *(each / data / INFO for each in above)]
    return next((place for place in places if place.is_file()), None)


def names_of(value: object) -> list[str]:
    """Return the names in a list, or in a text with commas between them."""
    items = value if is_list(value) else str(value or "").split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def listed_datasets(place: KeyPath) -> Rule:
    """Names in `dataset_info.json`, with commas between them."""

    def rule(key: FileKey) -> Outcome:
        names = names_of(key.value)
        said = (
            f". {OF_TOKENIZER}"
            if place == TRAIN and key.of_file("stage") is None and is_template_of_tokenizer(key)
            else ""
        )
        first = sum(1 for target in key.ledger.settings if target[:2] == place and target[-1] == "path")
        unknown = [name for name in names if key.of_file(INFO, name) is None]
        if unknown:
            words = in_words(SYNONYMS["dataset"].outcome(", ".join(unknown)))
            return Ask(f"`{INFO}` was not found here, or does not have it: {words}{said}", place)
        places = [(name, (*place, index)) for index, name in enumerate(names, first)]
        settings = {(*target, "path"): _path_of(key.of_file(INFO, name)) or "NAME" for name, target in places}
        entries = [At((INFO, name), source(target, _ENTRY)) for name, target in places]
        if key.of_file("stage") == "pt":
            texts = [
                step
                for name, target in places
                for step in _text_steps(name, as_mapping(key.of_file(INFO, name)), target)
            ]
            return [*texts, Write(settings, f"by {INFO}"), *entries]
        is_alpaca = any((key.of_file(INFO, name, "formatting") or "alpaca") == "alpaca" for name in names)
        return [Write(settings, f"by {INFO}{f'; {JOINED}' if is_alpaca else ''}{said}"), *entries]

    return rule


def _text_steps(name: str, entry: dict[str, object], place: KeyPath) -> list[Step]:
    """`stage: pt` reads the text of the first message, without a template: of Alpaca's columns that is
    `prompt`."""
    columns = as_mapping(entry.get("columns"))
    column = str(columns.get("prompt") or "instruction")
    found: list[Step] = [Also((*place, "format"), "text", "`stage: pt` reads texts", Weight.GIVEN)]
    if entry.get("formatting", "alpaca") != "alpaca" or columns.get("query"):
        found.append(
            Decide(
                place, "`stage: pt` trains the first message of a row, without a template: write it as `text`"
            )
        )
    elif column != "text":
        found.append(
            Also((*place, "rename_columns", column), "text", "`stage: pt` reads this column", Weight.GIVEN)
        )
    words = "`stage: pt` reads the text of the first message alone"
    return [*found, *(At((INFO, name, key), Drop(words)) for key in ("formatting", "columns", "tags"))]


def _path_of(entry: Mapping[str, object]) -> str | None:
    found = entry.get("hf_hub_url") or entry.get("file_name")
    return str(found) if found else None


def _place(key: FileKey) -> Outcome:
    """The key that `_path_of` took is converted; others name other places of the same rows."""
    target = (*key.place, "path")
    found = key.of_recipe(*target)
    if found == key.value:
        return Write({target: found})
    return (
        Ask("write the file or the hub id of the rows", target)
        if found == "NAME"
        else Drop(f"the rows are read from `{found}`")
    )


def _formatting(key: FileKey) -> Outcome:
    """Rows whose messages have `role` and `content` are LLaMA-Factory's sharegpt too."""
    is_chat = key.value == "sharegpt" and as_mapping(key.beside("tags")).get("role_tag") == "role"
    return Write({(*key.place, "format"): "messages" if is_chat else str(key.value)})


def _columns(key: FileKey) -> Outcome:
    is_chat = (
        key.of_recipe(*key.place, "format") == "messages"
        or (key.beside("tags", "role_tag") or "from") == "role"
    )
    names = _COLUMNS | ({"messages": "messages"} if is_chat else {})
    return (
        Inside({content: _column(names.get(content)) for content in key.mapping})
        if key.mapping
        else Drop("no columns")
    )


def _column(name: str | None) -> Rule:
    if name is None:
        return lambda key: Ask("rows of preferences, images or sound are not trained here", key.place)
    return lambda key: renamed(str(key.value), name, key.place)


_TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "system_tag": ("system",),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",),
}
"""How the keys of a message, and the roles in them, are named here too."""
_ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "function_call",
}


def _tag(key: FileKey) -> Outcome:
    if key.value in _TAGS.get(key.name, ()):
        return Drop("that name is known here too")
    if key.name in _ROLES:
        return Write({("data", "roles", str(key.value)): _ROLES[key.name]})
    return Ask(
        "messages have `role` and `content`, or `from` and `value`: rename the keys in the file", key.place
    )


def _sample(key: FileKey) -> Outcome:
    words = (
        f"{key.value} rows are drawn at random there, and those of a smaller set are repeated; "
        "`max_rows` takes the first ones"
    )
    return Ask(words, (*key.place, "max_rows"))


_ENTRY: Rules = {
    **each(("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"), _place),
    "formatting": _formatting,
    "columns": _columns,
    "tags": lambda key: Inside(each(tuple(key.mapping), _tag)) if key.mapping else Drop("no tags"),
    "ranking": switch(lambda key: Ask("rows of preferences are not trained here", key.place), Drop("off")),
    "num_samples": _sample,
    "folder": in_source("data_dir"),
    "load_from": Drop("the place of the rows says so"),
}
