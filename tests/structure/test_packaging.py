"""Containerfile, wheel and sdist agree on the files that they need, and the files of a release on its
version. No image is built here."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from fsdp_tune.core.version import __version__
from tests.structure.sources import ROOT

CONTAINERFILE = ROOT / "Containerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) in order, with continued lines joined and comments removed."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace(
        "\\\n", " "
    )
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
    assert [
        source for source in copied() if not (ROOT / source).exists() or f"!{source}" not in patterns
    ] == []
    assert sorted(line.removeprefix("!") for line in patterns if line.startswith("!")) == sorted(copied())


def test_container_copies_everything_that_a_wheel_contains() -> None:
    """The first stage builds the wheel from its copies alone."""
    settings = project()
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    licences = [path for path in settings["project"]["license-files"] if not path.startswith("fsdp_tune/")]
    needed = [
        "pyproject.toml",
        settings["project"]["readme"],
        *licences,
        *wheel["packages"],
        *wheel["force-include"],
    ]
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


@pytest.mark.parametrize(
    "path", ["Containerfile", ".dockerignore", "constraints.txt", "scripts", "tests", "docs", "benchmarks"]
)
def test_sdist_contains_what_tests_and_image_need(path: str) -> None:
    assert path in project()["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


def test_package_is_marked_as_typed() -> None:
    """PEP 561: an empty `py.typed` in the package, which the wheel takes with every file that git does not
    ignore."""
    assert (ROOT / "fsdp_tune" / "py.typed").read_bytes() == b""
    assert "Typing :: Typed" in project()["project"]["classifiers"]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert [line for line in ignored if "typed" in line or line == "*"] == []


def releases() -> list[tuple[str, str]]:
    """(version, date) of the headings of the changelog; the date is "" where there is none."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.findall(r"^## (\S+)(?: \((\d{4}-\d\d-\d\d)\))?$", text, re.MULTILINE)


def test_version_changelog_and_citation_agree() -> None:
    """The newest release of the changelog; a section `Unreleased` may be above it."""
    newest, date = next(release for release in releases() if release[0] != "Unreleased")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (newest, citation["version"], citation["date-released"]) == (__version__, __version__, date)
    assert citation["license"] == project()["project"]["license"]
    assert project()["project"]["dynamic"] == ["version"]


def test_python_versions_of_the_classifiers_are_supported() -> None:
    metadata = project()["project"]
    least = metadata["requires-python"].removeprefix(">=")
    named = re.findall(r"Python :: (\d+\.\d+)", " ".join(metadata["classifiers"]))
    assert least in named


FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def test_issue_forms_have_the_fields_that_the_host_requires() -> None:
    """https://docs.github.com/communities: name, description, body; inputs have a label and an id that is
    theirs alone."""
    assert len(FORMS) == 3
    for path in FORMS:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys(), path
        inputs = [each for each in form["body"] if each["type"] != "markdown"]
        assert {each["type"] for each in inputs} <= {"textarea", "input", "dropdown", "checkboxes"}, path
        assert len({each["id"] for each in inputs}) == len(inputs), path
        assert len({each["attributes"]["label"] for each in inputs}) == len(inputs), path
        assert any(each.get("validations", {}).get("required") for each in inputs), path


def test_issue_forms_name_commands_and_options_that_exist() -> None:
    surface = (ROOT / "tests" / "golden" / "surface_cli.txt").read_text(encoding="utf-8")
    options = dict(re.findall(r"^fsdp-tune (\S+)\n((?: .*\n)*)", surface, re.MULTILINE))
    commands = re.findall(
        r"`fsdp-tune ([\w-]+)([^`]*)`", "".join(path.read_text(encoding="utf-8") for path in FORMS)
    )
    assert {"env", "doctor", "validate", "status"} <= {name for name, _ in commands}
    for name, rest in commands:
        assert name in options
        assert [
            word for word in rest.split() if word.startswith("--") and f"option {word}" not in options[name]
        ] == [], name
