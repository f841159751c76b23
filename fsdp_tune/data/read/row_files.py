"""Read rows of files: JSON text, Parquet and Arrow.

JSON with duplicate keys, NaN, unpaired surrogates, oversized numbers or excessive nesting is refused. Rows of
Parquet and Arrow are counted from 1, and a few megabytes of them at a time are converted to Python objects.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.data.read.file_access import RemoteFile
from fsdp_tune.run.remote_requests import UrlError

SPACE = re.compile(r"[ \t\r\n]*")
MOST_NESTED = 100
"""Levels of objects and lists in a row; templates and this package walk through them recursively."""
UNPAIRED = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used. `number` is the line in a text file, else the row; `column` counts
    characters from 1."""

    number: int
    reason: str
    column: int | None = None
    hint: str | None = None
    unread: tuple[str, ...] = ()
    """Keys of the row that no format reads and that `data.ignore_columns` may name."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a file: those with index `first`, `first + step`, …, counted from 0 at the beginning of the
    file or of the range of bytes."""

    first: int = 0
    step: int = 1
    start_byte: int = 0
    """Of a text file without compression: only lines that begin at or after this byte."""
    end_byte: int | None = None
    """Only lines that begin before this byte; None = to the end of the file."""


ALL_ROWS = Part()


class RowError(ValueError):
    """A row cannot be used; the message is the reason. The caller adds file and line."""

    def __init__(self, reason: str, *, hint: str | None = None, unread: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.hint, self.unread = hint, unread

    def bad_row(self, number: int, *, hint: str | None = None) -> BadRow:
        """Return the row as a bad one; `hint` if the error itself has none."""
        return BadRow(number, str(self), hint=self.hint or hint, unread=self.unread)


class ColumnError(Exception):
    """A column cannot be used. The caller replaces its name by the original name in the file."""

    def __init__(self, column: str, what: str, *, hint: str | None = None) -> None:
        super().__init__(column, what)
        self.column, self.what, self.hint = column, what, hint


NumberedRow = tuple[int, dict[str, object]]


def json_row(number: int, text: str) -> NumberedRow | BadRow:
    """Parse one line of a JSON Lines file."""
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        return BadRow(number, _no_json(error), error.pos + 1)
    except (ValueError, RecursionError) as error:
        return BadRow(number, _why(error))
    return _checked(number, value, text)


def document_rows(text: str, path: Path | str) -> Iterator[NumberedRow | BadRow]:
    """Yield the elements of one JSON list, each with the number of its first line; of several on a line, each
    after the first has the next number.

    Raises: usage error (exit 2) if the list itself is malformed.
    """
    at = _skip(text, 0)
    assert text[at] == "[", "the caller has checked"
    at = _skip(text, at + 1)
    line, counted, number = 1, 0, 0
    closed = text[at : at + 1] == "]"
    while not closed:
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise _broken(path, text, error.pos, _no_json(error)) from error
        except (ValueError, RecursionError) as error:
            raise _broken(path, text, at, _why(error)) from error
        number = max(line, number + 1)  # two rows of a file never have one number
        yield _checked(number, value, text[at:end])
        at = _skip(text, end)
        closed = text[at : at + 1] == "]"
        if not closed:
            if text[at : at + 1] != ",":
                raise _broken(path, text, at, "a comma or `]` is missing")
            at = _skip(text, at + 1)
    rest = _skip(text, at + 1)
    if rest < len(text):
        raise _broken(path, text, rest, "text follows the end of the list")


def parse_text(text: str) -> Any:
    """Parse JSON text inside a row. Raises: ValueError."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if _is_nested_too_deeply(value, text):
        raise ValueError("nested too deeply")
    return value


def kind_of(value: object) -> str:
    """Return the name of a value's type for messages."""
    if value is None:
        return "null"
    names: dict[type, str] = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"of type {type(value).__name__}")


