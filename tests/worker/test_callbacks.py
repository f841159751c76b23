"""Output of the run callback before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import ReadBack
from fsdp_tune.worker import callbacks
from fsdp_tune.worker.callbacks import RunCallback
from fsdp_tune.worker.readback.witness import Witness


def test_warnings_of_the_read_back_are_printed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    nothing = SimpleNamespace(beat=lambda *_: None, mark=lambda *_: None, event=lambda *_, **__: None)
    stop_request: Any = SimpleNamespace(training=False)
    callback = RunCallback(RunDir(tmp_path), stop_request, said.append, Witness("off", lambda _: None), is_first=False, saves=True)
    callback.trainer = SimpleNamespace(parts=SimpleNamespace(recipe=None, loaded=None, heartbeat=nothing, metrics=nothing))  # type: ignore[assignment]
    monkeypatch.setattr(callbacks, "read_back", lambda *_: ReadBack([], [], ["it grew by 9 GiB"]))
    monkeypatch.setattr(callbacks, "_table", lambda _: ["a table"])
    monkeypatch.setattr(callback, "_check_what_tokens_see", lambda: None)
    arguments: Any = None
    callback.on_train_begin(arguments, SimpleNamespace(global_step=0, max_steps=1), arguments)  # type: ignore[arg-type]
    assert said == ["a table", "WARNING: host memory: it grew by 9 GiB"]
    assert stop_request.training
