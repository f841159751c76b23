"""Facts of a recipe's model, from a process of its own, so that the command line never imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any, Self

from fsdp_tune.errors import FsdpTuneError, Notice, Problem, Where, failed_error
from fsdp_tune.recipe.schema import Recipe


class ModelInspection:
    """Starts at once and works beside the caller; `facts` waits. Leaving the block early ends it."""

    def __init__(self, recipe: Recipe) -> None:
        self._talk = tempfile.TemporaryFile()  # noqa: SIM115  closed on exit; a pipe nobody reads would block the child
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "fsdp_tune.model.inspect"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._talk
        )
        assert self._child.stdin is not None
        self._child.stdin.write(recipe.model_dump_json(by_alias=True).encode())
        self._child.stdin.close()
        self._child.stdin = None  # else communicate() flushes a closed file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.communicate()
        self._talk.close()

    def facts(self) -> dict[str, Any]:
        """The document of `fsdp_tune.model.inspect`, problems included; FailedError where the process died."""
        out, _ = self._child.communicate()
        try:
            return json.loads(out)
        except ValueError:
            self._talk.seek(0)
            said = self._talk.read().decode("utf-8", "replace").strip().splitlines()
            why = said[-1] if said else f"exit code {self._child.returncode}"
            raise failed_error("inspection-failed", f"the model could not be looked at: {why}", hint="see `fsdp-tune env`") from None


def problems_of(document: dict[str, Any]) -> list[Problem]:
    return [Problem(raw["code"], raw["message"], _where(raw), raw["hint"]) for raw in document["problems"]]


def notices_of(document: dict[str, Any]) -> list[Notice]:
    return [Notice(raw["code"], raw["message"], _where(raw), raw["hint"]) for raw in document["notices"]]


def raise_problems(document: dict[str, Any]) -> None:
    if problems := problems_of(document):
        raise FsdpTuneError(*problems)


def _where(raw: dict[str, Any]) -> Where:
    return Where(raw["file"], raw["line"], raw["column"], raw["key"])
