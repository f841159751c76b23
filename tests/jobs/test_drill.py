"""A job of the drill has ended when Slurm says so, and not when Slurm does not answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import failed_error
from fsdp_tune.jobs import drill
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.slurm_queue import QueuedJob
from fsdp_tune.run.job_files import JobFiles


def test_job_is_not_over_until_slurm_has_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [failed_error("slurm-failed", "no answer"), QueuedJob("1", "PENDING", ""), None]

    def job_now(_: str) -> QueuedJob | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(drill, "queued_jobs", lambda _: [])
    monkeypatch.setattr(drill, "job_now", job_now)
    monkeypatch.setattr(drill, "QUEUE_SECONDS", 0.0)
    submission: Any = SimpleNamespace(
        files=JobFiles(tmp_path / "run"), submit=lambda: SimpleNamespace(job="1")
    )
    watched = drill._Watched(drill._Jobs(Observer()), submission, Observer())
    over = [watched.is_over]
    for _ in range(3):
        watched._look()
        over.append(watched.is_over)
    assert over == [False, False, False, True]


def test_job_that_cannot_be_cancelled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Said(Observer):
        def message(self, text: str) -> None:
            messages.append(text)

    def no_answer(_: str) -> None:
        raise failed_error("slurm-failed", "`squeue` failed: no answer")

    messages: list[str] = []
    monkeypatch.setattr(drill, "job_now", no_answer)
    with drill._Jobs(Said()) as jobs:
        jobs.ids.append("7")
    assert messages == ["job 7 may still run: `squeue` failed: no answer; `scancel 7` cancels it"]
