"""Write rows in every file format that a stream reads."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

Rows = Sequence[dict[str, Any]]


def lines(rows: Rows, end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode()


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def tar(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def write_parquet(path: Path, rows: Rows) -> None:
    parquet.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=13)


def write_arrow(path: Path, rows: Rows) -> None:
    table = pa.Table.from_pylist(list(rows))
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=13)


def write_table(path: Path, rows: Rows) -> None:
    path.write_text("text\n" + "\n".join(row["text"] for row in rows), encoding="utf-8")


WRITERS: dict[str, Callable[[Path, Rows], object]] = {
    "jsonl": lambda path, rows: path.write_bytes(lines(rows)),
    "jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "jsonl.zst": lambda path, rows: path.write_bytes(zstd(lines(rows[:60])) + zstd(lines(rows[60:]))),
    "tar": lambda path, rows: path.write_bytes(
        tar({f"s/{i:04}.json": json.dumps(row).encode() for i, row in enumerate(rows)})
    ),
    "json": lambda path, rows: path.write_text(json.dumps(list(rows), indent=1)),
    "txt": lambda path, rows: path.write_text("\n".join(row["text"] for row in rows), encoding="utf-8"),
    "csv": write_table,
    "tsv": write_table,
    "parquet": write_parquet,
    "arrow": write_arrow,
}
"""By the suffix of the file. Rows of txt, csv and tsv have only a `text`."""
