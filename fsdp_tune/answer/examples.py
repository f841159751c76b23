"""Rows of an evaluation with their prompts and answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.data.account import examples_of
from fsdp_tune.data.store import IGNORE_INDEX, Row, RowStore
from fsdp_tune.data.tokenise.encoder_protocol import Encoder, closing_tokens, end_of_text


@dataclass(frozen=True, slots=True)
class EvaluatedExample:
    row: Row
    """Its ids and labels."""
    where: Where
    """Its file and line."""
    is_cut: bool
    """Whether it is a part of an example: longer than `data.max_length`, or divided by packing."""

    @property
    def place(self) -> tuple[str | None, int | None]:
        """Its file and line: equal for the pieces of a row."""
        return self.where.source, self.where.line

    @property
    def answer(self) -> tuple[int, int]:
        """Begin and end of the last run of trained tokens. The tokens before it are the prompt."""
        trained = np.flatnonzero(self.row.labels != IGNORE_INDEX)
        end = int(trained[-1]) + 1
        before = np.flatnonzero(self.row.labels[:end] == IGNORE_INDEX)
        return int(before[-1]) + 1, end

    @property
    def targets(self) -> int:
        return int(np.count_nonzero(self.row.labels != IGNORE_INDEX))


def read_examples(rows: RowStore, *, most: int | None = None) -> list[EvaluatedExample]:
    """Return the first `most` examples of a prepared set in the order in which they were read, packed or not;
    all pieces of each."""
    segments = rows.segments()
    order = np.lexsort((segments.starts, segments.examples))
    chosen = np.isin(segments.examples, np.unique(segments.examples)[:most])
    first_of_row = np.searchsorted(segments.rows, segments.rows)
    return [_example(rows, int(segments.rows[at]), int(at - first_of_row[at])) for at in order if chosen[at]]


def _example(store: RowStore, index: int, position: int) -> EvaluatedExample:
    file, line = store.origins(index)[position]
    return EvaluatedExample(
        examples_of(store[index])[position], Where(file, line), not store.are_complete(index)[position]
    )


def refuse_without_prompt(examples: Sequence[EvaluatedExample]) -> None:
    """Refuse rows whose answer begins at the first or second token, which in most tokenizers is after BOS.
    Raises: usage error."""
    for example in examples:
        if example.answer[0] < 2:
            raise usage_error(
                "no-prompt",
                "the row has no prompt: all of it is trained, so there is nothing to answer",
                where=example.where,
                hint="exact_match needs rows with prompts (prompt_completion, alpaca, messages); --metric "
                "perplexity takes any row",
            )


class AnswerReader:
    """Turns tokens into the text that is compared: without special tokens at the end, or only the match of a
    pattern."""

    def __init__(self, encoder: Encoder, pattern: str | None) -> None:
        """Raises: usage error for a pattern that is not a regular expression."""
        self._encoder = encoder
        try:
            self._pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            raise usage_error(
                "answer-pattern", f"`--answer {pattern}` is not a regular expression: {error}"
            ) from error

    def text(self, ids: Sequence[int]) -> str:
        """Return the decoded ids, without the special tokens at their end."""
        return self._encoder.decode(list(ids[: end_of_text(ids, self._encoder)]))

    def end_ids(self, examples: Sequence[EvaluatedExample]) -> set[int]:
        """Return the tokens after which a generated answer ends: EOS, and the token that ends the answers of
        the rows."""
        found = {self._encoder.eos_id}
        for example in examples:
            begin, end = example.answer
            found |= closing_tokens(example.row.input_ids[begin:end].tolist(), self._encoder)
        return found

    def compared(self, text: str) -> str | None:
        """Return what is compared: the text without white space around it, or the first match of the pattern;
        None without a match."""
        if self._pattern is None:
            return text.strip()
        match = self._pattern.search(text)
        # None also if an optional group takes no part
        found = None if match is None else match[1 if match.re.groups else 0]
        return None if found is None else found.strip()

    def target(self, example: EvaluatedExample) -> str:
        """Return the answer of the row as it is compared. Raises: usage error if the pattern is not in it."""
        begin, end = example.answer
        found = self.compared(self.text(example.row.input_ids[begin:end].tolist()))
        if found is None:
            message = "`--answer` matches nothing in the answer of this row"
            raise usage_error(
                "answer-pattern", message, where=example.where, hint=r"for GSM8K: --answer '#### (.*)'"
            )
        return found
