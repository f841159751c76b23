from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from fsdp_tune.jobs.answers import Remark
from tests.answer_kinds import answers
from tests.cuda.environment import environment_on

Done = subprocess.CompletedProcess[str]
Cli = Callable[..., Done]


@pytest.fixture
def cli(tmp_path: Path, device: str) -> Cli:
    """Runs `fsdp-tune ARGUMENTS` in a process of its own, in an empty directory, on a machine with or without
    GPUs."""

    def run(*arguments: str, **environment: str) -> Done:
        command = [sys.executable, "-m", "fsdp_tune", *map(str, arguments)]
        env = environment_on(device, os.environ | environment)
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env, timeout=300
        )
        if "--json" in arguments:
            refuse_undeclared(arguments, done.stdout)
        return done

    return run


def refuse_undeclared(arguments: Sequence[str], text: str) -> None:
    """Refuse a document that is not one of its command's answers (`jobs/answers.py`): another field or type,
    or a missing field."""
    command = next(
        (
            name
            for name in (" ".join(map(str, arguments[:2])), f"{arguments[0]} list", arguments[0])
            if name in answers()
        ),
        None,
    )
    if command is None:
        return  # usage errors of groups, and `recipes schema`
    found = json.loads(
        text, object_pairs_hook=lambda pairs: {KEYWORDS.get(name, name): value for name, value in pairs}
    )
    remarks = [
        found.pop("notices", []),
        *([found.pop("errors")] if isinstance(found.get("errors"), list) else []),
    ]
    assert TypeAdapter(list[list[Remark]]).validate_json(json.dumps(remarks), strict=True)
    if len(remarks) == 2:
        return  # of a failure, the answer may have a part
    reasons: list[str] = []
    for kind in answers()[command]:
        adapter = TypeAdapter(kind)
        try:
            if json.loads(adapter.dump_json(adapter.validate_json(json.dumps(found), strict=True))) == found:
                return
            reasons.append(f"{kind.__name__}: it has other fields")
        except ValidationError as error:
            reasons.append(str(error))
    raise AssertionError("\n".join([f"`{command} --json` is none of its answers", *reasons]))


KEYWORDS = {"for": "for_", "class": "class_"}
"""Fields of answers that are words of Python."""


def document(done: Done) -> dict[str, Any]:
    """The one JSON document on stdout."""
    return json.loads(done.stdout)
