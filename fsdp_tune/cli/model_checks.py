"""What `validate`, `plan` and `train` ask of a resolved recipe's model, in a child process: the surface never imports torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_tune.core import processes as children
from fsdp_tune.core.errors import Notice, Problem

if TYPE_CHECKING:
    from fsdp_tune.recipe.schema import Recipe

INSPECT = (sys.executable, "-P", "-m", "fsdp_tune.model.build.inspect")
INSPECT_SECONDS = 300.0
_UNREACHABLE = re.compile(
    r"couldn't connect|offline mode|connection error|could not reach|max retries|timed out|name resolution", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    facts: dict[str, Any]
    """The document of `fsdp_tune.model.build.inspect`, without problems and notices; empty where the model could not be built."""
    problems: tuple[Problem, ...]
    notices: tuple[Notice, ...]
    unchecked: tuple[str, ...]
    """What could not be looked at without network, one sentence each."""


def model_facts(recipe: Recipe, *, offline: bool = False, command: Sequence[str] | None = None) -> ModelFacts:
    """Parameters, layer classes, FSDP units and every problem of the model, found on the meta device."""
    environment = os.environ | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    raw = recipe.model_dump_json(by_alias=True)
    child = children.start(command or INSPECT, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, talk = child.communicate(raw, timeout=INSPECT_SECONDS)
    except subprocess.TimeoutExpired:
        return ModelFacts({}, (Problem("model-not-inspected", f"looking at the model took more than {INSPECT_SECONDS:.0f} s"),), (), ())
    finally:
        children.end(child)
    try:
        document: dict[str, Any] = json.loads(output)
    except ValueError:
        return ModelFacts({}, (_crashed(child.returncode, talk),), (), ())
    problems: list[Problem] = []
    unchecked: list[str] = []
    for each in document.pop("problems"):
        problem = Problem.from_dict(each)
        if problem.code == "model-not-found" and (offline or _UNREACHABLE.search(problem.message)):
            unchecked.append(f"the model `{recipe.model.name_or_path}`: the hub is out of reach, and its files are not in the cache")
        else:
            problems.append(problem)
    notices = [
        Notice(problem.code, problem.message, problem.where, problem.hint) for problem in map(Problem.from_dict, document.pop("notices"))
    ]
    return ModelFacts(document, tuple(problems), tuple(notices), tuple(unchecked))


def _crashed(exit_code: int, output: str) -> Problem:
    is_killed = exit_code < 0
    hint = "out of host memory? The kernel then kills a process: see `dmesg`" if is_killed else "`fsdp-tune env` shows the installation"
    return Problem("model-not-inspected", f"the model could not be inspected: {children.last_words(exit_code, output)}", hint=hint)
