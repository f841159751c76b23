"""Formats of rows: their columns, what is trained, and what a row holds. `data/format/formats.py` reads rows
of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

DataFormat = Literal[
    "auto", "text", "prompt_completion", "alpaca", "messages", "sharegpt", "segments", "tokenized"
]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What differs by the format of rows."""

    columns: tuple[tuple[str, ...], ...]
    """The columns that it needs, in one of several spellings; `format: auto` detects it by them."""
    loss_on: tuple[str, ...]
    """The possible values of `loss_on`; `auto` selects the first."""
    holds: Literal["text", "text or chat", "chat with a template", "chat", "ids"]
    """text or chat: each row by itself. chat with a template: where there is a chat template, else text."""
    marks_trained: bool = False
    """Whether rows mark what is trained."""
    question: Callable[[str, str], dict[str, object]] | None = None
    """Makes a row of a prompt and an answer. None: a prompt is not the question of an answer, and is
    continued as it is."""
    surrounds: str | None = None
    """What a prompt becomes, if the package surrounds it with text of its own; None: it stays as it is."""


def _messages(prompt: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


ROW_FORMATS: dict[str, RowFormat] = {
    "text": RowFormat((("text",),), ("all",), "text"),
    "prompt_completion": RowFormat(
        (("prompt", "completion"),),
        ("completion", "all"),
        "text or chat",
        question=lambda prompt, answer: {"prompt": prompt, "completion": answer},
    ),
    "alpaca": RowFormat(
        (("instruction", "output"), ("instruction", "response"), ("query", "response")),
        ("completion", "last_assistant", "all"),
        "chat with a template",
        question=lambda prompt, answer: {"instruction": prompt, "output": answer},
        surrounds="Stanford Alpaca's instruction",
    ),
    "messages": RowFormat(
        (("messages",),), ("assistant", "last_assistant", "all"), "chat", question=_messages
    ),
    "sharegpt": RowFormat(
        (("conversations",), ("conversation",)),
        ("assistant", "last_assistant", "all"),
        "chat",
        question=lambda prompt, answer: {"conversations": _messages(prompt, answer)["messages"]},
    ),
    "segments": RowFormat((("segments",),), ("labels",), "text", marks_trained=True),
    "tokenized": RowFormat((("input_ids",),), ("labels",), "ids", marks_trained=True),
}
"""One for each `DataFormat` but auto."""
