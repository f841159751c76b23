"""The stages of a tool's side that do not depend on the tool: its examples, and the rows that it makes of
them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from fsdp_tune.comparison.tool_trainers import IGNORE_INDEX, Facts, ToolRequest


def step_rows(step: int, count: int, size: int) -> list[int]:
    """Return the rows of a step, counted from 0, of an epoch in the order of its rows; the last step of an
    epoch may have fewer."""
    at = step % max(1, math.ceil(count / size)) * size
    return list(range(at, min(at + size, count)))


class ToolRows:
    """The stages that do not depend on the tool, and the rows that it is given."""

    def __init__(self, request: ToolRequest) -> None:
        self.request = request
        self.stages: dict[str, Facts] = {}
        self.texts: dict[str, str] = {}
        self.left_out: list[str] = []
        lines = [json.loads(line) for line in Path(request.rows).read_text(encoding="utf-8").splitlines()]
        self.keys: list[str] = [line["key"] for line in lines]
        self.raw: list[dict[str, Any]] = [line["values"] for line in lines]
        self.sources: list[int] = [line.get("source", 0) for line in lines]
        self.names: dict[str, str] = {line["key"]: line["name"] for line in lines}
        self.tokens: dict[str, list[int]] = {}

    def leave_out(self, what: str) -> None:
        if what not in self.left_out:
            self.left_out.append(what)

    def set_examples(
        self, tokens: Sequence[list[int]], labels: Sequence[list[int]], decode: Callable[[list[int]], str]
    ) -> None:
        self.tokens = dict(zip(self.keys, tokens, strict=True))
        flags = {
            key: [0, *(int(label != IGNORE_INDEX) for label in each[1:])]
            for key, each in zip(self.keys, labels, strict=True)
        }
        self.texts = {
            str(token): decode([token]) for token in sorted({token for each in tokens for token in each})
        }
        self.stages |= {"tokens": {"values": self.tokens}, "labels": {"values": flags}}

    def set_rows(self, rows: Sequence[tuple[list[int], Sequence[int] | None]], *, is_wrapped: bool) -> None:
        """`rows`: tokens, and the lengths of their examples if the tool lists them."""
        used: dict[str, int] = {}
        stream = iter([(key, index) for key, ids in self.tokens.items() for index in range(len(ids))])
        found: dict[str, list[list[Any]]] = {}
        for number, (ids, lengths) in enumerate(rows):
            if is_wrapped:
                parts = [
                    list(part) for _, part in groupby(islice(stream, len(ids)), key=lambda token: token[0])
                ]
                found[f"row {number}"] = [[*part[0], len(part)] for part in parts]
                continue
            pieces, at = [], 0
            for length in lengths or [len(ids)]:
                pieces.append(self._located(ids[at : at + length], used))
                at += length
            found[f"row {number}"] = pieces
            self.names[f"row-id {number}"] = f"row {number} ({self.names.get(pieces[0][0], 'unknown')})"
        self.stages["rows"] = {"values": found}

    def _located(self, piece: list[int], used: dict[str, int]) -> list[Any]:
        """Return [example, first token, tokens] of a piece: of the first example that has these tokens, and
        has not given them yet."""
        free = [(key, ids) for key, ids in self.tokens.items() if used.get(key, 0) < len(ids)]
        free.sort(key=lambda each: each[1] != piece)  # a complete example first
        for key, ids in free:
            start = used.get(key, 0)
            for at in dict.fromkeys((start, len(ids) - len(piece))):
                if at >= start and ids[at : at + len(piece)] == piece:
                    used[key] = at + len(piece)
                    return [key, at, len(piece)]
        return ["tokens of no example", 0, len(piece)]
