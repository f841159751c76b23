"""The line that tells, as soon as a signal arrives, at which step the run will stop."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_tune.launch.ranks import Heartbeat
from fsdp_tune.units import format_seconds

STARTING_PHASES = frozenset({"starting", "importing", "loading the model", "reading back"})
"""Here a signal ends a rank at once."""
VOTE_STEPS = 2
"""The step in progress, after which the ranks vote, and the next one, after which they read the votes (`worker.agree.StopVote`)."""
NAMED_SECONDS = 1.0
"""A heartbeat is up to a second old: the step at which a run stops is named where steps take longer than that."""


def stop_line(beats: Sequence[Heartbeat], total_steps: int | None, step_seconds: float | None) -> str:
    """Return where a run stops whose ranks get a signal now. `beats`: the last heartbeat of each rank that has written one."""
    if not beats or any(beat.phase in STARTING_PHASES for beat in beats):
        return "stopping; no step has been trained since the launch, so there is nothing to save"
    step = max(beat.step for beat in beats)
    if total_steps is not None and step + VOTE_STEPS >= total_steps:
        return f"step {total_steps} is the last one; saving a checkpoint there, then stopping"
    phases = {beat.phase for beat in beats} & {"evaluating", "saving"}
    first = f"after the {'evaluation' if 'evaluating' in phases else 'save'} in progress, " if phases else ""
    if step_seconds is not None and step_seconds < NAMED_SECONDS:
        return f"{first}saving a checkpoint within {VOTE_STEPS} more steps, then stopping"
    takes = f", about {format_seconds(VOTE_STEPS * step_seconds)}" if step_seconds is not None else ""
    return f"{first}stopping after step {step + VOTE_STEPS} ({VOTE_STEPS} more steps{takes}) and saving a checkpoint there"
