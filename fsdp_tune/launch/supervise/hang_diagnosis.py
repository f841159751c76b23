"""Diagnose a hang: where each rank of this machine is, which rank is late, and in which collective the others
wait."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from fsdp_tune.core.errors import Problem
from fsdp_tune.core.files import read_end_of_log
from fsdp_tune.core.units import format_seconds
from fsdp_tune.launch.supervise.retried_io import REFUSALS
from fsdp_tune.launch.supervise.stack_dumps import find_location, parse, waits_in
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Heartbeat, RankState

ANSWER_SECONDS = 5.0
"""Limit for all ranks to write their stacks; a rank in uninterruptible sleep never does."""


STATES = {
    psutil.STATUS_STOPPED: "stopped (SIGSTOP)",
    psutil.STATUS_TRACING_STOP: "held by a debugger",
    psutil.STATUS_DISK_SLEEP: "in uninterruptible sleep (waiting for a disk or a driver)",
}


def collect_rank_states(
    run: RunDir, ranks: Mapping[int, psutil.Process], beats: Mapping[int, Heartbeat]
) -> tuple[list[RankState], dict[int, str]]:
    """Return the standing of each rank, and its stacks as text.

    Each rank dumps its stacks on SIGUSR2: faulthandler does so from C, even while the GIL is held. A stopped
    rank is continued until it has written them; the pending signal is handled before any other work.
    """
    states = {rank: _state(process) for rank, process in ranks.items()}
    starts = {rank: _size(run.rank_log(rank)) for rank in ranks}
    for process in ranks.values():
        _ask(process)
    texts = _answers(run, starts)
    for rank, process in ranks.items():
        if states[rank] == STATES[psutil.STATUS_STOPPED]:
            _signal(process, signal.SIGSTOP)
    rank_states: list[RankState] = []
    for rank, process_state in sorted(states.items()):
        beat = beats.get(rank)
        stacks = parse(texts[rank])
        rank_states.append(
            RankState(
                rank=rank,
                step=beat.step if beat else None,
                phase=beat.phase if beat else None,
                state=process_state,
                waits_in=waits_in(stacks),
                at=find_location(stacks),
                collective=beat.collective if beat else None,
            )
        )
    return rank_states, texts


def with_launcher_state(
    rank_states: Sequence[RankState], ranks: range, launcher: psutil.Process
) -> list[RankState]:
    """Return the rank_states of all `ranks`, with the state of their launcher if it cannot run.

    torchrun's agent starts the ranks and serves the store through which they find each other, so they wait
    for it.
    """
    state = _state(launcher)
    if state not in STATES.values():
        return list(rank_states)
    known = {standing.rank: standing for standing in rank_states}
    every = [known.get(rank, RankState(rank)) for rank in ranks]
    return [replace(each, state=each.state or f"its launcher is {state}") for each in every]


def _state(process: psutil.Process) -> str | None:
    try:
        return STATES.get(process.status())
    except psutil.NoSuchProcess:
        return "gone"
    except REFUSALS:
        return None


def _ask(process: psutil.Process) -> None:
    if _dumps_on_request(process.pid):
        _signal(process, signal.SIGUSR2)
        _signal(process, signal.SIGCONT)


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(*REFUSALS):
        process.send_signal(number)


def _dumps_on_request(pid: int) -> bool:
    """Return whether the process handles SIGUSR2; a process that is still importing would die of it."""
    try:
        caught = next(
            line.split()[1]
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("SigCgt:")
        )
    except (OSError, StopIteration):
        return False
    return bool(int(caught, 16) & (1 << (signal.SIGUSR2 - 1)))


def _answers(run: RunDir, starts: Mapping[int, int]) -> dict[int, str]:
    """Return what each rank's log gained since `starts`, once all logs are quiet or time is up."""
    deadline = time.monotonic() + ANSWER_SECONDS
    sizes: dict[int, int] = {}
    while time.monotonic() < deadline:
        before, sizes = sizes, {rank: _size(run.rank_log(rank)) for rank in starts}
        if sizes == before and all(sizes[rank] > start for rank, start in starts.items()):
            break
        time.sleep(0.2)
    return {rank: _read_from(run.rank_log(rank), start) for rank, start in starts.items()}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, start: int) -> str:
    try:
        return read_end_of_log(path, start)
    except OSError:
        return ""


