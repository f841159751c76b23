"""Notes about rows: conditions that are allowed but reported, counted by kind and detail, with the first rows
of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_tune.data.report import NamedRows
from fsdp_tune.data.sets import NAMED_ROWS


class Note(NamedTuple):
    kind: str
    """The code of the notice that reports it."""
    detail: str


@dataclass(slots=True)
class _Noted:
    rows: int = 0
    first: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(file, row in the file)."""


class RowNotes:
    """The notes of many rows. Memory is independent of the number of rows."""

    def __init__(self) -> None:
        self._noted: dict[Note, _Noted] = {}

    def add(self, note: Note, file: int, row: int) -> None:
        noted = self._noted.setdefault(note, _Noted())
        noted.rows += 1
        if len(noted.first) < NAMED_ROWS:
            noted.first.append((file, row))

    def merge(self, later: RowNotes) -> None:
        for note, more in later._noted.items():
            noted = self._noted.setdefault(note, _Noted())
            noted.rows += more.rows
            noted.first += more.first[: NAMED_ROWS - len(noted.first)]

    def report(self, names: Sequence[str]) -> dict[str, dict[str, NamedRows]]:
        """Return the rows per kind and detail, the most frequent detail first."""
        report: dict[str, dict[str, NamedRows]] = {}
        for note, noted in sorted(self._noted.items(), key=lambda item: (-item[1].rows, item[0])):
            first = tuple(f"{names[file]}:{row}" for file, row in noted.first)
            report.setdefault(note.kind, {})[note.detail] = NamedRows(noted.rows, first)
        return report
