"""Which rank files a rank restores after the number of ranks has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_tune.run.directory import CHECKPOINT_KIND
from fsdp_tune.run.manifest import MANIFEST_NAME, FileEntry, Manifest
from fsdp_tune.worker.checkpoint import restore
from fsdp_tune.worker.checkpoint.exchange import rank_file
from tests.merge.ranks import run_ranks


def test_rank_0_verifies_all_files_and_others_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files on each of hundreds of ranks are as many requests to one file system at once."""
    for rank in range(3):
        torch.save(
            {"own": {"sums": [1.0, 10.0, float(rank)], "loss_scale": None, "unwritten": []}},
            tmp_path / rank_file(rank),
        )
    entries = {rank_file(rank): FileEntry(1, "") for rank in range(3)}
    (tmp_path / MANIFEST_NAME).write_text(Manifest(CHECKPOINT_KIND, entries, {}).to_json())
    read: list[tuple[int, str]] = []
    load: Any = torch.load

    def counted(path: Path, **options: Any) -> Any:
        read.append((dist.get_rank(), path.name))
        return load(path, **options)

    monkeypatch.setattr(torch, "load", counted)
    found: dict[int, list[float]] = {}

    def rank_main(rank: int) -> None:
        found[rank] = restore.restore_own(str(tmp_path))["sums"]

    run_ranks(2, rank_main)
    assert found == {0: [3.0, 30.0, 3.0], 1: [0.0, 0.0, 0.0]}
    assert sorted(read) == [*((0, rank_file(rank)) for rank in range(3)), (1, rank_file(0))]
