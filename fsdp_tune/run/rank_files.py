"""Files in logs/: of each rank a heartbeat while it runs and an outcome when it ends, and the verdict on the
launch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem, Where
from fsdp_tune.core.library_errors import refusal_words
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import Document

STOPPED = (ExitReason.PREEMPTED, ExitReason.INTERRUPTED, ExitReason.MAX_RUNTIME)


ECHO_CODES = frozenset({"lost-rank", "machine-failed"})
"""Codes of ranks and machines that only report the failure of another."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective in the flight recorder: the current one of a rank, or else its last."""

    name: str
    number: int
    """In its group."""
    group: str
    ended: bool
    entered: dict[str, int]
    """The last number that the rank entered, by group."""


@dataclass(frozen=True, slots=True)
class Heartbeat(Document):
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
    collective: Collective | None = None
    """Once the rank hangs."""
    done: int = 0
    """Finished batches of the phase, where the rank counts them: in an evaluation."""
    planned: int = 0
    """Batches of the phase; 0: not counted."""
    launch: str = ""
    """The launch that the rank belongs to (`LAUNCH_VARIABLE`)."""
    began_at: float = 0.0
    """Wall-clock time at which the rank started."""


@dataclass(frozen=True, slots=True)
class RankState(Document):
    """Where one rank is. Everything but the rank may be unknown: a rank that hangs early has written no
    heartbeat."""

    rank: int
    step: int | None = None
    phase: str | None = None
    state: str | None = None
    """Why its process cannot run, or None."""
    waits_in: str | None = None
    at: str | None = None
    collective: Collective | None = None

    def __str__(self) -> str:
        parts = ["before its first heartbeat" if self.phase is None else f"step {self.step}, `{self.phase}`"]
        if self.state is not None:
            parts.append(self.state)
        if self.at is not None and (self.state is not None or self.waits_in is None):
            parts.append(f"at {self.at}")
        return f"rank {self.rank} ({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Outcome(Document):
    """Exit code and reason of a rank, and the problem that ended it. The last file that a rank writes."""

    IS_PRIVATE: ClassVar[bool] = True

    exit_code: int
    reason: ExitReason
    problem: Problem | None = None
    traceback: str | None = None
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """All other fields of the file: loss, eval_loss, tokens …"""
    rank: int = 0
    step: int = 0
    time: float = 0.0
    launch: str = ""
    """The launch that the rank belonged to (`LAUNCH_VARIABLE`)."""

    def as_dict(self) -> dict[str, Any]:
        problem = self.problem
        return {
            "rank": self.rank,
            "exit_code": int(self.exit_code),
            "exit_reason": self.reason.value,
            "step": self.step,
            "time": self.time,
            "launch": self.launch,
            "problem": {**problem.as_dict(), "hint": problem.hint, "ways_out": problem.ways_out}
            if problem
            else None,
            "traceback": self.traceback,
            **self.facts,
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Outcome:
        facts = dict(raw)
        rank, code, reason, step, ended_at = (
            facts.pop(name) for name in ("rank", "exit_code", "exit_reason", "step", "time")
        )
        problem = Problem.from_dict(found) if (found := facts.pop("problem", None)) else None
        trace, launch = facts.pop("traceback", None), str(facts.pop("launch", ""))
        return cls(
            int(code),
            ExitReason(reason),
            problem,
            trace,
            facts,
            int(rank),
            int(step or 0),
            float(ended_at),
            launch,
        )


@dataclass(frozen=True, slots=True)
class Verdict(Document):
    """How a launch ended, as its supervisor judged; killed ranks write no outcome of their own."""

    IS_PRIVATE: ClassVar[bool] = True

    exit_code: ExitCode
    reason: ExitReason
    step: int
    problem: Problem | None = None
    first_outcome: Outcome | None = None
    """Outcome of the first rank of this machine, with the loss and counts of the run; not in the file."""
    signal: int | None = None
    """The first signal that the command received meanwhile; not in the file. A run may finish although a stop
    was requested."""

    @property
    def is_stop(self) -> bool:
        """Whether a signal or `launch.max_runtime` ended the launch, and nothing failed."""
        return self.problem is None and self.reason in STOPPED

    def as_dict(self) -> dict[str, Any]:
        return {
            "exit_code": int(self.exit_code),
            "exit_reason": self.reason.value,
            "step": self.step,
            "time": time.time(),
            "problem": self.problem.as_dict() if self.problem else None,
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Verdict:
        problem = Problem.from_dict(raw["problem"]) if raw.get("problem") else None
        return cls(ExitCode(raw["exit_code"]), ExitReason(raw["exit_reason"]), int(raw["step"]), problem)


LAUNCH_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Set by torch's agent for its ranks to the id of its rendezvous (PET_RDZV_ID), which differs between
launches over several machines."""


def read_heartbeat(run: RunDir, rank: int, launch: str | None = None) -> Heartbeat | None:
    """Return the last heartbeat of a rank; None before the first, and for a file that is damaged or of
    another version. Raises: OSError.

    `launch`: None too for a heartbeat of another launch. A rank of an earlier one may still run on a machine
    that was lost and is back.
    """
    try:
        beat = Heartbeat.read(run.rank_heartbeat(rank))
    except FsdpTuneError:
        return None
    return beat if beat is not None and launch in (None, beat.launch) else None


def read_outcome(run: RunDir, rank: int, launch: str | None = None) -> Outcome | None:
    """Return the outcome of a rank; None if it has not ended, and if not of `launch`. A damaged file is a
    failure. Raises: OSError."""
    path = run.rank_outcome(rank)
    try:
        outcome = Outcome.read(path)
        return outcome if outcome is not None and launch in (None, outcome.launch) else None
    except FsdpTuneError as error:
        return unreadable_outcome(run, rank, f"it {error}")


def unreadable_outcome(run: RunDir, rank: int, why: str) -> Outcome:
    """Return what stands for the outcome of a rank that cannot be read."""
    where = Where(str(run.rank_outcome(rank)))
    problem = Problem("outcome-unreadable", f"rank {rank} left an outcome that cannot be read: {why}", where)
    return Outcome(ExitCode.FAILED, ExitReason.FAILED, problem, rank=rank)


def is_unreadable(outcome: Outcome) -> bool:
    """Return whether it is of `unreadable_outcome`: how the rank ended is not known from it."""
    return outcome.problem is not None and outcome.problem.code == "outcome-unreadable"


def record(run: RunDir, verdict: Verdict) -> str | None:
    """Write the verdict on a launch. Returns why it could not be written, and what it is; None if it is."""
    try:
        verdict.write(run.outcome_json)
    except (OSError, MemoryError) as error:
        how = f"exit code {int(verdict.exit_code)}, {verdict.reason.value}, step {verdict.step}"
        return f"{run.outcome_json} cannot be written ({refusal_words(error)}): the run ended with {how}"
    return None


def clear(run: RunDir, ranks: Iterable[int], *, with_verdict: bool) -> None:
    """Delete the files of an earlier launch, so that they are not mistaken for those of this one."""
    if with_verdict:
        run.outcome_json.unlink(missing_ok=True)
    cleared = set(ranks)
    for stage in run.logs.glob("rank-*.heartbeat.*.tmp"):
        number = stage.name.removeprefix("rank-").partition(".")[0]
        if number.isdecimal() and int(number) in cleared:  # any other is a user's
            stage.unlink(missing_ok=True)
    for rank in cleared:
        run.rank_heartbeat(rank).unlink(missing_ok=True)
        run.rank_outcome(rank).unlink(missing_ok=True)
