from __future__ import annotations

import gzip
import json
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.data.read import row_files
from fsdp_tune.data.read.readers import read_rows
from fsdp_tune.data.read.row_files import BadRow, Part

ROWS: list[dict[str, Any]] = [{"text": "one"}, {"text": "zwei ä\u2028\u0085\u000b ü"}, {"text": "three"}]


def lines(rows: Sequence[Any], end: str = "\n") -> bytes:
    return end.join(json.dumps(row, ensure_ascii=False) for row in rows).encode() + end.encode()


def read(path: Path, kind: str = "lines") -> list[tuple[int, dict[str, Any]] | BadRow]:
    return list(read_rows(path, kind))


def good(path: Path, kind: str = "lines") -> list[dict[str, Any]]:
    return [row[1] for row in read(path, kind) if not isinstance(row, BadRow)]


def bad(path: Path, kind: str = "lines") -> list[BadRow]:
    return [row for row in read(path, kind) if isinstance(row, BadRow)]


def problem(path: Path, kind: str = "lines") -> Problem:
    with pytest.raises(FsdpTuneError) as caught:
        read(path, kind)
    assert caught.value.exit_code == 2
    (found,) = caught.value.problems
    assert found.code == "data-unreadable"
    assert found.where.source == str(path)
    return found


@pytest.mark.parametrize(
    "contents",
    [
        lines(ROWS),
        lines(ROWS, "\r\n"),
        b"\xef\xbb\xbf" + lines(ROWS),
        lines(ROWS).removesuffix(b"\n"),
        b"\n" + lines(ROWS).replace(b"\n", b"\n \n"),
        gzip.compress(lines(ROWS)),
    ],
    ids=["clean", "crlf", "bom", "no-last-newline", "blank-lines", "gzip"],
)
def test_rows_do_not_depend_on_line_endings(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(contents)
    assert good(path) == ROWS
    assert good(path, "json") == ROWS


def test_rows_carry_their_line_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n\n{"a": 2}\n')
    assert read(path) == [(1, {"a": 1}), (4, {"a": 2})]


BAD_LINES = {
    '{"text": "cut': ("not JSON: unterminated string starting", 10),
    '{"text": a}': ("not JSON: expecting value", 10),
    "7": ("a row is an object, and this is a number", 1),
    '["a"]': ("a row is an object, and this is a list", 1),
    '{"text": NaN}': ("`NaN` is not JSON", None),
    '{"text": "a", "text": "b"}': ("the key `text` occurs twice", None),
    '{"text": "a \\ud800 b"}': ("`\\ud800` is half of a surrogate pair", 13),
    '{"text": "\\udc00\\ud800"}': ("`\\udc00` is half", 11),
    '{"n": ' + "9" * 5000 + "}": ("a number of too many digits", None),
    "[" * 100_000: ("nested too deeply", None),
    '{"a":' * 101 + "1" + "}" * 101: ("nested too deeply", None),
    '{"text": "a"} {"text": "b"}': ("not JSON: extra data", 15),
}


@pytest.mark.parametrize("line", BAD_LINES, ids=[reason for reason, _ in BAD_LINES.values()])
def test_bad_line_is_reported_with_column_and_reading_continues(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 3}}\n')
    assert good(path) == [{"a": 1}, {"a": 3}]
    (found,) = bad(path)
    reason, column = BAD_LINES[line]
    assert found.number == 2
    assert found.reason.startswith(reason)
    assert found.column == column


def test_surrogate_pair_decodes_to_one_character(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}\n')
    assert good(path) == [{"text": "😀"}]


def test_line_that_is_not_utf8_is_named_with_its_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"text": "\xc3\xa4 caf\xe9"}\n')
    assert bad(path) == [BadRow(2, "not UTF-8: byte 0xe9", 16)]


def test_row_beyond_the_limit_is_skipped_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_tune.data.read.readers.MAX_ROW_BYTES", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(gzip.compress(b'{"text": "' + b"x" * 5_000_000 + b'"}\n{"a": 1}\n'))
    assert good(path) == [{"a": 1}]
    assert [row.number for row in bad(path)] == [1]


def test_rows_of_a_json_list_have_their_first_line_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[\n {"a": 1},\n\n {"a":\n 2}, {"a": 3}\n]\n')
    assert read(path, "json") == [(2, {"a": 1}), (4, {"a": 2}), (5, {"a": 3})]
    path.write_text("[]")
    assert read(path, "json") == []
    path.write_text('[{"a": 1}, 5]')
    assert bad(path, "json") == [BadRow(2, "a row is an object, and this is a number", 1)]


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ('[\n {"a": 1}\n {"a": 2}]', 3, 2),
        ('[{"a": 1},\n {"a": }]', 2, 8),
        ('[{"a": 1},]', 1, 11),
        ('[{"a": 1}', 1, 10),
        ('[{"a": 1}]\n{"a": 2}', 2, 1),
        ("[\n", 2, 1),
    ],
)
def test_broken_json_list_is_refused_with_line_and_column(
    tmp_path: Path, text: str, line: int, column: int
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    found = problem(path, "json")
    assert (found.where.line, found.where.column) == (line, column)


def test_json_list_that_lanes_share_is_refused_above_their_part_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 100}] * 8))
    monkeypatch.setattr("fsdp_tune.data.read.readers.MAX_DOCUMENT_BYTES", 4 << 10)
    assert len(list(read_rows(tmp_path / "a.json", "json"))) == 8
    assert len(list(read_rows(tmp_path / "a.json", "json", Part(1, 4)))) == 2
    with pytest.raises(FsdpTuneError, match="16 lanes of a stream"):
        list(read_rows(tmp_path / "a.json", "json", Part(0, 16)))


