"""What a job of the trace server reports if it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.planner.trace import trace_server
from fsdp_tune.planner.trace.trace_server import trace_one
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved


def job(output: Path) -> dict[str, object]:
    recipe = resolved().model_dump(mode="json", by_alias=True)
    return {"recipe": recipe, "exact": False, "vocabulary": None, "output": str(output)}


def test_error_without_a_message_is_reported_by_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(trace_server, "trace_recipe", fail)
    (problem,) = trace_one(job(tmp_path / "found.npz"))
    assert problem.message == "the step could not be traced: NotImplementedError"


def test_trace_that_cannot_be_written_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Hand().op("mm", flops=1.0).trace()
    monkeypatch.setattr(trace_server, "trace_recipe", lambda *_, **__: traced)
    output = tmp_path / "missing" / "found.npz"
    (problem,) = trace_one(job(output))
    assert problem.message.startswith("the trace could not be written: ")
    assert str(output.parent) in problem.message
