"""Read the rows of one file, with the line number of each. An unreadable row is returned as a `BadRow`; it
does not stop the read.

A `Part` selects rows, so that several readers can share a file: every n-th row, or the lines that begin in a
range of bytes. Only a line feed ends a line, also after a carriage return: U+2028 and U+0085 are part of the
text. Memory is bounded by the longest row.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.data.read.file_access import RemoteFile, url_path
from fsdp_tune.data.read.row_files import (
    ALL_ROWS,
    BadRow,
    NumberedRow,
    Part,
    arrow_rows,
    document_rows,
    json_row,
    parquet_rows,
)
from fsdp_tune.data.read.tar_rows import tar_rows
from fsdp_tune.run.remote_requests import UrlError

MAX_ROW_BYTES = 256 << 20


MAX_DOCUMENT_BYTES = 1 << 30


PEEK_BYTES = 1 << 12


UTF8_BOM, GZIP_MAGIC, ZSTD_MAGIC, PARQUET_MAGIC = b"\xef\xbb\xbf", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"


_NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""Characters to which `surrogateescape` decodes bytes that are not UTF-8."""


Rows = Iterator[NumberedRow | BadRow]


def read_rows(path: Path | str, kind: str, part: Part = ALL_ROWS) -> Rows:
    """Yield the rows of a file or, if `path` is a str, of a URL.

    `kind`: lines (one JSON object per line) | json (lines or one list) | csv | tsv | text | tar | parquet |
    arrow. The lines of a range of bytes are numbered from the first line of the range.
    Raises: usage error (exit 2) if the file itself cannot be read.
    """
    number = 0
    try:
        for row in _rows(path, kind, part):
            number = row.number if isinstance(row, BadRow) else row[0]
            yield row
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _unreadable(
            path, f"its compressed data are damaged or cut off (after row {number}): {error}"
        ) from error
    except tarfile.TarError as error:
        raise _unreadable(path, f"the archive is damaged or cut off (after row {number}): {error}") from error
    except UrlError as error:
        hint = "check the URL and the network; `--resume auto` continues a run from its last checkpoint"
        raise _unreadable(path, f"{error} (after row {number})", hint) from error
    except OSError as error:
        # Errors of zstd have no errno.
        why = error.strerror or f"its compressed data are damaged or cut off (after row {number}): {error}"
        raise _unreadable(path, why) from error


def _rows(path: Path | str, kind: str, part: Part) -> Rows:
    if kind == "parquet":
        yield from parquet_rows(path, part)
    elif kind == "arrow":
        yield from arrow_rows(path, part)
    else:
        with _open_binary(path) as plain, _open_text(plain, path, part) as file:
            yield from (
                tar_rows(file, part, MAX_ROW_BYTES)
                if kind == "tar"
                else _TEXT_READERS[kind](file, path, part)
            )


def _open_binary(path: Path | str) -> io.RawIOBase:
    return RemoteFile(path) if isinstance(path, str) else open(path, "rb", buffering=0)


def is_plain_lines(path: Path | str, kind: str) -> bool:
    """Return whether the rows of a file are its lines, without compression, so that it can be divided at any
    byte."""
    if kind not in ("lines", "text"):
        return False
    if isinstance(path, str):
        return url_path(path).suffix not in (".gz", ".zst")
    with open(path, "rb") as file:
        return not file.read(len(ZSTD_MAGIC)).startswith((GZIP_MAGIC, ZSTD_MAGIC))


def count_lines(path: Path, end: int) -> int:
    """Return the number of lines that begin before byte `end`."""
    count, left, last = 0, end, b""
    with open(path, "rb") as file:
        while left and (block := file.read(min(left, 1 << 20))):
            count, left, last = count + block.count(b"\n"), left - len(block), block[-1:]
    return count + (last not in (b"", b"\n"))


def count_rows(path: Path, kind: str, part: Part = ALL_ROWS) -> int:
    """Return the number of rows, bad ones included, that `read_rows` yields. Raises: usage error if the file
    cannot be read."""
    if kind not in ("lines", "text"):
        return sum(1 for _ in read_rows(path, kind, part))
    try:
        with _open_binary(path) as plain, _open_text(plain, path, part) as file:
            return sum(1 for _ in _raw_lines(file, part))
    except (OSError, EOFError, zlib.error):
        # raises the error, with the row after which it occurs
        return sum(1 for _ in read_rows(path, kind, part))


