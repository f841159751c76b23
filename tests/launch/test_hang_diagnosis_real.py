"""Real ranks that hang in each phase, and saves slower than the hang timeout."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.launch.supervise.launch_events import Event, Message
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Verdict
from tests.cuda.devices import on_devices
from tests.launch.test_attempts_real import launch, written
from tests.parity.runs import lines

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
LIMIT_SECONDS = 15.0
PROMISED_SECONDS = LIMIT_SECONDS + 10.0
STEPS = 3
KEYS = {
    "launch.max_restarts": 0,
    "launch.hang_timeout": f"{LIMIT_SECONDS:.0f}s",
    "checkpoint.probe": True,
    "training.save_steps": STEPS,
}


def hang_of(run: RunDir, accident: dict[str, Any]) -> tuple[Verdict, list[Event], float]:
    """The end, the events, and the seconds from the accident to the report."""
    ended, events = launch(run, accident)
    assert ended.problem is not None
    assert ended.problem.code == "hang", ended.problem.message
    return ended, events, run.hang_report.stat().st_mtime - (run.path / "accident-0").stat().st_mtime


@on_devices
@pytest.mark.parametrize(
    ("phase", "step"),
    [
        ("importing", 0),
        ("loading the model", 0),
        ("reading back", 0),
        ("training", 1),
        ("probing a save", 1),
        ("evaluating", 2),
        ("saving", 3),
    ],
)
def test_rank_stopped_in_any_phase_is_named(phase: str, step: int, tmp_path: Path, device: str) -> None:
    evaluated = {"training.eval_strategy": "steps", "training.eval_steps": 2}
    run = written(tmp_path, "run", steps=STEPS, device=device, **KEYS, **evaluated)
    ended, _, seconds = hang_of(run, {"rank": 1, "step": step, "phase": phase, "how": int(signal.SIGSTOP)})
    assert ended.problem is not None
    assert f"rank 1 (step {step}, `{phase}`, stopped (SIGSTOP)" in ended.problem.message
    assert "rank 0 (" not in ended.problem.message
    assert LIMIT_SECONDS <= seconds <= PROMISED_SECONDS


@on_devices
@pytest.mark.parametrize("asynchronous", [True, False])
def test_stalled_final_save_is_a_hang(asynchronous: bool, tmp_path: Path, device: str) -> None:
    """In a background save, the training threads of both ranks wait; only one of the saves has stalled."""
    run = written(tmp_path, "run", steps=STEPS, device=device, **KEYS, **{"checkpoint.async": asynchronous})
    ended, _, seconds = hang_of(run, {"rank": 1, "step": STEPS, "phase": "training", "how": "dead disk"})
    assert ended.problem is not None
    assert "rank 1 (step 3, `saving`, at " in ended.problem.message
    assert "mortal.py" in ended.problem.message
    assert "rank 0 (" not in ended.problem.message
    assert seconds <= PROMISED_SECONDS + 5.0, "counted from the step before the save"


@on_devices
@pytest.mark.parametrize("how", ["the last save", "a save after a signal"])
def test_background_save_slower_than_the_limit_is_not_a_hang(how: str, tmp_path: Path, device: str) -> None:
    keys = KEYS | {"checkpoint.probe": False, "checkpoint.async": True, "training.save_steps": 100}
    run = written(tmp_path, "run", steps=STEPS if how == "the last save" else 1000, device=device, **keys)
    accidents: list[dict[str, Any]] = [{"rank": rank, "step": 2, "how": "slow disk"} for rank in range(2)]
    if how == "a save after a signal":
        accidents.append({"rank": 1, "step": 3, "how": int(signal.SIGTERM)})
    ended, events = launch(run, *accidents)
    assert ended.problem is None, ended.problem
    assert ended.exit_code == (0 if how == "the last save" else 143)
    (saved,) = [line for line in lines(run) if line.get("event") == "checkpoint_saved"]
    assert saved["seconds"] > LIMIT_SECONDS + 5.0, "slow enough to be taken for a hang"
    assert not any(isinstance(event, Message) and "no progress" in event.text for event in events)