def test_rows_of_a_list_on_one_line_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1}, 7, {"a": 2}]\n')
    assert [row.number if isinstance(row, BadRow) else row[0] for row in read(path, "json")] == [1, 2, 3]


def test_object_over_several_lines_is_refused_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{\n "data": []\n}')
    assert "jq" in (problem(path, "json").hint or "")


def test_csv_reads_quotes_and_newlines_inside_fields(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,completion\r\n"a ""b""\nc",d\r\n\r\ne,f\r\n')
    assert read(path, "csv") == [
        (2, {"prompt": 'a "b"\nc', "completion": "d"}),
        (5, {"prompt": "e", "completion": "f"}),
    ]


def test_csv_lines_with_wrong_field_count_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n1,2\n1,2,3\n"x" y,2\ncaf\xe9,2\n3,4\n')
    assert [(row.number, row.reason) for row in bad(path, "csv")] == [
        (3, "3 fields where the first line names 2 columns"),
        (4, "not CSV: ',' expected after '\"'"),
        (5, "column `a` is not UTF-8: byte 0xe9"),
    ]
    assert good(path, "csv") == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


def test_non_utf8_column_name_is_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,r\xe9ponse\n1,2\n")
    found = problem(path, "csv")
    assert (found.where.line, found.hint) == (1, "convert it: `iconv -f LATIN1 -t UTF-8 rows.csv`")
    assert "the names of its columns are not UTF-8" in found.message


def test_unclosed_quote_is_one_error_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n1,2\n"open,5\n6,7\n8,9\n')
    found = problem(path, "csv")
    assert (found.where.line, found.message) == (
        3,
        "cannot be read: a quote that begins here is never closed: lines 3 to 5 are one field",
    )


def test_csv_with_a_column_named_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b,a\n1,2,3\n")
    assert "a column twice: a" in problem(path, "csv").message


def test_quote_in_tsv_does_not_span_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text(
        'prompt\tcompletion\n"Yes\tshe said\n1\t2\nno"\tthree\n"so" he said\tx\n"a ""b"""\t"c\td"\n'
    )
    assert [row.number for row in bad(path, "tsv")] == [2, 5]
    assert "must end with one on its line" in bad(path, "tsv")[0].reason
    assert good(path, "tsv") == [
        {"prompt": "1", "completion": "2"},
        {"prompt": 'no"', "completion": "three"},
        {"prompt": 'a "b"', "completion": "c\td"},
    ]


@pytest.mark.parametrize(("kind", "mark"), [("csv", ","), ("tsv", "\t")])
def test_blank_lines_above_the_names_of_the_columns_are_skipped(tmp_path: Path, kind: str, mark: str) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(f"\xef\xbb\xbf\r\n\na{mark}b\r\n\n1{mark}2\n{mark}\n".encode("latin1"))
    assert read(path, kind) == [(5, {"a": "1", "b": "2"}), (6, {"a": "", "b": ""})]
    path.write_text(f"\na{mark}a\n1{mark}2\n")
    assert problem(path, kind).where.line == 2


def test_tsv_lines_with_wrong_field_count_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"a\tb\n1\t2\t3\ncaf\xe9\t2\n3\t4\n")
    assert [(row.number, row.reason) for row in bad(path, "tsv")] == [
        (2, "3 fields where the first line names 2 columns"),
        (3, "not UTF-8: byte 0xe9"),
    ]
    path.write_bytes(b"a\tcaf\xe9\n1\t2\n")
    assert problem(path, "tsv").where.line == 1


class Batch:
    """Stands in for a record batch, whose rows are texts of given lengths; notes the parts that become Python
    objects."""

    def __init__(self, lengths: list[int], parts: list[list[int]]) -> None:
        self.lengths, self.parts = lengths, parts
        self.num_rows, self.nbytes = len(lengths), sum(lengths)
        self.columns: list[Any] = []

    def slice(self, start: int, length: int | None = None) -> Batch:
        return Batch(self.lengths[start:][:length], self.parts)

    def to_pylist(self) -> list[dict[str, Any]]:
        self.parts.append(self.lengths)
        return [{"text": "x" * length} for length in self.lengths]