def _raw_lines(file: io.BufferedReader, part: Part) -> Iterator[bytes]:
    """Yield the lines that `_lines` yields, as bytes."""
    if part.start_byte:
        file.seek(part.start_byte - 1)
        _finish_line(file, file.readline(MAX_ROW_BYTES))
    left = float("inf") if part.end_byte is None else part.end_byte - file.tell()
    while left > 0 and (raw := file.readline(MAX_ROW_BYTES + 1)):
        left -= len(raw)
        if len(raw) > MAX_ROW_BYTES:
            left -= _finish_line(file, raw)
        if not raw.isspace():
            yield raw


def _unreadable(
    path: Path | str, why: str, hint: str | None = None, line: int | None = None
) -> FsdpTuneError:
    return usage_error("data-unreadable", f"cannot be read: {why}", where=Where(str(path), line), hint=hint)


def _open_text(plain: io.RawIOBase, path: Path | str, part: Part) -> io.BufferedReader:
    """Return an open file without its byte-order mark. It is decompressed if its first bytes are those of
    gzip or zstd."""
    head = plain.read(4) or b""
    plain.seek(0)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _unreadable(
            path,
            "it is UTF-16; data must be UTF-8",
            f"convert it: `iconv -f UTF-16 -t UTF-8 {Path(path).name}`",
        )
    if head == PARQUET_MAGIC:
        raise _unreadable(path, "it is a Parquet file under another name", "rename it to end in .parquet")
    if part.end_byte is not None and head.startswith((GZIP_MAGIC, ZSTD_MAGIC)):
        raise _unreadable(path, "it is compressed, and its name does not end in .gz or .zst", "rename it")
    raw: Any = plain
    if head.startswith(GZIP_MAGIC):
        raw = gzip.GzipFile(fileobj=io.BufferedReader(plain, 1 << 20))
    elif head.startswith(ZSTD_MAGIC):
        pyarrow = import_module("pyarrow")  # it ships no types
        raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(plain, mode="r"), "zstd")
    file = io.BufferedReader(raw, 1 << 20)
    if file.peek(len(UTF8_BOM)).startswith(UTF8_BOM):
        file.read(len(UTF8_BOM))
    return file


def _lines(
    file: io.BufferedReader, blank: bytes | None = None, part: Part = ALL_ROWS
) -> Iterator[tuple[int, str] | BadRow]:
    """Yield the decoded lines that begin in the range of bytes of `part`, with their numbers.

    Lines that consist of bytes of `blank` (None: any white space) are left out.
    """
    if part.start_byte:
        file.seek(part.start_byte - 1)
        _finish_line(file, file.readline(MAX_ROW_BYTES))
    position = file.tell() if part.end_byte is not None else 0
    number = 0
    while part.end_byte is None or position < part.end_byte:
        raw = file.readline(MAX_ROW_BYTES + 1)
        if not raw:
            return
        number += 1
        position += len(raw)
        if len(raw) > MAX_ROW_BYTES:
            position += _finish_line(file, raw)
            yield BadRow(number, f"longer than {MAX_ROW_BYTES >> 20} MiB")
            continue
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        if not raw.strip(blank):
            continue
        try:
            yield number, raw.decode("utf-8")
        except UnicodeDecodeError as error:
            column = len(raw[: error.start].decode("utf-8")) + 1
            yield BadRow(number, f"not UTF-8: byte 0x{raw[error.start]:02x}", column)


def _finish_line(file: io.BufferedReader, raw: bytes) -> int:
    """Read to the end of the line that begins with `raw`; return the number of bytes that were read."""
    count = 0
    while raw and not raw.endswith(b"\n"):
        raw = file.readline(MAX_ROW_BYTES)
        count += len(raw)
    return count


def _json_lines(file: io.BufferedReader, path: Path | str, part: Part) -> Rows:  # noqa: ARG001  same shape as its siblings
    for line in islice(_lines(file, part=part), part.first, None, part.step):
        yield line if isinstance(line, BadRow) else json_row(*line)


