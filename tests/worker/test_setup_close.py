"""The last save of a run, if its last step has no checkpoint yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_tune.core.errors import FailedError, failed_error
from fsdp_tune.worker import setup
from fsdp_tune.worker.checkpoint.save import Saved


def closing(saved: Saved) -> list[object]:
    """Close a run whose last save ends with `saved`; returns what was reported."""
    reported: list[object] = []
    checkpointer = SimpleNamespace(
        last_step=2, is_scattered=False, asynchronous=True, report=reported.append, wait=lambda: None
    )
    checkpointer.save = lambda *_, **__: checkpointer.report(saved)
    metrics = SimpleNamespace(event=lambda _: None, close=lambda: None, failure=None)
    trainer: Any = SimpleNamespace(
        checkpointer=checkpointer,
        parts=SimpleNamespace(run=SimpleNamespace(resume_json=None), metrics=metrics),
        state=SimpleNamespace(global_step=4, best_global_step=None),
        own_state=dict,
    )
    with (
        patch.object(setup.ResumeRequest, "read", lambda _: None),
        patch("fsdp_tune.worker.checkpoint.restore.trainer_state_json", lambda _: "{}"),
        patch.object(setup, "all_or_none", lambda act, _: act()),
    ):
        setup.close(trainer, is_finished=True)
    return reported


def test_save_at_the_end_is_reported_as_any_other() -> None:
    saved = Saved(4, 0.1, moved="checkpoint-4 of another run is now checkpoint-4.1")
    assert closing(saved) == [saved]


def test_save_at_the_end_that_fails_ends_the_run() -> None:
    with pytest.raises(FailedError, match="no room"):
        closing(Saved(4, 0.1, error=failed_error("save-failed", "no room")))
