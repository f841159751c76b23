"""Read rows of Parquet and Arrow files, counted from 1. A few megabytes of rows at a time are converted to Python objects."""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.data.read.file_access import RemoteFile, UrlError
from fsdp_tune.data.read.json_rows import NumberedRow, Part

BATCH_ROWS = 1000
BATCH_BYTES = 4 << 20
"""A larger row is a batch by itself."""


def parquet_rows(path: Path | str, part: Part) -> Iterator[NumberedRow]:
    """Yield the rows of a Parquet file. Raises: usage error (exit 2) naming the damaged row group.

    `part.step` is 1: a reader skips the row groups before `part.first`, and stops when it has its rows.
    """
    parquet = _untyped("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(_buffered(path) if isinstance(path, str) else path)
    except UrlError:
        raise
    except _errors() as error:
        raise _damaged(path, f"not a complete Parquet file: {error}") from error
    with file:
        number, end, before = part.first, file.metadata.num_rows, 0
        for group in range(file.num_row_groups):
            after = before + file.metadata.row_group(group).num_rows
            try:
                for row in _group_rows(file, group, max(number, before) - before, min(end, after) - before):
                    number += 1
                    yield number, row
            except UrlError:
                raise
            except _errors() as error:
                raise _damaged(path, f"row group {group} is damaged (after row {number}): {error}") from error
            before = after


def parquet_row_count(path: Path | str) -> int:
    """Return the number of rows in the footer of a Parquet file. Raises: usage error (exit 2) if it has none."""
    parquet = _untyped("pyarrow.parquet")
    try:
        with parquet.ParquetFile(_buffered(path) if isinstance(path, str) else path) as file:
            return int(file.metadata.num_rows)
    except UrlError as error:
        raise usage_error("data-unreadable", f"cannot be read: {error}", where=Where(str(path))) from error
    except _errors() as error:
        raise _damaged(path, f"not a complete Parquet file: {error}") from error


def _group_rows(file: Any, group: int, start: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield the rows with index `start` to `end - 1` of a row group."""
    if start >= end:
        return
    before = 0
    for batch in file.iter_batches(batch_size=_batch_rows(file.metadata.row_group(group)), row_groups=[group]):
        after = before + batch.num_rows
        first, last = max(start, before), min(end, after)
        if first < last:
            yield from _rows(batch.slice(first - before, last - first))
        before = after
        if before >= end:
            return


def arrow_row_count(path: Path) -> int:
    """Return the number of rows in the record batches of an Arrow file. Raises: usage error (exit 2) if it is damaged."""
    pyarrow = _untyped("pyarrow")
    with pyarrow.memory_map(str(path)) as source:
        try:
            return sum(int(batch.num_rows) for batch in _batches(source))
        except _errors() as error:
            raise _damaged(path, f"damaged: {error}") from error


def arrow_rows(path: Path | str, part: Part) -> Iterator[NumberedRow]:
    """Yield the rows of an Arrow file in the file or the streaming format; `datasets` writes the latter."""
    number = 0
    pyarrow = _untyped("pyarrow")
    with pyarrow.PythonFile(_buffered(path), mode="r") if isinstance(path, str) else pyarrow.memory_map(str(path)) as source:
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


def _every(batch: Any, first: int, step: int) -> Any:
    """Return the rows `first`, `first + step`, … of a record batch."""
    if step == 1:
        return batch.slice(first)
    return batch.take(_untyped("pyarrow").array(range(first, batch.num_rows, step), "int64"))


def dataset_rows(dataset: Any, start: int = 0, end: int | None = None) -> Iterator[NumberedRow]:
    """Yield the rows of a `datasets.Dataset` with index `start` to `end - 1`."""
    selected = dataset if end is None else dataset.select(range(start, end))
    for number, row in table_rows(selected.with_format("arrow").iter(batch_size=1000)):
        yield start + number, row


def table_rows(batches: Iterator[Any]) -> Iterator[NumberedRow]:
    """Yield the rows of Arrow tables, such as those of a `datasets.Dataset` in its arrow format."""
    number = 0
    for batch in batches:
        for row in _rows(batch):
            number += 1
            yield number, row


def _batch_rows(group: Any) -> int:
    """Return the number of rows of a row group that take BATCH_BYTES, by the mean size of its rows."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)))


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch or table as dicts; it is halved until each part has at most BATCH_BYTES or one row."""
    if batch.num_rows > 1 and max(batch.nbytes, _decoded_bytes(batch)) > BATCH_BYTES:
        half = batch.num_rows // 2
        yield from _rows(batch.slice(0, half))
        yield from _rows(batch.slice(half))
    else:
        yield from batch.to_pylist()


def _decoded_bytes(batch: Any) -> int:
    """Return an upper bound of the texts of dictionary columns: a text that all rows share is stored once, and each row gets its own."""
    pa = _untyped("pyarrow")
    total = 0
    for column in batch.columns:
        if not pa.types.is_dictionary(column.type):
            continue
        for chunk in getattr(column, "chunks", [column]):
            if pa.types.is_string(column.type.value_type) or pa.types.is_large_string(column.type.value_type):
                longest = _untyped("pyarrow.compute").max(_untyped("pyarrow.compute").binary_length(chunk.dictionary)).as_py()
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
