"""Rows from Parquet and Arrow files, counted from 1."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from fsdp_tune.data.json_rows import NumberedRow
from fsdp_tune.errors import FsdpTuneError, Where, usage_error

BATCH_ROWS = 1000


def parquet_rows(path: Path) -> Iterator[NumberedRow]:
    """Exit 2 with the row group that is damaged."""
    parquet = _untyped("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
    except _errors() as error:
        raise _damaged(path, f"no whole Parquet file: {error}") from error
    number = 0
    with file:
        for group in range(file.num_row_groups):
            try:
                for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row
            except _errors() as error:
                raise _damaged(path, f"row group {group} is damaged (after row {number}): {error}") from error


def arrow_rows(path: Path) -> Iterator[NumberedRow]:
    """Either of Arrow's formats; `datasets` writes the streaming one."""
    number = 0
    with _untyped("pyarrow").memory_map(str(path)) as source:
        try:
            for batch in _batches(source):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except _errors() as error:
            raise _damaged(path, f"damaged after row {number}: {error}") from error


def table_rows(batches: Iterator[Any]) -> Iterator[NumberedRow]:
    """Rows of Arrow tables, such as a `datasets.Dataset` gives in its arrow format."""
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, row


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


def _damaged(path: Path, why: str) -> FsdpTuneError:
    return usage_error("data-unreadable", f"cannot be read: {why}", where=Where(str(path)))


def _untyped(module: str) -> Any:
    return import_module(module)  # pyarrow ships no types