def _is_encodable(row: dict[str, object]) -> bool:
    """Return whether all text in the row can be encoded as UTF-8."""
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _checked(number: int, value: object, text: str) -> NumberedRow | BadRow:
    if not isinstance(value, dict):
        return BadRow(number, f"a row is an object, and this is {kind_of(value)}", 1)
    row = cast(dict[str, object], value)
    if _is_nested_too_deeply(row, text):
        return BadRow(number, "nested too deeply")
    if "\\u" in text and (escape := UNPAIRED.search(text)) is not None and not _is_encodable(row):
        return BadRow(
            number, f"`{escape[0]}` is half of a surrogate pair and not a character", escape.start() + 1
        )
    return number, row


def _is_nested_too_deeply(value: Any, text: str) -> bool:
    """Return whether `value`, parsed from `text`, has more than MOST_NESTED levels."""

    def is_deeper(part: Any, levels: int) -> bool:
        inner = list(cast(dict[str, Any], part).values()) if isinstance(part, dict) else cast(list[Any], part)
        return not levels or any(
            is_deeper(each, levels - 1) for each in inner if isinstance(each, (dict, list))
        )

    return (
        text.count("[") + text.count("{") > MOST_NESTED
        and isinstance(value, (dict, list))
        and is_deeper(value, MOST_NESTED)
    )


def _skip(text: str, at: int) -> int:
    match = SPACE.match(text, at)
    assert match is not None
    return match.end()


def _broken(path: Path | str, text: str, at: int, why: str) -> FsdpTuneError:
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    return usage_error("data-unreadable", why, where=Where(str(path), line, column))


def _no_json(error: json.JSONDecodeError) -> str:
    return f"not JSON: {error.msg[:1].lower()}{error.msg[1:].removesuffix(' at')}"


