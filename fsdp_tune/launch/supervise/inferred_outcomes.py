"""Outcomes of ranks that have left none that can be read, inferred from how the launch ended: the disk
refused them, or they were damaged afterwards."""

from __future__ import annotations

import signal
from dataclasses import replace

from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitCode, ExitReason
from fsdp_tune.launch.supervise.end_of_launch import GOOD_CODES, LaunchObservation, exit_code_of
from fsdp_tune.run.rank_files import Outcome, is_unreadable

_REASON_OF_CODE = {int(code): reason for reason, code in reversed(EXIT_CODE_OF_REASON.items())}


def with_inferred_outcomes(seen: LaunchObservation) -> tuple[LaunchObservation, list[str]]:
    """Add the outcomes of ranks that have left none, where it is known how they ended. Returns also the
    messages about that."""
    lacking = [rank for rank in seen.ranks if rank not in seen.outcomes or is_unreadable(seen.outcomes[rank])]
    found = {rank: outcome for rank in lacking if (outcome := _inferred_outcome(seen, rank)) is not None}
    if not found:
        return seen, []
    first, outcome = next(iter(found.items()))
    left = seen.outcomes.get(first)
    why = (
        left.problem.message
        if left is not None and left.problem is not None
        else f"rank {first} could leave no outcome: {seen.disk_refusal}"
    )
    more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
    saved = f", and checkpoint-{seen.saved_step} is complete" if seen.saved_step is not None else ""
    message = f"{why}{more}; it ended with exit code {outcome.exit_code} ({outcome.reason.value}){saved}"
    deaths = [death for death in seen.deaths if death.rank not in found]
    return replace(seen, outcomes={**seen.outcomes, **found}, deaths=deaths), [message]


def _inferred_outcome(seen: LaunchObservation, rank: int) -> Outcome | None:
    """Return how a rank ended; None if that is not known, or without a sign that it reached its end."""
    left = seen.outcomes.get(rank)
    if left is None and (seen.disk_refusal is None or seen.saved_step is None):
        return None
    code = 0 if seen.launcher_code == 0 else exit_code_of(seen, rank)
    code = _common_code(seen) if code is None else code
    if code is None or code not in set(ExitCode):
        return None
    reason = _REASON_OF_CODE.get(code, ExitReason.FAILED)
    step = max(seen.last_step, seen.saved_step or 0)
    if code in GOOD_CODES:
        return Outcome(code, reason, rank=rank, step=step)
    return (
        replace(left, exit_code=code, reason=reason, step=step, time=float("inf"))
        if left is not None
        else None
    )


def _common_code(seen: LaunchObservation) -> int | None:
    """Return the exit code of the other ranks if it is one of a good end, on which ranks agree, or that of a
    stop after which was saved."""
    known = [outcome for outcome in seen.outcomes.values() if not is_unreadable(outcome)]
    if known:
        return known[0].exit_code if all(outcome.exit_code in GOOD_CODES for outcome in known) else None
    if seen.signals and seen.saved_step is not None:
        return ExitCode.INTERRUPTED if seen.signals[0] == signal.SIGINT else ExitCode.PREEMPTED
    return None
