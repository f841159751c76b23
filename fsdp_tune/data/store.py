"""Prepared rows on disk, memory-mapped: one pool of tokens, and for each set (train, eval) an index into it.

A store is a directory of little-endian arrays without headers; `manifest.json` lists their sizes and digests:

    tokens.int32      every example, one after another
    trained.uint8     1 where the token is trained, as long as tokens
    examples.int64    n + 1 offsets of the examples in tokens
    origins.int64     n × 2: number of the source file (`facts.files`), row in it (a line, counted from 1)
    SET/segments.int64   m × 2: first token in the pool, number of tokens
    SET/rows.int64       r + 1 offsets of the rows in segments

A row is a list of segments; a segment is an example or a part of one. So packing, cutting, splitting off the
eval rows and repeating rows of a mixture copy no tokens, and a row is read without decompression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.errors import failed_error
from fsdp_tune.run.manifest import read_manifest

IGNORE_INDEX = -100
STORE_KIND = "fsdp-tune prepared data"
SHOWN_ROWS = 8
"""Rows that a message names."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.uint8]
Origin = tuple[str, int]
"""(name of a source file, row in it, counted from 1)."""
ROW_BITS = 40
"""Of the number of a row in a key that has the number of its file above."""
Number = TypeVar("Number", np.int32, np.int64, np.uint8)


@dataclass(frozen=True, slots=True)
class Row:
    """One input sequence of the model.

    `input_ids` and `labels` have the same length; labels are -100 where not trained, and always at the first
    token of each example, which the previous example must not predict. `lengths` are the lengths of the
    examples; their sum is that of the row. `sources` are the indices of their sources in `data.train`, or
    empty where no caller needs them.
    """

    input_ids: Int32
    labels: Int32
    lengths: tuple[int, ...]
    row_id: int
    sources: tuple[int, ...] = ()


EVALUATION_HASHES = "evaluation.uint64"


@dataclass(frozen=True, slots=True)
class Segments:
    """A table of segments: an entry of each array for each segment."""

    rows: Int64
    files: Int64
    """Indices into `RowStore.files`."""
    lengths: Int64
    is_cut: npt.NDArray[np.bool_]
    """Whether the segment is a part of its example."""
    examples: Int64
    """Example of which each is a piece, numbered in the order in which the rows were read."""
    starts: Int64
    """First token in the pool."""


class StoredExample(NamedTuple):
    """An example as it was tokenised: its tokens, the flags of the trained ones, and its source."""

    tokens: Int32
    trained: Mask
    origin: Origin


class ExamplePiece(NamedTuple):
    """Consecutive tokens of an example in a row."""

    example: int
    first_token: int
    """In the example."""
    tokens: int


