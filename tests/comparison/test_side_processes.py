"""The processes that compute the sides of a comparison: their environment, requests, answers and ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fsdp_tune.comparison import side_processes
from fsdp_tune.comparison.side_processes import ObservingChild, ToolChild, _files_of
from fsdp_tune.comparison.tool_options import SETTINGS
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.version import PACKAGE
from fsdp_tune.recipe.schema.recipe import Recipe


class StandIn:
    """In place of a child: notes how it was started and what it was sent, and answers to each request."""

    made: ClassVar[list[Any]] = []
    lost_with: ClassVar[str | None] = None
    """How it ended without an answer."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.command, self.environment, self.is_closed = command, environment, False
        self.sent: list[Any] = []
        StandIn.made.append(self)

    def send(self, line: str) -> None:
        self.sent.append(json.loads(line))

    def receive(self) -> dict[str, Any] | None:
        answer = {"stages": {}, "names": {}, "texts": {}, "versions": {"trl": "1.0"}, "left_out": ["a"]}
        return None if self.lost_with is not None else answer

    def failure(self) -> str:
        return str(self.lost_with)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_processes, "JsonChild", StandIn)
    monkeypatch.setattr(StandIn, "made", [])
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "/of/this/environment")


@pytest.fixture
def tool(tmp_path: Path) -> ToolChild:
    return ToolChild("/of/trl/python", "TRL", {"rows": tmp_path / "rows", "ranks": 1})


def test_tool_imports_only_this_package_of_this_environment(tool: ToolChild, tmp_path: Path) -> None:
    tool.observe({"max_steps": 3}, "tokens")
    [child] = StandIn.made
    assert child.command[:3] == ("/of/trl/python", "-P", "-m")
    folder = Path(child.environment["PYTHONPATH"])
    assert folder.parent == tmp_path
    assert [path.resolve() for path in folder.iterdir()] == [PACKAGE.resolve()]
    assert not {"PYTHONHOME", "VIRTUAL_ENV"} & child.environment.keys()
    assert (child.environment["CUDA_VISIBLE_DEVICES"], child.environment["OMP_NUM_THREADS"]) == ("", "1")


def test_tool_is_started_once_and_gets_what_it_may(tool: ToolChild) -> None:
    found = tool.observe({"max_steps": 3, "trust_remote_code": True}, "rows")
    assert found.versions == {"trl": "1.0"}
    assert tool.observe({"max_steps": 3}, "tokens") is found, "it is known up to a later stage"
    tool.observe({"max_steps": 3}, "batch")
    tool.observe({"max_steps": 4}, "tokens")
    [child] = StandIn.made
    assert [(each["values"], each["until"][-1]) for each in child.sent] == [
        ({"max_steps": 3}, "rows"),
        ({"max_steps": 3}, "batch"),
        ({"max_steps": 4}, "tokens"),
    ]
    assert child.sent[0]["settings"] == json.loads(json.dumps(SETTINGS["TRL"]))
    assert (child.sent[0]["tool"], child.sent[0]["ranks"]) == ("TRL", 1)
    assert not child.is_closed
    tool.close()
    assert child.is_closed


def test_tool_that_was_never_asked_is_closed_without_a_process(tool: ToolChild) -> None:
    tool.close()
    assert StandIn.made == []


def test_tool_that_ends_is_a_failure_with_its_reason(
    tool: ToolChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "lost_with", "ImportError: no trl")
    with pytest.raises(FsdpTuneError) as caught:
        tool.observe({}, "tokens")
    problem = caught.value.problems[0]
    assert (problem.code, caught.value.exit_code) == ("compare-failed", 1)
    assert problem.message == "TRL did not compute its side with /of/trl/python: ImportError: no trl"
    assert "`--with trl==VERSION`" in str(problem.hint)
    assert "`compare --tools import`" in str(problem.hint)


def observing(folder: Path, python: str) -> ObservingChild:
    return ObservingChild(python, folder, rows=3, model="small")


def test_other_interpreter_borrows_packages_and_this_one_needs_none(tmp_path: Path) -> None:
    for python in (sys.executable, "/of/other/python"):
        with observing(tmp_path, python) as child:
            child.observe(Recipe(), "tokens")
    own, other = StandIn.made
    assert own.command[-1] == "fsdp_tune.comparison.observe"
    assert own.environment["PYTHONPATH"] == "/of/this/environment"
    assert own.is_closed
    lent = Path(other.command[-1])
    assert lent.parent == tmp_path
    assert {"pydantic", "yaml", "psutil", "xxhash"} <= {path.name for path in lent.iterdir()}
    assert not {"torch", "transformers"} & {path.name for path in lent.iterdir()}, "it has its own"
    assert [path.resolve() for path in Path(other.environment["PYTHONPATH"]).iterdir()] == [PACKAGE.resolve()]


def test_package_that_is_not_installed_is_not_lent() -> None:
    assert _files_of("a-package-that-no-index-has") == []


@pytest.mark.parametrize(
    ("reason", "code", "exit_code", "words"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "compare-python", 2, "it needs torch"),
        ("its process was killed by SIGKILL", "compare-failed", 1, "`fsdp-tune env`"),
    ],
)
def test_end_of_an_interpreter_is_a_usage_error_only_if_it_lacks_a_package(
    reason: str, code: str, exit_code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "lost_with", reason)
    with pytest.raises(FsdpTuneError) as caught, observing(tmp_path, "/of/other/python") as child:
        child.observe(Recipe(), "tokens")
    problem = caught.value.problems[0]
    assert (problem.code, caught.value.exit_code) == (code, exit_code)
    assert reason in problem.message
    assert words in str(problem.hint)
    assert "/of/other/python" in problem.message
