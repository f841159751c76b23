"""Judge a finished launch: one exit code, and the first problem. Pure.

Watch the ranks of one machine: processes, heartbeats, outcomes, and the first failure; and kill them.

Processes are queried at each poll. Files may be on a shared file system, so a few a second are read in turn, whatever the number of
ranks. That is enough: a heartbeat has the time since its rank last made progress, and when it matters (a rank has ended, all ranks seem
to hang, a signal was received) every file is read at once.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, NATIVE_ENDS, ExitCode, ExitReason, Problem, Where, device_failure, device_fault
from fsdp_tune.core.ownership import is_alive
from fsdp_tune.launch.supervise.hang import STATES, collect_rank_states
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import STOPPED, Heartbeat, Outcome, RankState, Verdict, disk_refusal, read_heartbeat, read_outcome

REASON_OF_SIGNAL: dict[int, ExitReason] = {
    signal.SIGINT: ExitReason.INTERRUPTED,
    signal.SIGTERM: ExitReason.PREEMPTED,
    signal.SIGHUP: ExitReason.PREEMPTED,
    signal.SIGUSR1: ExitReason.PREEMPTED,
}
KILL_WAIT_SECONDS = 5.0
GOOD_CODES = (ExitCode.OK, ExitCode.INTERRUPTED, ExitCode.PREEMPTED)
# torch/distributed/elastic/multiprocessing/api.py, SubprocessContext._poll; torch 2.11 to 2.13
_AGENT_REPORT = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_LAST_LINE_OF_TRACEBACK = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?!\s)([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$", re.MULTILINE
)
_MEMORY_HINT = "out of host memory? The kernel then kills a process: see `dmesg`"


@dataclass(frozen=True, slots=True)
class Death:
    """A rank that ended without an outcome, and when the supervisor noticed (wall clock)."""

    rank: int
    time: float


@dataclass(frozen=True, slots=True)
class LaunchObservation:
    """The supervisor's observations of a launch."""

    run: RunDir
    ranks: range
    launcher_code: int
    launcher_log: Path
    launcher_text: str
    """The part of the log that this launch wrote."""
    outcomes: Mapping[int, Outcome] = field(default_factory=dict[int, Outcome])
    deaths: Sequence[Death] = ()
    rank_texts: Mapping[int, str] = field(default_factory=dict[int, str])
    """What ranks without an outcome have written to their logs in this launch."""
    signals: Sequence[int] = ()
    """Signals received and forwarded by the supervisor, in order."""
    gave_up_saving: bool = False
    """A second signal ended the ranks at once."""
    stuck: Problem | None = None
    elsewhere: Problem | None = None
    """The failure on another machine that ended the ranks here."""
    killed_ranks: bool = False
    """The supervisor killed ranks that did not end after the failure of another, or of their own, in time."""
    last_step: int = 0
    """The largest step in any heartbeat or metrics line; 0 before the first."""
    disk_refusal: str | None = None
    """Why the logs cannot be written, so that ranks may have left no outcome; None if they can."""

    @property
    def all_ended_well(self) -> bool:
        return len(self.outcomes) == len(self.ranks) and all(outcome.exit_code in GOOD_CODES for outcome in self.outcomes.values())


def judge(seen: LaunchObservation) -> Verdict:
    """Judge by, in order: second signal, hang, failure elsewhere, first failure, stop by signal or clock, finished, no outcome."""
    step = max([seen.last_step, *(outcome.step for outcome in seen.outcomes.values())])
    first = seen.outcomes.get(seen.ranks.start)
    if seen.gave_up_saving and not seen.all_ended_well:  # the second signal may arrive after everything is saved
        message = f"stopped at once by a second signal ({_names(seen.signals)}), at step {step}, without saving"
        return _ended(ExitReason.FAILED, step, Problem("stopped-unsaved", message), first)
    if seen.stuck is not None:
        return _ended(ExitReason.LOST_RANK, step, seen.stuck, first)
    failure = _first_failure(seen)
    if step == 0 and failure is not None and (early := _stop_before(seen, failure)) is not None:
        return _ended(early, 0, None, first)
    if seen.elsewhere is not None and (failure is None or (isinstance(failure, Outcome) and failure.reason is ExitReason.LOST_RANK)):
        return _ended(ExitReason.LOST_RANK, step, seen.elsewhere, first)
    if not isinstance(failure, Outcome) and not seen.outcomes:
        if seen.signals and step == 0:  # no handler was installed yet, and there was nothing to save
            return _ended(REASON_OF_SIGNAL[seen.signals[0]], 0, None, first)
        if seen.launcher_code < 0 and not seen.signals:  # the ranks were killed with their parent
            return _ended(ExitReason.LOST_RANK, step, _launcher_problem(seen), first)
    if failure is not None:
        return _failed(seen, failure, step, first)
    stopped = [outcome.reason for outcome in seen.outcomes.values() if outcome.reason in STOPPED]
    if stopped:
        return _ended(max(stopped, key=STOPPED.index) if ExitReason.INTERRUPTED in stopped else stopped[0], step, None, first)
    if len(seen.outcomes) == len(seen.ranks):
        return _ended(ExitReason.FINISHED, step, None, first)
    if seen.signals:
        message = f"stopped by {_names(seen.signals)} at step {step}, and the ranks ended before they had saved"
        return _ended(ExitReason.FAILED, step, Problem("stopped-unsaved", message, hint=_log_hint(seen.launcher_log)), first)
    return _ended(ExitReason.FAILED, step, _launcher_problem(seen), first)


