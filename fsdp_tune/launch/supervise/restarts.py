"""Decide whether a launch that failed is started again: its failure may not repeat, and earlier restarts have
helped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_tune.core.errors import ExitReason, Problem
from fsdp_tune.run.rank_files import Verdict

# Failures that may not repeat: a dead process, a lost peer, a hang, an exception in a library.
# Any other is a check that would fail again, an error in the input, or a requested stop.
TRANSIENT_CODES = frozenset(
    {
        "device-failed",
        "failed",
        "hang",
        "host-out-of-memory",
        "launcher-failed",
        "loader-died",
        "lost-rank",
        "machine-lost",
        "rank-died",
        "rank-failed",
        "rank-killed",
        "worker-failed",
    }
)
TRANSIENT_REASONS = (ExitReason.FAILED, ExitReason.LOST_RANK)
SAME_STEP_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed launch."""

    problem: Problem
    step: int
    """The last completed step."""
    checkpoint_step: int
    """Of the newest complete checkpoint afterwards; 0 for none."""
    has_trained: bool
    """Whether it reached its first step."""
    members: tuple[int, ...] = ()
    """The machines of the launch."""


@dataclass(frozen=True, slots=True)
class Restart:
    number: int
    """1 for the first one."""


def is_transient(ended: Verdict, signals: Sequence[int]) -> bool:
    """Return whether the same command may succeed next time. A signal means that a stop was requested."""
    return (
        ended.problem is not None
        and not signals
        and ended.reason in TRANSIENT_REASONS
        and ended.problem.code in TRANSIENT_CODES
    )


def decide_restart(
    failures: Sequence[Failure], max_restarts: int, rows_of_step: Callable[[int], str | None]
) -> Restart | Problem:
    """Return the next restart, or the problem that ends the run. `failures`: all of this command, oldest
    first; each `is_transient`.

    Progress is a newer complete checkpoint or a later step than ever before. The run ends after two launches
    without progress before training, and after three in training, where two may be a coincidence.
    """
    last = failures[-1]
    stalled = _without_progress(failures)
    if stalled >= SAME_STEP_FAILURES and len({failure.step for failure in failures[-stalled:]}) == 1:
        return _same_step(last, stalled, rows_of_step(last.step + 1))
    if stalled >= SAME_STEP_FAILURES or (stalled >= 2 and not last.has_trained):
        where = f"step {last.step}" if last.has_trained else "the start-up"
        message = (
            f"{last.problem.message}; restarting does not help: {stalled} launches in a row did not get "
            f"beyond {where}"
        )
        return replace(last.problem, message=message)
    if len(failures) > max_restarts:
        if max_restarts == 0:
            return last.problem
        times = "1 restart" if max_restarts == 1 else f"{max_restarts} restarts"
        return replace(
            last.problem, message=f"{last.problem.message}; all {times} (`launch.max_restarts`) are used up"
        )
    return Restart(len(failures))


def _without_progress(failures: Sequence[Failure]) -> int:
    """Return the number of the last failures without progress on the same machines, including the first of
    them."""
    count, best_step, best_checkpoint, members = 0, -1, -1, tuple[int, ...]()
    for failure in failures:
        is_new = (
            failure.step > best_step
            or failure.checkpoint_step > best_checkpoint
            or failure.members != members
        )
        count, members = 1 if is_new else count + 1, failure.members
        best_step, best_checkpoint = (
            max(best_step, failure.step),
            max(best_checkpoint, failure.checkpoint_step),
        )
    return count


def _same_step(last: Failure, times: int, rows: str | None) -> Problem:
    named = f"; the rows of that step: {rows}" if rows else ""
    message = (
        f"step {last.step + 1} failed {times} times in a row{named}; the last failure: {last.problem.message}"
    )
    hint = "check those rows and the logs of the ranks" + (
        f"; {last.problem.hint}" if last.problem.hint else ""
    )
    return Problem("fails-each-time", message, last.problem.where, hint, last.problem.ways_out)
