"""Prompts for a trained model: encoded as the context of an answer is in training, with the tokens that end
an answer there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from fsdp_tune.core.errors import Notice
from fsdp_tune.data.format.chat_columns import CHAT_KEYS, parsed_column
from fsdp_tune.data.format.formats import Chat, Text
from fsdp_tune.data.format.message_keys import FUNCTION_CALL, ROLES, Message
from fsdp_tune.data.inputs import format_settings
from fsdp_tune.data.read.row_files import BadRow, ColumnError, RowError, kind_of
from fsdp_tune.data.report import DataReport, InputAccount
from fsdp_tune.data.tokenise.encoder_protocol import Encoder, closing_tokens
from fsdp_tune.data.tokenise.encoding import encode_texts
from fsdp_tune.data.tokenise.rows import RawRow, Tokeniser
from fsdp_tune.data.tokenise.sample_prompts import render_prompt
from fsdp_tune.data.tokenise.special_tokens import InseparableError, RestoringEncoder, SpecialTokens
from fsdp_tune.recipe.schema.data_section import DataSource
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.row_formats import ROW_FORMATS

PromptKind = Literal["question", "chat", "text"]
"""question: formatted as the model was trained. chat: a row with `messages`. text: continued as it is."""
ANSWER = "."
"""In the place of an answer, where a row needs one to be read."""
_ANSWERING = ("assistant", FUNCTION_CALL)
READ_KEYS = ("messages", "conversations", "conversation", "prompt", "text")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is to answer."""

    kind: PromptKind
    row: dict[str, Any]
    """question: `prompt`; chat: `messages` and what else a chat has, such as `tools`; text: `text`."""

    @property
    def shown(self) -> str:
        """The text by which a person recognises it: the question, or the last message that is not the
        assistant's."""
        if self.kind != "chat":
            return str(self.row[self.kind if self.kind == "text" else "prompt"])
        turns = [
            cast("Message", turn)
            for turn in cast("list[object]", self.row["messages"])
            if isinstance(turn, dict)
        ]
        asked = [
            turn for turn in turns if ROLES.get(str(turn.get("role", turn.get("from")))) not in _ANSWERING
        ]
        return str(asked[-1].get("content", asked[-1].get("value"))) if asked else ""


def question(text: str) -> Prompt:
    return Prompt("question", {"prompt": text})


def prompt_of_row(row: Mapping[str, object], *, is_line: bool) -> Prompt:
    """Return the prompt of a row with `messages`, `prompt` or `text`, or of a line of a text file. Raises:
    RowError for other rows."""
    if is_line:
        return question(str(row["text"]))
    key = next((key for key in READ_KEYS if row.get(key) is not None), None)
    if key is None:
        raise RowError(f"it has no `messages`, `prompt` or `text`; it has {', '.join(row) or 'no keys'}")
    value: object = row[key]
    if key in ("prompt", "text") and isinstance(value, str):
        return question(value) if key == "prompt" else Prompt("text", {"text": value})
    try:
        turns = parsed_column(dict(row), key) if key != "text" else None  # a list, or its JSON text
    except ColumnError as error:
        raise RowError(f"`{key}` {error.what}") from error
    if not isinstance(turns, list):
        raise RowError(f"`{key}` holds {kind_of(value)} instead of {'text' if key == 'text' else 'messages'}")
    others = {name: each for name, each in row.items() if name in CHAT_KEYS}
    return Prompt("chat", {"messages": turns, **others})


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    ids: list[int]
    text: str
    """What the ids are of: the rendered conversation, or the text without what the tokenizer adds before
    it."""
    chat: Chat | None
    """The conversation up to the answer; None: the prompt is text."""


@dataclass(frozen=True, slots=True)
class PromptDescription:
    """How prompts are formatted, for people."""

    is_chat: bool
    text: str
    ends: tuple[str, ...]
    """The tokens after which an answer ends, as text."""


