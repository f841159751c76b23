"""Load the merged output in a child process with transformers, and compare its parameters with the class's
list."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fsdp_tune.core import processes as children
from fsdp_tune.core.errors import FsdpTuneError, Notice, Where, failed_error
from fsdp_tune.core.tensors.dtypes import Shape
from fsdp_tune.merge.read.reader import NAMES_SHOWN

CHILD_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Of a child that loads a model: it needs no accelerator and no network."""


class Child:
    """One run of `fsdp_tune.merge.loaded`, started at once; `answer` waits for it."""

    def __init__(self, mode: str, folder: Path) -> None:
        # -P: a `torch.py` in the current directory, which may be the checkpoint's, is not ours to run.
        command = [sys.executable, "-P", "-m", "fsdp_tune.merge.loaded", mode, str(folder.absolute())]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = children.start(
            command, {**os.environ, **CHILD_ENVIRONMENT}, errors="replace", **pipes
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children.end(self._process)
        self._process.communicate()

    def answer(self) -> dict[str, Any] | str:
        """Return what the child found, or how it failed."""
        output, errors = self._process.communicate()
        lines = output.splitlines()
        if self._process.returncode == 0 and lines:
            return json.loads(lines[-1])
        return children.describe_failure(self._process.returncode, errors)


def compare_parameters(
    answer: dict[str, Any] | str, shapes: Mapping[str, Shape], tied: Mapping[str, str], folder: Path
) -> list[Notice]:
    """Compare the tensors to write with the parameters of the model. Return a notice if these are not known.

    Raises: FailedError unless they are the same, with the same `shapes`.
    """
    if isinstance(answer, str):
        return [
            Notice(
                "merge-not-compared",
                f"the model's own parameter list is not known, so nothing was compared with it: {answer}",
                Where(str(folder)),
            )
        ]
    wanted: dict[str, list[int]] = answer["parameters"]
    have = {name: list(shape) for name, shape in shapes.items()}
    restored = {name for name, source in {**answer["tied"], **tied}.items() if source in have or name in have}
    restored |= {source for name, source in answer["tied"].items() if name in have}
    ignored = [re.compile(pattern) for pattern in answer["ignored"]]
    missing = [
        name
        for name in wanted
        if name not in have and name not in restored and not any(rule.search(name) for rule in ignored)
    ]
    extra = [name for name in have if name not in wanted]
    other = [
        f"{name} {have[name]} instead of {wanted[name]}"
        for name in have
        if name in wanted and have[name] != wanted[name]
    ]
    found = [
        f"{len(names)} {what}: {', '.join(names[:NAMES_SHOWN])}"
        for names, what in (
            (missing, "missing"),
            (extra, "unknown to the model"),
            (other, "of another shape"),
        )
        if names
    ]
    if found:
        raise failed_error(
            "merge-other-model",
            f"the checkpoint does not hold the parameters of this model: {'; '.join(found)}",
            where=Where(str(folder)),
            hint=_hint(extra, wanted),
        )
    return []


def _hint(extra: Sequence[str], wanted: Collection[str]) -> str:
    levels = {name.partition(".")[0] for name in extra}
    if len(levels) == 1 and all(name.partition(".")[2] in wanted for name in extra):
        return (
            f"the unknown names are this model's with `{levels.pop()}.` before them: save the state dict "
            "of the model itself"
        )
    return (
        "is it the model that was trained (`--base`)? Names of torchtitan and torchtune are not "
        "transformers' (docs/guide/merging.md)"
    )


def load_and_run(stage: Path, carried: Collection[str] = (), *, allow_nonfinite: bool) -> list[Notice]:
    """Load the output with transformers. `carried`: tensors that the model does not have.

    Raises: FailedError if transformers reports other keys, or if the logits are not finite.
    """
    with Child("forward", stage) as child:
        answer = child.answer()
    if isinstance(answer, str):
        raise _does_not_load(f"transformers does not load the output: {answer}")
    report = {
        name: [key for key in keys if name != "unexpected_keys" or not _is_carried(key, carried)]
        for name, keys in answer["report"].items()
    }
    if report := {name: keys for name, keys in report.items() if keys}:
        what = "; ".join(
            f"{name.replace('_', ' ')}: {', '.join(keys[:NAMES_SHOWN])}" for name, keys in report.items()
        )
        raise _does_not_load(f"transformers loads the output, but reports {what}")
    if answer["finite"] is False and not allow_nonfinite:
        raise _does_not_load("the model loads, and the logits of its first tokens are not finite")
    if answer["where"] == "shapes":
        return [
            Notice(
                "merge-verified-by-shapes",
                "the model is too large for this machine's memory, so its forward pass was checked "
                "by shapes alone",
            )
        ]
    return []


def _is_carried(key: str, carried: Collection[str]) -> bool:
    """Return whether a key that transformers does not expect is of a carried tensor, or of a carried layer,
    whose experts it stacks."""
    layer = re.match(r".*?\.\d+\.", key)
    return key in carried or (layer is not None and any(name.startswith(layer[0]) for name in carried))


def _does_not_load(message: str) -> FsdpTuneError:
    return failed_error(
        "merge-does-not-load",
        message,
        hint="nothing was published; `--verify quick` writes it without loading",
    )
