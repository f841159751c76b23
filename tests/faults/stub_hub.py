"""A hub whose answer depends on the repository name, and the result of each way that the package queries it.
Run as a
program: the libraries read the hub's address when they are imported."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

STATUS = {
    "missing": 404,
    "unversioned": 404,
    "gated": 403,
    "unauthorised": 401,
    "forbidden": 403,
    "busy": 429,
    "down": 503,
}
WORD = {"missing": "RepoNotFound", "unversioned": "RevisionNotFound", "gated": "GatedRepo"}


class Hub(BaseHTTPRequestHandler):
    authorised = 0

    def _answer(self) -> None:
        name = self.path.partition("/org/")[2].partition("/")[0]
        Hub.authorised += "authorization" in self.headers
        if name == "cut":
            self._headers(200, 100_000)
            if self.command == "GET":
                self.wfile.write(b"{")
            self.close_connection = True
            return
        self._headers(STATUS.get(name, 404), 2, WORD.get(name))
        if self.command == "GET":
            self.wfile.write(b"{}")

    def _headers(self, status: int, length: int, word: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"0"')
        self.send_header("X-Repo-Commit", "0" * 40)
        if word is not None:
            self.send_header("X-Error-Code", word)
        self.end_headers()

    do_GET = do_HEAD = _answer

    def log_message(self, *_: object) -> None:
        pass


def main(names: list[str]) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    from fsdp_tune.core.errors import FsdpTuneError
    from fsdp_tune.core.hub import download_model
    from fsdp_tune.data.format.templates import resolve_template
    from fsdp_tune.data.tokenise.tokenizer import open_tokenizer
    from fsdp_tune.merge.config_and_tokenizer import fetch_model
    from fsdp_tune.recipe.schema.recipe import Recipe

    doors: dict[str, Callable[[str], object]] = {
        "tokenizer": lambda name: open_tokenizer(Recipe.model_validate({"model": {"tokenizer": name}})),
        "template": resolve_template,
        "model": lambda name: download_model(name, "main"),
        "base": fetch_model,
    }
    told: dict[str, dict[str, dict[str, Any]]] = {door: {} for door in doors}
    for door, ask in doors.items():
        for name in names:
            try:
                with patch("time.sleep"):  # the libraries wait half a minute between their attempts
                    ask(f"org/{name}")
            except FsdpTuneError as error:
                told[door][name] = error.problems[0].as_dict()
    print(json.dumps({"told": told, "authorised_requests": Hub.authorised}))


if __name__ == "__main__":
    main(sys.argv[1:])
