"""Child processes of a rehearsal: `fsdp-tune` itself, and the two scripts in `check/parity/` that need torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fsdp_tune.core import processes as children

CHILD_SECONDS = 900.0
FSDP_TUNE = (sys.executable, "-P", "-m", "fsdp_tune")


@dataclass(frozen=True, slots=True)
class ChildResult:
    """The result of a child that prints one JSON document."""

    exit_code: int
    document: dict[str, Any]
    stderr: str

    @property
    def error(self) -> str:
        """The exit code with the first error of the document, or the last line of stderr if the document has none."""
        errors: list[dict[str, str]] = self.document.get("errors") or []
        lines = self.stderr.strip().splitlines() or ["no output"]
        return f"exit code {self.exit_code}: {errors[0]['message'] if errors else lines[-1]}"


def run_fsdp_tune(*arguments: str) -> ChildResult:
    return run_child((*FSDP_TUNE, *arguments, "--json"))


def run_torch_script(module: str, request: dict[str, Any]) -> ChildResult:
    """Run `python -m fsdp_tune.check.parity.MODULE` with the request on its stdin."""
    return run_child((sys.executable, "-P", "-m", f"fsdp_tune.check.parity.{module}"), json.dumps(request))


def run_child(argv: Sequence[str], text: str = "") -> ChildResult:
    return finish(_start(argv, subprocess.PIPE), text)


def start_training(recipe: Path, output: Path, options: Sequence[str]) -> subprocess.Popen[str]:
    command = (*FSDP_TUNE, "train", "--config", str(recipe), "--set", f"output_dir={output}", *options, "--json")
    return _start(command, subprocess.DEVNULL)


def _start(argv: Sequence[str], stdin: int) -> subprocess.Popen[str]:
    return children.start(argv, environment(), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(child: subprocess.Popen[str], text: str | None = None) -> ChildResult:
    """Wait for a child. The child is killed on a timeout, and if the rehearsal is interrupted."""
    try:
        stdout, stderr = child.communicate(text, timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        return ChildResult(1, {}, f"it took more than {CHILD_SECONDS:.0f} s")
    finally:
        children.end(child)
    return ChildResult(child.returncode, _document(stdout), stderr)


def environment() -> dict[str, str]:
    """Return the environment of children: offline, because everything they need was downloaded before."""
    return os.environ | {"HF_HUB_OFFLINE": "1"}


def _document(text: str) -> dict[str, Any]:
    try:
        document: Any = json.loads(text)
    except ValueError:
        return {}
    return cast("dict[str, Any]", document) if isinstance(document, dict) else {}
