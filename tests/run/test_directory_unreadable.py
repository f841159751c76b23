"""A checkpoint whose manifest cannot be read is rejected with the reason, and the others are found."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fsdp_tune.run import manifest
from fsdp_tune.run.directory import RunDir, complete_checkpoints


def test_checkpoint_whose_manifest_cannot_be_read_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    (tmp_path / "checkpoint-1").mkdir()
    monkeypatch.setattr(manifest, "read_regular", read)
    complete, (rejected,) = complete_checkpoints(RunDir(tmp_path))
    assert complete == []
    assert rejected.reason == "its manifest.json cannot be read (Input/output error)"
