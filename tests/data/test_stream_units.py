from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from fsdp_tune.data.read.json_rows import BadRow
from fsdp_tune.data.read.readers import read_rows
from fsdp_tune.data.read.sources import RowSource, find_source
from fsdp_tune.data.read.stream_units import StreamUnit, stream_units
from fsdp_tune.recipe.schema.model_and_data import DataSource

ROWS: list[dict[str, Any]] = [{"text": f"{number} {'zwölf ä€😀' * (number % 7)}"} for number in range(101)]
LANES = (1, 3, 16, 64)


def lines(rows: Sequence[dict[str, Any]], end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode()


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    parquet.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=13)


def write_arrow(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(list(rows))
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=13)


WRITERS: dict[str, Callable[[Path, Sequence[dict[str, Any]]], object]] = {
    "rows.jsonl": lambda path, rows: path.write_bytes(lines(rows)),
    "rows.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "rows.json": lambda path, rows: path.write_text(json.dumps(list(rows), indent=1)),
    "rows.txt": lambda path, rows: path.write_text("\n".join(row["text"] for row in rows), encoding="utf-8"),
    "rows.csv": lambda path, rows: path.write_text("text\n" + "\n".join(row["text"] for row in rows), encoding="utf-8"),
    "rows.tsv": lambda path, rows: path.write_text("text\n" + "\n".join(row["text"] for row in rows), encoding="utf-8"),
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
}


def source(path: Path | str, **entry: Any) -> RowSource:
    return find_source(DataSource(path=str(path), **entry), "data.train[0]")


def values(unit: StreamUnit, start: int = 0) -> list[dict[str, Any]]:
    return [row[1] for row in unit.read(start) if not isinstance(row, BadRow)]


def texts(units: Sequence[StreamUnit]) -> list[str]:
    return [value["text"].rstrip() for unit in units for value in values(unit)]


def expected() -> list[str]:
    return sorted(row["text"].rstrip() for row in ROWS)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", WRITERS)
def test_units_hold_each_row_once_and_read_from_any_row(tmp_path: Path, name: str, lanes: int) -> None:
    WRITERS[name](tmp_path / name, ROWS)
    units = stream_units(source(tmp_path / name), lanes)
    assert len(units) >= lanes
    assert sorted(text.rstrip() for text in texts(units)) == expected()
    for unit in units[:: max(1, len(units) // 7)]:
        rows = list(unit.read())
        for start in {0, 1, len(rows) // 2, max(0, len(rows) - 1), len(rows), len(rows) + 5}:
            assert list(unit.read(start)) == rows[start:]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.jsonl.gz", "rows.arrow", "rows.csv"])
def test_rows_are_located_by_their_number_in_the_file(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, ROWS)
    numbers = {
        row[1]["text"]: row[0] for row in read_rows(tmp_path / name, name.split(".")[1].replace("jsonl", "lines")) if isinstance(row, tuple)
    }
    for unit in stream_units(source(tmp_path / name), 5):
        for row in unit.read():
            assert isinstance(row, tuple)
            where = unit.locate(row[0])
            assert (where.source, where.line) == (str(tmp_path / name), numbers[row[1]["text"]])


@pytest.mark.parametrize(
    "content",
    [
        lines(ROWS, "\r\n"),
        lines(ROWS).rstrip(),
        lines(ROWS, "\n\n \n"),
        b"\xef\xbb\xbf" + lines(ROWS),
        b"\n" + lines(ROWS),
        lines([*ROWS[:50], {"text": "x" * 5000}, *ROWS[50:]]),
    ],
    ids=["crlf", "no-newline-at-the-end", "empty-lines", "byte-order-mark", "empty-first-line", "line-longer-than-a-range"],
)
def test_ranges_of_bytes_agree_with_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    whole = [row[1] for row in read_rows(path, "lines") if isinstance(row, tuple)]
    assert len(whole) >= len(ROWS)
    for lanes in (1, 2, 5, 64, 300):
        assert [value for unit in stream_units(source(path), lanes) for value in values(unit)] == whole


@pytest.mark.parametrize("content", [b"", b"\n", b'{"a":1}', b'\xef\xbb\xbf{"a":1}\n{"a":2}', b'{"a":1}\n{"a":2}\n'])
def test_every_division_of_a_small_file_holds_its_rows(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    whole = list(read_rows(path, "lines"))
    found = source(path)
    for pieces in range(1, len(content) + 4):
        units = [StreamUnit(found, 0, piece, pieces, len(content)) for piece in range(pieces)]
        assert [value for unit in units for value in values(unit)] == [row[1] for row in whole if isinstance(row, tuple)]
    assert len(stream_units(found, 32)) >= 32


def test_units_of_many_files_and_of_sources_without_files(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[number * 20 : (number + 1) * 20 + (number == 4)])))
    units = stream_units(source(tmp_path), 4)
    assert sorted(texts(units)) == expected()
    assert -(-len(units) // 4) <= 1.125 * len(units) / 4
    builtin = source("builtin:arithmetic")
    spread = [row for unit in stream_units(builtin, 3) for row in values(unit)]
    everything = [row[1] for _, row in builtin.read() if isinstance(row, tuple)]
    assert sorted(map(str, spread)) == sorted(map(str, everything))


def test_max_rows_limits_units_to_the_first_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:30]))
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS[30:]))
    (tmp_path / "c.jsonl").write_bytes(lines(ROWS))
    for lanes in (1, 4, 50):
        units = stream_units(source(tmp_path, max_rows=37), lanes)
        assert sorted(texts(units)) == sorted(row["text"].rstrip() for row in ROWS[:37])
        assert len(units) >= lanes


def test_bad_rows_of_a_range_are_located_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROWS[:70]) + b'{"text": \n' + lines(ROWS[70:]))
    bad = [unit.locate(row.number) for unit in stream_units(source(path), 16) for row in unit.read() if isinstance(row, BadRow)]
    assert [str(where) for where in bad] == [f"{path}:71"]
