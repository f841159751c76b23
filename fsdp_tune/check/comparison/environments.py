"""Environments with other versions of packages for `compare --with`: made once for each list of requirements, never in this environment."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import DISK, write_json
from fsdp_tune.core.errors import failed_error, usage_error
from fsdp_tune.data.cache import alone

ENVIRONMENTS = "environments"
"""Folder of the cache."""
COMPLETE = "complete.json"
"""Written last: an environment without it is made again."""
FALLBACK = "packages_of_fsdp_tune.pth"
SHOWN_LINES = 4


def python_with(requirements: Sequence[str], cache: Path) -> Path:
    """Return an interpreter of this version of Python whose environment has `requirements`, and for the rest the packages of this one.

    It is kept in the `cache` for the next time. Commands that want the same one take turns.
    Raises: usage error for what is no requirement, failed error with what was tried and said if it cannot be installed.
    """
    wanted = sorted({_requirement(each) for each in requirements})
    home = sysconfig.get_path("purelib")
    key = hashlib.blake2b(json.dumps([wanted, sys.version, home]).encode(), digest_size=10).hexdigest()
    folder = cache / ENVIRONMENTS / key
    python = folder / "bin" / "python"
    DISK.mkdir(folder.parent)
    with alone(folder):
        if (folder / COMPLETE).is_file() and os.access(python, os.X_OK):
            return python
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _make(folder, python, wanted)
            # Behind what was installed, so that torch and all that the requirements do not name is that of this environment.
            site = next((folder / "lib").glob("python*/site-packages"))
            (site / FALLBACK).write_text(f"{home}\n", encoding="utf-8")
            write_json(folder / COMPLETE, {"requirements": wanted})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return python


def _requirement(text: str) -> str:
    try:
        return str(Requirement(text))
    except InvalidRequirement as error:
        message = f"`--with {text}` is not a requirement: {str(error).splitlines()[0]}"
        raise usage_error("compare-with", message, hint='--with "transformers==4.57.6"') from error


def _make(folder: Path, python: Path, wanted: Sequence[str]) -> None:
    if (uv := shutil.which("uv")) is not None:
        commands = [[uv, "venv", "--quiet", "--python", sys.executable, str(folder)]]
        commands.append([uv, "pip", "install", "--quiet", "--python", str(python), *wanted])
    else:
        commands = [[sys.executable, "-m", "venv", str(folder)]]
        commands.append([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted])
    for command in commands:
        _run(command)


def _run(command: Sequence[str]) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    with tempfile.TemporaryFile("w+") as output:
        child = children.start(command, variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = child.wait()
        finally:
            children.end(child)
        if code:
            output.seek(0)
            said = [line.strip() for line in output.read().splitlines() if line.strip()][-SHOWN_LINES:]
            message = f"no environment could be made: `{shlex.join(command)}` ended with exit code {code}: {' / '.join(said)}"
            hint = "check the name, the version and the package index; or make one yourself and give `--python ENVIRONMENT/bin/python`"
            raise failed_error("compare-environment", message, hint=hint)
