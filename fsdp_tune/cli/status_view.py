"""What `status` shows: a table of the runs in a directory, and one run with its progress, files, starts and
spikes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.terminal_text import trend
from fsdp_tune.core.units import format_bytes, format_clock, format_seconds

if TYPE_CHECKING:
    from fsdp_tune.launch.run_status import MirrorStatus, RunStatus, Spike
    from fsdp_tune.run.job_files import JobStart

SHOWN_ROWS = 8  # of starts, and of a spike
STATE_ORDER = ("running", "starting or merging", "", "finished", "not started")
"""Order of the states in a table of runs; "": every other one, which are failures."""
DROPPED_FIRST = (
    "memory",
    "tokens/s/device",
    "losses",
    "ends",
    "eval losses",
    "left",
    "eval loss",
    "loss",
    "step",
)
"""Columns of a table of runs that a terminal gets only if they fit, the least important first."""


def show_runs(screen: Screen, runs: Sequence[RunStatus]) -> None:
    """Print a row for each run, by state and then by loss. A terminal gets the columns that fit, a narrow one
    short names."""
    now, ordered = time.time(), sorted(runs, key=_order)
    names = [Path(run.run_dir).name for run in ordered]
    if screen.is_narrow and len(runs) > 1:
        from fsdp_tune.pages.run_record import labels_of

        names = labels_of([Path(run.run_dir) for run in ordered])
    columns = [
        "run",
        "state",
        "step",
        "left",
        "ends",
        "loss",
        "eval loss",
        "best eval",
        "tokens/s/device",
        "memory",
    ]
    columns += ["losses", "eval losses"] if screen.draws else []
    rows: list[list[str]] = []
    for name, run in zip(names, ordered, strict=True):
        of = f"/{run.total_steps:,}" if run.total_steps else ""
        peak, evaluation = run.peak_reserved_gib or run.peak_host_gib, run.evaluation
        cells = [
            name,
            run.state,
            f"{run.step or 0:,}{of}",
            "" if run.seconds_left is None else format_seconds(run.seconds_left),
            "" if run.ends_at is None else format_clock(run.ends_at, now),
            _loss(run),
            "" if evaluation is None else _evaluated(evaluation.last),
            "" if evaluation is None or evaluation.best is None else f"{evaluation.best:.4f}",
            "" if run.tokens_per_second_per_device is None else f"{run.tokens_per_second_per_device:,.0f}",
            f"{peak:.2f} GiB" if peak else "",
        ]
        trends = [
            _drawn(screen, run.recent_losses),
            _drawn(screen, evaluation.recent if evaluation is not None else []),
        ]
        rows.append([*cells, *(trends if screen.draws else [])])
    kept = [
        at
        for at, name in enumerate(columns)
        if name in ("run", "state", "step", "loss") or any(row[at] for row in rows)
    ]
    screen.table(
        "", [columns[at] for at in kept], [[row[at] for at in kept] for row in rows], droppable=DROPPED_FIRST
    )


def _order(run: RunStatus) -> tuple[int, float, float, str]:
    """Return the position of a run among others: by state, then by its best evaluation loss, then by its
    loss; unknown ones last."""
    state = STATE_ORDER.index(run.state) if run.state in STATE_ORDER else STATE_ORDER.index("")
    best = run.evaluation.best if run.evaluation is not None else None
    return state, math.inf if best is None else best, math.inf if run.loss is None else run.loss, run.run_dir


def _loss(run: RunStatus) -> str:
    return f"{run.loss:.4f}" if run.loss is not None else "not finite" if run.recent_losses else ""


def _evaluated(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _drawn(screen: Screen, losses: Sequence[float | None]) -> str:
    """Return the sparkline of losses, oldest first; "" if there are less than two, or the terminal does not
    show any."""
    return (
        trend([math.nan if loss is None else loss for loss in losses], is_narrow=screen.is_narrow)
        if screen.draws
        else ""
    )


def _memory(run: RunStatus) -> str:
    """Return the peak memory and how it compares with the plan."""
    if run.peak_reserved_gib:
        planned = run.planned_reserved_gib
        against = (
            f", {planned:.2f} GiB planned ({run.peak_reserved_gib / planned - 1:+.0%})" if planned else ""
        )
        return f"{run.peak_reserved_gib:.2f} GiB reserved{against}"
    return f"{run.peak_host_gib:.2f} GiB of host memory" if run.peak_host_gib else ""


def show_status(screen: Screen, facts: RunStatus) -> None:
    """Print the status of a run: what decides about it first, then speed and ranks, then paths and spikes."""
    first = (
        f"; metrics, events and the end of the run are in {facts.first_machine}"
        if facts.first_machine
        else ""
    )
    screen.message(f"{facts.run_dir}: {facts.state}" + (f" ({facts.owner})" if facts.owner else "") + first)
    if facts.problem:
        screen.message(f"ended with: {facts.problem}")
    _show_progress(screen, facts)
    speed = facts.tokens_per_second_per_device
    figures = [
        *([f"{speed:,.0f} tokens/s/device"] if speed is not None else []),
        *([memory] if (memory := _memory(facts)) else []),
    ]
    if figures:
        screen.message(", ".join(figures))
    if (slow := facts.slow_rank) is not None:
        costs = "is slow: it costs" if facts.is_active else "was slow at the end: it cost"
        screen.message(f"rank {slow.rank} {costs} {slow.share:.0%} of each step ({slow.part})")
    for way in facts.ways_on:
        _show_way(screen, way)
    rows = [
        [rank.rank, rank.state, rank.phase or "", rank.step, rank.pid or "", rank.age or ""]
        for rank in facts.ranks
    ]
    if rows:
        screen.table(
            "", ["rank", "state", "phase", "step", "pid", "last heartbeat"], rows, droppable=("pid", "phase")
        )
    if facts.starts:
        _show_starts(screen, facts.starts)
    _show_files(screen, facts)
    if facts.spike is not None:
        _show_spike(screen, facts.spike)


def _show_progress(screen: Screen, facts: RunStatus) -> None:
    """Print step, time left and loss, then the evaluation loss."""
    step, total = facts.step, facts.total_steps
    age = (
        "no line yet"
        if facts.last_line_age_seconds is None
        else f"last line {format_seconds(facts.last_line_age_seconds)} ago"
    )
    ends = f", ends {format_clock(facts.ends_at, time.time())}" if facts.ends_at is not None else ""
    screen.message(
        f"step {step if step is not None else 0}{f' of {total}' if total else ''}"
        + (f", {format_seconds(facts.seconds_left)} left{ends}" if facts.seconds_left is not None else "")
        + f", {age}"
        + (f", loss {_loss(facts)}" if facts.recent_losses else "")
    )
    if drawn := _drawn(screen, facts.recent_losses):
        screen.message(f"last losses: {drawn}")
    if (found := facts.evaluation) is not None:
        best = f", best {found.best:.4f} at step {found.best_step:,}" if found.best is not None else ""
        drawn = _drawn(screen, found.recent)
        screen.message(
            f"evaluation loss {_evaluated(found.last)} at step "
            f"{found.step:,}{best}{f': {drawn}' if drawn else ''}"
        )
    for line in facts.evaluation_lines:
        screen.message(line)


def _show_files(screen: Screen, facts: RunStatus) -> None:
    """Print where the checkpoint, the mirror, the merged model and the logs are."""
    screen.message(f"newest complete checkpoint: {facts.checkpoint or 'none'}")
    for bad in facts.rejected_checkpoints:
        screen.message(f"not complete: {bad.path}: {bad.reason}")
    if facts.mirror is not None:
        _show_mirror(screen, facts.mirror)
    if facts.merged:
        screen.message(
            f"merged model{'' if facts.state == 'finished' else ' of an earlier run to its end'}: "
            f"{facts.merged}"
        )
    screen.message(f"logs: {facts.logs}")


def _show_way(screen: Screen, way: str) -> None:
    """Print a next command and what it does; on a narrow terminal below it, so that the command can be
    copied."""
    command, _, does = way.removeprefix("`").partition("` ")
    if not does or screen.wrap_width is None or len(way) + 2 <= screen.wrap_width:
        screen.message(f"  {way}", wraps=False)
        return
    screen.message(f"  {command}" if len(command) + 2 <= screen.wrap_width else command, wraps=False)
    screen.message(f"    {does}")


def _show_mirror(screen: Screen, mirror: MirrorStatus) -> None:
    newest = "no checkpoint yet" if mirror.newest_step is None else f"checkpoint-{mirror.newest_step}"
    behind = (
        f"; behind by {', '.join(mirror.behind)} ({format_bytes(mirror.left_bytes)})" if mirror.behind else ""
    )
    screen.message(f"mirror {mirror.url}: {newest}{behind}")
    if mirror.failing is not None:
        screen.message(f"the mirror fails for {mirror.failing}: {mirror.error}")
    for reason in mirror.damaged:
        screen.message(f"not mirrored: {reason}")


def _show_starts(screen: Screen, starts: Sequence[JobStart]) -> None:
    """Print the newest starts by a cluster's engine, with what each added."""
    rows: list[list[str]] = []
    for each in starts[-SHOWN_ROWS:]:
        began = time.strftime("%m-%d %H:%M", time.localtime(each.started_at))
        lasted = "" if each.ended_at is None else format_seconds(each.ended_at - each.started_at)
        steps = f"{each.first_step:,} → {'' if each.last_step is None else f'{each.last_step:,}'}"
        ended = "runs, or was killed" if each.then is None else f"{each.exit_code}, {each.then}"
        rows.append([f"{each.job}.{each.start}", began, lasted, steps, ended])
    screen.table(
        f"starts as a job ({len(starts)})", ["job", "started", "time", "saved steps", "exit code"], rows
    )


def _show_spike(screen: Screen, spike: Spike) -> None:
    """Print the newest spike, and the rows of its micro-batches with the highest losses."""
    screen.message(f"{spike.event.replace('_', ' ')} at step {spike.step:,}: {spike.message}")
    if not spike.rows:
        return
    rows = [
        [
            f"{row.file}:{row.row}",
            f"{row.tokens:,}",
            f"{row.step}/{row.rank}/{row.micro_batch}",
            "" if row.loss is None else f"{row.loss:.4f}",
        ]
        for row in spike.rows[:SHOWN_ROWS]
    ]
    screen.table("", ["row", "tokens", "step/rank/micro-batch", "loss"], rows)
    named = f"`--json` names {len(spike.rows):,}" if len(spike.rows) > SHOWN_ROWS else "all named"
    hint = "`train --skip-rows FILE` leaves rows out"
    screen.message(f"{min(len(spike.rows), SHOWN_ROWS)} of {spike.rows_total:,} rows ({named}); {hint}")
