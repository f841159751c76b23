"""Entries of axolotl's `datasets`: prompt strategies, columns and roles of their rows."""

from __future__ import annotations

import shlex

from fsdp_tune.core.values import as_items
from fsdp_tune.migrate.dataset_entries import in_entry, source, sources
from fsdp_tune.migrate.general import chat_template
from fsdp_tune.migrate.rules import (
    TRAIN,
    Also,
    FileKey,
    Outcome,
    Rule,
    Rules,
    each,
    outcome_of,
    rename,
    renamed,
    steps,
)
from fsdp_tune.migrate.tools.axolotl_prompts import prompt_program
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Drop, Weight, Write, in_words
from fsdp_tune.recipe.schema.value_kinds import NO_TEMPLATE
from fsdp_tune.recipe.synonyms import OF_A_SOURCE, SYNONYMS


def datasets(place: KeyPath) -> Rule:
    def rule(key: FileKey) -> Outcome:
        if isinstance(key.value, list) and not any(isinstance(item, dict) for item in key.items):
            return Write({(*place, index, "path"): str(name) for index, name in enumerate(key.items)})
        return outcome_of(sources(place, _SOURCE), key)

    return rule


def pretraining(key: FileKey) -> Outcome:
    """Streamed text without a mask."""
    return [*steps(outcome_of(datasets(TRAIN), key)), Also("data.streaming", True, "pretraining_dataset")]


_RENAME_KEYS = "messages have `role` and `content`, or `from` and `value`: rename the keys in the file"


def _type(key: FileKey) -> Outcome:
    """The name of a prompt strategy, or a mapping with the columns of one of the user's own.

    A strategy's plain name is written as the format. A variant, as in `alpaca:chat` and
    `alpaca.load_no_prompt`, has prompts of its own: a question.
    """
    target = (*key.place, "format")
    if isinstance(key.value, dict):
        if not key.mapping.get("format"):
            return outcome_of(source(key.place, _SOURCE), key)
        program = prompt_program(key.mapping)
        if program is None:
            return Ask("write the prompts into the rows, as `prompt` and `completion`", target)
        words = (
            f"write the prompts into the rows: `jq -c {shlex.quote(program)} ROWS.jsonl > NEW.jsonl`, "
            "and read `path: NEW.jsonl`"
        )
        return Ask(f'{words}; `data: {{separator: ""}}`', target)
    outcome = OF_A_SOURCE["type"].outcome(key.value)
    if isinstance(outcome, Write):
        # `chat_template` is the type of sharegpt rows too: the names of their keys decide.
        write = Write(
            {target: in_entry(outcome)[("format",)]},
            weight=Weight.IMPLIED if key.value == "chat_template" else Weight.GIVEN,
        )
        if key.value != "alpaca":
            return write
        template = Also(
            (*key.place, "chat_template"),
            NO_TEMPLATE,
            "default of axolotl: by the prompts of Stanford Alpaca",
        )
        return [
            write,
            template,
            Also("data.separator", "\n", "default of axolotl: the answer is on its own line"),
        ]
    return Ask(f"`{key.value}` is a prompt strategy of axolotl: {in_words(outcome)}", target)


def _builder(key: FileKey) -> Outcome:
    """`ds_type: json` beside `data_files` is a builder; beside a file as `path`, its ending says the same."""
    if key.beside("data_files") is None:
        return Drop("the ending of the file says so")
    return Ask(in_words(OF_A_SOURCE["ds_type"].outcome(key.value)), (*key.place, "path"))


def _message_keys(key: FileKey) -> Outcome:
    """How the keys of a message are named: `from` and `value` (sharegpt), or `role` and `content`, are known
    here."""
    role, content = str(key.mapping.get("role", "role")), key.mapping.get("content", "content")
    if (role, content) not in (("from", "value"), ("role", "content")) or not set(key.mapping) <= {
        "role",
        "content",
    }:
        return Ask(_RENAME_KEYS, key.place)
    return (
        Drop("messages have these keys here too")
        if role == "role"
        else Write({(*key.place, "format"): "sharegpt"})
    )


def _messages(key: FileKey) -> Outcome:
    """The column of the messages, which sharegpt calls `conversations`."""
    keys = key.beside("message_property_mappings", "role") or key.beside("message_field_role")
    return renamed(str(key.value), "conversations" if keys == "from" else "messages", key.place)


def _message_key(key: FileKey) -> Outcome:
    """The older spelling of `message_property_mappings`, one key for each."""
    if key.value in ("role", "content"):
        return Drop("messages have this key here too")
    return (
        Write({(*key.place, "format"): "sharegpt"})
        if key.value in ("from", "value")
        else Ask(_RENAME_KEYS, key.place)
    )


_KNOWN_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}


def _roles(key: FileKey) -> Outcome:
    """{known role: [names in the rows]} is the other way round here."""
    pairs = [(role, name) for role, names in key.mapping.items() for name in as_items(names)]
    written: dict[KeyPath, object] = {
        ("data", "roles", str(name)): role
        for role, name in pairs
        if role not in (name, _KNOWN_ROLES.get(str(name)))
    }
    return Write(written) if written else Drop("these names are known here too")


def _trained_roles(key: FileKey) -> Outcome:
    target = (*key.place, "loss_on")
    outcome = SYNONYMS["roles_to_train"].outcome(key.value)
    return Ask(outcome.words, target) if isinstance(outcome, Ask) else Write({target: "assistant"})


_SOURCE: Rules = {
    "type": _type,
    "ds_type": _builder,
    "message_property_mappings": _message_keys,
    **each(("message_field_role", "message_field_content"), _message_key),
    "roles": _roles,
    "roles_to_train": _trained_roles,
    **each(
        ("train_on_eos", "train_on_eot"),
        lambda key: (
            Drop("the end of each trained turn is trained, as the chat template renders it")
            if key.value in ("turn", "all", True)
            else Ask(
                "the end of each trained turn is trained here, as the chat template renders it", key.place
            )
        ),
    ),
    **each(("chat_template", "chat_template_jinja"), chat_template),
    "field_messages": _messages,
    "text_column": rename("text"),
    "trust_remote_code": Drop("data sets never run code here"),
    "field_system": rename("system"),
    "field_tools": rename("tools"),
}
