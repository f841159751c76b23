from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import datasets
import fsspec
import pytest

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.data.read import file_access, readers, sources
from fsdp_tune.data.read.readers import read_rows
from fsdp_tune.data.read.row_files import BadRow
from fsdp_tune.data.read.sources import RowSource, find_source
from fsdp_tune.data.stream.units import (
    FileStamp,
    StreamUnit,
    count_units,
    refuse_changed_files,
    stream_stamps,
    stream_units,
    unstamped_files,
)
from fsdp_tune.recipe.schema.data_section import DataSource
from fsdp_tune.run import remote_requests
from tests.data.hub_of_files import COMMIT
from tests.data.row_files import WRITERS, lines, tar, zstd

ROWS: list[dict[str, Any]] = [{"text": f"{number} {'zwölf ä€😀' * (number % 7)}"} for number in range(101)]
LANES = (1, 3, 16, 64)


FILES = [f"rows.{suffix}" for suffix in WRITERS]


def write(path: Path) -> None:
    WRITERS[path.name.removeprefix("rows.")](path, ROWS)


def source(path: Path | str, **entry: Any) -> RowSource:
    return find_source(DataSource(path=str(path), **entry), "data.train[0]", streaming=True)


def values(unit: StreamUnit, start: int = 0) -> list[dict[str, Any]]:
    return [row[1] for row in unit.read(start) if not isinstance(row, BadRow)]


def texts(units: Sequence[StreamUnit]) -> list[str]:
    return [value["text"].rstrip() for unit in units for value in values(unit)]


def expected() -> list[str]:
    return sorted(row["text"].rstrip() for row in ROWS)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", FILES)
