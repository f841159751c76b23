"""Files of each rank in logs/: a heartbeat while it runs, and an outcome when it ends."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from fsdp_tune.core.atomic import json_safe, write_json
from fsdp_tune.core.errors import ExitReason, Problem, Where
from fsdp_tune.run.directory import RunDir


@dataclass(frozen=True, slots=True)
class Heartbeat:
    rank: int
    pid: int
    step: int
    phase: str
    time: float
    """Wall-clock time of the rank, used only to distinguish one write of the file from the next."""
    progressed_at: float
    """Monotonic time of its machine when the rank last made progress."""
    silent_seconds: float
    """Seconds since then when the file was written."""
    collective: dict[str, Any] | None = None
    """The last collective in the flight recorder, once the rank hangs."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Exit code and reason of a rank, and the problem that ended it."""

    exit_code: int
    reason: ExitReason
    problem: Problem | None = None
    traceback: str | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other fields of the file: loss, eval_loss, tokens …"""
    rank: int = 0
    step: int = 0
    time: float = 0.0


def write_outcome(run: RunDir, outcome: Outcome) -> None:
    """Write the last file of a rank. Raises: OSError."""
    problem = outcome.problem
    content = {
        "rank": outcome.rank,
        "exit_code": int(outcome.exit_code),
        "exit_reason": outcome.reason.value,
        "step": outcome.step,
        "time": outcome.time,
        "problem": {**problem.as_dict(), "hint": problem.hint, "ways_out": problem.ways_out} if problem else None,
        "traceback": outcome.traceback,
    }
    write_json(run.rank_outcome(outcome.rank), json_safe(content | outcome.facts), private=True)


def read_heartbeat(run: RunDir, rank: int) -> Heartbeat | None:
    raw = _read(run.rank_heartbeat(rank))
    try:
        if raw is None:
            return None
        seen: dict[str, Any] | None = raw.get("collective")
        progressed_at, silent_seconds = float(raw["progressed_at"]), float(raw["silent_seconds"])
        return Heartbeat(
            rank, int(raw["pid"]), int(raw["step"]), str(raw["phase"]), float(raw["time"]), progressed_at, silent_seconds, seen
        )
    except (KeyError, TypeError, ValueError):
        return None  # written by another version


def read_outcome(run: RunDir, rank: int) -> Outcome | None:
    """Return the outcome of a rank; None if it has not ended."""
    raw = _read(run.rank_outcome(rank))
    if raw is None:
        return None
    try:
        reason = ExitReason(raw["exit_reason"])
        problem = None if raw.get("problem") is None else Problem.from_dict(raw["problem"])
        known = {"rank", "exit_code", "exit_reason", "step", "time", "problem", "traceback"}
        facts = {name: value for name, value in raw.items() if name not in known}
        code, step, ended_at = int(raw["exit_code"]), int(raw["step"] or 0), float(raw["time"])
        return Outcome(code, reason, problem, raw.get("traceback"), facts, rank, step, ended_at)
    except (KeyError, TypeError, ValueError) as error:
        message = f"rank {rank} left an outcome that cannot be read: {error!r}"
        where = Where(str(run.rank_outcome(rank)))
        return Outcome(1, ExitReason.FAILED, Problem("outcome-unreadable", message, where), rank=rank)


def verdict_path(run: RunDir) -> Path:
    """Path of the outcome of the last launch, written by its supervisor; killed ranks write no outcome of their own."""
    return run.logs / "outcome.json"


def read_verdict(run: RunDir) -> dict[str, Any] | None:
    """Return the outcome of the last launch; None while it runs, and if its supervisor was killed too."""
    return _read(verdict_path(run)) or None


def clear(run: RunDir, ranks: Iterable[int], *, with_verdict: bool) -> None:
    """Delete the files of an earlier launch, so that they are not mistaken for those of this one."""
    if with_verdict:
        verdict_path(run).unlink(missing_ok=True)
    for rank in ranks:
        run.rank_heartbeat(rank).unlink(missing_ok=True)
        run.rank_outcome(rank).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        raw: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return cast(dict[str, Any], raw) if isinstance(raw, dict) else {}
