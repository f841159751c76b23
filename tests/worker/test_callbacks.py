"""Output of the run callback before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import ReadBack
from fsdp_tune.worker import callbacks
from fsdp_tune.worker.callbacks import RunCallback
from fsdp_tune.worker.observe.startup_phases import startup_seconds
from fsdp_tune.worker.readback.witness import Witness


def test_warnings_of_the_read_back_are_printed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    nothing = SimpleNamespace(beat=lambda *_: None, mark=lambda *_: None, event=lambda *_, **__: None)
    stop_request: Any = SimpleNamespace(training=False)
    callback = RunCallback(
        RunDir(tmp_path),
        stop_request,
        said.append,
        Witness("off", lambda _: None),
        is_first=False,
        saves=True,
    )
    callback.trainer = SimpleNamespace(
        parts=SimpleNamespace(recipe=None, loaded=None, heartbeat=nothing, metrics=nothing)
    )  # type: ignore[assignment]
    monkeypatch.setattr(callbacks, "read_back", lambda *_: ReadBack([], [], ["it grew by 9 GiB"]))
    monkeypatch.setattr(callbacks, "_table", lambda _: ["a table"])
    monkeypatch.setattr(callback, "_check_what_tokens_see", lambda: None)
    arguments: Any = None
    callback.on_train_begin(arguments, SimpleNamespace(global_step=0, max_steps=1), arguments)  # type: ignore[arg-type]
    assert said == ["a table", "WARNING: host memory: it grew by 9 GiB"]
    assert stop_request.training


def _gone() -> float:
    raise psutil.NoSuchProcess(7)


@pytest.mark.parametrize(
    ("launcher", "launching"),
    [
        (None, {}),  # the rank is the first process of its namespace
        (SimpleNamespace(pid=1, create_time=lambda: 0.0), {}),  # its launcher has ended
        (SimpleNamespace(pid=7, create_time=_gone), {}),
        (SimpleNamespace(pid=7, create_time=lambda: 98.0), {"launching": 2.0}),
    ],
)
def test_startup_is_counted_from_a_launcher_that_can_be_seen(
    monkeypatch: pytest.MonkeyPatch, launcher: Any, launching: dict[str, float]
) -> None:
    rank = SimpleNamespace(create_time=lambda: 100.0, parent=lambda: launcher)
    monkeypatch.setattr(psutil, "Process", lambda: rank)
    heartbeat: Any = SimpleNamespace(began_at=103.0, phase_seconds={"importing": 4.0})
    assert startup_seconds(heartbeat) == {**launching, "starting Python": 3.0, "importing": 4.0}


def test_startup_where_no_process_can_be_seen_has_the_phases_of_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unseen() -> None:
        raise psutil.NoSuchProcess(7)

    monkeypatch.setattr(psutil, "Process", unseen)
    heartbeat: Any = SimpleNamespace(began_at=103.0, phase_seconds={"importing": 4.0})
    assert startup_seconds(heartbeat) == {"importing": 4.0}
