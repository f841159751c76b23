"""Rows of source files that a run leaves out: the file of `--skip-rows`, and what it means for prepared rows
and for streams.

Prepared data stay as they are. A row that is left out from step S on was trained in the steps before, if it
was due; the rows that remain close up. From step 0 on, rows that are not packed have the order of files
without these rows.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.data.row_order import Removed
from fsdp_tune.data.store import ROW_BITS, Origin, RowStore

SHOWN_PROBLEMS = 10
LONGEST_NUMBER = 13
"""Digits of the largest number of a row, 2 to the power of `ROW_BITS`."""
FORMS = (
    "`PATH:ROW`, or an object with `file` and `row`, as `fsdp-tune status RUN --json` prints the rows "
    "of a spike"
)


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row of a source file that a run leaves out."""

    file: str
    row: int
    """Its number in the file, counted from 1: a line, where the file has lines."""
    step: int
    """The steps that were trained before it was left out."""

    @property
    def origin(self) -> Origin:
        return (self.file, self.row)


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row that a file of `--skip-rows` names."""

    file: str
    row: int
    where: Where


def read_named_rows(path: Path) -> list[NamedRow]:
    """Read a file of `--skip-rows`, a row on each line; blank lines are ignored. Raises: usage error for all
    lines that name no row."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise usage_error("skip-rows-unreadable", f"`--skip-rows {path}` cannot be read: {reason}") from error
    found: list[NamedRow] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        where = Where(str(path), number)
        if line.strip() and (named := _named(line.strip())) is not None:
            found.append(NamedRow(*named, where))
        elif line.strip():
            problems.append(
                Problem("skip-rows-line", f"`{line.strip()[:80]}` names no row", where, f"write {FORMS}")
            )
    _refuse(problems)
    if not found:
        raise usage_error(
            "skip-rows-line", "it names no row", where=Where(str(path)), hint=f"write {FORMS}, one a line"
        )
    return found


def _named(line: str) -> Origin | None:
    if not line.startswith("{"):
        name, _, row = line.rpartition(":")
        return (
            _origin(name, int(row))
            if row.isascii() and row.isdigit() and len(row) <= LONGEST_NUMBER
            else None
        )
    try:
        raw: Any = json.loads(line)
        name, row = raw["file"], raw["row"]
    except (ValueError, KeyError, RecursionError):
        return None
    return _origin(name, row) if isinstance(name, str) and type(row) is int else None


def _origin(name: str, row: int) -> Origin | None:
    return (name, row) if name and 0 < row < 1 << ROW_BITS else None


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        rest = len(problems) - SHOWN_PROBLEMS
        shown = [*problems[:SHOWN_PROBLEMS]]
        if rest > 0:
            shown[-1] = replace(shown[-1], message=f"{shown[-1].message} (and {rest:,} more lines)")
        raise FsdpTuneError(*shown)


def resolved_rows(
    named: Sequence[NamedRow], earlier: Iterable[SkippedRow], known: NamedFiles, step: int
) -> tuple[SkippedRow, ...]:
    """Return the rows that a run leaves out from `step` on: those of `earlier` starts, and the named ones.

    Raises: usage error with the line of each name that is not a training row, and for a row of `earlier` that
    is not in the data.
    """
    found = {each.origin: replace(each, step=min(each.step, step)) for each in _found_again(earlier, known)}
    origins = [(known.name_of(each.file), each.row) for each in named]
    exist = known.are_rows([(file or "", row) for file, row in origins])
    problems: list[Problem] = []
    for each, (file, row), is_row in zip(named, origins, exist, strict=True):
        if file is None:
            problems.append(_unknown(each, f"`{each.file}` is not a file of the training data", known.hint))
        elif not is_row:
            problems.append(_unknown(each, f"`{file}:{row}` is not a training row", known.row_hint))
        else:
            found.setdefault((file, row), SkippedRow(file, row, step))
    _refuse(problems)
    return tuple(sorted(found.values(), key=lambda each: (each.step, each.file, each.row)))


def _found_again(earlier: Iterable[SkippedRow], known: NamedFiles) -> list[SkippedRow]:
    """Return the rows by the names that their files have now: the same data may lie in another directory."""
    earlier = list(earlier)
    names = [known.moved(each.file) for each in earlier]
    rows = [replace(each, file=name or each.file) for each, name in zip(earlier, names, strict=True)]
    exist = known.are_rows([each.origin for each in rows])
    lost = [each for each, name, is_row in zip(rows, names, exist, strict=True) if name is None or not is_row]
    if lost:
        message = (
            f"the run skips `{lost[0].file}:{lost[0].row}` since step {lost[0].step:,}, and the training "
            "data have no such row"
        )
        more = f" ({len(lost):,} such rows)" if len(lost) > 1 else ""
        raise usage_error(
            "skip-rows-unknown",
            message + more,
            hint=f"{known.hint}; give the files their names, or start another run",
        )
    return rows


