"""Containerfile, wheel and sdist agree on the files that they need. No image is built: the tests have no container engine."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from tests.structure.sources import ROOT

CONTAINERFILE = ROOT / "Containerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) in order, with continued lines joined and comments removed."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def copied() -> list[str]:
    """Paths of the repository that are copied into a stage."""
    copies = [arguments.split() for name, arguments in instructions() if name == "COPY"]
    return [source for words in copies if not words[0].startswith("--from=") for source in words[:-1]]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_container_copies_files_that_exist_and_that_its_context_has() -> None:
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in patterns
    assert len(copied()) > 5
    assert [source for source in copied() if not (ROOT / source).exists() or f"!{source}" not in patterns] == []
    assert sorted(line.removeprefix("!") for line in patterns if line.startswith("!")) == sorted(copied())


def test_container_copies_everything_that_a_wheel_contains() -> None:
    """The first stage builds the wheel from its copies alone."""
    settings = project()
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    licences = [path for path in settings["project"]["license-files"] if not path.startswith("fsdp_tune/")]
    needed = ["pyproject.toml", settings["project"]["readme"], *licences, *wheel["packages"], *wheel["force-include"]]
    assert [path for path in needed if path not in copied()] == []


def test_container_runs_the_command_as_an_ordinary_user() -> None:
    steps = instructions()
    user = next(arguments for name, arguments in reversed(steps) if name == "USER")
    assert not user.startswith(("0", "root"))
    assert [name for name, _ in steps[steps.index(("USER", user)) :] if name == "RUN"] == []
    command = next(arguments for name, arguments in steps if name == "ENTRYPOINT")
    assert command == f'["{next(iter(project()["project"]["scripts"]))}"]'


def test_container_has_a_version_of_python_that_the_package_supports() -> None:
    version = next(arguments.removeprefix("PYTHON=") for name, arguments in instructions() if name == "ARG")
    least = project()["project"]["requires-python"].removeprefix(">=")
    assert [int(part) for part in version.split(".")] >= [int(part) for part in least.split(".")]


@pytest.mark.parametrize("path", ["Containerfile", ".dockerignore", "constraints.txt", "scripts", "tests", "docs"])
def test_sdist_contains_what_tests_and_image_need(path: str) -> None:
    assert path in project()["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
