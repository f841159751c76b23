"""`status`: the status of a run, from its files alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import verb
from fsdp_tune.core.option import Argument
from fsdp_tune.core.units import format_seconds

if TYPE_CHECKING:
    from fsdp_tune.launch.run_status import RunStatus


@verb
def status(screen: Screen, run: Annotated[Path, Argument("A run directory.", metavar="RUN")]) -> None:
    """Show the status of a run: step, age of the last line, live ranks, newest complete checkpoint, logs.

    Reads files only; the run is not affected.

    \b
    Example:
        fsdp-tune status runs/gpt2_smoke
    """
    from fsdp_tune.launch.run_status import run_status
    from fsdp_tune.run.directory import existing_run

    facts = run_status(existing_run(run))
    screen.document(facts)
    show(screen, facts)


def show(screen: Screen, facts: RunStatus) -> None:
    screen.message(f"{facts.run_dir}: {facts.state}" + (f" ({facts.owner})" if facts.owner else ""))
    step, total = facts.step, facts.total_steps
    age = "no line yet" if facts.last_line_age_seconds is None else f"last line {format_seconds(facts.last_line_age_seconds)} ago"
    screen.message(
        f"step {step if step is not None else 0}{f' of {total}' if total else ''}, {age}"
        + (f", loss {facts.loss:.4f}" if facts.loss is not None else "")
    )
    rows = [[rank.rank, rank.state, rank.phase or "", rank.step, rank.pid or "", rank.age or ""] for rank in facts.ranks]
    if rows:
        screen.table("", ["rank", "state", "phase", "step", "pid", "last heartbeat"], rows)
    screen.message(f"newest complete checkpoint: {facts.checkpoint or 'none'}")
    for bad in facts.rejected_checkpoints:
        screen.message(f"not complete: {bad.path}: {bad.reason}")
    if facts.merged:
        screen.message(f"merged model{'' if facts.state == 'finished' else ' of an earlier run to its end'}: {facts.merged}")
    if facts.problem:
        screen.message(f"ended with: {facts.problem}")
    for way in facts.ways_on:
        screen.message(f"  {way}")
    screen.message(f"logs: {facts.logs}")
