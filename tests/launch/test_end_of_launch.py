"""Every way in which a launch can end, as a table of observations and verdicts."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason, Problem
from fsdp_tune.launch.supervise.end_of_launch import (
    Death,
    LaunchObservation,
    first_exception,
    judge,
    last_exception,
)
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Outcome, Verdict

RUN = RunDir(Path("/r"))
KILLED_BY_9 = "E0101 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: /usr/bin/python"
BOX = """
  warnings.warn("x")
[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 1, in <module>
[rank1]:     import nothing
[rank1]: ModuleNotFoundError: No module named 'nothing'
E0101 failed (exitcode: 1) local_rank: 1 (pid: 7) of binary: /usr/bin/python
Traceback (most recent call last):
  File "run.py", line 1, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
"""


def end(
    rank: int, reason: ExitReason, code: int, *, step: int = 9, at: float = 1.0, code_name: str | None = None
) -> Outcome:
    problem = None if code_name is None else Problem(code_name, f"{code_name} happened")
    return Outcome(code, reason, problem, rank=rank, step=step, time=at)


def good(rank: int) -> Outcome:
    return end(rank, ExitReason.FINISHED, 0)


def seen(*outcomes: Outcome, **more: Any) -> LaunchObservation:
    base = LaunchObservation(
        RUN,
        range(2),
        launcher_code=0,
        launcher_log=RUN.launcher_log,
        launcher_text="",
        outcomes={outcome.rank: outcome for outcome in outcomes},
    )
    return dataclasses.replace(base, **more)


def problem_of(ended: Verdict) -> Problem:
    assert ended.problem is not None
    return ended.problem


OOM = end(1, ExitReason.OUT_OF_MEMORY, 3, at=5.0, code_name="oom")
LOST = end(0, ExitReason.LOST_RANK, 5, at=2.0, code_name="lost")
TERM = [signal.SIGTERM]
LEFT = end(1, ExitReason.PREEMPTED, 143, step=0)
"""A rank that a signal reached before training."""
BOTH_SAVED = end(0, ExitReason.PREEMPTED, 143), end(1, ExitReason.PREEMPTED, 143)


@pytest.mark.parametrize(
    ("what", "code", "reason", "problem"),
    [
        (seen(good(0), good(1)), 0, "finished", None),
        (seen(good(0), good(1), launcher_code=1), 0, "finished", None),
        (seen(*BOTH_SAVED, signals=TERM, launcher_code=1), 143, "preempted", None),
        (
            seen(end(0, ExitReason.INTERRUPTED, 130), end(1, ExitReason.PREEMPTED, 143), launcher_code=1),
            130,
            "interrupted",
            None,
        ),
        (
            seen(end(0, ExitReason.MAX_RUNTIME, 143), end(1, ExitReason.MAX_RUNTIME, 143), launcher_code=1),
            143,
            "max_runtime",
            None,
        ),
        (seen(good(0), good(1), signals=TERM), 0, "finished", None),
        (seen(LEFT, deaths=[Death(0, 31.0)], launcher_code=1), 143, "preempted", None),
        (seen(LEFT, deaths=[Death(0, 31.0)], signals=TERM, launcher_code=1), 143, "preempted", None),
        (seen(LEFT, dataclasses.replace(LOST, step=0), launcher_code=1), 143, "preempted", None),
        (seen(LEFT, deaths=[Death(0, 0.5)], launcher_code=1), 1, "failed", "rank-died"),
        (seen(LEFT, deaths=[Death(0, 31.0)], last_step=4, launcher_code=1), 1, "failed", "rank-died"),
        (seen(OOM, LOST), 3, "out_of_memory", "oom"),
        (seen(end(0, ExitReason.NON_FINITE, 4, code_name="nan"), OOM), 4, "non_finite", "nan"),
        (seen(end(0, ExitReason.FAILED, 2, code_name="bad-input")), 2, "failed", "bad-input"),
        (seen(LOST, deaths=[Death(1, 3.0)], launcher_text=KILLED_BY_9), 5, "lost_rank", "rank-killed"),
        (seen(OOM, deaths=[Death(0, 9.0)]), 3, "out_of_memory", "oom"),
        (seen(good(0), launcher_text=KILLED_BY_9, launcher_code=1), 5, "lost_rank", "rank-killed"),
        (seen(deaths=[Death(1, 1.0)], launcher_text=BOX, launcher_code=1), 1, "failed", "rank-died"),
        (
            seen(deaths=[Death(0, 1.0), Death(1, 1.0)], launcher_text=BOX, launcher_code=1),
            1,
            "failed",
            "rank-died",
        ),
        (seen(launcher_text=BOX, launcher_code=1), 1, "failed", "rank-died"),
        (seen(signals=TERM, launcher_code=1), 143, "preempted", None),
        (seen(signals=[signal.SIGINT], launcher_code=1), 130, "interrupted", None),
        (seen(signals=TERM, deaths=[Death(0, 1.0), Death(1, 1.0)], launcher_code=1), 143, "preempted", None),
        (seen(signals=TERM, last_step=7, launcher_code=1), 1, "failed", "stopped-unsaved"),
        (seen(end(0, ExitReason.FAILED, 1, code_name="disk-full"), signals=TERM), 1, "failed", "disk-full"),
        (seen(good(0), gave_up_saving=True, signals=[*TERM, *TERM]), 1, "failed", "stopped-unsaved"),
        (
            seen(*BOTH_SAVED, gave_up_saving=True, signals=[*TERM, *TERM], launcher_code=-9),
            143,
            "preempted",
            None,
        ),
        (seen(stuck=Problem("hang", "rank 1 is silent")), 5, "lost_rank", "hang"),
        (seen(launcher_code=2, launcher_text="launch.py: error: bad"), 1, "failed", "launcher-failed"),
        (
            seen(launcher_code=-9, deaths=[Death(0, 1.0), Death(1, 1.0)], last_step=3),
            5,
            "lost_rank",
            "launcher-failed",
        ),
        (seen(launcher_code=-9), 5, "lost_rank", "launcher-failed"),
        (seen(signals=TERM, launcher_code=-15), 143, "preempted", None),
        (seen(good(0)), 1, "failed", "launcher-failed"),
    ],
)
def test_verdict_follows_from_rank_outcomes(
    what: LaunchObservation, code: int, reason: str, problem: str | None
) -> None:
    ended = judge(what)
    assert (ended.exit_code, ended.reason.value, ended.problem.code if ended.problem else None) == (
        code,
        reason,
        problem,
    )


def test_rank_that_the_supervisor_killed_does_not_hide_the_failure() -> None:
    """The failed rank had reported and was still ending when the time for it was over: the agent sees two
    ranks killed by SIGKILL."""
    both = KILLED_BY_9 + "\n" + KILLED_BY_9.replace("local_rank: 1", "local_rank: 0")
    assert (
        judge(seen(OOM, launcher_text=both, launcher_code=1, killed_ranks=True)).problem
        == judge(seen(OOM)).problem
    )


WATCHDOG = (
    "[rank1]:[E ProcessGroupNCCL.cpp:690] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
    "NumelIn=4, NumelOut=4, Timeout(ms)=5000) ran for 5001 milliseconds before timing out.\nFatal "
    "Python error: Aborted\n"
)
UNCAUGHT = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG "
    "GUID 0(default_pg) Rank 1] "
    "Process group watchdog thread terminated with exception: CUDA error: "
)
ABORTED = "E0101 api.py:1002] failed (exitcode: -6) local_rank: 1 (pid: 7) of binary: /usr/bin/python"


def killed(text: str) -> Verdict:
    return judge(seen(LOST, deaths=[Death(1, 3.0)], launcher_text=ABORTED, last_step=4, rank_texts={1: text}))


def test_rank_that_the_watchdog_ended_has_its_message() -> None:
    ended = killed(f"what():  an earlier one\n{WATCHDOG}")
    assert (ended.exit_code, problem_of(ended).code) == (5, "rank-killed")
    assert problem_of(ended).message == (
        "rank 1 was killed by SIGABRT at step 4: Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=5000) ran for 5001 "
        "milliseconds before timing out."
    )


AMD_FAULT = (
    "Memory access fault by GPU node-2 (Agent handle: 0x56468ab3bb50) on address 0x7fe55fb03000. Reason: "
    "Unknown."
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [(f"{UNCAUGHT}unspecified launch failure", "unspecified launch failure"), (AMD_FAULT, AMD_FAULT)],
    ids=["NVIDIA", "AMD"],
)
def test_rank_that_was_ended_by_an_error_of_its_device_is_a_failed_device(text: str, fault: str) -> None:
    """The watchdog, or AMD's runtime, may see the error before the thread that trains does."""
    ended = killed(f"{text}\nFatal Python error: Aborted\n")
    assert (ended.exit_code, ended.reason.value) == (1, "failed")
    assert (problem_of(ended).code, problem_of(ended).message) == (
        "device-failed",
        f"the GPU of rank 1 failed: {fault}",
    )


HSA = (
    ":0:rocdevice.cpp:2984: 4812 us: [pid:7 tid:0x7f] Callback: Queue 0x7f aborting with error : "
    "HSA_STATUS_ERROR_EXCEPTION: An HSAIL "
    "operation resulted in a hardware exception. code: 0x1016\n"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ("Fatal Python error: Aborted\n", ""),
        ("  what():  std::bad_alloc\n", ": std::bad_alloc"),
        (
            HSA,
            ": HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception. code: 0x1016",
        ),
    ],
)
def test_other_aborts_have_the_uncaught_exception(text: str, reason: str) -> None:
    assert problem_of(killed(text)).message == f"rank 1 was killed by SIGABRT at step 4{reason}"