def _ended(reason: ExitReason, step: int, problem: Problem | None, first: Outcome | None) -> Verdict:
    return Verdict(EXIT_CODE_OF_REASON[reason], reason, step, problem, first)


def _first_failure(seen: LaunchObservation) -> Outcome | Death | None:
    """Return the earliest failure. Ranks that only lost their peers, or that the agent ended because of another, sort after it."""
    reported = {seen.ranks.start + int(local_rank) for _, local_rank, _ in _AGENT_REPORT.findall(seen.launcher_text)}
    bad: list[Outcome | Death] = [outcome for outcome in seen.outcomes.values() if outcome.exit_code not in GOOD_CODES]
    bad.extend(seen.deaths)
    if not seen.signals:  # a rank that died between two polls, or that the supervisor killed in the end
        known = {*seen.outcomes, *(death.rank for death in seen.deaths)}
        bad.extend(Death(rank, float("inf") if seen.killed_ranks else 0.0) for rank in reported - known)

    def order(end: Outcome | Death) -> tuple[bool, bool, float, int]:
        # Every rank reports the message of a failed collective action; the rank where it failed has the error itself.
        is_echo = isinstance(end, Outcome) and (end.reason is ExitReason.LOST_RANK or bool(end.facts.get("echo")))
        is_collateral = isinstance(end, Death) and bool(reported) and end.rank not in reported
        return is_echo, is_collateral, end.time, end.rank

    return min(bad, key=order, default=None)


def _stop_before(seen: LaunchObservation, failure: Outcome | Death) -> ExitReason | None:
    """Return why a rank had stopped before `failure`, which then is the end of a rank that waited for it; None if none had stopped.

    Before training a rank leaves at the first signal. Others may wait for it in code that runs no handler: they lose their peer, or
    their agent kills them after 30 s. In training there is something to save, so the same is a failure.
    """
    is_echo = isinstance(failure, Death) or failure.reason is ExitReason.LOST_RANK
    before = [outcome for outcome in seen.outcomes.values() if outcome.reason in STOPPED and outcome.time <= failure.time]
    return min(before, key=lambda outcome: outcome.time).reason if before and is_echo else None


def _failed(seen: LaunchObservation, failure: Outcome | Death, step: int, first: Outcome | None) -> Verdict:
    if isinstance(failure, Death):
        problem, is_signal = _death_problem(seen, failure)
        reason = ExitReason.LOST_RANK if is_signal and problem.code == "rank-killed" else ExitReason.FAILED
        return _ended(reason, step, problem, first)
    known = failure.exit_code in set(ExitCode)
    code = ExitCode(failure.exit_code) if known else EXIT_CODE_OF_REASON[failure.reason]
    bare = failure.problem or Problem("rank-failed", f"rank {failure.rank} ended with exit code {failure.exit_code} and no message")
    hints = [*([bare.hint] if bare.hint else []), _log_hint(seen.run.rank_log(failure.rank))]
    # An input error is the same on every rank; a failure belongs to one rank and one step.
    message = bare.message if code is ExitCode.USAGE else f"{bare.message} (rank {failure.rank}, step {failure.step})"
    return Verdict(code, failure.reason, step, replace(bare, message=message, hint="; ".join(hints)), first)