def _json(file: io.BufferedReader, path: Path | str, part: Part) -> Rows:
    """Yield the rows of a `.json` file, which is either a list of objects or one object per line.

    A list is read completely, by each of the readers that share its file, which together may hold
    MAX_DOCUMENT_BYTES.
    """
    head = file.peek(PEEK_BYTES).lstrip()
    if not head.startswith(b"["):
        if head.split(b"\n", 1)[0].strip() == b"{":
            raise _unreadable(
                path,
                "it holds one object over several lines",
                "write a list of objects, or one object a line (`jq -c '.data[]'`)",
            )
        yield from _json_lines(file, path, part)
        return
    most = MAX_DOCUMENT_BYTES // part.step
    raw = file.read(most + 1)
    if len(raw) > most:
        readers = f", which {part.step} lanes of a stream would hold" if part.step > 1 else ""
        raise _unreadable(
            path,
            f"one JSON list of more than {most >> 20} MiB{readers}",
            "write one object a line (`jq -c '.[]'`)",
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _unreadable(path, f"not UTF-8: byte 0x{raw[error.start]:02x}", line=line) from error
    del raw  # it would stay while the rows are read
    yield from islice(document_rows(text, path), part.first, None, part.step)


class _Lines:
    """Lines of a file. `ended` is set when a line after the last is requested, which only happens inside an
    incomplete row."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text, self.ended = text, False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._text.readline()
        if not line:
            self.ended = True
            raise StopIteration
        return line


def _csv(file: io.BufferedReader, path: Path | str, part: Part) -> Rows:
    return islice(_all_csv(file, path), part.first, None, part.step)


def _all_csv(file: io.BufferedReader, path: Path | str) -> Rows:
    """Yield the rows of a CSV file. A quoted field may contain commas and line ends (RFC 4180)."""
    csv.field_size_limit(MAX_ROW_BYTES)
    # Bytes that are not UTF-8 become lone surrogates, so that their rows can be reported and the other rows
    # read.
    with io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="") as text:
        lines = _Lines(text)
        reader = csv.reader(lines, strict=True)
        header: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                # the open quote takes in all following rows, so skipping this row would skip them too
                if lines.ended:
                    rest = f"lines {line} to {reader.line_num} are one field"
                    hint = 'close it; a quote inside a field is written `""`'
                    raise _unreadable(
                        path, f"a quote that begins here is never closed: {rest}", hint, line
                    ) from error
                yield BadRow(line, f"not CSV: {error}")
                continue
            if not fields:
                continue  # a blank line, possibly before the header
            if header is None:
                header = _header(fields, path, line)
            else:
                yield _csv_row(line, header, fields)


def _header(fields: list[str], path: Path | str, line: int) -> list[str]:
    if any(_NOT_UTF8.search(name) for name in fields):
        raise _unreadable(
            path,
            "the names of its columns are not UTF-8",
            f"convert it: `iconv -f LATIN1 -t UTF-8 {Path(path).name}`",
            line,
        )
    twice = {name for name, number in Counter(fields).items() if number > 1}
    if twice:
        raise _unreadable(path, f"its first line names a column twice: {', '.join(sorted(twice))}", line=line)
    return fields


def _csv_row(line: int, header: list[str], fields: list[str]) -> NumberedRow | BadRow:
    if len(fields) != len(header):
        return BadRow(line, f"{len(fields)} fields where the first line names {len(header)} columns")
    for column, text in zip(header, fields, strict=True):
        if (escaped := _NOT_UTF8.search(text)) is not None:
            return BadRow(line, f"column `{column}` is not UTF-8: byte 0x{ord(escaped[0]) - 0xDC00:02x}")
    return line, dict(zip(header, fields, strict=True))


def _tsv(file: io.BufferedReader, path: Path | str, part: Part) -> Rows:
    return islice(_all_tsv(file, path), part.first, None, part.step)


def _all_tsv(file: io.BufferedReader, path: Path | str) -> Rows:
    """Yield the rows of a TSV file, one per line. A field may be quoted as in CSV but may not contain a line
    end: in most TSV files a quote is text, and one at the beginning of a field would otherwise include the
    following lines, up to the next quote."""
    csv.field_size_limit(MAX_ROW_BYTES)
    header: list[str] | None = None
    for line in _lines(file, b"\r"):
        row = line if isinstance(line, BadRow) else _tsv_fields(*line)
        if header is None:
            if isinstance(row, BadRow):
                raise _unreadable(path, f"the names of its columns: {row.reason}", line=row.number)
            header = _header(row[1], path, row[0])
        else:
            yield row if isinstance(row, BadRow) else _csv_row(row[0], header, row[1])


def _tsv_fields(number: int, text: str) -> tuple[int, list[str]] | BadRow:
    try:
        return number, next(csv.reader([text], delimiter="\t", strict=True))
    except csv.Error as error:
        if '"' not in text:
            return BadRow(number, f"not TSV: {error}")
        rule = (
            "a field that begins with a quote must end with one on its line, inner quotes doubled "
            '(`"""Yes"" she said"`)'
        )
        return BadRow(number, f"{rule}: {error}")


def _text(file: io.BufferedReader, path: Path | str, part: Part) -> Rows:  # noqa: ARG001  same shape as its siblings
    for line in islice(_lines(file, part=part), part.first, None, part.step):
        yield line if isinstance(line, BadRow) else (line[0], {"text": line[1]})


_TEXT_READERS = {"lines": _json_lines, "json": _json, "csv": _csv, "tsv": _tsv, "text": _text}