def test_units_hold_each_row_once_and_read_from_any_row(tmp_path: Path, name: str, lanes: int) -> None:
    write(tmp_path / name)
    units = stream_units(source(tmp_path / name), lanes)
    assert [unit.rows for unit in count_units(units, {})] == [len(list(unit.read())) for unit in units]
    assert sorted(text.rstrip() for text in texts(units)) == expected()
    for unit in units[:: max(1, len(units) // 7)]:
        rows = list(unit.read())
        for start in {0, 1, len(rows) // 2, max(0, len(rows) - 1), len(rows), len(rows) + 5}:
            assert list(unit.read(start)) == rows[start:]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.jsonl.gz", "rows.arrow", "rows.csv"])
def test_rows_are_located_by_their_number_in_the_file(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    numbers = {
        row[1]["text"]: row[0]
        for row in read_rows(tmp_path / name, name.split(".")[1].replace("jsonl", "lines"))
        if isinstance(row, tuple)
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
    ids=[
        "crlf",
        "no-newline-at-the-end",
        "empty-lines",
        "byte-order-mark",
        "empty-first-line",
        "line-longer-than-a-range",
    ],
)
def test_ranges_of_bytes_agree_with_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    whole = [row[1] for row in read_rows(path, "lines") if isinstance(row, tuple)]
    assert len(whole) >= len(ROWS)
    for lanes in (1, 2, 5, 64, 300):
        assert [value for unit in stream_units(source(path), lanes) for value in values(unit)] == whole


@pytest.mark.parametrize(
    "content", [b"", b"\n", b'{"a":1}', b'\xef\xbb\xbf{"a":1}\n{"a":2}', b'{"a":1}\n{"a":2}\n']
)
def test_every_division_of_a_small_file_holds_its_rows(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    whole = list(read_rows(path, "lines"))
    found = source(path)
    for pieces in range(1, len(content) + 4):
        units = [
            StreamUnit(found, 0, piece, pieces, len(content), stamps=stream_units(found, 1)[0].stamps)
            for piece in range(pieces)
        ]
        assert [value for unit in units for value in values(unit)] == [
            row[1] for row in whole if isinstance(row, tuple)
        ]


def test_units_of_many_files_and_of_sources_without_files(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.jsonl.gz").write_bytes(
            gzip.compress(lines(ROWS[number * 20 : (number + 1) * 20 + (number == 4)]))
        )
    units = stream_units(source(tmp_path), 4)
    assert sorted(texts(units)) == expected()
    builtin = source("builtin:arithmetic")
    spread = [row for unit in stream_units(builtin, 3) for row in values(unit)]
    everything = [row[1] for _, row in builtin.read() if isinstance(row, tuple)]
    assert sorted(map(str, spread)) == sorted(map(str, everything))
    assert [unit.rows for unit in count_units(stream_units(builtin, 3), {"builtin:arithmetic": 5})] == [
        len(everything)
    ], "not by name"


def test_bad_rows_of_a_range_are_located_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROWS[:70]) + b'{"text": \n' + lines(ROWS[70:]))
    bad = [
        unit.locate(row.number)
        for unit in stream_units(source(path), 16)
        for row in unit.read()
        if isinstance(row, BadRow)
    ]
    assert [str(where) for where in bad] == [f"{path}:71"]


def test_saved_dataset_is_one_unit_that_is_counted(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (unit,) = count_units(stream_units(source(tmp_path / "saved"), 16), {})
    assert unit.rows == len(ROWS)
    for start in (0, 2, 100, 101, 105):
        assert [row[1] for row in unit.read(start) if isinstance(row, tuple)] == ROWS[start:]


def test_saved_dataset_that_changes_is_found_after_its_unit(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (unit,) = units = stream_units(source(tmp_path / "saved"), 16)
    (name,) = stream_stamps(units)
    assert len(values(unit)) == len(ROWS)
    os.utime(name, ns=(0, 0))
    problem = failure(lambda: values(unit))
    assert (problem.code, problem.where.source) == ("data-changed", name)


def test_members_of_a_tar_are_grouped_and_pickles_are_not_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "loaded"),)

    path = tmp_path / "rows.tar"
    members = {
        "a.json": b'{"x": 1}',
        "a.txt": b"one",
        "b.pkl": pickle.dumps(Trap()),
        "b.json": b'{"x": 2}',
        "c.pyd": pickle.dumps(Trap()),
        "d.json": b'{"x": ',
        "e.txt": b"\xff",
        "dir.1/f.cls.txt": b"5",
        "dir.1/f.json": b'{"x": 6}',
    }
    for content in (tar(members), gzip.compress(tar(members))):
        path.write_bytes(content)
        rows = list(read_rows(path, "tar"))
        good = [row for row in rows if isinstance(row, tuple)]
        assert good == [
            (1, {"x": 1, "text": "one"}),
            (2, {"x": 2, ".pkl": "b.pkl"}),
            (6, {"x": 6, ".cls.txt": "dir.1/f.cls.txt"}),
        ]
        reasons = [(row.number, row.reason) for row in rows if isinstance(row, BadRow)]
        assert reasons[0] == (3, "`c` has no `.json` or `.txt` member; it has .pyd")
        assert [number for number, _ in reasons] == [3, 4, 5]
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl.gz", gzip.compress(os.urandom(9000).hex().encode())[:-2000]),
        ("rows.jsonl.zst", zstd(os.urandom(9000).hex().encode())[:-2000]),
        ("rows.tar", tar({f"{number}.txt": b"x" * 2000 for number in range(20)})[:-12_000]),
        ("rows.tar", tar({f"{number}.txt": b"x" * 512 for number in range(20)})[:8192]),
    ],
)
def test_file_that_is_cut_off_is_named_with_its_row(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    problem = failure(lambda: texts(stream_units(source(tmp_path / name), 2)))
    assert problem.where.source == str(tmp_path / name)
    assert "damaged or cut off (after row" in problem.message


def failure(call: Callable[[], object]) -> Problem:
    with pytest.raises(FsdpTuneError) as caught:
        call()
    return caught.value.problems[0]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.arrow"])
def test_file_that_changes_is_not_counted(tmp_path: Path, name: str) -> None:
    write(tmp_path / name)
    units = stream_units(source(tmp_path / name), 2)
    WRITERS[name.removeprefix("rows.")](tmp_path / name, ROWS[:7])
    problem = failure(lambda: count_units(units, {}))
    assert (problem.code, problem.where.source) == ("data-changed", str(tmp_path / name))


def test_file_that_changes_is_found_after_a_unit_and_on_resume(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(lines(ROWS))
    units = stream_units(source(tmp_path), 2)
    recorded = stream_stamps(units)
    refuse_changed_files(recorded, stream_stamps(units))
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS) + b"\n")
    problem = failure(lambda: texts(units))
    assert (problem.code, problem.where.source) == ("data-changed", str(tmp_path / "b.jsonl"))
    problem = failure(
        lambda: refuse_changed_files(recorded, stream_stamps(stream_units(source(tmp_path), 2)))
    )
    assert (problem.code, problem.where.source) == ("data-changed", str(tmp_path / "b.jsonl"))


class Files(BaseHTTPRequestHandler):
    """Serve ranges of `contents`; the first `failures` requests fail with a transient status."""

    contents: ClassVar[dict[str, bytes]] = {}
    failures: ClassVar[list[int]] = []
    etag: str | None = "one"
    ranges = True

    def do_GET(self) -> None:
        if Files.failures:
            self.send_error(Files.failures.pop())
            return
        content = Files.contents.get(self.path.partition("?")[0])
        if content is None:
            self.send_error(404)
            return
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = content[first : last + 1] if Files.ranges else content
        self.send_response((206 if body else 416) if Files.ranges else 200)
        if Files.etag:
            self.send_header("ETag", Files.etag)
        self.send_header(
            "Content-Range",
            f"bytes {first}-{first + len(body) - 1}/{len(content)}" if body else f"bytes */{len(content)}",
        )
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote_requests, "WAITS", (0.0, 0.0))
    monkeypatch.setattr(file_access, "FIRST_BLOCK", 700)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in FILES:
        write(tmp_path / name)
    Files.contents = {f"/{path.name}": path.read_bytes() for path in tmp_path.iterdir()} | {
        "/empty.jsonl": b""
    }
    Files.failures, Files.etag, Files.ranges = [], "one", True
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.mark.parametrize("name", FILES)
def test_files_at_http_urls_hold_each_row_once(server: str, name: str) -> None:
    units = stream_units(source(f"{server}/{name}?token=1"), 3)
    assert sorted(text.rstrip() for text in texts(units)) == expected()
    assert list(units[-1].read(3)) == list(units[-1].read())[3:]
    assert [unit.rows for unit in count_units(units, {})] == (
        [len(ROWS)] if name == "rows.parquet" else [None] * len(units)
    )


