from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Done = subprocess.CompletedProcess[str]
Cli = Callable[..., Done]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs `fsdp-tune ARGUMENTS` in a process of its own, in an empty directory."""

    def run(*arguments: str, **environment: str) -> Done:
        command = [sys.executable, "-m", "fsdp_tune", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **environment}, timeout=300
        )

    return run


def document(done: Done) -> dict[str, Any]:
    """The one JSON document on stdout."""
    return json.loads(done.stdout)
