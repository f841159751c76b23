from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def beside_the_benchmarks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the command is run: the scripts import each other by name."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