def _why(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    # `int` raises a plain ValueError
    return str(error) if isinstance(error, _NotJsonError) else "a number of too many digits"


class _NotJsonError(ValueError):
    """Python's parser accepts the text, but the JSON standard or this package does not. The message gives the
    reason."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _NotJsonError(f"the key `{twice}` occurs twice in one object")
    return row


def _refuse_constant(name: str) -> object:
    raise _NotJsonError(f"`{name}` is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


BATCH_ROWS = 1000
BATCH_BYTES = 4 << 20
"""A larger row is a batch by itself."""


def parquet_rows(path: Path | str, part: Part) -> Iterator[NumberedRow]:
    """Yield the rows of a Parquet file. Raises: usage error (exit 2) naming the damaged row group.

    `part.step` is 1: the row groups before `part.first` are not read.
    """
    parquet = _untyped("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(_buffered(path) if isinstance(path, str) else path)
    except UrlError:
        raise
    except _errors() as error:
        raise _damaged(path, f"not a complete Parquet file: {error}") from error
    with file:
        number, before = part.first, 0
        for group in range(file.num_row_groups):
            after = before + file.metadata.row_group(group).num_rows
            try:
                for row in _group_rows(file, group, max(number - before, 0)):
                    number += 1
                    yield number, row
            except UrlError:
                raise
            except _errors() as error:
                raise _damaged(path, f"row group {group} is damaged (after row {number}): {error}") from error
            before = after


def parquet_row_count(path: Path | str) -> int:
    """Return the number of rows in the footer of a Parquet file. Raises: usage error (exit 2) if it has
    none."""
    parquet = _untyped("pyarrow.parquet")
    try:
        with parquet.ParquetFile(_buffered(path) if isinstance(path, str) else path) as file:
            return int(file.metadata.num_rows)
    except UrlError as error:
        raise usage_error("data-unreadable", f"cannot be read: {error}", where=Where(str(path))) from error
    except _errors() as error:
        raise _damaged(path, f"not a complete Parquet file: {error}") from error


def _group_rows(file: Any, group: int, start: int) -> Iterator[dict[str, object]]:
    """Yield the rows of a row group from index `start` on."""
    described = file.metadata.row_group(group)
    if start >= described.num_rows:
        return
    before = 0
    for batch in file.iter_batches(batch_size=_batch_rows(described), row_groups=[group]):
        after = before + batch.num_rows
        if start < after:
            yield from _rows(batch.slice(max(start - before, 0)))
        before = after


def arrow_row_count(path: Path) -> int:
    """Return the number of rows in the record batches of an Arrow file. Raises: usage error (exit 2) if it is
    damaged."""
    pyarrow = _untyped("pyarrow")
    try:
        with pyarrow.memory_map(str(path)) as source:
            return sum(int(batch.num_rows) for batch in _batches(source))
    except _errors() as error:
        raise _damaged(path, f"damaged: {error}") from error


def arrow_rows(path: Path | str, part: Part) -> Iterator[NumberedRow]:
    """Yield the rows of an Arrow file in the file or the streaming format; `datasets` writes the latter."""
    number = 0
    pyarrow = _untyped("pyarrow")
    with (
        pyarrow.PythonFile(_buffered(path), mode="r")
        if isinstance(path, str)
        else pyarrow.memory_map(str(path)) as source
    ):
        try:
            for batch in _batches(source):
                first = part.first - number if number < part.first else (part.first - number) % part.step
                for index, row in enumerate(_rows(_every(batch, first, part.step))):
                    yield number + first + index * part.step + 1, row
                number += batch.num_rows
        except UrlError:
            raise
        except _errors() as error:
            raise _damaged(path, f"damaged after row {number}: {error}") from error


def _every(batch: Any, first: int, step: int) -> object:
    """Return the rows `first`, `first + step`, … of a record batch."""
    if step == 1:
        return batch.slice(first)
    return batch.take(_untyped("pyarrow").array(range(first, batch.num_rows, step), "int64"))


def dataset_rows(dataset: Any, start: int = 0, end: int | None = None) -> Iterator[NumberedRow]:
    """Yield the rows of a `datasets.Dataset` with index `start` to `end - 1`."""
    selected = dataset if end is None else dataset.select(range(start, end))
    for number, row in table_rows(selected.with_format("arrow").iter(batch_size=1000)):
        yield start + number, row


def table_rows(batches: Iterator[object]) -> Iterator[NumberedRow]:
    """Yield the rows of Arrow tables, such as those of a `datasets.Dataset` in its arrow format."""
    number = 0
    for batch in batches:
        for row in _rows(batch):
            number += 1
            yield number, row


def _batch_rows(group: Any) -> int:
    """Return the number of rows of a row group that take BATCH_BYTES, by the mean size of its rows."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)))


def _rows(batch: Any) -> Iterator[dict[str, object]]:
    """Yield the rows of a record batch or table as dicts; it is halved until each part has at most
    BATCH_BYTES or one row."""
    if batch.num_rows > 1 and max(batch.nbytes, _decoded_bytes(batch)) > BATCH_BYTES:
        half = batch.num_rows // 2
        yield from _rows(batch.slice(0, half))
        yield from _rows(batch.slice(half))
    else:
        yield from batch.to_pylist()


def _decoded_bytes(batch: Any) -> int:
    """Return an upper bound of the texts of dictionary columns: a text that all rows share is stored once,
    and each row gets its own."""
    pa = _untyped("pyarrow")
    total = 0
    for column in batch.columns:
        if not pa.types.is_dictionary(column.type):
            continue
        for chunk in getattr(column, "chunks", [column]):
            if pa.types.is_string(column.type.value_type) or pa.types.is_large_string(column.type.value_type):
                longest = (
                    _untyped("pyarrow.compute")
                    .max(_untyped("pyarrow.compute").binary_length(chunk.dictionary))
                    .as_py()
                )
                total += len(chunk) * (longest or 0)
    return total


def _batches(source: Any) -> Iterator[Any]:
    ipc = _untyped("pyarrow").ipc
    try:
        reader = ipc.open_file(source)
    except _untyped("pyarrow").ArrowInvalid:  # the streaming format has no footer
        source.seek(0)
        yield from ipc.open_stream(source)
        return
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _errors() -> tuple[type[Exception], ...]:
    return (_untyped("pyarrow").ArrowException, OSError, UnicodeDecodeError)


def _buffered(url: str) -> io.BufferedReader:
    """Open a URL; each read returns as many bytes as pyarrow requests."""
    return io.BufferedReader(RemoteFile(url))


def _damaged(path: Path | str, why: str) -> FsdpTuneError:
    return usage_error("data-unreadable", f"cannot be read: {why}", where=Where(str(path)))


def _untyped(module: str) -> Any:
    return import_module(module)  # pyarrow ships no types