def late_ranks(rank_states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that the others wait for; [] if they cannot be distinguished.

    In order: ranks that cannot run; ranks that do not wait for others, all of them if none does (the others
    are on another machine); ranks that have entered the fewest collectives.
    """
    held = [standing for standing in rank_states if standing.state is not None]
    if held:
        return held
    busy = [standing for standing in rank_states if standing.waits_in is None]
    if busy:
        return busy
    known = [standing.collective for standing in rank_states if standing.collective is not None]
    groups = {each.group for each in known if not each.ended}
    if len(known) == len(rank_states) > 1 and len(groups) == 1:
        (group,) = groups
        entered = [each.entered.get(group, 0) for each in known]
        late = [
            standing for standing, number in zip(rank_states, entered, strict=True) if number == min(entered)
        ]
        return late if len(late) < len(rank_states) else []
    return []


def hang_problem(rank_states: Sequence[RankState], silent_seconds: float, report: Path) -> Problem:
    """Return the problem naming the late ranks, their step and location, and the collective that the others
    wait in."""
    late = late_ranks(rank_states)
    lead = f"no progress for {format_seconds(silent_seconds)}"
    if late:
        names = "; ".join(map(str, late[:4])) + (f" and {len(late) - 4} more" if len(late) > 4 else "")
        verb = "is" if len(late) == 1 else "are"
        is_busy = len(late) == len(rank_states) and all(standing.state is None for standing in late)
        message = (
            f"{lead}: {names} {verb} "
            f"{'in no collective' if is_busy else 'late' + _waiting(rank_states, late)}"
        )
    else:
        message = f"{lead}: {_all_wait(rank_states)}"
    hint = f"the stacks of every rank are in {report}; raise `launch.hang_timeout` to allow more time"
    return Problem("hang", message, hint=hint)


def _waiting(rank_states: Sequence[RankState], late: Sequence[RankState]) -> str:
    by_name: dict[str, list[int]] = {}
    for standing in rank_states:
        if standing not in late and standing.waits_in is not None:
            by_name.setdefault(standing.waits_in, []).append(standing.rank)
    parts = [f"{_ranks(ranks)} in {name}" for name, ranks in by_name.items()]
    return f"; waiting for it: {', '.join(parts)}" if parts else ""


def _all_wait(rank_states: Sequence[RankState]) -> str:
    if not rank_states:
        return "no rank had started"
    shown = [
        f"{standing} in {standing.waits_in or 'no collective'}"
        + (
            f" (number {standing.collective.number}, {standing.collective.name})"
            if standing.collective
            else ""
        )
        for standing in rank_states[:4]
    ]
    more = f" and {len(rank_states) - 4} more" if len(rank_states) > 4 else ""
    waits = {standing.waits_in for standing in rank_states}
    if len(waits) > 1:
        return f"the ranks wait in different collectives: {'; '.join(shown)}{more}"
    return (
        "every rank waits and none is late: suspect a rank on another machine, or the network: "
        f"{'; '.join(shown)}{more}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 4 else f"{len(ranks)} ranks"


def report_text(rank_states: Sequence[RankState], texts: Mapping[int, str], problem: Problem) -> str:
    """Return the content of RUN/logs/hang.txt."""
    lines = [problem.message, ""]
    for standing in rank_states:
        waits = f"waits in {standing.waits_in}" if standing.waits_in else "does not wait for others"
        last = standing.collective
        which = "last collective" if last and last.ended else "in the collective"
        recorded = f"; {which} {last.name}, number {last.number} of group {last.group}" if last else ""
        lines.append(f"{standing}: {waits}{recorded}")
    for rank, text in sorted(texts.items()):
        lines += [
            "",
            f"── stacks of rank {rank}",
            text.rstrip() or "no answer: it was where no signal is handled",
        ]
    return "\n".join(lines) + "\n"
