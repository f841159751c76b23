"""A hub with one data set, and the files and rows that a stream reads of it. Run as a program: the libraries
read the hub's address when they are imported."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet

COMMIT = "0" * 39 + "1"


def table(name: str, rows: int) -> bytes:
    file = io.BytesIO()
    parquet.write_table(
        pa.Table.from_pylist([{"text": f"{name} {row}"} for row in range(rows)]), file, row_group_size=20
    )
    return file.getvalue()


FILES = {
    "README.md": b"# rows\n",
    **{f"data/{name}.parquet": table(name, 50) for name in ("train-0", "train-1", "test-0")},
}


class DataHub(BaseHTTPRequestHandler):
    downloads = 0

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        if "/resolve/" in path:
            self._file(path.partition("/resolve/")[2].partition("/")[2])
        elif "/tree/" in path:
            folder = path.partition(f"/tree/{COMMIT}")[2].strip("/")
            self._answer(200, json.dumps(self._entries(folder)).encode())
        elif path.startswith("/api/datasets/org/rows"):
            siblings = [{"rfilename": name} for name in FILES]
            self._answer(
                200, json.dumps({"id": "org/rows", "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
            )
        else:
            self._answer(404, b"{}")

    do_HEAD = do_GET

    def _file(self, name: str) -> None:
        if name not in FILES:
            self._answer(404, b"", "EntryNotFound")
            return
        content, wanted = FILES[name], self.headers.get("Range")
        if wanted is not None:
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            content = content[first : last + 1]
        elif self.command == "GET" and name.endswith(".parquet"):
            DataHub.downloads += 1
        self._answer(200 if wanted is None else 206, content)

    def _entries(self, folder: str) -> list[dict[str, object]]:
        inside = [name for name in FILES if name.rpartition("/")[0] == folder]
        files = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": "b" * 40} for name in inside]
        return [*files, *([] if folder else [{"type": "directory", "path": "data", "oid": "c" * 40}])]

    def _answer(self, status: int, body: bytes, error: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error is not None:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main(paths: list[str]) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), DataHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    from fsdp_tune.data.read.sources import find_source
    from fsdp_tune.data.stream.units import stream_stamps, stream_units
    from fsdp_tune.recipe.schema.data_section import DataSource

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    for path in paths:
        units = stream_units(find_source(DataSource(path=path), "data.train[0]", streaming=True), 4)

        def read(units: Any = units) -> None:
            queue.put([row[1]["text"] for unit in units for row in unit.read()])

        process = context.Process(target=read)
        process.start()
        rows = queue.get(timeout=60)
        process.join()
        print(
            json.dumps(
                {"path": path, "rows": rows, "stamps": stream_stamps(units), "downloads": DataHub.downloads}
            )
        )


if __name__ == "__main__":
    main(sys.argv[1:])