class RowStore:
    """One set of a store: `RowStore(store / "train")`. Picklable: another process maps the same files
    again."""

    def __init__(self, path: Path | str, skipped: Sequence[Origin] = (), files: Sequence[str] = ()) -> None:
        """Map the files of a set. Of the rows of the source files in `skipped` no example is read, and every
        other number stays.

        `files`: names of the source files, if they have others now than when the store was built.
        Raises: FailedError if the store is missing, incomplete or damaged.
        """
        self.path, self._skipped = Path(path), tuple(skipped)
        pool = self.path.parent
        try:
            manifest = read_manifest(pool)
        except ValueError as error:
            raise failed_error(
                "no-prepared-data",
                f"the prepared data at {self.path} cannot be read: {error}",
                hint="prepare them again (`fsdp-tune prepare`)",
            ) from error
        if manifest is None or manifest.kind != STORE_KIND or not self.path.is_dir():
            raise failed_error(
                "no-prepared-data",
                f"there are no prepared data at {self.path}",
                hint="prepare them again (`fsdp-tune prepare`); with several machines, `data.cache_dir` "
                "must be a directory that all share",
            )
        self.built_from: tuple[str, ...] = tuple(manifest.facts["files"])
        """Names that the source files had when the store was built."""
        self.files: tuple[str, ...] = tuple(files) or self.built_from
        """Names of the source files, indexed by `origins`."""
        self._tokens = mapped(pool / "tokens.int32", np.int32)
        self._trained = mapped(pool / "trained.uint8", np.uint8)
        self._examples = mapped(pool / "examples.int64", np.int64)
        self._origins = mapped(pool / "origins.int64", np.int64).reshape(-1, 2)
        self._segments = mapped(self.path / "segments.int64", np.int64).reshape(-1, 2)
        self._rows = mapped(self.path / "rows.int64", np.int64)
        self._left_out = (
            np.sort(np.concatenate(self.find(self._skipped))) if self._skipped else np.zeros(0, np.int64)
        )

    def __reduce__(self) -> tuple[type[Self], tuple[Path, tuple[Origin, ...], tuple[str, ...]]]:
        # else pickle would copy the mapped arrays
        return (
            type(self),
            (self.path, self._skipped, self.files),
        )

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return row_of(self._tokens, self._trained, self._segments_of(index), index)

    def _segments_of(self, index: int) -> Int64:
        """Return [n, 2], start and length of the segments of a row, without those of skipped rows of the
        source files."""
        first, end = int(self._rows[index]), int(self._rows[index + 1])
        segments = self._segments[first:end]
        low, high = np.searchsorted(self._left_out, (first, end))
        return segments if low == high else np.delete(segments, self._left_out[low:high] - first, axis=0)

    @property
    def lengths(self) -> Int64:
        """Number of tokens of each row, those of skipped examples included: the order of a run must not
        change when more are skipped."""
        return np.add.reduceat(self._segments[:, 1], self._rows[:-1])

    def find(self, rows: Sequence[Origin]) -> list[Int64]:
        """Return the segments of each row of a source file: none if it is not in this set."""
        numbers: dict[str, list[int]] = {}
        for number, name in enumerate(self.files):  # a file may be named by several sources
            numbers.setdefault(name, []).append(number)
        wanted = [
            (number, row, at) for at, (name, row) in enumerate(rows) for number in numbers.get(name, ())
        ]
        keys = np.array([(number << ROW_BITS) + row for number, row, _ in wanted], np.int64)
        examples = np.flatnonzero(np.isin((self._origins[:, 0] << ROW_BITS) + self._origins[:, 1], keys))
        owners = np.searchsorted(self._examples, self._segments[:, 0], side="right") - 1
        segments = np.flatnonzero(np.isin(owners, examples))
        found = (self._origins[owners[segments], 0] << ROW_BITS) + self._origins[owners[segments], 1]
        by_key = np.argsort(found, kind="stable")
        starts, ends = (np.searchsorted(found[by_key], keys, side) for side in ("left", "right"))
        by_row: list[list[Int64]] = [[] for _ in rows]
        for start, end, (_, _, at) in zip(starts, ends, wanted, strict=True):
            by_row[at].append(segments[by_key[start:end]])
        return [np.concatenate([np.zeros(0, np.int64), *each]) for each in by_row]

    def rows_with(self, segments: Int64) -> Int64:
        """Return the row of each segment."""
        return np.searchsorted(self._rows, segments, side="right") - 1

    def segments_in(self, row: int) -> int:
        """Return the number of segments of a row, skipped ones included."""
        return int(self._rows[row + 1] - self._rows[row])

    def origins(self, index: int) -> list[tuple[str, int]]:
        """Return source file and row of each example in a row, for messages."""
        starts = self._segments_of(index)[:, 0]
        examples = np.searchsorted(self._examples, starts, side="right") - 1
        return [(self.files[int(file)], int(row)) for file, row in self._origins[examples].tolist()]

    def files_of(self, rows: Sequence[int]) -> tuple[Int64, Int64]:
        """Return the file (an index into `files`) and the number of tokens of each segment of some rows."""
        segments = np.concatenate([self._segments_of(row) for row in rows])
        examples = np.searchsorted(self._examples, segments[:, 0], side="right") - 1
        return self._origins[examples, 0], segments[:, 1]

    def are_complete(self, index: int) -> list[bool]:
        """Return for each example in a row whether all its tokens are there: none were cut off at
        `data.max_length` or by packing."""
        segments = self._segments_of(index)
        examples = np.searchsorted(self._examples, segments[:, 0], side="right") - 1
        return (self._examples[examples + 1] - self._examples[examples] == segments[:, 1]).tolist()

    @property
    def example_count(self) -> int:
        """Number of examples of all sets, as they were tokenised: neither cut nor packed."""
        return len(self._examples) - 1

    def example(self, index: int) -> StoredExample:
        """Return an example as it was tokenised: neither cut nor packed."""
        begin, end = self._examples[index : index + 2].tolist()
        file, row = (int(number) for number in self._origins[index])
        return StoredExample(self._tokens[begin:end], self._trained[begin:end], (self.files[file], row))

    def pieces(self, index: int) -> list[ExamplePiece]:
        """Return the piece of an example that each segment of a row holds."""
        segments = self._segments[self._rows[index] : self._rows[index + 1]]
        examples = np.searchsorted(self._examples, segments[:, 0], side="right") - 1
        firsts = segments[:, 0] - self._examples[examples]
        found = zip(examples.tolist(), firsts.tolist(), segments[:, 1].tolist(), strict=True)
        return [ExamplePiece(example, first_token=first, tokens=tokens) for example, first, tokens in found]

    def segments(self) -> Segments:
        """Return a table of all segments of the set, row by row."""
        starts, lengths = self._segments[:, 0], self._segments[:, 1]
        examples = np.searchsorted(self._examples, starts, side="right") - 1
        return Segments(
            rows=np.repeat(np.arange(len(self)), np.diff(self._rows)),
            files=self._origins[examples, 0],
            lengths=lengths,
            is_cut=lengths < np.diff(self._examples)[examples],
            examples=examples,
            starts=starts,
        )

    def describe_rows(self, rows: Sequence[int]) -> str:
        """Return `12 (train.jsonl:17), 3 (train.jsonl:5) and 6 more`, with the source of the first example of
        each row."""
        named = [
            f"{row} ({file}:{line})" for row in rows[:SHOWN_ROWS] for file, line in self.origins(row)[:1]
        ]
        return ", ".join(named) + (f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else "")


def row_of(tokens: Int32, trained: Mask, segments: Int64, row_id: int) -> Row:
    """Return the row of `segments`, [n, 2] of start and length in the pool of `tokens`."""
    lengths = tuple(int(length) for length in segments[:, 1])
    input_ids = np.empty(sum(lengths), np.int32)
    labels = np.empty_like(input_ids)
    at = 0
    for start, length in segments.tolist():
        ids = tokens[start : start + length]
        input_ids[at : at + length] = ids
        labels[at : at + length] = np.where(trained[start : start + length], ids, IGNORE_INDEX)
        labels[at] = IGNORE_INDEX
        at += length
    return Row(input_ids, labels, lengths, row_id)


def evaluation_hashes(train: Path | str) -> UInt64:
    """Return the sorted hashes of the rows of the evaluation sets next to the training set of a stream; empty
    without such sets."""
    path = Path(train).parent / EVALUATION_HASHES
    return np.fromfile(path, "<u8") if path.exists() else np.zeros(0, np.uint64)


def mapped(path: Path, dtype: type[Number]) -> npt.NDArray[Number]:
    """Return the memory-mapped numbers of a file of a store."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r")