def _death_problem(seen: LaunchObservation, death: Death) -> tuple[Problem, bool]:
    """Return the problem of a rank without an outcome, and whether a signal ended it."""
    code = _exit_code_of(seen, death.rank)
    log = seen.run.rank_log(death.rank)
    if code is not None and code < 0:
        name, end = _names([-code]), native_end(seen.rank_texts.get(death.rank, ""))
        if end is not None and (fault := device_fault(end)) is not None:
            failed = device_failure(f"the GPU of rank {death.rank}", fault)
            return replace(failed, hint=f"{failed.hint}; {_log_hint(log)}"), True
        hint = f"{_MEMORY_HINT}; {_log_hint(log)}" if -code == signal.SIGKILL else _log_hint(log)
        message = f"rank {death.rank} was killed by {name} at step {seen.last_step}" + (f": {end}" if end else "")
        return Problem("rank-killed", message, Where(), hint), True
    own = re.search(rf"^error: rank {death.rank}: (.+)$", seen.launcher_text, re.MULTILINE)
    exception = own[1] if own else seen.disk_refusal or first_exception(seen.launcher_text)
    how = "ended" if code is None else f"ended with exit code {code}"
    message = f"rank {death.rank} {how} before it could report" + (f": {exception}" if exception else "")
    return Problem("rank-died", message, hint=_log_hint(seen.launcher_log)), False


def _exit_code_of(seen: LaunchObservation, rank: int) -> int | None:
    """Return the exit code of a rank that the agent reported, or None."""
    for code, local_rank, _ in _AGENT_REPORT.findall(seen.launcher_text):
        if int(local_rank) == rank - seen.ranks.start:
            return int(code)
    return None


def _launcher_problem(seen: LaunchObservation) -> Problem:
    exception = first_exception(seen.launcher_text)
    tail = f": {exception}" if exception else ""
    missing = sorted(set(seen.ranks) - set(seen.outcomes))
    if seen.launcher_code < 0:
        message = f"the launcher was killed by {_names([-seen.launcher_code])}"
    elif seen.launcher_code:
        message = f"the launcher ended with exit code {seen.launcher_code}{tail}"
    else:
        message = f"the launcher ended, and rank {missing[0]} reported no outcome{tail}"
    return Problem("launcher-failed", message, hint=_log_hint(seen.launcher_log))


def first_exception(text: str) -> str | None:
    """Return the message of the first traceback in a log; later ones are mostly the launcher's."""
    start = text.find("Traceback (most recent call last)")
    match = _LAST_LINE_OF_TRACEBACK.search(text, start) if start >= 0 else None
    if match is not None:
        return match[1].strip()
    errors = [line for line in text.splitlines() if "error:" in line]
    return errors[0].strip() if errors else None


def native_end(text: str) -> str | None:
    """Return why a process called abort(), as NCCL's watchdog or C++ wrote it last in its log; None if neither did."""
    found = next(filter(None, ([*pattern.finditer(text)] for pattern in NATIVE_ENDS)), None)
    return None if not found else (found[-1][1] if found[-1].re.groups else found[-1][0]).strip()


def _log_hint(path: Path) -> str:
    return f"the log is {path}"


def _names(signals: Sequence[int]) -> str:
    return ", ".join(signal.Signals(number).name for number in signals)


UNSEEN_SECONDS = 10.0
"""The agent starts its ranks together. A rank that is not seen this long after another one started and ended between two polls."""
READS_PER_SECOND = 4.0
"""Heartbeats read per second, over all ranks of this machine."""
SLOWEST_ROUND_SECONDS = 10.0
"""Limit for a round over very many ranks."""
QUIET_SECONDS = 60.0
"""After so long without progress of its ranks a machine reports that to the others; half of `launch.hang_timeout` if that is less."""
ALL_ROUND_SECONDS = 2.0
"""Least time between two full reads of the heartbeats of this machine, while its ranks are silent."""
ENDED_PHASES = ("finished", "failed")
UNWRITTEN_SECONDS = 5.0
"""After so long without any new heartbeat the watch tries whether they can be written, and again each `TRIAL_SECONDS`."""
TRIAL_SECONDS = 1.0


class HeartbeatTimes:
    """The last heartbeat of one rank, in seconds that this process lived through (`core.clocks`)."""

    def __init__(self, now: float) -> None:
        self.beat: Heartbeat | None = None
        self.progressed_at = self.written_at = now
        """When the rank last made progress and when its file last changed, at the latest when that was read."""

    def read(self, run: RunDir, rank: int, launch: str | None) -> None:
        beat, now = read_heartbeat(run, rank, launch), LIVED.now()
        if beat is None:
            return
        if self.beat is None or beat.time != self.beat.time:
            self.written_at = now
        self.beat, self.progressed_at = beat, LIVED.at(beat.progressed_at)


