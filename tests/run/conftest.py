from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.run.directory import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run
