"""A stand-in for the child process that inspects a model (`fsdp_tune.model.loading.inspect`) and imports
torch for it."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.jobs import inspection as checks
from fsdp_tune.model.model_files import ModelFacts
from tests.model.recipes import model_facts

FACTS = model_facts(embedding_rows=384, layers=2, layer_classes=["Block"], units=[["a"], ["b"]])


def inspector(
    folder: Path, document: ModelFacts | dict[str, Any] | str, exit_code: int = 0
) -> tuple[str, ...]:
    """Return the command of a child that reads its request, prints `document`, and ends."""
    document = (
        {**document.as_dict(), "problems": [], "notices": []}
        if isinstance(document, ModelFacts)
        else document
    )
    text = document if isinstance(document, str) else json.dumps(document)
    script = folder / "inspect_model.py"
    script.write_text(
        f"import sys\nassert sys.stdin.buffer.read()\nprint({text!r})\nsys.stderr.write('last "
        f"words\\n')\nsys.exit({exit_code})\n"
    )
    return (sys.executable, "-I", "-S", str(script))


@pytest.fixture
def fake_model(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is `FACTS`, and `train` does not start its ranks while it checks its inputs."""
    monkeypatch.setattr("fsdp_tune.jobs.train.start_early", lambda *_: nullcontext())
    monkeypatch.setattr(checks, "INSPECT", inspector(tmp_path_factory.mktemp("inspector"), FACTS))
