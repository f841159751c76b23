"""The server of traces: each job gets its result, also one that is refused, breaks or kills its worker."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import usage_error
from fsdp_tune.planner.trace import trace_server
from fsdp_tune.planner.trace.trace_server import Server, trace_one
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved

REFUSED, BROKEN, DEADLY = 1, 2, 3
"""Sizes of the vocabulary with which the stand-in has no trace."""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a trace: a file with its options and the process that made it."""

    def trace_recipe(recipe: Recipe, *, exact: bool, vocabulary: int | None) -> Any:
        assert recipe.lora is None or recipe.lora.adapter is None, "its files may not be on this machine"
        if vocabulary == REFUSED:
            raise usage_error("model-refused", "no such model")
        if vocabulary == BROKEN:
            raise RuntimeError("no such kernel\nat a line of C++")
        if vocabulary == DEADLY:
            os._exit(9)
        made = {"exact": exact, "vocabulary": vocabulary, "process": os.getpid()}
        return SimpleNamespace(save=lambda path: path.write_text(json.dumps(made)))

    monkeypatch.setattr(trace_server, "trace_recipe", trace_recipe)


def job_of(folder: Path, number: int = 0, vocabulary: int | None = None) -> dict[str, Any]:
    recipe = resolved().model_dump(mode="json", by_alias=True)
    output = str(folder / f"{number}.npz")
    return {"job": number, "recipe": recipe, "exact": True, "vocabulary": vocabulary, "output": output}


def test_trace_is_written_or_its_problems_are_returned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path)
    job["recipe"]["lora"] = {"adapter": str(tmp_path / "gone")}
    assert trace_one(job) == []
    assert json.loads((tmp_path / "0.npz").read_text())["exact"] is True
    [refused] = trace_one(job_of(tmp_path, 1, REFUSED))
    assert (refused.code, refused.message) == ("model-refused", "no such model")
    [broken] = trace_one(job_of(tmp_path, 2, BROKEN))
    assert broken.message == "the step could not be traced: RuntimeError: no such kernel"
    assert "at a line of C++" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["0.npz"]


class Answers:
    """The standard output of a server, whose input ends after `count` results."""

    def __init__(self, count: int, stdin: socket.socket) -> None:
        self.found: list[dict[str, Any]] = []
        self._count, self._stdin = count, stdin

    def write(self, line: str) -> None:
        self.found.append(json.loads(line))
        if len(self.found) == self._count:
            self._stdin.shutdown(socket.SHUT_WR)  # closing would leave that of each fork open

    def flush(self) -> None: ...


def served(
    monkeypatch: pytest.MonkeyPatch, jobs: list[dict[str, Any]], most: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the results of a server of at most `most` workers, and how many it has at the end."""
    reading, writing = socket.socketpair()
    monkeypatch.setattr(trace_server, "STDIN", reading.fileno())
    server, answers = Server(most), Answers(len(jobs), writing)
    with reading, writing, contextlib.redirect_stdout(answers):  # type: ignore[type-var]
        writing.sendall("".join(f"{json.dumps(job)}\n" for job in jobs).encode())
        server.run()
    for worker in server.workers:
        assert os.waitstatus_to_exitcode(os.waitpid(worker.process, 0)[1]) == 0
    return answers.found, len(server.workers)


def test_lost_worker_is_a_problem_of_its_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job_of(tmp_path, number, size) for number, size in enumerate((None, REFUSED, DEADLY, None))]
    found, workers = served(monkeypatch, jobs, most=1)
    messages = [[problem["message"] for problem in each["problems"]] for each in found]
    assert [each["job"] for each in found] == [0, 1, 2, 3]
    assert messages == [[], ["no such model"], ["the process that traced ended with status 9"], []]
    assert workers == 1, "another one in the place of the lost one"
    makers = [json.loads((tmp_path / f"{number}.npz").read_text())["process"] for number in (0, 3)]
    assert len({*makers, os.getpid()}) == 3


@pytest.mark.parametrize(("count", "most", "used"), [(5, 2, 2), (1, 3, 1)])
def test_worker_is_made_only_for_a_job_that_waits(
    count: int, most: int, used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, workers = served(monkeypatch, [job_of(tmp_path, number) for number in range(count)], most)
    assert sorted(each["job"] for each in found) == list(range(count))
    assert all(each["problems"] == [] for each in found)
    makers = {json.loads(path.read_text())["process"] for path in tmp_path.glob("*.npz")}
    assert (workers, len(makers)) == (used, used)


def test_job_that_arrives_in_parts_is_read_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(trace_server, "STDIN", reading)
    server, line = Server(1), json.dumps(job_of(tmp_path)) + "\n"
    for part, waiting in ((line[:9], 0), (line[9:] + line[:5], 1), (line[5:-1], 1), ("\n", 2)):
        os.write(writing, part.encode())
        assert server._read()
        assert len(server.waiting) == waiting
    os.close(writing)
    assert not server._read(), "the end of the jobs"
    os.close(reading)


def test_error_without_a_message_is_reported_by_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(trace_server, "trace_recipe", fail)
    (problem,) = trace_one(job_of(tmp_path))
    assert problem.message == "the step could not be traced: NotImplementedError"


def test_trace_that_cannot_be_written_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = Hand().op("mm", flops=1.0).trace()
    monkeypatch.setattr(trace_server, "trace_recipe", lambda *_, **__: traced)
    missing = tmp_path / "missing"
    (problem,) = trace_one(job_of(missing))
    assert problem.message.startswith("the trace could not be written: ")
    assert str(missing) in problem.message
