"""Hang reports, computed from stack dumps and heartbeats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.launch.supervise.hang_diagnosis import hang_problem, late_ranks, report_text
from fsdp_tune.launch.supervise.stack_dumps import find_location, main_thread, parse, waits_in
from fsdp_tune.run.rank_files import Collective, RankState

TORCH = "/venv/lib/python3.11/site-packages/torch"
ENTRY = (
    '  File "<frozen runpy>", line 88 in _run_code',
    '  File "<frozen runpy>", line 198 in _run_module_as_main',
)


def dump(*threads: tuple[str, ...]) -> str:
    """As faulthandler writes it: the main thread last."""
    heads = ["Thread 0x00007f97e8a186c0 (most recent call first):"] * (len(threads) - 1)
    heads.append("Current thread 0x00007f1dd7058b80 [python] (most recent call first):")
    return "\n\n".join("\n".join([head, *frames]) for head, frames in zip(heads, threads, strict=True))


def frame(file: str, function: str, line: int = 7) -> str:
    return f'  File "{file}", line {line} in {function}'


HEARTBEAT = (
    frame("/usr/lib/python3.11/threading.py", "wait"),
    frame("/x/fsdp_tune/worker/observe/heartbeat.py", "_keep_beating"),
)
ALL_REDUCE = (
    frame(f"{TORCH}/distributed/distributed_c10d.py", "all_reduce", 3252),
    frame(f"{TORCH}/distributed/c10d_logger.py", "wrapper"),
    frame("/x/fsdp_tune/worker/trainer.py", "get_batch_samples", 138),
    *ENTRY,
)
FSDP_WAIT = (
    frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather_copy_out"),
    frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "wait_for_unshard"),
    frame(f"{TORCH}/nn/modules/module.py", "_call_impl"),
    *ENTRY,
)
VOTE = (
    frame("/x/fsdp_tune/worker/agreement.py", "exchange"),
    frame("/x/fsdp_tune/worker/callbacks.py", "on_step_end"),
    *ENTRY,
)
COMPUTES = (
    frame(f"{TORCH}/nn/modules/linear.py", "forward"),
    frame("/x/fsdp_tune/worker/trainer.py", "training_step", 150),
    *ENTRY,
)
ENGINE = (
    frame(f"{TORCH}/autograd/graph.py", "_engine_run_backward"),
    frame("/x/fsdp_tune/worker/trainer.py", "_forward_backward"),
    *ENTRY,
)
WRITES = (
    frame("/x/fsdp_tune/worker/checkpoint/storage.py", "write"),
    frame(f"{TORCH}/distributed/checkpoint/filesystem.py", "write"),
    *ENTRY,
)
HOOK = (
    frame(f"{TORCH}/distributed/distributed_c10d.py", "reduce_scatter_tensor"),
    frame(f"{TORCH}/x.py", "post_backward"),
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (dump(HEARTBEAT, ALL_REDUCE), "all_reduce"),
        (dump(HEARTBEAT, FSDP_WAIT), "foreach_all_gather_copy_out"),
        (dump(HEARTBEAT, VOTE), "the vote on stopping"),
        (dump(HEARTBEAT, COMPUTES), None),
        (dump(HOOK, ENGINE), "reduce_scatter_tensor"),
        (dump(HEARTBEAT, ENGINE), None),
        (dump(HEARTBEAT, WRITES), None),
        ("", None),
    ],
    ids=[
        "collective",
        "FSDP's own wait",
        "vote",
        "computes",
        "hook of the backward",
        "backward without a hook",
        "writes a shard",
        "no answer",
    ],
)
def test_reported_collective_is_that_of_main_thread(text: str, name: str | None) -> None:
    assert waits_in(parse(text)) == name


def test_rank_waiting_for_background_save_reports_its_location() -> None:
    checkpoint, threads = "/x/fsdp_tune/worker/checkpoint/save.py", "/usr/lib/python3.11/threading.py"
    joins = (
        frame(threads, "join"),
        frame(checkpoint, "wait"),
        frame("/x/fsdp_tune/worker/setup.py", "close"),
        *ENTRY,
    )
    base = (frame(checkpoint, "_write_reporting"), frame(checkpoint, "write"), frame(threads, "_bootstrap"))
    writes, waits = (
        (*top, *base) for top in ((frame("/x/fsdp_tune/core/atomic.py", "write"),), ALL_REDUCE[:2])
    )
    late, waiting = parse(dump(HEARTBEAT, writes, joins)), parse(dump(HEARTBEAT, waits, joins))
    assert (waits_in(late), waits_in(waiting)) == (None, "all_reduce")
    assert str(find_location(late)).startswith("fsdp_tune/core/atomic.py:7 in write")


def test_background_save_is_not_reported_as_the_wait_of_a_rank() -> None:
    saving = (
        frame(f"{TORCH}/distributed/distributed_c10d.py", "all_gather_object"),
        frame("/usr/lib/python3.11/threading.py", "run"),
    )
    assert waits_in(parse(dump(saving, COMPUTES))) is None


def test_location_has_innermost_call_and_own_code() -> None:
    assert find_location(parse(dump(HEARTBEAT, COMPUTES))) == (
        f"{TORCH}/nn/modules/linear.py:7 in forward, called from fsdp_tune/worker/trainer.py:150 in "
        "training_step"
    )
    assert find_location(parse(dump(VOTE))) == "fsdp_tune/worker/agreement.py:7 in exchange"
    assert find_location([]) is None


def test_other_log_lines_are_not_stacks() -> None:
    stacks = parse(
        'Traceback (most recent call last):\n  File "a.py", line 1, in '
        f"<module>\nwarning\n{dump(HEARTBEAT, COMPUTES)}\nmore"
    )
    assert len(stacks) == 2
    assert main_thread(stacks)[0].function == "forward"


def standing(rank: int, **more: Any) -> RankState:
    return replace(RankState(rank, step=5, phase="training", waits_in="all_reduce"), **more)


def recorded(number: int, *, ended: bool = False, group: str = "0") -> Collective:
    return Collective("nccl:all_gather", number, group, ended, {group: number})


@pytest.mark.parametrize(
    ("rank_states", "late"),
    [
        ([standing(0), standing(1, state="stopped (SIGSTOP)"), standing(2, waits_in=None)], [1]),
        ([standing(0), standing(1, waits_in=None), standing(2)], [1]),
        ([standing(0, waits_in=None), standing(1, waits_in=None)], [0, 1]),
        ([standing(0), standing(1)], []),
        ([standing(0, collective=recorded(57)), standing(1, collective=recorded(56, ended=True))], [1]),
        ([standing(0, collective=recorded(57)), standing(1, collective=recorded(57))], []),
        ([standing(0, collective=recorded(57)), standing(1)], []),
        ([standing(0, collective=recorded(57)), standing(1, collective=recorded(3, group="1"))], []),
    ],
    ids=[
        "stopped",
        "computes",
        "all compute",
        "all wait",
        "a collective behind",
        "same collective",
        "unknown",
        "other groups",
    ],
)
def test_late_rank_is_distinguished_from_waiting_ranks(rank_states: list[RankState], late: list[int]) -> None:
    assert [each.rank for each in late_ranks(rank_states)] == late


def test_message_names_rank_step_location_and_where_others_wait() -> None:
    late = standing(3, waits_in=None, step=128, phase="optimizer step", at="optim.py:1 in step")
    problem = hang_problem([*(standing(rank) for rank in range(3)), late], 1800.0, Path("/r/logs/hang.txt"))
    assert problem.message == (
        "no progress for 30m00s: rank 3 (step 128, `optimizer step`, at optim.py:1 in step) is late; "
        "waiting for it: ranks 0, 1, 2 in all_reduce"
    )
    assert "/r/logs/hang.txt" in (problem.hint or "")


def test_ranks_in_different_collectives_are_reported_with_sequence_numbers() -> None:
    one, other = (
        standing(0, collective=recorded(57)),
        standing(1, waits_in="barrier", collective=recorded(57)),
    )
    message = hang_problem([one, other], 60.0, Path("x")).message
    assert (
        "the ranks wait in different collectives: rank 0 (step 5, `training`) in all_reduce (number "
        "57, nccl:all_gather); rank 1" in message
    )


def test_network_is_named_if_no_rank_is_late() -> None:
    assert (
        "a rank on another machine, or the network"
        in hang_problem([standing(0), standing(1)], 60.0, Path("x")).message
    )
    assert hang_problem([], 60.0, Path("x")).message.endswith(": no rank had started")


def test_ranks_that_wait_for_no_other_rank_are_named() -> None:
    """Rank 0 waits on another machine, for the data of this one."""
    stuck = standing(1, waits_in=None, at="connection.py:395 in _recv")
    message = hang_problem([stuck], 33.2, Path("x")).message
    assert (
        message
        == "no progress for 33.2s: rank 1 (step 5, `training`, at connection.py:395 in _recv) is in no "
        "collective"
    )


def test_thousand_ranks_are_summarised_on_one_line() -> None:
    message = hang_problem(
        [standing(0, waits_in=None), *(standing(rank) for rank in range(1, 1000))], 60.0, Path("x")
    ).message
    assert message.endswith("waiting for it: 999 ranks in all_reduce")


def test_report_lists_every_rank_and_those_without_an_answer() -> None:
    rank_states = [standing(0), RankState(1)]
    text = report_text(rank_states, {0: dump(ALL_REDUCE), 1: ""}, hang_problem(rank_states, 60.0, Path("x")))
    assert "rank 1 (before its first heartbeat): does not wait for others" in text
    assert "── stacks of rank 1\nno answer" in text
    assert 'distributed_c10d.py", line 3252 in all_reduce' in text
