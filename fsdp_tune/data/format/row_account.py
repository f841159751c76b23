"""The account of a row: each of its keys is read, is metadata, is ignored by the recipe, or the row is
refused.

Keys below the row are written as paths: `messages.name`, `messages.content.cache_control`,
`messages.tool_calls.function.arguments`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.report import KeyAccount
from fsdp_tune.recipe.schema.row_formats import ROW_FORMATS

IGNORE_KEY = "data.ignore_columns"


# fmt: off
METADATA = frozenset((
    # which row it is
    "id", "_id", "idx", "index", "uid", "uuid", "guid", "row_id", "sample_id", "example_id", "item_id", "doc_id", "document_id",  # noqa: E501
    "conversation_id", "conv_id", "chat_id", "session_id", "thread_id", "message_id", "parent_id", "prompt_id", "question_id", "qid",  # noqa: E501
    "task_id", "problem_id", "request_id", "trace_id", "hash", "md5", "sha1", "sha256", "__index_level_0__",
    "Unnamed: 0", "", "__key__", "__url__",
    # where it is from
    "source", "sources", "source_dataset", "source_name", "data_source", "dataset", "dataset_name", "_dataset_name", "dataset_id",  # noqa: E501
    "subset", "split", "origin", "provenance", "url", "uri", "link", "domain", "dump", "crawl", "repo", "repo_name", "file_path",  # noqa: E501
    "redpajama_set_name", "license", "license_type", "author", "annotator", "contributor", "generator", "model", "model_name",  # noqa: E501
    "version", "revision", "channel",
    # when
    "timestamp", "time", "date", "created", "created_at", "created_utc", "updated_at", "create_time",
    # what it is about
    "language", "lang", "locale", "language_code", "category", "categories", "topic", "topics", "subject", "ability", "tag", "tags",  # noqa: E501
    "keywords", "title", "meta", "metadata", "extra_info",
    # how good and how long it is
    "score", "int_score", "language_score", "quality", "quality_score", "rating", "difficulty", "complexity", "perplexity",  # noqa: E501
    "token_count", "num_tokens", "n_tokens", "num_turns", "n_turns", "turn_count", "length", "len", "char_count", "word_count",  # noqa: E501
    # an option of a request
    "parallel_tool_calls", "tool_choice",
))
# fmt: on
"""Keys of a row that never change what is trained: they are ignored and listed. docs/guide/data-formats.md
has the same list."""


# fmt: off
NESTED_METADATA = frozenset((
    "id", "_id", "idx", "index", "uid", "uuid", "message_id", "parent_id", "turn_id", "hash", "source", "model", "model_name",  # noqa: E501
    "timestamp", "time", "date", "created", "created_at", "create_time", "updated_at", "language", "lang", "score", "rating",  # noqa: E501
    "metadata", "meta", "extra_info", "cache_control", "signature", "annotations", "token_count", "num_tokens",  # noqa: E501
))
# fmt: on
"""The same for messages, parts of `content`, and calls. A chat template may read any of them; then they are
not ignored."""


MEDIA = "only text is supported: leave such rows out"


BETTER = "the better answer of a pair"


WORSE = "the worse answer of a pair, which is not trained"


WORSE_ANSWERS = ("rejected", "rejected_response", "rejected_messages", "non_preferred_output")


PACKED = "write each packed example as a row of its own; `data.packing: true` joins them again"


JUDGED = "whether the answer is a good one: leave the bad ones out, then ignore it"


NEEDS_CHAT = "write the row as a chat, with `messages`, or put it into the prompt"


EARLIER = "write the earlier turns as messages"


MASKED = "write `train: false` for what is not trained"


TOKEN_MARKS = (
    "marks of tokens need `input_ids`: write the row tokenized, or mark messages with `train: false`"
)


ADVICE = {
    **dict.fromkeys(
        (
            "image",
            "images",
            "video",
            "videos",
            "audio",
            "audios",
            "objects",
            "pixel_values",
            "image_grid_thw",
        ),
        MEDIA,
    ),
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp", ".gif", ".mp3", ".wav", ".flac", ".mp4"), MEDIA),
    **dict.fromkeys(("chosen", "chosen_messages", "preferred_output"), BETTER),
    **dict.fromkeys(WORSE_ANSWERS, WORSE),
    **dict.fromkeys(("kto_tag", "label"), JUDGED),
    **dict.fromkeys(("position_ids", "seq_lengths", "sequence_ids", "cu_seqlens"), PACKED),
    **dict.fromkeys(("system", "tools", "functions", "chat_template_kwargs", "enable_thinking"), NEEDS_CHAT),
    "history": EARLIER,
    **dict.fromkeys(
        ("mask", "masked", "ignore", "ignored", "skip", "exclude", "no_loss", "train_detail"), MASKED
    ),
    **dict.fromkeys(
        (
            "completion_mask",
            "assistant_masks",
            "assistant_mask",
            "loss_mask",
            "labels",
            "attention_mask",
            "response_mask",
        ),
        TOKEN_MARKS,
    ),
    "parameters": "a call has `name` and `arguments`",
    "refusal": "write the text of the refusal as `content`",
}
"""What to write instead of some keys, where a format does not read them."""


How = Literal["read", "metadata", "ignored", "other format"]


HOW: tuple[How, ...] = ("read", "metadata", "ignored", "other format")


_HOW_SHOWN: dict[str, str] = {
    "read": "read",
    "metadata": "ignored as metadata",
    "ignored": f"ignored by `{IGNORE_KEY}`",
    "other format": "ignored: another format reads them, and the recipe names this one",
}


class KeyUse(NamedTuple):
    key: str
    how: How
    meaning: str = ""
    """For `read`: what a key that the format does not need is read as."""


@dataclass(slots=True)
class RowAccount:
    """The account of one row, filled while the row is read."""

    ignored: Collection[str] = ()
    """Keys that the recipe ignores (`data.ignore_columns`)."""
    uses: dict[KeyUse, None] = field(default_factory=dict[KeyUse, None])
    _unread: dict[str, str] = field(default_factory=dict[str, str])
    """What to write instead of each key that is not read; empty if that is unknown."""

    def close(
        self,
        values: dict[str, object],
        known: Mapping[str, str],
        *,
        path: str = "",
        metadata: Collection[str] = NESTED_METADATA,
        template: str | None = None,
        names: Mapping[str, str] | None = None,
        other: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return `values` without the keys that are not read. Keys that are neither known nor metadata are
        refused by `finish`.

        `known`: what each key is read as. Keys that `template` reads are read too. `names`: the names of
        columns in the file. `other`: columns of a format that the recipe has not chosen.
        """
        kept: dict[str, object] = {}
        for key, value in values.items():
            name = path + (names or {}).get(key, key)
            if name in self.ignored:
                self.uses[KeyUse(name, "ignored")] = None
            elif key in known:
                kept[key] = value
                if not _is_empty(value):
                    self.uses[KeyUse(name, "read", known[key])] = None
            elif _is_empty(value):
                continue
            elif template is not None and is_named(template, key):
                kept[key] = value
                self.uses[KeyUse(name, "read", "a field of the chat template")] = None
            elif key in other:
                self.uses[KeyUse(name, "other format")] = None
            elif key in metadata:
                self.uses[KeyUse(name, "metadata")] = None
            else:
                self._unread[name] = ADVICE.get(key, "")
        return kept

    def _ways_out(self, unknown: Sequence[str], format_: str, template: str | None) -> Iterator[str]:
        """Yield what can be done about the keys that are not read; for those in `unknown`, no format has
        advice."""
        by_advice: dict[str, list[str]] = {}
        for name, advice in self._unread.items():
            by_advice.setdefault(advice, []).append(name)
        yield from (f"{listed_keys(names)}: {advice}" for advice, names in by_advice.items() if advice)
        messages = next(
            (use.key for use in self.uses if use.how == "read" and not use.meaning and "." not in use.key),
            None,
        )
        if (
            ROW_FORMATS[format_].holds == "chat"
            and messages
            and "chosen" in self._unread
            and "prompt" not in self._unread
        ):
            yield (
                f"to train it after messages that end with the question, `rename_columns: {{{messages}: "
                f"prompt, chosen: completion}}`"
            )
        for name in unknown if template is not None else ():
            if name.isidentifier() and names_variable(template, name):
                yield f'the chat template reads `{name}`: write it as `chat_template_kwargs: {{"{name}": …}}`'
        names = [*self.ignored, *self._unread]
        if unknown:
            yield ignoring_hint(names)
        else:
            yield (
                f"`{ignoring_option(names)}` ignores {'it' if len(self._unread) == 1 else 'them'} all "
                "the same"
            )

    def finish(self, format_: str, template: str | None) -> None:
        """Raise a RowError that names every key that was not read, if there are any."""
        if not self._unread:
            return
        unknown = [name for name, advice in self._unread.items() if not advice]
        reason = (
            f"{listed_keys(self._unread)} {'is' if len(self._unread) == 1 else 'are'} not read by the "
            f"format {format_}"
        )
        hint = "; ".join(self._ways_out(unknown, format_, template))
        only_unknown = len(unknown) == len(self._unread)
        raise RowError(reason, hint=hint, unread=(*self.ignored, *unknown) if only_unknown else ())


