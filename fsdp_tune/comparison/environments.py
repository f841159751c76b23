"""Other interpreters that compute a side of a comparison: a given one, or that of an environment with other
versions of packages (`compare --with`), made once for each list of requirements and never in this one."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from fsdp_tune.comparison.tool_options import TOOLS
from fsdp_tune.comparison.tool_trainers import PACKAGES
from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import DISK, write_json
from fsdp_tune.core.errors import failed_error, usage_error
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.data.cache import alone

ENVIRONMENTS = "environments"
"""Folder of the cache."""
COMPLETE = "complete.json"
"""Written last: an environment without it is made again."""
FALLBACK = "packages_of_fsdp_tune.pth"
SHOWN_LINES = 4


def python_with(requirements: Sequence[str], cache: Path) -> Path:
    """Return an interpreter of this version of Python whose environment has `requirements`, and for the rest
    the packages of this one.

    It is kept in the `cache` for the next time. Commands that want the same one take turns.
    Raises: usage error for what is no requirement, failed error with what was tried and said if it cannot be
    installed.
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
            _make(folder, python, wanted, home)
            write_json(folder / COMPLETE, {"requirements": wanted})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return python


def _requirement(text: str) -> str:
    try:
        return str(Requirement(text))
    except InvalidRequirement as error:
        message = f"`--with {text}` is not a requirement: {first_line(error)}"
        raise usage_error("compare-with", message, hint='--with "transformers==4.57.6"') from error


def _make(folder: Path, python: Path, wanted: Sequence[str], home: str) -> None:
    uv = shutil.which("uv")
    if uv is not None:
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
    else:
        _run([sys.executable, "-m", "venv", str(folder)])
    # Behind what is installed, so that torch and all that the requirements do not name is that of this
    # environment. pip counts what it finds there as installed; uv does not, so it installs what the
    # requirements need.
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / FALLBACK).write_text(f"{home}\n", encoding="utf-8")
    install = (
        [uv, "pip", "install", "--quiet", "--python", str(python)]
        if uv is not None
        else [str(python), *PIP, "--upgrade"]
    )
    if others := [each for each in wanted if Requirement(each).name.lower() not in PARTLY]:
        _run([*install, *others])
    for each in wanted:
        if (name := Requirement(each).name.lower()) in PARTLY:
            _run([*install, "--no-deps", each])
            given = {canonicalize_name(Requirement(other).name) for other in wanted}
            _add_needed(install, python, name, given)


PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
PARTLY = {
    "axolotl": (
        "axolotl.cli.train",
        "axolotl.cli.config",
        "axolotl.common.datasets",
        "axolotl.train",
        "axolotl.core.builders",
    )
}
"""Packages most of whose requirements serve GPUs, clouds and servers → the modules that are used. Of the
requirements those are installed that these modules import and this environment lacks, and those that compute,
if this environment has a version that does not meet them."""
TRIES = 40
_METADATA = "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires({!r}) or []))"
_IMPORT = """
import importlib, sys
for name in {!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        sys.exit("{}" + str(error.name))
"""
_MISSING = "no module: "


def _add_needed(install: Sequence[str], python: Path, name: str, given: Collection[str]) -> None:
    """Install what a package needs, its requirements' versions included, and nothing in place of this
    environment's torch.

    `given`: canonical names that the user chose versions of. Raises: failed error as `_run`, or for a module
    that no requirement is named after.
    """
    code, text = _output([str(python), "-c", _METADATA.format(name)])
    requirements = [Requirement(each) for each in (json.loads(text.splitlines()[-1]) if code == 0 else [])]
    requirements = [
        each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})
    ]
    requirements = [each for each in requirements if canonicalize_name(each.name) not in {"torch", *given}]
    held = python.parent.parent / "held.txt"
    held.write_text(f"torch=={importlib.metadata.version('torch')}\n", encoding="utf-8")
    install = [*install, "--constraint", str(held)]
    computing = [each for each in requirements if canonicalize_name(each.name) in PACKAGES]
    if stale := [f"{each.name}{each.specifier}" for each in computing if _is_other_version(each)]:
        _run([*install, *stale])
    tried: set[str] = set()
    for _ in range(TRIES):
        code, text = _output([str(python), "-c", _IMPORT.format(PARTLY[name], _MISSING)])
        if code == 0:
            return
        module = text.rpartition(_MISSING)[2].strip() if _MISSING in text else ""
        found = [each for each in requirements if _provides(each, module)]
        if not module or not found or module in tried:
            break
        tried.add(module)
        _run([*install, *(f"{each.name}{each.specifier}" for each in found)])
    shown = " / ".join([line.strip() for line in text.splitlines() if line.strip()][-SHOWN_LINES:])
    others = f"`--with {name}==VERSION` tries another version, `--with PACKAGE` adds a package"
    hint = f"`compare --tools import` compares the imported recipe; {others}"
    raise failed_error(
        "compare-environment", f"{name} was installed and cannot be imported: {shown}", hint=hint
    )


def _is_other_version(requirement: Requirement) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return not requirement.specifier.contains(
            importlib.metadata.version(requirement.name), prereleases=True
        )
    return False


def _provides(requirement: Requirement, module: str) -> bool:
    """Return whether a requirement is named after a module: `axolotl.contribs` is in `axolotl-contribs-mit`
    and `axolotl-contribs-lgpl`."""
    name, parts = canonicalize_name(requirement.name), canonicalize_name(module)
    top = canonicalize_name(module.partition(".")[0])
    return name in (parts, top, f"python-{top}") or name.startswith(f"{parts}-")


def _output(command: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the output of a command in a tool's environment."""
    with tempfile.TemporaryFile("w+") as output:
        child = children.start(
            command, tool_variables(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = child.wait()
        finally:
            children.end(child)
        output.seek(0)
        return code, output.read()


def tool_variables() -> dict[str, str]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    return variables | {"AXOLOTL_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}


def _run(command: Sequence[str]) -> None:
    code, text = _output(command)
    if code:
        said = [line.strip() for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
        message = (
            f"no environment could be made: `{shlex.join(command)}` ended with exit code {code}: "
            f"{' / '.join(said)}"
        )
        hint = (
            "check the name, the version and the package index; or make one yourself and give `--python "
            "ENVIRONMENT/bin/python`"
        )
        raise failed_error("compare-environment", message, hint=hint)


def find_interpreter(python: Path) -> str:
    """Return the interpreter's path. Raises: usage error if it cannot be run."""
    found = shutil.which(str(python))
    if found is None:
        raise usage_error(
            "compare-python",
            f"`--python {python}` is not an interpreter",
            hint="give the path of `bin/python` of a venv",
        )
    return str(Path(found).absolute())


def needed_requirements(tools: Collection[str], given: Sequence[str]) -> list[str]:
    """Return the requirements of the environment of these tools: `given`, and the newest version of the tool
    if they do not name it.

    Raises: usage error for two tools, or for text that is not a requirement.
    """
    packages = {TOOLS[tool] for tool in tools}
    if len(packages) > 1:
        hint = (
            "`compare --tools import` compares the recipes that `import` makes of them; or compare each "
            "with a recipe"
        )
        raise usage_error(
            "compare-with", "A and B are of two tools, whose environments exclude each other", hint=hint
        )
    named = {Requirement(_requirement(each)).name.lower() for each in given}
    return [*given, *sorted(packages - named)]