class PromptFormat:
    """Encodes prompts as the rows of one source were; without a run, as chats if there is a template, else as
    text."""

    def __init__(self, recipe: Recipe, encoder: Encoder, report: DataReport | None) -> None:
        """`report`: of the run's data. Raises: usage error for a run of chats whose template is gone."""
        self._encoder, self._special = encoder, SpecialTokens(encoder)
        at, account = _trained_source(report)
        named = (
            account.format
            if account is not None
            else "messages"
            if encoder.chat_template is not None
            else "text"
        )
        entry = (
            recipe.data.train[at]
            if account is not None and at < len(recipe.data.train)
            else DataSource(path="prompts")
        )
        settings = format_settings(
            recipe, entry.model_copy(update={"loss_on": "auto"}), f"data.train[{at}]", named, encoder
        )
        self.is_chat = ROW_FORMATS[named].holds == "chat" or (
            account is not None and _holds_chats(account, settings.template)
        )
        self._settings = (
            replace(settings, format="messages", loss_on="assistant") if self.is_chat else settings
        )
        self._is_of_run = account is not None
        self.notices: tuple[Notice, ...] = ()
        self.end_ids = frozenset({encoder.eos_id, *self._trained_end()})

    def describe(self, end_ids: Sequence[int]) -> PromptDescription:
        """`end_ids` also has those of the model."""
        ends = tuple(self._encoder.decode([token]) for token in sorted(end_ids))
        whose = "the run's" if self._is_of_run else "the model's own"
        if self.is_chat:
            return PromptDescription(
                is_chat=True, text=f"a chat: turns are formatted by {whose} chat template", ends=ends
            )
        rows = (
            f"the run trained on `{self._settings.format}` rows"
            if self._is_of_run
            else "the model has no chat template"
        )
        row_format, how = ROW_FORMATS[self._settings.format], "a prompt is continued as it is"
        if row_format.surrounds is not None:
            how = f"a prompt becomes {row_format.surrounds}"
        elif row_format.question is not None and self._settings.separator:
            how = f"a prompt is followed by {self._settings.separator!r}"
        return PromptDescription(is_chat=False, text=f"no chat: {rows}; {how}", ends=ends)

    def encode(self, prompt: Prompt, system: str | None = None) -> list[int]:
        """Return the ids of a prompt. Raises: RowError for one that cannot be read, is empty, or that the
        template rejects."""
        return self.encoded(prompt, system).ids

    def encoded(self, prompt: Prompt, system: str | None = None) -> EncodedPrompt:
        """Return a prompt with its text and conversation. Raises: as `encode`."""
        chat: Chat | None = None
        if prompt.kind == "chat" or (prompt.kind == "question" and self.is_chat):
            chat = self._chat(prompt, system)
            text, ids = self._chat_ids(chat)
        elif system is not None:
            raise RowError(
                "a system message needs a chat, and this prompt is text", hint="leave out `--system`"
            )
        else:
            ids = self._text_ids(prompt)
            prefix = self._encoder.prefix_ids
            text = self._encoder.decode(ids[len(prefix) :] if tuple(ids[: len(prefix)]) == prefix else ids)
        if not ids:
            raise RowError("the prompt has no token")
        return EncodedPrompt(ids, text, chat)

    def _chat(self, prompt: Prompt, system: str | None) -> Chat:
        """Return the conversation up to the answer that is asked for: a row's own last answer is left out."""
        if self._settings.template is None:
            raise RowError(
                "the row is a conversation, and the model has no chat template",
                hint="write it as `prompt` or `text`",
            )
        turns: list[object] = (
            [{"role": "user", "content": prompt.row["prompt"]}]
            if prompt.kind == "question"
            else prompt.row["messages"]
        )
        others = (
            {}
            if prompt.kind == "question"
            else {name: value for name, value in prompt.row.items() if name != "messages"}
        )
        settings = replace(self._settings, format="messages", loss_on="assistant")
        read = settings.example({"messages": _with_answer(turns), **others})
        assert isinstance(read, Chat)
        messages = read.messages[:-1]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if system is not None:
            messages = [
                {"role": "system", "content": system},
                *(each for each in messages if each["role"] != "system"),
            ]
        if not any(message["role"] != "system" for message in messages):
            raise RowError("there is no message to answer")
        return replace(read, messages=messages, trained=None)

    def _chat_ids(self, chat: Chat) -> tuple[str, list[int]]:
        """Return a conversation as text and as ids."""
        template = self._settings.template
        assert template is not None
        text = render_prompt(chat, template, self._encoder)
        if self._settings.encodes_special_tokens_as_text(chat):
            keeps_added = self._settings.special_tokens == "auto"
            inside = self._special.in_chat(chat, template, [text], keeps_added=keeps_added)
            if inside.as_text:
                marked, placeholders = self._special.with_placeholders(chat, inside, text)
                restoring = RestoringEncoder(self._encoder, self._special, placeholders)
                try:
                    return text, restoring.encode([render_prompt(marked, template, self._encoder)])[0]
                except InseparableError:
                    pass  # training keeps them as tokens too
        return text, self._encoder.encode([text])[0]

    def _text_ids(self, prompt: Prompt) -> list[int]:
        settings = self._settings
        question = ROW_FORMATS[settings.format].question
        if prompt.kind == "text" or question is None:
            text = Text(prompt.row.get("text", prompt.row.get("prompt", "")), "", train_prompt=False)
        else:
            text = settings.example(question(prompt.row["prompt"], ANSWER))
            assert isinstance(text, Text)
            text = replace(text, completion="")
        return next(encode_texts([(text, settings)], self._encoder, self._special, Counter())).ids

    def _trained_end(self) -> set[int]:
        """Return the token that ends an answer in a row of this format, tokenised as in training."""
        settings = self._settings
        question = ROW_FORMATS[settings.format].question
        row: dict[str, object] = {"text": ANSWER} if question is None else question(ANSWER, ANSWER)
        settings = replace(settings, format="text", loss_on="all") if question is None else settings
        done = Tokeniser(self._encoder, (settings,)).chunk([RawRow(0, 0, 1, row)])
        if done.bad:
            bad: BadRow = done.bad[0][1]
            message = (
                "the token that ends an answer is not known, since the chat template does not render a "
                f"plain one: {bad.reason}"
            )
            self.notices = (
                Notice(
                    "answer-end-unknown",
                    message,
                    hint="answers end at the end of sequence, or at `--max-new-tokens`",
                ),
            )
            return set()
        trained = [int(token) for token, flag in zip(done.tokens, done.trained, strict=True) if flag]
        return closing_tokens(trained, self._encoder)


def _trained_source(report: DataReport | None) -> tuple[int, InputAccount | None]:
    """Return the training source whose format prompts get, with its position: the first of chats, else the
    first."""
    sources = [each for each in report.inputs if each.set == "train"] if report is not None else []
    chats = [
        at
        for at, each in enumerate(sources)
        if ROW_FORMATS[each.format].holds == "chat" or _has_messages(each)
    ]
    at = next(iter(chats), 0)
    return (at, sources[at]) if sources else (0, None)


def _has_messages(account: InputAccount) -> bool:
    """Return whether prompts and completions are lists of messages."""
    return any(key.key in ("prompt.role", "prompt.from") for key in account.keys)


def _holds_chats(account: InputAccount, template: str | None) -> bool:
    """Return whether rows of a format that has chats and texts are chats."""
    return _has_messages(account) or (
        ROW_FORMATS[account.format].holds == "chat with a template" and template is not None
    )


def _with_answer(turns: list[object]) -> list[object]:
    return [*turns, {"role": "assistant", "content": ANSWER}]