def key_account(keys: Counter[tuple[int, KeyUse]], source: int) -> tuple[KeyAccount, ...]:
    """Return the account of a source: how each key of its rows is used, and in how many rows."""
    own = [(use, rows) for (number, use), rows in keys.items() if number == source]
    own.sort(key=lambda item: (HOW.index(item[0].how), item[0].meaning, item[0].key))
    return tuple(KeyAccount(use.key, use.how, use.meaning, rows) for use, rows in own)


def account_line(keys: Sequence[KeyAccount]) -> str:
    """Describe the account of a source in one line; keys that every row of a format has below its columns are
    left out."""
    shown: dict[tuple[str, str], list[str]] = {}
    for each in keys:
        if each.how != "read" or each.meaning or "." not in each.key:
            shown.setdefault((each.how, each.meaning), []).append(each.key)
    return "; ".join(
        f"{listed_keys(names)} {describe_use(how, meaning)}" for (how, meaning), names in shown.items()
    )


def describe_use(how: str, meaning: str) -> str:
    """Describe how a key of an account is used."""
    return f"{_HOW_SHOWN[how]}{f' as {meaning}' if meaning else ''}"


def ignored_by_none(ignored: Iterable[str], accounts: Iterable[Sequence[KeyAccount]]) -> list[str]:
    """Return the names in `data.ignore_columns` that no row has."""
    found = {each.key for keys in accounts for each in keys if each.how == "ignored"}
    return [name for name in ignored if name not in found]


