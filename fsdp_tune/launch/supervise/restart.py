"""Whether a failed launch is started again: by what failed, how often, and whether anything was gained meanwhile. Pure.

The supervisor starts the whole `accelerate launch` again. torchrun's own `--max_restarts` is left at 0, because its agent
(torch/distributed/elastic/agent/server/api.py, `_invoke_run`) restarts after any exit code, those of "saved and stopped",
"out of memory" and "non-finite" included; it counts restarts but not what they gained; it ends the other ranks by SIGTERM,
which ours take as "save, then stop"; and a static rendezvous never tells the agents of other machines. A new launch has a
new agent and a new store, so none of the store's old keys is met again (the reason why such restarts fail with torchrun).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_tune.core.errors import ExitReason, Problem
from fsdp_tune.launch.supervise.verdict import Ended

# What another attempt may not meet again: a process that died, a peer that was lost, a hang, an exception of a library.
# Everything else is a check of ours that would fail the same way, a mistake of the user's, or a wish to stop.
TRANSIENT_CODES = frozenset(
    {
        "failed",
        "hang",
        "host-out-of-memory",
        "launcher-failed",
        "loader-died",
        "lost-rank",
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
    """One launch that ended badly."""

    problem: Problem
    step: int
    """The last step that was done."""
    checkpoint_step: int
    """Of the newest complete checkpoint afterwards; 0 for none."""
    has_trained: bool
    """Whether it came as far as its first step."""


@dataclass(frozen=True, slots=True)
class Restart:
    number: int
    """1 for the first one."""


def is_transient(ended: Ended, signals: Sequence[int]) -> bool:
    """Whether the same command may well succeed where it failed. A signal means that somebody wanted the run to stop."""
    return ended.problem is not None and not signals and ended.reason in TRANSIENT_REASONS and ended.problem.code in TRANSIENT_CODES


def decide(failures: Sequence[Failure], max_restarts: int, rows_of_step: Callable[[int], str | None]) -> Restart | Problem:
    """The next restart, or the problem that the run ends in. `failures`: all of this command, oldest first; each `is_transient`.

    Progress is a newer complete checkpoint or a later step than ever before. Twice without progress is stopped where the
    ranks never came to train; in training it takes three, since two may be chance.
    """
    last = failures[-1]
    stalled = _without_progress(failures)
    if stalled >= SAME_STEP_FAILURES and len({failure.step for failure in failures[-stalled:]}) == 1:
        return _same_step(last, stalled, rows_of_step(last.step + 1))
    if stalled >= SAME_STEP_FAILURES or (stalled >= 2 and not last.has_trained):
        where = f"step {last.step}" if last.has_trained else "the start-up"
        message = f"{last.problem.message}; restarting does not help: {stalled} launches in a row got no further than {where}"
        return replace(last.problem, message=message)
    if len(failures) > max_restarts:
        if max_restarts == 0:
            return last.problem
        times = "1 restart" if max_restarts == 1 else f"{max_restarts} restarts"
        return replace(last.problem, message=f"{last.problem.message}; all {times} (`launch.max_restarts`) are used up")
    return Restart(len(failures))


def _without_progress(failures: Sequence[Failure]) -> int:
    """How many of the last failures, the first of them included, ended where an earlier one did or before."""
    count, best_step, best_checkpoint = 0, -1, -1
    for failure in failures:
        count = 1 if failure.step > best_step or failure.checkpoint_step > best_checkpoint else count + 1
        best_step, best_checkpoint = max(best_step, failure.step), max(best_checkpoint, failure.checkpoint_step)
    return count


def _same_step(last: Failure, times: int, rows: str | None) -> Problem:
    named = f"; the rows of that step: {rows}" if rows else ""
    message = f"the run fails in step {last.step + 1} each time ({times} times in a row){named}; the last failure: {last.problem.message}"
    hint = "look at those rows, and at the ranks' logs" + (f"; {last.problem.hint}" if last.problem.hint else "")
    return Problem("fails-each-time", message, last.problem.where, hint, last.problem.ways_out)
