"""Judge a finished launch: one exit code, and the first problem. Pure."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitCode, ExitReason, Problem, Where
from fsdp_tune.core.gpu_failures import device_failure, device_fault
from fsdp_tune.core.library_errors import NATIVE_ENDS, PORT_TAKEN
from fsdp_tune.launch.command.ports import NO_FREE_PORT
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import STOPPED, Outcome, Verdict

KILL_WAIT_SECONDS = 5.0


GOOD_CODES = (ExitCode.OK, ExitCode.INTERRUPTED, ExitCode.PREEMPTED)


# torch/distributed/elastic/multiprocessing/api.py, SubprocessContext._poll; torch 2.11 to 2.13
_AGENT_REPORT = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")


_TRACEBACK = "Traceback (most recent call last)"
_SIGNALLED = re.compile(r"SignalException: Process (\d+) got signal: (\d+)")
"""What torchrun raises when it has received a signal."""
_OF_OTHERS = re.compile(r"Exception (ignored in|in thread)")

_LAST_LINE_OF_TRACEBACK = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?!\s)([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$",
    re.MULTILINE,
)


_MEMORY_HINT = "out of host memory? The kernel then kills a process: see `dmesg`"


_CPU_TIME_HINT = "it has used the CPU time of its limit: raise `ulimit -t`"


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
    refused_variable: Problem | None = None
    """The environment variable that a library of the launcher or of a rank refused when it was imported."""
    disk_refusal: str | None = None
    """Why the logs cannot be written, so that ranks may have left no outcome; None if they can."""
    saved_step: int | None = None
    """Step of a complete checkpoint that has all that was trained: until the last known step, or written
    after the first signal."""

    @property
    def all_ended_well(self) -> bool:
        return len(self.outcomes) == len(self.ranks) and all(
            outcome.exit_code in GOOD_CODES for outcome in self.outcomes.values()
        )


def judge(seen: LaunchObservation) -> Verdict:
    """Judge by, in order: second signal, hang, failure elsewhere, first failure, stop by signal or clock,
    finished, no outcome."""
    step = max([seen.last_step, *(outcome.step for outcome in seen.outcomes.values())])
    first = seen.outcomes.get(seen.ranks.start)
    # the second signal may arrive after everything is saved
    if seen.gave_up_saving and not seen.all_ended_well:
        message = (
            f"stopped at once by a second signal ({_names(seen.signals)}), at step {step}, without saving"
        )
        return _ended(ExitReason.FAILED, step, Problem("stopped-unsaved", message), first)
    if seen.stuck is not None:
        return _ended(ExitReason.LOST_RANK, step, seen.stuck, first)
    failure = _first_failure(seen)
    if step == 0 and failure is not None and (early := _stop_before(seen, failure)) is not None:
        return _ended(early, 0, None, first)
    if seen.elsewhere is not None and (
        failure is None or (isinstance(failure, Outcome) and failure.reason is ExitReason.LOST_RANK)
    ):
        return _ended(ExitReason.LOST_RANK, step, seen.elsewhere, first)
    if (
        not isinstance(failure, Outcome)
        and not seen.outcomes
        and (silent := _without_outcomes(seen, step)) is not None
    ):
        return silent
    if failure is not None:
        return _failed(seen, failure, step, first)
    stopped = [outcome.reason for outcome in seen.outcomes.values() if outcome.reason in STOPPED]
    if stopped:
        return _ended(
            max(stopped, key=STOPPED.index) if ExitReason.INTERRUPTED in stopped else stopped[0],
            step,
            None,
            first,
        )
    if len(seen.outcomes) == len(seen.ranks):
        return _ended(ExitReason.FINISHED, step, None, first)
    if seen.signals:
        message = (
            f"stopped by {_names(seen.signals)} at step {step}, and the ranks ended before they had saved"
        )
        return _ended(
            ExitReason.FAILED,
            step,
            Problem("stopped-unsaved", message, hint=_log_hint(seen.launcher_log)),
            first,
        )
    return _ended(ExitReason.FAILED, step, _launcher_problem(seen), first)


def _without_outcomes(seen: LaunchObservation, step: int) -> Verdict | None:
    """Judge a launch of which no rank has reported, where something outside the ranks explains that."""
    if seen.refused_variable is not None:
        return Verdict(ExitCode.USAGE, ExitReason.FAILED, step, seen.refused_variable)
    if seen.signals and step == 0:  # no handler was installed yet, and there was nothing to save
        return _ended(
            ExitReason.INTERRUPTED if seen.signals[0] == signal.SIGINT else ExitReason.PREEMPTED,
            0,
            None,
            None,
        )
    if seen.launcher_code < 0 and not seen.signals:  # the ranks were killed with their parent
        return _ended(ExitReason.LOST_RANK, step, _launcher_problem(seen), None)
    return None


def _ended(reason: ExitReason, step: int, problem: Problem | None, first: Outcome | None) -> Verdict:
    return Verdict(EXIT_CODE_OF_REASON[reason], reason, step, problem, first)


def _first_failure(seen: LaunchObservation) -> Outcome | Death | None:
    """Return the earliest failure. Ranks that only lost their peers, or that the agent ended because of
    another, sort after it."""
    reported = {
        seen.ranks.start + int(local_rank) for _, local_rank, _ in _AGENT_REPORT.findall(seen.launcher_text)
    }
    bad: list[Outcome | Death] = [
        outcome for outcome in seen.outcomes.values() if outcome.exit_code not in GOOD_CODES
    ]
    bad.extend(seen.deaths)
    if not seen.signals:  # a rank that died between two polls, or that the supervisor killed in the end
        known = {*seen.outcomes, *(death.rank for death in seen.deaths)}
        bad.extend(Death(rank, float("inf") if seen.killed_ranks else 0.0) for rank in reported - known)

    def order(end: Outcome | Death) -> tuple[bool, bool, float, int]:
        # Every rank reports the message of a failed collective action; the rank where it failed has the error
        # itself.
        is_echo = isinstance(end, Outcome) and (
            end.reason is ExitReason.LOST_RANK or bool(end.facts.get("echo"))
        )
        is_collateral = isinstance(end, Death) and bool(reported) and end.rank not in reported
        return is_echo, is_collateral, end.time, end.rank

    return min(bad, key=order, default=None)


def _stop_before(seen: LaunchObservation, failure: Outcome | Death) -> ExitReason | None:
    """Return why a rank had stopped before `failure`, which then is the end of a rank that waited for it;
    None if none had stopped.

    Before training a rank leaves at the first signal. Others may wait for it in code that runs no handler:
    they lose their peer, or their agent kills them after 30 s. In training there is something to save, so the
    same is a failure.
    """
    is_echo = isinstance(failure, Death) or failure.reason is ExitReason.LOST_RANK
    before = [
        outcome
        for outcome in seen.outcomes.values()
        if outcome.reason in STOPPED and outcome.time <= failure.time
    ]
    return min(before, key=lambda outcome: outcome.time).reason if before and is_echo else None


def _failed(seen: LaunchObservation, failure: Outcome | Death, step: int, first: Outcome | None) -> Verdict:
    if isinstance(failure, Death):
        problem, is_signal = _death_problem(seen, failure)
        reason = ExitReason.LOST_RANK if is_signal and problem.code == "rank-killed" else ExitReason.FAILED
        return _ended(reason, step, problem, first)
    known = failure.exit_code in set(ExitCode)
    code = ExitCode(failure.exit_code) if known else EXIT_CODE_OF_REASON[failure.reason]
    bare = failure.problem or Problem(
        "rank-failed", f"rank {failure.rank} ended with exit code {failure.exit_code} and no message"
    )
    hints = [*([bare.hint] if bare.hint else []), _log_hint(seen.run.rank_log(failure.rank))]
    # An input error is the same on every rank; a failure belongs to one rank and one step.
    message = (
        bare.message
        if code is ExitCode.USAGE
        else f"{bare.message} (rank {failure.rank}, step {failure.step})"
    )
    return Verdict(code, failure.reason, step, replace(bare, message=message, hint="; ".join(hints)), first)


def _death_problem(seen: LaunchObservation, death: Death) -> tuple[Problem, bool]:
    """Return the problem of a rank without an outcome, and whether a signal ended it."""
    code = exit_code_of(seen, death.rank)
    log = seen.run.rank_log(death.rank)
    if code is not None and code < 0:
        name, end = _names([-code]), native_end(seen.rank_texts.get(death.rank, ""))
        if end is not None and (fault := device_fault(end)) is not None:
            failed = device_failure(f"the GPU of rank {death.rank}", fault)
            return replace(failed, hint=f"{failed.hint}; {_log_hint(log)}"), True
        cause = {int(signal.SIGKILL): _MEMORY_HINT, int(signal.SIGXCPU): _CPU_TIME_HINT}.get(-code)
        hint = "; ".join(filter(None, (cause, _log_hint(log))))
        message = f"rank {death.rank} was killed by {name} at step {seen.last_step}" + (
            f": {end}" if end else ""
        )
        return Problem("rank-killed", message, Where(), hint), True
    own = re.search(rf"^error: rank {death.rank}: (.+)$", seen.launcher_text, re.MULTILINE)
    last = last_exception(seen.rank_texts.get(death.rank, "")) if code in (None, 1) else None  # Python's own
    exception = own[1] if own else seen.disk_refusal or last or first_exception(seen.launcher_text)
    how = "ended" if code is None else f"ended with exit code {code}"
    saved = (
        f"; checkpoint-{seen.saved_step} is complete"
        if seen.disk_refusal is not None and seen.saved_step is not None
        else ""
    )
    message = (
        f"rank {death.rank} {how} before it could report" + (f": {exception}" if exception else "") + saved
    )
    is_in_own_log = exception is not None and exception == last
    return Problem("rank-died", message, hint=_log_hint(log if is_in_own_log else seen.launcher_log)), False


def exit_code_of(seen: LaunchObservation, rank: int) -> int | None:
    """Return the exit code of a rank that the agent reported, or None."""
    for code, local_rank, _ in _AGENT_REPORT.findall(seen.launcher_text):
        if int(local_rank) == rank - seen.ranks.start:
            return int(code)
    return None


def _launcher_problem(seen: LaunchObservation) -> Problem:
    if (taken := PORT_TAKEN.search(seen.launcher_text)) is not None:
        return _port_problem(int(taken[1]), seen.launcher_log)
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


def _port_problem(port: int, log: Path) -> Problem:
    """`port` 0: the launcher wanted any that is free. That may succeed the next time."""
    if port == 0:
        message = "the launcher found no free port on this machine"
        return Problem("launcher-failed", message, hint=f"{NO_FREE_PORT}; {_log_hint(log)}")
    message = (
        f"port {port} (`launch.main_process_port`) was taken by another process when the launcher started"
    )
    return Problem(
        "port-taken",
        message,
        hint="end that process, or set another port; on one machine, `auto` takes a free one",
    )


def directory_problem(given: Path, moved: Path | None, ended: Verdict | None = None) -> Problem:
    """Return the problem of a run directory that is no longer at its path.

    `moved`: where it is now; None: it is not known. `ended`: how the launch would have ended otherwise.
    """
    if moved == given:
        message = f"{given} was gone for a while, and the ranks were stopped"
        return Problem("run-directory-gone", message, hint="start again with `--resume auto`")
    if moved is None:
        message = f"{given} is gone: the run directory was removed, or replaced by another one"
        return Problem(
            "run-directory-gone", message, hint="restore it, then start again with `--resume auto`"
        )
    message = f"{given} is gone: the run directory is now {moved}"
    if ended is not None and ended.problem is not None:
        message += f"; {ended.problem.message}"
    elif ended is not None and ended.step > 0:
        message += f", and step {ended.step} is saved there"
    hint = (
        f"move it back, or pass `--set output_dir={shlex.quote(str(moved))}`; `--resume auto` then continues"
    )
    return Problem("run-directory-gone", message, hint=hint)


def first_exception(text: str) -> str | None:
    """Return the message of the first traceback in a log; later ones are mostly the launcher's."""
    start = text.find(_TRACEBACK)
    match = _LAST_LINE_OF_TRACEBACK.search(text, start) if start >= 0 else None
    if match is not None:
        signalled = _SIGNALLED.search(match[1])
        if signalled is not None and int(signalled[2]) in set(signal.Signals):
            return f"the launcher (process {signalled[1]}) has received {_names([int(signalled[2])])}"
        return match[1].strip()
    errors = [line for line in text.splitlines() if "error:" in line]
    return errors[0].strip() if errors else None


def last_exception(text: str) -> str | None:
    """Return the message of the last traceback in the log of a rank, without those of other threads and of
    exceptions that Python ignored."""
    end = len(text)
    for each in reversed([*re.finditer(re.escape(_TRACEBACK), text)]):
        line = text.rfind("\n", 0, each.start()) + 1
        before = text[text.rfind("\n", 0, max(line - 1, 0)) + 1 : line]
        match = _LAST_LINE_OF_TRACEBACK.search(text, each.end(), end)
        if match is not None and _OF_OTHERS.search(before) is None:
            return match[1].strip()
        end = each.start()
    return None


def native_end(text: str) -> str | None:
    """Return why a process called abort(), as NCCL's watchdog or C++ wrote it last in its log; None if
    neither did."""
    found = next(filter(None, ([*pattern.finditer(text)] for pattern in NATIVE_ENDS)), None)
    return None if not found else (found[-1][1] if found[-1].re.groups else found[-1][0]).strip()


def _log_hint(path: Path) -> str:
    return f"the log is {path}"


def _names(signals: Sequence[int]) -> str:
    return ", ".join(signal.Signals(number).name for number in signals)