def _unknown(named: NamedRow, message: str, hint: str) -> Problem:
    return Problem("skip-rows-unknown", message, named.where, hint)


class NamedFiles(ABC):
    """The files of the training data, by the names that rows carry in messages and events."""

    row_hint = "rows that are held out, dropped or bad are not trained"

    def __init__(self, names: Iterable[str]) -> None:
        self.names = dict.fromkeys(names)
        self._asked: dict[str, str | None] = {}

    @property
    def hint(self) -> str:
        more = f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        return f"rows are of {', '.join(f'`{name}`' for name in [*self.names][:3])}{more}"

    def name_of(self, given: str) -> str | None:
        """Return the name of the file that is given by this name, by its absolute path, or by the end of its
        path if only one has it."""
        if given not in self._asked:
            self._asked[given] = given if given in self.names else self._search(Path(given))
        return self._asked[given]

    def moved(self, name: str) -> str | None:
        """Return the name of a file that had this name when a run began: its own, or that of the only file
        that is called so. None if it is unknown."""
        last = [other for other in self.names if Path(other).name == Path(name).name]
        return self.name_of(name) or (last[0] if len(last) == 1 else None)

    def _search(self, path: Path) -> str | None:
        same = [name for name in self.names if Path(name).absolute() == path.absolute()]
        ends = [
            name
            for name in self.names
            if not path.is_absolute() and Path(name).parts[-len(path.parts) :] == path.parts
        ]
        return same[0] if same else ends[0] if len(ends) == 1 else None

    @abstractmethod
    def are_rows(self, rows: Sequence[Origin]) -> list[bool]:
        """Return whether each is a row that may be trained."""


class PreparedFiles(NamedFiles):
    """Those of a store, by the names that they have now."""

    def __init__(self, store: RowStore) -> None:
        super().__init__(store.files)
        self._store = store

    def moved(self, name: str) -> str | None:
        """A row that was left out before a file was renamed has the name with which the store was built,
        unless another has it now."""
        now = {
            self._store.files[number]
            for number, built_from in enumerate(self._store.built_from)
            if built_from == name
        }
        if name in self.names:
            return name if now <= {name} else None
        return now.pop() if len(now) == 1 else super().moved(name)

    def are_rows(self, rows: Sequence[Origin]) -> list[bool]:
        return [len(segments) > 0 for segments in self._store.find(rows)]


class StreamedFiles(NamedFiles):
    """Those of a stream: its files, and ranges of them, in which rows are numbered."""

    row_hint = (
        "of a file that a stream divides, rows are numbered within its parts: `FILE:ROW` in the first, "
        "`FILE (part 2 of 8):ROW` …"
    )

    def __init__(
        self, units: Iterable[str], unit_rows: Mapping[str, int], last_row: Callable[[str], int]
    ) -> None:
        """`units` are the names of files and ranges. `unit_rows`: rows of those that were counted; `last_row`
        reads another one."""
        super().__init__(units)
        self._rows, self._last_row = dict(unit_rows), last_row

    def are_rows(self, rows: Sequence[Origin]) -> list[bool]:
        return [file in self.names and row <= self._last(file) for file, row in rows]

    def _last(self, file: str) -> int:
        """Return the number of the last row. A file at a URL is read for it: a number behind its end would
        leave out nothing."""
        if file not in self._rows:
            self._rows[file] = self._last_row(file)
        return self._rows[file]


def removed_rows(store: RowStore, skipped: Sequence[SkippedRow]) -> list[Removed]:
    """Return the rows of a store of which every example is left out, by the step from which the last of them
    is."""
    if not skipped:
        return []
    found = store.find([each.origin for each in skipped])
    segments = np.concatenate(found)
    steps = np.repeat([each.step for each in skipped], [len(each) for each in found])
    rows, counts = np.unique(store.rows_with(segments), return_counts=True)
    last = np.zeros(len(store), np.int64)
    np.maximum.at(last, store.rows_with(segments), steps)
    gone = np.array(
        [
            row
            for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
            if count == store.segments_in(row)
        ],
        np.int64,
    )
    return [(int(step), gone[last[gone] == step]) for step in np.unique(last[gone])]