class RankWatch:
    """The ranks of one machine. Call `poll` a few times a second. Times are seconds that this process lived through (`core.clocks`)."""

    def __init__(self, run: RunDir, ranks: range, launch: str | None = None) -> None:
        """`launch`: files of ranks of another launch are left out; None: there can be none."""
        now = LIVED.now()
        self._run, self._launch = run, launch
        self._ranks = ranks
        self._signs = {rank: HeartbeatTimes(now) for rank in ranks}
        self._turn, self._read_at = 0, now
        self._all_read_at = float("-inf")
        self._ended: dict[int, float] = {}
        self._outcome_seen: dict[int, float] = {}
        self._first_seen: float | None = None
        self._tried_at = self._refused_at = float("-inf")
        self.disk_refusal: str | None = None
        """Why heartbeats cannot be written at present: a full or read-only disk. Silence counts from the end of that."""
        self.processes: dict[int, psutil.Process] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.deaths: list[Death] = []
        self.failed_at: float | None = None
        self.expects_deaths = False
        """Set before terminating processes, so that their exits are not reported as failures."""

    @property
    def first_beat(self) -> Heartbeat | None:
        """The last heartbeat of the first rank of this machine."""
        return self._signs[self._ranks.start].beat

    def poll(self, launcher_pid: int) -> None:
        now = LIVED.now()
        if len(self.processes) < len(self._ranks):
            self.processes.update(find_ranks(launcher_pid, self._ranks))
            if self.processes and self._first_seen is None:
                self._first_seen = now
        self._read_some(now)
        self._try_disk(now)
        for rank in self._ranks:
            if rank not in self._ended and self._is_gone(rank, now):
                self._ended[rank] = now
                self._read(rank)  # after it has ended: it writes its outcome last
                if not self.expects_deaths and rank not in self.outcomes:
                    self.deaths.append(Death(rank, time.time()))
        if self.failed_at is None and (self.deaths or any(outcome.exit_code not in GOOD_CODES for outcome in self.outcomes.values())):
            self.failed_at = now
            self.read_all()

    def _try_disk(self, now: float) -> None:
        """Without heartbeats, learn whether the disk refuses them: ranks that train on a full disk must not be taken for silent ones."""
        if now - max(sign.written_at for sign in self._signs.values()) <= UNWRITTEN_SECONDS:
            self.disk_refusal = None
        elif now - self._tried_at >= TRIAL_SECONDS:
            self._tried_at, self.disk_refusal = now, disk_refusal(self._run)
            self._refused_at = now if self.disk_refusal is not None else self._refused_at

    def _read_some(self, now: float) -> None:
        """Read the next few ranks' files, as many as are due since the last call."""
        per_second = max(READS_PER_SECOND, len(self._ranks) / SLOWEST_ROUND_SECONDS)
        due = int((now - self._read_at) * per_second)
        self._read_at += due / per_second
        for _ in range(min(due, len(self._ranks))):
            self._read(self._ranks[self._turn])
            self._turn = (self._turn + 1) % len(self._ranks)

    def _read(self, rank: int) -> None:
        """Read one rank's heartbeat, and its outcome where there may be one."""
        sign = self._signs[rank]
        sign.read(self._run, rank, self._launch)
        if rank in self._ended or sign.beat is None or sign.beat.phase in ENDED_PHASES:
            self._read_outcome(rank)

    def _read_outcome(self, rank: int) -> None:
        if rank not in self.outcomes:
            outcome = read_outcome(self._run, rank, self._launch)
            if outcome is not None:
                self.outcomes[rank] = outcome
                self._outcome_seen[rank] = LIVED.now()

    def read_all(self) -> None:
        """Read the files of every rank of this machine now."""
        self._all_read_at = LIVED.now()
        for rank in self._ranks:
            self._read(rank)
            self._read_outcome(rank)

    def _is_gone(self, rank: int, now: float) -> bool:
        process = self.processes.get(rank)
        return not is_alive(process) if process is not None else self._was_missed(rank, now)

    def _was_missed(self, rank: int, now: float) -> bool:
        return self._first_seen is not None and now - self._first_seen > UNSEEN_SECONDS and self._signs[rank].beat is None

    @property
    def beats(self) -> dict[int, Heartbeat]:
        """The last heartbeat of each rank that has written one."""
        return {rank: sign.beat for rank, sign in self._signs.items() if sign.beat is not None}

    @property
    def last_step(self) -> int:
        """The largest step in any heartbeat; 0 before the first."""
        return max((beat.step for beat in self.beats.values()), default=0)

    @property
    def alive(self) -> list[psutil.Process]:
        return [process for process in self.processes.values() if is_alive(process)]

    @property
    def all_ended_at(self) -> float | None:
        """When the last rank ended; None while one runs or has not been seen."""
        return max(self._ended.values()) if len(self._ended) == len(self._ranks) else None

    def lingering(self, seconds: float) -> list[psutil.Process]:
        """Return the ranks that wrote their outcome so long ago and are still alive."""
        now = LIVED.now()
        return [
            self.processes[rank]
            for rank, seen in self._outcome_seen.items()
            if rank in self.processes and now - seen > seconds and is_alive(self.processes[rank])
        ]

    def is_quiet(self, limit_seconds: float) -> bool:
        """Return whether the ranks of this machine have made no progress for a while, as it reports to the others."""
        return self.silent_seconds > min(limit_seconds / 2, QUIET_SECONDS)

    def silence(self, limit_seconds: float, *, others_are_quiet: bool) -> float | None:
        """Return the seconds without progress if beyond the limit and all other machines are quiet, else None.

        A hang stops every rank: a hanging rank stops the others at their next collective, and ranks that wait for one that makes progress
        (such as writing a checkpoint to a slow disk) do not hang. A rank whose process cannot run writes no heartbeat and counts alone.
        """
        if self.failed_at is not None or all(rank in self.outcomes or rank in self._ended for rank in self._ranks):
            return None
        if self.silent_seconds <= limit_seconds:
            return self._frozen_seconds(limit_seconds)
        if not others_are_quiet or LIVED.now() - self._all_read_at < ALL_ROUND_SECONDS:
            return None
        self.read_all()
        silent_seconds = self.silent_seconds
        return silent_seconds if silent_seconds > limit_seconds else None

    @property
    def silent_seconds(self) -> float:
        """Seconds since any rank of this machine made progress or ended, or could not have reported that."""
        progressed = (sign.progressed_at for sign in self._signs.values())
        return LIVED.now() - max([*progressed, *self._ended.values(), *self._outcome_seen.values(), self._refused_at])

    def _frozen_seconds(self, limit_seconds: float) -> float | None:
        """Return the seconds since the last heartbeat of a rank that is stopped or in the kernel, if beyond the limit."""
        now = LIVED.now()
        for rank, sign in self._signs.items():
            if rank not in self._ended and rank not in self.outcomes and now - sign.written_at > limit_seconds:
                self._read(rank)
                process = self.processes.get(rank)
                if now - sign.written_at > limit_seconds and process is not None and _status(process) in STATES:
                    return now - sign.written_at
        return None

    def stacks(self) -> tuple[list[RankState], dict[int, str]]:
        """Return the standing and the stacks of every rank of this machine that still runs."""
        self.read_all()
        there = {rank: process for rank, process in self.processes.items() if is_alive(process) and rank not in self.outcomes}
        return collect_rank_states(self._run, there, self.beats)


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.Error:
        return None


