from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fsdp_tune.merge.merging import MergeResult, merge_checkpoint
from fsdp_tune.merge.source import MergeOptions

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def merge(tmp_path: Path):
    """Merge into `tmp_path/out` by default."""

    def run(source: Path, **options: object) -> MergeResult:
        options.setdefault("output", tmp_path / "out")
        return merge_checkpoint(source, MergeOptions(**options))  # type: ignore[arg-type]

    return run