def test_transient_errors_are_retried_and_the_last_one_names_url_and_row(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = stream_units(source(f"{server}/rows.jsonl"), 1)
    Files.failures = [503, 429]
    assert sorted(texts(units)) == expected()
    Files.contents["/long.jsonl.gz"] = gzip.compress(
        lines([{"text": os.urandom(500).hex()} for _ in range(8000)]), 1
    )
    rows = stream_units(source(f"{server}/long.jsonl.gz"), 1)[0].read()
    next(rows)
    Files.failures = [503] * 3
    problem = failure(lambda: list(rows))
    assert problem.where.source == f"{server}/long.jsonl.gz"
    assert "responds with 503" in problem.message
    assert "3 attempts" in problem.message
    assert "after row" in problem.message
    assert "--resume auto" in (problem.hint or "")
    assert "404" in failure(lambda: stream_units(source(f"{server}/none.jsonl"), 1)).message
    monkeypatch.setattr(Files, "ranges", False)
    assert "ranges of bytes" in failure(lambda: stream_units(source(f"{server}/rows.jsonl"), 1)).message


def test_changed_etag_is_found_and_its_absence_reported(server: str) -> None:
    units = stream_units(source(f"{server}/rows.jsonl"), 2)
    assert unstamped_files(stream_stamps(units)) == []
    Files.etag = "two"
    assert failure(lambda: texts(units)).code == "data-changed"
    Files.etag = None
    units = stream_units(source(f"{server}/rows.jsonl"), 2)
    assert unstamped_files(stream_stamps(units)) == [f"{server}/rows.jsonl"]
    assert sorted(texts(units)) == expected()
    assert texts(stream_units(source(f"{server}/empty.jsonl"), 4)) == []


def test_stamp_is_recorded_as_text_and_only_a_file_without_a_mark_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl")
    status = (tmp_path / "rows.jsonl").stat()
    name = str(tmp_path / "rows.jsonl")
    assert stream_stamps(stream_units(source(tmp_path / "rows.jsonl"), 2)) == {
        name: f"{status.st_size}:{status.st_mtime_ns}"
    }
    marks = {"size": FileStamp(5, None).text, "etag": FileStamp(5, "W/ no mark").text}
    assert marks == {"size": "5:no mark", "etag": "5:W/ no mark"}
    assert unstamped_files(marks) == ["size"]


def test_globs_and_directories_of_fsspec_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_access, "PROTOCOLS", ("memory",))
    files = fsspec.filesystem("memory")
    files.pipe(
        {"/units/a.jsonl": lines(ROWS[:50]), "/units/b.jsonl": lines(ROWS[50:]), "/units/README.md": b"x"}
    )
    for path in ("memory://units/*.jsonl", "memory://units"):
        found = source(path)
        assert [name.rpartition("/")[2] for name in found.names] == ["a.jsonl", "b.jsonl"]
        units = stream_units(found, 5)
        assert sorted(texts(units)) == expected()
    files.pipe("/units/b.jsonl", lines(ROWS))
    assert failure(lambda: texts(units)).code == "data-changed"
    assert failure(lambda: source("memory://units/*.csv")).code == "data-not-found"


