"""What a launch tells its surface: lines of its metrics, messages, where its first rank is, the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_tune.run.rank_files import Verdict


@dataclass(frozen=True, slots=True)
class Logged:
    """A line of metrics.jsonl: a step, an evaluation, or an event."""

    line: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the supervisor."""

    text: str


@dataclass(frozen=True, slots=True)
class Position:
    """Where the first rank of this machine is, for the screen."""

    step: int
    phase: str
    done: int
    """Finished batches of an evaluation."""
    planned: int
    """Batches of an evaluation; 0 in other phases."""


Event = Logged | Message | Position | Verdict
