"""A tracker that raises or hangs is left out from then on; until then it sees every event that it has a method for, in one thread."""

from __future__ import annotations

import threading
from typing import Any

from transformers import TrainerCallback

from fsdp_tune.worker.trackers import Guarded


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []
        self.stuck = threading.Event()

    def _see(self, event: str, step: int) -> None:
        self.seen.append((event, step, threading.get_ident()))

    def on_log(self, step: int, **_: Any) -> str:  # type: ignore[override]
        self._see("log", step)
        if step == 3:
            raise ConnectionError("the server is gone")
        if step == 4:
            self.stuck.wait(60)
        return "control"

    def on_save(self, step: int, **_: Any) -> None:  # type: ignore[override]
        self._see("save", step)


def guarded() -> tuple[Recorder, Guarded, list[str]]:
    recorder, told = Recorder(), []
    return recorder, Guarded(recorder, told.append, 0.3), told


def test_every_event_of_a_tracker_reaches_it_in_order_and_in_one_thread() -> None:
    recorder, guard, told = guarded()
    assert guard.on_log(1) == "control"  # type: ignore[attr-defined]
    guard.on_save(1)  # type: ignore[attr-defined]
    guard.on_step_end(1)  # type: ignore[attr-defined]
    guard.on_log(2)  # type: ignore[attr-defined]
    assert [(event, step) for event, step, _ in recorder.seen] == [("log", 1), ("save", 1), ("log", 2)]
    assert len({thread for _, _, thread in recorder.seen}) == 1
    assert told == []


def test_a_tracker_that_raises_gets_nothing_more() -> None:
    recorder, guard, told = guarded()
    guard.on_log(3)  # type: ignore[attr-defined]
    guard.on_log(2)  # type: ignore[attr-defined]
    assert told == ["Recorder has failed and gets nothing more: ConnectionError: the server is gone"]
    assert len(recorder.seen) == 1


def test_a_tracker_that_hangs_is_left_behind() -> None:
    recorder, guard, told = guarded()
    assert guard.on_log(4) is None  # type: ignore[attr-defined]
    guard.on_log(2)  # type: ignore[attr-defined]
    recorder.stuck.set()
    assert told == ["Recorder has failed and gets nothing more: TimeoutError: `on_log` did not return within 0.3 s"]
    assert len(recorder.seen) == 1