@pytest.mark.parametrize(
    "url",
    [
        "sftp://host/rows.jsonl",
        "filecache::https://host/rows.jsonl",
        "zip://a.jsonl::https://host/a.zip",
        "file:///a.jsonl",
    ],
)
def test_protocols_that_do_more_than_read_are_refused(url: str) -> None:
    assert "are not read by" in failure(lambda: source(url)).message


def test_url_needs_a_stream() -> None:
    problem = failure(lambda: find_source(DataSource(path="https://host/rows.jsonl"), "data.train[0]"))
    assert "data.streaming: true" in (problem.hint or "")


def test_files_of_a_hub_data_set_are_listed_and_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {
        "train": [f"hf://datasets/org/rows@{'0' * 40}/data/{part}.parquet" for part in "ab"],
        "test": [],
    }

    def load_dataset_builder(path: str, **options: Any) -> SimpleNamespace:
        assert (path, options["name"], options["revision"]) == ("org/rows", "main", "v1")
        return SimpleNamespace(config=SimpleNamespace(data_files=splits))

    monkeypatch.setattr(sources, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    found = source("org/rows", name="main", revision="v1")
    assert [(file.path, file.kind) for file in found.files] == [(url, "parquet") for url in splits["train"]]
    assert "train, test" in (
        failure(lambda: source("org/rows", name="main", revision="v1", split="dev")).hint or ""
    )


def test_files_of_a_hub_data_set_are_read_by_ranges_in_a_child_process(tmp_path: Path) -> None:
    paths = ["org/rows", f"hf://datasets/org/rows@{COMMIT}/data/train-*.parquet"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-m", "tests.data.hub_of_files", *paths]
    environment = {**kept, "HF_HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180, env=environment)
    for line in done.stdout.splitlines():
        found = json.loads(line)
        assert found["path"] == paths.pop(0)
        assert sorted(found["rows"]) == sorted(f"train-{part} {row}" for part in (0, 1) for row in range(50))
        assert list(found["stamps"]) == [
            f"hf://datasets/org/rows@{COMMIT}/data/train-{part}.parquet" for part in (0, 1)
        ]
        assert found["downloads"] == 0
    assert not paths


def test_line_beyond_the_limit_is_one_bad_row_of_one_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([*ROWS[:50], {"text": "x" * 5000}, *ROWS[50:]]))
    for lanes in (1, 4, 40):
        units = stream_units(source(path), lanes)
        assert sorted(texts(units)) == expected()
        assert [
            str(unit.locate(row.number)) for unit in units for row in unit.read() if isinstance(row, BadRow)
        ] == [f"{path}:51"]
