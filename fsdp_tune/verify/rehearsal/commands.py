"""The commands of a rehearsal, as children: `fsdp-tune` itself, and the two scripts of `parity` that need torch."""

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
class Answer:
    """What a child that ends with one JSON document said."""

    exit_code: int
    document: dict[str, Any]
    stderr: str

    @property
    def why(self) -> str:
        """Its first error; where it left none, its last line."""
        errors: list[dict[str, str]] = self.document.get("errors") or []
        lines = self.stderr.strip().splitlines() or ["it said nothing"]
        said = errors[0]["message"] if errors else lines[-1]
        return f"exit code {self.exit_code}: {said}"


def fsdp_tune(*arguments: str) -> Answer:
    return ask((*FSDP_TUNE, *arguments, "--json"))


def torch_script(module: str, request: dict[str, Any]) -> Answer:
    """`python -m fsdp_tune.verify.parity.MODULE`, with the request on its stdin."""
    return ask((sys.executable, "-P", "-m", f"fsdp_tune.verify.parity.{module}"), json.dumps(request))


def ask(argv: Sequence[str], text: str = "") -> Answer:
    return finish(_start(argv, subprocess.PIPE), text)


def start_training(recipe: Path, output: Path, options: Sequence[str]) -> subprocess.Popen[str]:
    command = (*FSDP_TUNE, "train", "--config", str(recipe), "--set", f"output_dir={output}", *options, "--json")
    return _start(command, subprocess.DEVNULL)


def _start(argv: Sequence[str], stdin: int) -> subprocess.Popen[str]:
    return children.start(argv, environment(), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(child: subprocess.Popen[str], text: str | None = None) -> Answer:
    """Waits for a child's end; a rehearsal that is interrupted meanwhile ends it."""
    try:
        stdout, stderr = child.communicate(text, timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        return Answer(1, {}, f"it took more than {CHILD_SECONDS:.0f} s")
    finally:
        children.end(child)
    return Answer(child.returncode, _document(stdout), stderr)


def environment() -> dict[str, str]:
    """A rehearsal asks no hub: what it needs was looked for before."""
    return os.environ | {"HF_HUB_OFFLINE": "1"}


def _document(text: str) -> dict[str, Any]:
    try:
        document: Any = json.loads(text)
    except ValueError:
        return {}
    return cast("dict[str, Any]", document) if isinstance(document, dict) else {}
