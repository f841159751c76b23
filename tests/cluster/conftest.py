from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.cluster.mirror.remote_run import RemoteRun
from fsdp_tune.run.directory import RunDir
from tests.cluster.mirrors import save, send_all, without_waits_for_the_disk


@pytest.fixture
def disk_without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    without_waits_for_the_disk(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run


@pytest.fixture
def remote(tmp_path: Path) -> RemoteRun:
    """A mirror in a directory."""
    return RemoteRun(f"file://{tmp_path}/mirror", "run")


@pytest.fixture
def sent(run: RunDir, remote: RemoteRun) -> RunDir:
    """A run whose checkpoint of step 5 is in the mirror."""
    save(run, 5)
    assert send_all(run, remote)
    return run