def find_ranks(launcher_pid: int, ranks: range) -> dict[int, psutil.Process]:
    """Return global rank → process for the launcher's children, which have RANK from torchrun's agent."""
    found: dict[int, psutil.Process] = {}
    try:
        children = psutil.Process(launcher_pid).children()
    except psutil.NoSuchProcess:
        return found
    for child in children:
        try:
            rank = int(child.environ().get("RANK", "-1"))
        except (psutil.Error, ValueError):  # just gone, or not yet past exec
            continue
        if rank in ranks:
            found[rank] = child
    return found


def kill_for_good(processes: Iterable[psutil.Process]) -> list[int]:
    """Send SIGKILL to each process, its descendants and its process group. Returns the pids that did not die.

    A process in uninterruptible sleep (D state: a dead file server, a wedged driver) outlives SIGKILL.
    """
    everyone: set[psutil.Process] = set()
    for process in processes:
        everyone.add(process)
        try:
            everyone.update(process.children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    for process in everyone:
        _kill(process)
    deadline = time.monotonic() + KILL_WAIT_SECONDS
    while (alive := [process for process in everyone if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(process.pid for process in alive)


def _kill(process: psutil.Process) -> None:
    try:
        if process.is_running() and os.getpgid(process.pid) == process.pid:  # each rank leads its own session
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
        pass
