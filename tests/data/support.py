"""A small tokenizer and recipes around one file, so that tests of `data/` do not depend on transformers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fsdp_tune.data.preparation import Prepared, prepare
from fsdp_tune.data.store import Row, RowStore
from fsdp_tune.data.tokenise.encoder_protocol import SpecialToken
from fsdp_tune.recipe.schema.recipe import Recipe

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ByteEncoder:
    """A token for each byte and for each special token; `merges` are pairs of letters that become one
    token."""

    SPECIAL = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")

    def __init__(
        self,
        *,
        adds_bos: bool = False,
        template: str | None = None,
        eos: str = "</s>",
        merges: Sequence[str] = (),
        bos: str | None = "<s>",
    ) -> None:
        self.pieces = [*self.SPECIAL, *merges]
        self.vocabulary_size = 256 + len(self.pieces)
        self.eos_token, self.eos_id, self.pad_id = eos, self.id(eos), self.id("<pad>")
        self.bos_id = None if bos is None else self.id(bos)
        self.prefix_ids = (self.id("<s>"),) if adds_bos else ()
        self.chat_template = template
        self.special_tokens = tuple(SpecialToken(text, self.id(text)) for text in self.SPECIAL)

    @property
    def digest(self) -> str:
        return hashlib.sha256(
            repr((self.pieces, self.eos_token, self.prefix_ids, self.chat_template)).encode()
        ).hexdigest()

    def id(self, piece: str) -> int:
        return 256 + self.pieces.index(piece)

    def encode_as_text(self, texts: list[str]) -> list[list[int]]:
        """Merges are tokens of ordinary text; the zero byte, which no text of a test holds, keeps special
        tokens apart."""
        return [
            [number for number in ids if number]
            for ids in self.encode([re.sub("([<[])", "\\1\0", text) for text in texts])
        ]

    def encode(self, texts: list[str]) -> list[list[int]]:
        pattern = "|".join(map(re.escape, self.pieces))
        return [
            [
                number
                for part in re.split(f"({pattern})", text)
                for number in ([self.id(part)] if part in self.pieces else part.encode())
            ]
            for text in texts
        ]

    def decode(self, ids: Sequence[int]) -> str:
        raw = b"".join(
            bytes([number]) if number < 256 else self.pieces[number - 256].encode() for number in ids
        )
        return raw.decode("utf-8", "replace")

    def render(
        self,
        messages: list[dict[str, Any]],
        template: str,
        *,
        tools: list[Any] | None,
        generation_prompt: bool,
        **variables: Any,
    ) -> str:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        return environment.from_string(re.sub(r"{% (end)?generation %}", "", template)).render(
            messages=messages,
            tools=tools,
            add_generation_prompt=generation_prompt,
            eos_token=self.eos_token,
            **variables,
        )

    def render_marked(
        self, messages: list[dict[str, Any]], template: str, *, tools: list[Any] | None, **variables: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marked = render_jinja_template(
            [messages],
            tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            eos_token=self.eos_token,
            **variables,
        )
        return texts[0], marked[0]


def _raise(message: str) -> None:
    raise TemplateError(message)


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def recipe_for(folder: Path, *entries: dict[str, Any] | Path, **data: Any) -> Recipe:
    """A resolved recipe of one rank whose cache is in `folder`."""
    train = [{"path": str(entry)} if isinstance(entry, Path) else entry for entry in entries]
    settings = {"train": train, "max_length": 64, "num_proc": 1, "cache_dir": str(folder / "cache")} | data
    return Recipe.model_validate({"data": settings, "launch": {"num_processes": 1}})


def prepared(
    folder: Path, *entries: dict[str, Any] | Path, encoder: ByteEncoder | None = None, **data: Any
) -> Prepared:
    return prepare(recipe_for(folder, *entries, **data), encoder or ByteEncoder())


def rows_of(found: Prepared) -> list[Row]:
    store = RowStore(found.train)
    return [store[index] for index in range(len(store))]


def marked(row: Row, encoder: ByteEncoder) -> str:
    """The row as text with what is trained in brackets; the first token of an example is never a target."""
    parts: list[str] = []
    inside = False
    for token, label in zip(row.input_ids.tolist(), row.labels.tolist(), strict=True):
        if (label != -100) != inside:
            parts.append("]" if inside else "[")
            inside = not inside
        assert label in (-100, token)
        parts.append(encoder.decode([token]))
    return "".join(parts) + ("]" if inside else "")
