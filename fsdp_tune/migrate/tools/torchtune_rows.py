"""torchtune's data sets and tokenizers: builders of data sets with the rows that they read, and which tokens
of a row are trained there."""

from __future__ import annotations

from fsdp_tune.core.values import as_items, as_mapping
from fsdp_tune.migrate.general import chat_template
from fsdp_tune.migrate.rules import (
    Also,
    FileKey,
    Inside,
    Outcome,
    Rule,
    Rules,
    each,
    in_source,
    is_on,
    outcome_of,
    remarked,
    rename,
    renamed,
)
from fsdp_tune.migrate.tools.named_objects import COMPONENT, class_named
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Weight, Write
from fsdp_tune.recipe.synonyms import SYNONYMS

FROM_FILES = Drop("it follows from the files of the model")
_DATASETS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "grammar_dataset": "liweili/c4_200m",
    "samsum_dataset": "Samsung/samsum",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail",
}
"""Builders with a data set of their own (torchtune/datasets): its hub id."""
_TRAINS_ALL = ("alpaca_dataset", "alpaca_cleaned_dataset")
"""Builders that train the prompts too, unless `train_on_input` is false."""
_BUILDERS = {"text_completion_dataset": "text"}
_CHATS = {"chat_dataset": None, "slimorca_dataset": "sharegpt"}
"""Builders of chats: the style of their rows, None if `conversation_style` has it."""
_STYLES = {"sharegpt": ("sharegpt", "conversations"), "openai": ("messages", "messages")}
"""Styles of conversations: the format here, and its column."""
_TEXTS = ("text_completion_dataset", "wikitext_dataset", "cnn_dailymail_articles_dataset")
"""Builders whose rows are no messages."""
_HEADERS = {
    "qwen2": "`<|im_start|>assistant`, and the line end after an earlier answer",
    "llama3": "`<|start_header_id|>assistant<|end_header_id|>`",
    "phi3": "`<|assistant|>`, and the line end after an answer",
    "phi4": "`<|im_start|>assistant<|im_sep|>`",
}
"""Families of tokenizers that write a header before an answer, which is masked only with the whole message
(`message.masked`)."""


def _family(key: FileKey) -> str:
    """Return the family of the tokenizer in `_HEADERS`; "" if it is in none."""
    name = class_named(key.of_file("tokenizer", COMPONENT))
    return next((family for family in _HEADERS if name.startswith(family)), "")


def _trained_header(key: FileKey) -> str:
    """Return what is trained beside the answers of the training rows, given a key of a data set."""
    header = _HEADERS.get(_family(key))
    if header is None or key.place[1] != "train" or class_named(key.beside(COMPONENT)) in _TEXTS:
        return ""
    words = "here it is context, which only labels of your own train (`format: segments` or `tokenized`)"
    return f"torchtune also trains the header of each answer, {header}; {words}"


def _longest(key: FileKey) -> Outcome:
    """Qwen's tokenizers mask the last token of a row, whether it is cut or not, as soon as there is a
    limit."""
    outcome = SYNONYMS["max_seq_len"].outcome(key.value)
    builders = [
        class_named(as_mapping(each).get(COMPONENT)) for each in as_items(key.of_file("dataset") or [])
    ]
    if _family(key) != "qwen2" or all(name in _TEXTS for name in builders):
        return outcome
    words = (
        "with a limit, torchtune's tokenizer of Qwen trains the last token of no row, which ends its "
        "last answer; here it is trained"
    )
    return remarked(outcome, words)


TOKENIZER: Rules = {
    COMPONENT: FROM_FILES,
    **each(
        ("path", "merges_file", "merges_path", "vocab_path", "special_tokens_path"),
        Drop("the tokenizer is that of the model's directory"),
    ),
    "max_seq_len": _longest,
    "prompt_template": chat_template,
}


def datasets(place: KeyPath) -> Rule:
    """Return a rule for a data set or a list of them: the sources from `place` on."""

    def rule(key: FileKey) -> Outcome:
        if not all(isinstance(each, dict) and each != {} for each in key.items):
            return Ask("a data set is a mapping with its `_component_`", place)
        if isinstance(key.value, list):
            return Inside({index: _set((*place, index)) for index in range(len(key.items))})
        return outcome_of(_set((*place, 0)), key)

    return rule


def _set(place: KeyPath) -> Rule:
    """Return a rule for one data set. Its builder, which decides what other keys mean, comes first."""

    def rule(key: FileKey) -> Outcome:
        others = {name: _SET.get(name, _unknown) for name in key.mapping if name != COMPONENT}
        return Inside({COMPONENT: _set_builder, **others}, place, only=True)

    return rule


