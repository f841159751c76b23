"""Launches of fake ranks under a fake agent (`fake_agent.py`, `fake_worker.py`), from the part of each
rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitReason, Problem
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.supervise.launch_events import Event, Message
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Verdict
from tests.launch.orphans import children, left_over

REPOSITORY = Path(__file__).resolve().parents[2]
Parts = Mapping[str, Sequence[Sequence[object]]]
PlanOf = Callable[[Parts], LaunchPlan]

FINISHED = {"exit_code": 0, "exit_reason": "finished", "loss": 1.5}
ENDS_WELL: list[list[object]] = [["outcome", FINISHED]]
SAVES_ON_SIGNAL: list[list[object]] = [
    ["beat", "training", 7],
    ["listen"],
    ["log", {"step": 7}],
    ["wait-for-signal"],
]


def fake_plan(run: RunDir, world_size: int) -> LaunchPlan:
    return LaunchPlan(
        argv=(
            sys.executable,
            str(REPOSITORY / "tests" / "launch" / "fake_agent.py"),
            str(world_size),
            str(run.path),
        ),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        settings={},
        removed=(),
        run=run,
        ranks=range(world_size),
        machine_rank=0,
        world_size=world_size,
    )


def write_parts_of_ranks(run: RunDir, parts: Parts) -> None:
    (run.path / "fake.json").write_text(json.dumps(parts))


def ended(reason: ExitReason, code: str | None = None, step: int = 3) -> Verdict:
    """A verdict with the problem `code`, or with none."""
    return Verdict(
        EXIT_CODE_OF_REASON[reason], reason, step, Problem(code, f"{code} happened") if code else None
    )


def end_of(
    events: Iterable[Event], act: Callable[[Event], object] = lambda _: None
) -> tuple[Verdict, list[Event]]:
    """Pass on events to `act` until the end, when no process may be left. Returns the verdict and all
    events."""
    before = children()
    seen: list[Event] = []
    for event in events:
        seen.append(event)
        act(event)
    verdict = seen[-1]
    assert isinstance(verdict, Verdict)
    assert left_over(before) == []
    return verdict, seen


def messages(events: Iterable[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Message)]
