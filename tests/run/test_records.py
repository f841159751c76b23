"""The JSON documents of a run: each reads what it writes, and refuses files of newer versions and damaged
ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_tune.core.command import ProfiledSteps
from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem
from fsdp_tune.run.base_model import BaseModel
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import LaunchRecord, ResumeRequest
from fsdp_tune.run.rank_files import Heartbeat, Outcome, Verdict, read_heartbeat, read_outcome
from fsdp_tune.run.records import DOCUMENT_DIGEST, Document, Environment, LiveState, Prediction, ReadBack

PROBLEM = Problem("hang", "no progress", hint="see hang.txt")
DOCUMENTS = [
    LaunchRecord(
        1.5,
        ProfiledSteps(3, 4),
        {"fsdp.version": "the default"},
        ["train"],
        "/work",
        {"argv": ["python"], "world_size": 2},
    ),
    ResumeRequest("RUN/checkpoint-3", digests_checked=True),
    Heartbeat(1, 42, 7, "training", 1.0, 2.0, 0.5),
    Outcome(5, ExitReason.LOST_RANK, PROBLEM, "Traceback", {"loss": 1.25}, rank=1, step=7, time=3.0),
    Verdict(ExitCode.LOST_RANK, ExitReason.LOST_RANK, 7, PROBLEM),
    Environment(
        {"torch": "2.13"},
        {"cpus": 2},
        [{"kind": "cuda", "name": "H100"}],
        [{"kind": "loaders", "name": "mine"}],
    ),
    Prediction(10.0, 12.0, None, {"gpu": "H100", "assumptions": ["no graph"]}),
    ReadBack(
        [{"local_bytes": 1}],
        [],
        ["a warning"],
        0.0,
        ran_in={"matmul": {"bfloat16": 3}},
        facts=LiveState(wrapper="fsdp2", mesh=[2]),
    ),
]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: type(document).__name__)


@each_document
def test_document_reads_what_it_wrote(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert type(document).read(path) is None
    document.write(path)
    assert type(document).read(path) == document
    assert (path.stat().st_mode & 0o077 == 0) is type(document).IS_PRIVATE


@each_document
def test_document_without_a_version_is_of_version_1(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    content = document.content()
    assert content.pop("version") == 1
    del content[DOCUMENT_DIGEST]  # nor had they digests
    path.write_text(json.dumps(content))
    assert type(document).read(path) == document


@each_document
def test_document_with_another_value_is_refused(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    changed = document.content() | {"added": 1}
    path.write_text(json.dumps(changed))
    with pytest.raises(FsdpTuneError, match="not those that were written"):
        type(document).read(path)


@each_document
def test_newer_or_damaged_document_is_refused(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    text = json.dumps(document.content())
    refused = {
        json.dumps(
            document.content() | {"version": 99}
        ): "was written by a newer fsdp-tune (version 99; this one reads up to 1)",
        text[: len(text) // 2]: "is damaged: ",
        "": "is damaged: ",
        "[]": "is damaged: ",
        '"text"': "is damaged: ",
        "null": "is damaged: ",
        "[" * 100_000: "is damaged: ",
    }
    for content, message in refused.items():
        path.write_text(content)
        with pytest.raises(FsdpTuneError) as caught:
            type(document).read(path)
        (problem,) = caught.value.problems
        assert (problem.code, problem.where.source) == ("run-unreadable", str(path))
        assert problem.message.startswith(message), content[:40]
        assert problem.hint is not None


@pytest.mark.parametrize(("kind", "hint"), [(Verdict, "remove it"), (BaseModel, "restore it")])
def test_hint_about_a_damaged_document_does_not_remove_what_nothing_writes_again(
    kind: type[Document], hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
    path.write_text("{")
    with pytest.raises(FsdpTuneError) as caught:
        kind.read(path)
    assert (caught.value.problems[0].hint or "").startswith(hint)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (Heartbeat, {"rank": 0, "pid": "one"}),
        (LaunchRecord, {"profile": [1]}),
        (Outcome, {"rank": 0, "exit_code": 0, "exit_reason": "bored", "step": 0, "time": 0.0}),
        (ReadBack, {"ranks": [], "differences": []}),
        (Verdict, {"exit_code": 0}),
    ],
)
def test_document_with_other_fields_is_damaged(
    kind: type[Document], content: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    with pytest.raises(FsdpTuneError, match="is damaged"):
        kind.read(path)


def test_unreadable_rank_file_does_not_stop_supervisor(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    assert (read_heartbeat(run, 3), read_outcome(run, 3)) == (None, None)
    for path in (run.rank_heartbeat(3), run.rank_outcome(3)):
        path.write_text('{"version": 99}')
    assert read_heartbeat(run, 3) is None
    outcome = read_outcome(run, 3)
    assert outcome is not None
    assert (outcome.rank, outcome.exit_code, outcome.reason) == (3, 1, ExitReason.FAILED)
    assert outcome.problem is not None
    assert outcome.problem.code == "outcome-unreadable"
    assert "newer fsdp-tune" in outcome.problem.message


def test_completed_read_back_keeps_its_other_fields_and_warnings(tmp_path: Path) -> None:
    path = tmp_path / "readback.json"
    ReadBack.complete(path, ran_in={})
    assert not path.exists()
    ReadBack([], [], ["it grew by 9 GiB"], facts=LiveState(wrapper="fsdp2")).write(path)
    ReadBack.complete(path, warnings=["fp32 matmul"], ran_in={"matmul": {"float32": 1}})
    ReadBack.complete(path, witness={"differences": []})
    content = json.loads(path.read_text())
    assert (content["warnings"], content["wrapper"]) == (["it grew by 9 GiB", "fp32 matmul"], "fsdp2")
    assert (content["ran_in"], content["witness"]) == ({"matmul": {"float32": 1}}, {"differences": []})