def _set_builder(key: FileKey) -> Outcome:
    name, place = class_named(key.value), key.place
    trains_all = name in _TRAINS_ALL and key.beside("train_on_input") is None and place[1] == "train"
    default = Also((*place, "loss_on"), "all", f"default of {name}", Weight.DEFAULT)
    read: dict[KeyPath, object] = {(*place, "columns"): columns} if (columns := _columns(key)) else {}
    outcome: Write | Drop = Drop("the columns of the rows decide the format")
    if name in _DATASETS and key.beside("source") is None:
        outcome = Write({(*place, "path"): _DATASETS[name]} | read, _NO_OTHERS if read else "")
    elif name == "instruct_dataset":  # a chat of two messages
        names: dict[KeyPath, object] = (
            {} if key.beside("column_map") else {(*place, "rename_columns", "input"): "instruction"}
        )
        outcome = Write({(*place, "format"): "alpaca"} | read | names, _NO_OTHERS)
    elif _BUILDERS.get(name):
        outcome = Write({(*place, "format"): _BUILDERS[name]})
    elif read:
        outcome = Write(read, f"{_NO_OTHERS}; they decide the format")
    if trains_all or key.beside("train_on_input") is not None:
        return [outcome, default] if trains_all else outcome
    return remarked(outcome, _trained_header(key))


_NO_OTHERS = "no other columns are read there"


def _columns(key: FileKey) -> list[str]:
    """Return the columns of the rows that a builder of chats reads; a recipe reads more where a row has them,
    as `system`."""
    name, mapped = class_named(key.value), as_mapping(key.beside("column_map"))
    if name == "instruct_dataset":
        return [str(mapped.get(content) or content) for content in ("input", "output")]
    if name not in _CHATS:
        return []
    named = mapped.get("conversations") or mapped.get("messages") or key.beside("conversation_column")
    return [str(named)] if named else ["conversations"] if _CHATS[name] else []


def _style(key: FileKey) -> str | None:
    """Return the style of the conversations of a data set, given one of its keys; None if it has no
    conversations."""
    builder = class_named(key.beside(COMPONENT))
    given = key.beside("conversation_style")
    return str(given) if given is not None else _CHATS.get(builder, "sharegpt" if builder in _CHATS else None)


def _trained(key: FileKey) -> Outcome:
    """Chats have several answers; prompts have one completion."""
    target = (*key.place, "loss_on")
    if is_on(key.value):
        return Write({target: "all"})
    return Write({target: "completion" if _style(key) is None else "assistant"}, _trained_header(key))


def _column_map(key: FileKey) -> Outcome:
    """{content: column}, as each builder names its contents."""
    style = _style(key)
    names = {"instruction": "instruction", "output": "output", "input": "input"}
    if style is not None:
        names = {"conversations": _STYLES.get(style, ("", "conversations"))[1], "messages": "messages"}
    elif class_named(key.beside(COMPONENT)) == "instruct_dataset":
        names = {"input": "instruction", "output": "output"}
    if not key.mapping:
        return Ask("write the columns as `rename_columns: {OLD: NEW}`", key.place)
    other = Ask("rename the column: `rename_columns: {OLD: NEW}`", key.place)
    return Inside({content: rename(names[content]) if content in names else other for content in key.mapping})


def _conversation(key: FileKey) -> Outcome:
    style = _style(key)
    if key.name == "conversation_column" and style in _STYLES:
        return renamed(str(key.value), _STYLES[style][1], key.place)
    if key.name == "conversation_style" and key.value in _STYLES:
        return Write({(*key.place, "format"): _STYLES[key.value][0]})
    words = (
        "conversations are `format: sharegpt`, with `from` and `value`, or `messages`, with `role` and "
        "`content`"
    )
    return Ask(words, (*key.place, "format"))


def _unknown(key: FileKey) -> Outcome:
    return Ask(f"`{key.name}` of a data set is not known here", key.place)


_SET: Rules = {
    "source": in_source("path"),
    "subset": in_source("name"),
    **{name: in_source(name, Fate.KEPT) for name in ("split", "name", "data_files", "data_dir", "max_rows")},
    "packed": lambda key: Write(
        {"data.packing" if key.place[1] == "train" else "data.eval_packing": key.value}
    ),
    "train_on_input": _trained,
    "column": rename("text"),
    **each(("conversation_column", "conversation_style"), _conversation),
    "column_map": _column_map,
    "new_system_prompt": lambda key: Ask("add the system message to the rows", key.place),
}
