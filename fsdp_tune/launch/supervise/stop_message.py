"""The message, printed as soon as a signal is received, of where the run will stop."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_tune.core.units import format_seconds
from fsdp_tune.run.rank_files import Heartbeat

STARTING_PHASES = frozenset({"starting", "importing", "loading the model", "reading back"})
"""Phases in which a signal ends a rank at once."""


VOTE_STEPS = 2
"""Ranks vote after the step in progress and read the votes after the next one
(`worker.agreement.StopVote`)."""


NAMED_SECONDS = 1.0
"""The step of the stop is named if steps are known to take longer than this: a heartbeat is up to a second
old."""


def stop_line(beats: Sequence[Heartbeat], total_steps: int | None, step_seconds: float | None) -> str:
    """Return the message of where the run stops after a signal. `beats`: the last heartbeat of each rank that
    has written one."""
    if not beats or any(beat.phase in STARTING_PHASES for beat in beats):
        return "stopping; no step has been trained in this launch, so there is nothing to save"
    step = max(beat.step for beat in beats)
    if total_steps is not None and step + VOTE_STEPS >= total_steps:
        return f"step {total_steps} is the last one; saving a checkpoint there, then stopping"
    phases = {beat.phase for beat in beats} & {"evaluating", "saving"}
    first = f"after the {'evaluation' if 'evaluating' in phases else 'save'} in progress, " if phases else ""
    if step_seconds is None or step_seconds < NAMED_SECONDS:
        return f"{first}saving a checkpoint within {VOTE_STEPS} more steps, then stopping"
    takes = format_seconds(VOTE_STEPS * step_seconds)
    return (
        f"{first}stopping after step {step + VOTE_STEPS} ({VOTE_STEPS} more steps, about {takes}) and "
        "saving a checkpoint there"
    )
