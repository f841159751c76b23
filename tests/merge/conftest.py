from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from fsdp_tune.core.atomic import Disk
from fsdp_tune.merge import load_check, loaded, merging
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import MergeResult, merge_checkpoint

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class ChildInProcess:
    """Stands for `load_check.Child`: the answers without a process that imports torch and transformers, which
    takes 7 s."""

    def __init__(self, mode: str, folder: Path) -> None:
        self._mode, self._folder = mode, folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def answer(self) -> dict[str, Any] | str:
        try:
            return json.loads(json.dumps(loaded.main(self._mode, self._folder)))
        except Exception as error:  # noqa: BLE001  a child that fails prints it, whatever it is
            return f"{type(error).__name__}: {error}"


@pytest.fixture
def real_child() -> None:
    """Merges of this test start the child process that loads the model."""


@pytest.fixture(autouse=True)
def _child_in_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_child" not in request.fixturenames:
        for module in (load_check, merging):
            monkeypatch.setattr(module, "Child", ChildInProcess)


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges of tests do not wait for the disk. The operations of `Disk` are counted all the same."""
    monkeypatch.setattr(Disk, "fsync", lambda _, file: file.flush())
    monkeypatch.setattr(Disk, "fsync_dir", lambda _, path: None)


@pytest.fixture
def merge(tmp_path: Path):
    """Merge into `tmp_path/out` by default."""

    def run(source: Path, **options: object) -> MergeResult:
        options.setdefault("output", tmp_path / "out")
        return merge_checkpoint(source, MergeOptions(**options))  # type: ignore[arg-type]

    return run