def test_failure_names_rank_step_and_log() -> None:
    problem = problem_of(judge(seen(OOM, LOST)))
    assert problem.message == "oom happened (rank 1, step 9)"
    assert problem.hint == "the log is /r/logs/rank-0001.log"


def test_input_error_is_not_attributed_to_a_rank() -> None:
    problem = problem_of(judge(seen(end(0, ExitReason.FAILED, ExitCode.USAGE, code_name="bad-input"))))
    assert problem.message == "bad-input happened"


def test_kill_is_named_and_memory_suggested() -> None:
    problem = problem_of(judge(seen(deaths=[Death(1, 3.0)], launcher_text=KILLED_BY_9, last_step=12)))
    assert problem.message == "rank 1 was killed by SIGKILL at step 12"
    assert "out of host memory" in (problem.hint or "")


def test_limit_of_cpu_time_that_ends_a_rank_is_named() -> None:
    problem = problem_of(
        judge(
            seen(deaths=[Death(1, 3.0)], launcher_text=KILLED_BY_9.replace("-9", f"-{int(signal.SIGXCPU)}"))
        )
    )
    assert problem.message == "rank 1 was killed by SIGXCPU at step 0"
    assert (problem.hint or "").startswith(
        "it has used the CPU time of its limit: raise `ulimit -t`; the log is "
    )


