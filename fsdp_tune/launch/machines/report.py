"""The document of a machine, as it publishes it, and what follows from those of all machines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem
from fsdp_tune.launch.machines.identity import Identity
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import ECHO_CODES, RankState, Verdict
from fsdp_tune.run.records import Document

NOT_STARTED = -1
"""The launch number of a machine that has confirmed none."""

State = Literal["waiting", "gathering", "ready", "running", "ended", "final"]


@dataclass(frozen=True, slots=True)
class Relayed(Document):
    """What the first machine repeats for the others."""

    failed_machine: int | None = None
    failure: dict[str, Any] | None = None
    """The problem of the first other machine that failed."""
    stop_reason: ExitReason | None = None
    """Why the ranks of another machine were stopped."""
    silent_seconds: float | None = None
    """Of another machine that has detected a hang."""
    rank_states: tuple[RankState, ...] = ()
    """Where the ranks of other machines are, in a hang."""
    is_complete: bool = False
    """Whether these are all of them."""
    are_quiet: bool = False
    """Whether all other machines are quiet."""


@dataclass(frozen=True, slots=True)
class MachineReport(Document):
    """The document of a machine."""

    token: str = ""
    """Of its command."""
    life: str | None = None
    """Of the first machine's command that it follows, or of itself."""
    identity: Identity | None = None
    work: int = 0
    """Only a change of it matters."""
    launch: int = NOT_STARTED
    """0 for the first launch of the command, then one more for each restart."""
    members: tuple[int, ...] = ()
    """On the first machine: those that take part in its launch. Ranks are numbered in this order."""
    state: State = "waiting"
    """waiting: to join. ready: for this launch. running. ended: this launch, on this machine. On the first machine only: gathering (waits
    for the others), and final (there is no other launch)."""
    ended: dict[str, Any] | None = None
    """The verdict on its launch."""
    rank_states: tuple[RankState, ...] = ()
    """Where its ranks are, in a hang."""
    silent_seconds: float = 0.0
    is_quiet: bool = False
    """Whether its ranks have made no progress for a while."""
    files: dict[str, str] | None = None
    """On the first machine: digests of the files that ranks read."""
    relayed: Relayed = field(default_factory=Relayed)

    @property
    def makes_no_progress(self) -> bool:
        return self.is_quiet or self.ended is not None

    @property
    def verdict(self) -> Verdict | None:
        """How the launch ended there; None if it has not, or if the document is not of this program."""
        with suppress(ValueError, KeyError, TypeError):
            return Verdict.from_dict(self.ended) if self.ended is not None else None
        return None

    @property
    def problem(self) -> Problem | None:
        return self.verdict.problem if self.verdict is not None else None


def relay(reports: Mapping[int, MachineReport], machines: int, *, are_quiet: bool) -> Relayed:
    """Return what the first machine repeats of its `machines` others, by those that have reported."""
    failed = next(((machine, problem) for machine, report in sorted(reports.items()) if (problem := report.problem) is not None), None)
    named = None if failed is None else replace(failed[1], code="machine-failed", message=f"machine {failed[0]}: {failed[1].message}")
    verdicts = [verdict for report in reports.values() if (verdict := report.verdict) is not None]
    return Relayed(
        failed_machine=None if failed is None else failed[0],
        failure=None if named is None else named.as_dict(),
        stop_reason=next((verdict.reason for verdict in verdicts if verdict.is_stop), None),
        silent_seconds=max((report.silent_seconds for report in reports.values() if report.rank_states), default=None),
        rank_states=tuple(each for report in reports.values() for each in report.rank_states),
        is_complete=len(reports) == machines and all(report.rank_states for report in reports.values()),
        are_quiet=are_quiet,
    )


def digests_of_files(run: RunDir) -> dict[str, str]:
    """Return digests of the files of a run that its ranks read at the start, of those that are there."""
    found: dict[str, str] = {}
    for path in (run.recipe_json, run.data_json, run.launch_json, run.resume_json):
        with suppress(OSError):
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def combined(ended: Verdict, elsewhere: Sequence[Verdict]) -> Verdict:
    """Return `ended` with the cause of the end on any machine, and the largest step."""
    every = [ended, *elsewhere]
    failure = next((each for each in every if each.problem is not None and each.problem.code not in ECHO_CODES), None)
    cause = failure or next((each for each in every if each.is_stop), ended)
    step = max(each.step for each in every)
    return replace(ended, exit_code=cause.exit_code, reason=cause.reason, step=step, problem=cause.problem)


def verdict_of(error: BaseException) -> Verdict:
    """Return how a command ends that raised before or between launches."""
    if isinstance(error, KeyboardInterrupt):
        return Verdict(ExitCode.INTERRUPTED, ExitReason.INTERRUPTED, 0)
    if not isinstance(error, FsdpTuneError):
        return Verdict(ExitCode.FAILED, ExitReason.FAILED, 0, Problem("machine-failed", f"{type(error).__name__}: {error}"))
    if error.exit_code is ExitCode.PREEMPTED:  # a scheduler's signal
        return Verdict(ExitCode.PREEMPTED, ExitReason.PREEMPTED, 0)
    return Verdict(error.exit_code, ExitReason.FAILED, 0, error.problems[0])


def before_launch(ended: Verdict | None) -> Verdict | None:
    """Return how the first machine ended the run before any rank started, as another machine reports it."""
    if ended is None or ended.problem is None:
        return ended
    return replace(ended, problem=replace(ended.problem, code="machine-failed", message=f"machine 0: {ended.problem.message}"))


def started_again(first: MachineReport) -> Problem:
    host = f" ({first.identity.host})" if first.identity is not None else ""
    hint = "start this machine's command again, too; it then joins the new one"
    return Problem("machine-lost", f"machine 0{host} is lost: its command was started again", hint=hint)