def test_long_rows_are_converted_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "BATCH_BYTES", 10_000)
    lengths = [10] * 500 + [4_000] * 20 + [50_000, 10, 10]
    parts: list[list[int]] = []
    assert [len(row["text"]) for _, row in row_files.table_rows(iter([Batch(lengths, parts)]))] == lengths
    assert all(len(part) == 1 or sum(part) <= 10_000 for part in parts)
    assert len(parts) < 50


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_long_text_that_all_rows_share_is_not_decoded_for_all_at_once(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a few hundred bytes can stand for gigabytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(row_files, "BATCH_BYTES", 10_000)
    path = tmp_path / f"rows.{kind}"
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 500, pa.int32()), pa.array(["x" * 4_000, "y"]))
    table = pa.table({"text": column})
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    sizes: list[int] = []

    def noted(batch: Any) -> Any:
        found = batch.num_rows == 1 or max(batch.nbytes, row_files._decoded_bytes(batch)) <= 10_000
        sizes.append(batch.num_rows if found else 0)
        return list(arrow_rows_rows(batch))

    arrow_rows_rows = row_files._rows
    monkeypatch.setattr(row_files, "_rows", noted)
    assert [len(row["text"]) for row in good(path, kind)] == [4_000, 1] * 500
    assert max(sizes) <= 2


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_pickle_in_the_type_of_a_column_is_not_loaded(tmp_path: Path, kind: str) -> None:
    """Older versions of pyarrow unpickled the metadata of `arrow.py_extension_type`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Trap()),
    }
    schema = pa.schema([pa.field("text", pa.string(), metadata=metadata)])
    table = pa.Table.from_arrays([pa.array(["a"])], schema=schema)
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, schema) as writer:
            writer.write_table(table)
    assert good(path, kind) == [{"text": "a"}]
    assert not (tmp_path / "ran").exists()


def test_csv_with_many_columns_and_long_fields_is_read_in_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    names = [f"c{number}" for number in range(100_000)]
    path.write_text(",".join(names) + "\n" + ",".join(["1"] * 99_999 + ["x" * 3_000_000]) + "\n")
    began = time.process_time()
    (row,) = good(path, "csv")
    assert time.process_time() - began < 10
    assert (len(row), len(row["c99999"])) == (100_000, 3_000_000)
    path.write_text(",".join([*names, "c7"]) + "\n")
    assert "names a column twice: c7" in problem(path, "csv").message


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_long_and_short_rows_keep_their_order(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    monkeypatch.setattr(row_files, "BATCH_BYTES", 10_000)
    texts = [f"{number} " + "x" * (4_000 if number % 7 == 0 else 3) for number in range(300)]
    path, table = tmp_path / f"rows.{kind}", pa.table({"text": texts})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as sink:
            sink.write_table(table)
    assert read(path, kind) == [(number, {"text": text}) for number, text in enumerate(texts, 1)]


def test_text_file_yields_one_row_per_non_blank_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_bytes("one\r\n\n  two \u2028 more\n".encode())
    assert read(path, "text") == [(1, {"text": "one"}), (3, {"text": "  two \u2028 more"})]


@pytest.mark.parametrize("format_", ["file", "stream"])
def test_arrow_file_and_stream_are_read_and_truncation_refused(tmp_path: Path, format_: str) -> None:
    import pyarrow as pa

    path = tmp_path / "rows.arrow"
    table = pa.table({"text": [f"row {index} " + "x" * 100 for index in range(3000)]})
    writer = pa.ipc.new_file if format_ == "file" else pa.ipc.new_stream
    with writer(path, table.schema) as sink:
        sink.write_table(table, max_chunksize=500)
    rows = read(path, "arrow")
    assert len(rows) == 3000
    assert rows[2999] == (3000, {"text": "row 2999 " + "x" * 100})
    os.truncate(path, path.stat().st_size // 2)
    problem(path, "arrow")


def test_damaged_parquet_row_group_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    pq.write_table(
        pa.table({"text": [f"row {index}" for index in range(300)]}),
        path,
        row_group_size=100,
        compression="gzip",
    )
    assert read(path, "parquet")[299] == (300, {"text": "row 299"})
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(b"\xff" * 40)
    assert "row group 1 is damaged (after row 100)" in problem(path, "parquet").message
    os.truncate(path, 200)
    assert "not a complete Parquet file" in problem(path, "parquet").message


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (gzip.compress(os.urandom(5000) * 3)[:-200], "cut off"),
        (gzip.compress(b"x" * 99)[:-8] + b"\0" * 8, "damaged"),
        (b"\x28\xb5\x2f\xfd rest", "damaged"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b"PAR1 rest", "Parquet"),
    ],
    ids=["cut-gzip", "broken-gzip", "broken-zstd", "utf-16", "parquet"],
)
def test_file_of_another_kind_is_refused_with_reason(tmp_path: Path, contents: bytes, says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(contents)
    assert says in problem(path).message


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.mkdir()
    assert "directory" in problem(path).message.lower()


def test_rows_of_a_list_have_different_numbers_also_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    one = '{"text": "one"}'
    for text, numbers in (
        (f"[{one}, {one}, {one}]\n", [1, 2, 3]),
        (f"[\n{one},\n{one},\n\n{one}\n]", [2, 3, 5]),
        (f"[\n{one}, {one},\n\n\n{one}\n]", [2, 3, 5]),
    ):
        path.write_text(text)
        assert [row[0] for row in read(path, "json") if not isinstance(row, BadRow)] == numbers