@pytest.mark.parametrize(
    "deaths", [[Death(0, 1.0), Death(1, 1.0)], [Death(0, 1.0)]], ids=["both seen", "only the other seen"]
)
def test_rank_ended_by_the_agent_is_not_blamed(deaths: list[Death]) -> None:
    problem = problem_of(judge(seen(deaths=deaths, launcher_text=BOX, launcher_code=1)))
    assert problem.message.startswith("rank 1 ended with exit code 1")


def test_rank_without_outcome_is_reported_from_launcher_log() -> None:
    text = f"error: rank 1: metrics.jsonl: Read-only file system\n{BOX}"
    problem = problem_of(judge(seen(launcher_text=text, launcher_code=1)))
    assert (
        problem.message
        == "rank 1 ended with exit code 1 before it could report: metrics.jsonl: Read-only file system"
    )


def test_rank_without_outcome_has_the_last_exception_of_its_own_log() -> None:
    def of(error: str) -> str:
        return f"[rank1]: Traceback (most recent call last):\n[rank1]:   File ...\n[rank1]: {error}\n"

    both = f"{of('EOFError')}\nDuring handling of the above:\n\n{of('RuntimeError: DataLoader worker')}"
    launcher = BOX.replace("ModuleNotFoundError: No module named 'nothing'", "ChildFailedError:")
    problem = problem_of(judge(seen(launcher_text=launcher, launcher_code=1, rank_texts={1: both})))
    assert problem.message == (
        "rank 1 ended with exit code 1 before it could report: RuntimeError: DataLoader worker"
    )
    assert (problem.hint or "").endswith("rank-0001.log")


def log_of(*errors: str, before: str = "") -> str:
    start = "Traceback (most recent call last):"
    return "\n".join(f"{before}{start}\n  File ...\n{error}\n" for error in errors)


IGNORED = log_of("AssertionError: can only test a child process", before="Exception ignored in: <f>\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("a line", None),
        (log_of("ValueError: a", "ValueError: b"), "ValueError: b"),
        (log_of("ValueError: a") + IGNORED, "ValueError: a"),
        (log_of("ValueError: a") + IGNORED + IGNORED, "ValueError: a"),
        (log_of("ValueError: a", "StopIteration"), "ValueError: a"),
        (log_of("KeyError: 1", before="Exception in thread Thread-1:\n"), None),
    ],
)
def test_last_exception_is_the_one_that_may_have_ended_a_rank(text: str, found: str | None) -> None:
    assert last_exception(text) == found


def test_last_exception_of_a_long_log_takes_no_time() -> None:
    began = time.monotonic()
    assert last_exception(log_of(*["StopIteration"] * 20_000)) is None
    assert time.monotonic() - began < 5


def test_signal_to_the_launcher_is_named() -> None:
    raised = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 77 got signal: "
    text = f"Traceback (most recent call last):\n  File ...\n{raised}"
    assert first_exception(f"{text}1\n") == "the launcher (process 77) has received SIGHUP"
    assert first_exception(f"{text}99\n") == f"{raised}99"


def test_first_exception_is_of_the_rank_not_torchrun() -> None:
    assert first_exception(BOX) == "ModuleNotFoundError: No module named 'nothing'"
    assert first_exception("nothing here") is None


LISTEN = (
    'Traceback (most recent call last):\n  File "c10d_rendezvous_backend.py", line 1, in '
    "_create_tcp_store\n    store = TCPStore(\n"
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
    "address. port: {}, useIpv6: false, "
    "code: -98, name: EADDRINUSE, message: address already in use\n"
)


@pytest.mark.parametrize(
    ("port", "code", "message", "hint"),
    [
        (
            29777,
            "port-taken",
            "port 29777 (`launch.main_process_port`) was taken by another process when the launcher started",
            "`auto`",
        ),
        (
            0,
            "launcher-failed",
            "the launcher found no free port on this machine",
            "net.ipv4.ip_local_port_range",
        ),
    ],
)
def test_port_that_the_launcher_cannot_have_is_named(port: int, code: str, message: str, hint: str) -> None:
    problem = problem_of(judge(seen(launcher_text=LISTEN.format(port), launcher_code=1)))
    assert (problem.code, problem.message) == (code, message)
    assert hint in (problem.hint or "")