def listed_keys(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def ignoring_hint(names: Iterable[str]) -> str:
    """Return a hint with the option that ignores keys, quoted for a shell."""
    names = list(dict.fromkeys(names))
    other = (
        "remove them"
        if all("." in name for name in names)
        else "rename them with `rename_columns` to what the format reads"
    )
    return f"{other}, or ignore them: `{ignoring_option(names)}`"


def ignoring_option(names: Iterable[str]) -> str:
    """Return the option that ignores keys, quoted for YAML and for a shell."""
    listed = ",".join(name if _is_plain(name) else json.dumps(name, ensure_ascii=False) for name in names)
    return f"--set {shlex.quote(f'{IGNORE_KEY}=[{listed}]')}"


def _is_plain(name: str) -> bool:
    """Return whether YAML reads a name in a list as that text."""
    return bool(re.fullmatch(r"[A-Za-z_.][\w.-]*", name)) and not re.fullmatch(
        r"(?i)y|n|yes|no|on|off|true|false|null|\.inf|\.nan|[.e_\d]*", name
    )


def _is_empty(value: object) -> bool:
    """Return whether a value has no content: Arrow gives each row the keys of all others, with null or an
    empty list."""
    return value is None or value in ("", [], {})


@lru_cache(maxsize=1024)
def is_named(template: str, key: str) -> bool:
    """Return whether a chat template reads `key` of an object: as an attribute or in quotes."""
    return (
        re.search(rf"\.\s*{re.escape(key)}\b|(['\"]){re.escape(key)}\1", _without_comments(template))
        is not None
    )


@lru_cache(maxsize=1024)
def names_variable(template: str, name: str) -> bool:
    """Return whether a chat template has a variable `name`, outside its comments."""
    return re.search(rf"\b{re.escape(name)}\b", _without_comments(template)) is not None


@lru_cache(maxsize=16)
def _without_comments(template: str) -> str:
    return re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
