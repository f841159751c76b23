"""The verdict on a launch from the verdicts of its machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.launch.machines.machine import MachineReport
from fsdp_tune.run.rank_files import ECHO_CODES, Verdict


def combined(ended: Verdict, elsewhere: Sequence[Verdict]) -> Verdict:
    """Return `ended` with the cause of the end on any machine, and the largest step."""
    every = [ended, *elsewhere]
    failure = next(
        (each for each in every if each.problem is not None and each.problem.code not in ECHO_CODES), None
    )
    cause = failure or next((each for each in every if each.is_stop), ended)
    step = max(each.step for each in every)
    return replace(ended, exit_code=cause.exit_code, reason=cause.reason, step=step, problem=cause.problem)


def verdict_of(error: BaseException) -> Verdict:
    """Return how a command ends that raised before or between launches."""
    if isinstance(error, KeyboardInterrupt):
        return Verdict(ExitCode.INTERRUPTED, ExitReason.INTERRUPTED, 0)
    if isinstance(error, StoppedBySignal):
        return Verdict(ExitCode.PREEMPTED, ExitReason.PREEMPTED, 0)
    if not isinstance(error, FsdpTuneError):
        return Verdict(
            ExitCode.FAILED,
            ExitReason.FAILED,
            0,
            Problem("machine-failed", f"{type(error).__name__}: {error}"),
        )
    if error.exit_code is ExitCode.PREEMPTED:  # another machine, or a trial, was stopped
        return Verdict(ExitCode.PREEMPTED, ExitReason.PREEMPTED, 0)
    if error.exit_code is ExitCode.INTERRUPTED:
        return Verdict(ExitCode.INTERRUPTED, ExitReason.INTERRUPTED, 0)
    return Verdict(error.exit_code, ExitReason.FAILED, 0, error.problems[0])


def before_launch(ended: Verdict | None) -> Verdict | None:
    """Return how the first machine ended the run before any rank started, as another machine reports it."""
    if ended is None or ended.problem is None:
        return ended
    return replace(
        ended,
        problem=replace(ended.problem, code="machine-failed", message=f"machine 0: {ended.problem.message}"),
    )


def started_again(first: MachineReport) -> Problem:
    host = f" ({first.identity.host})" if first.identity is not None else ""
    hint = "start this machine's command again, too; it then joins the new one"
    return Problem("machine-lost", f"machine 0{host} is lost: its command was started again", hint=hint)
