"""Lines of the status of a run: its mirror, its starts as a job, and what else is not in every run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdp_tune.cli import status_view
from fsdp_tune.cli.screen import Screen
from fsdp_tune.launch.run_status import (
    EvaluationLosses,
    MirrorStatus,
    RankStatus,
    RejectedCheckpoint,
    RunStatus,
    SlowRank,
    run_status,
)
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.job_files import JobStart
from tests.cli.test_status import run_in

MIRROR = MirrorStatus("s3://b/run", 10, [], 0, None, None, [])


@pytest.fixture
def run(tmp_path: Path) -> RunStatus:
    return run_status(RunDir(run_in(tmp_path, "a")))


def shown(run: RunStatus, **changes: Any) -> list[str]:
    """The lines of a status in a pipe."""
    screen = Screen(json_output=False)
    with screen.collected() as lines:
        status_view.show_status(screen, replace(run, **changes))
    return lines


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["mirror s3://b/run: checkpoint-10"]),
        ({"newest_step": None}, ["mirror s3://b/run: no checkpoint yet"]),
        (
            {"behind": ["checkpoint-20", "merged"], "left_bytes": 3 << 30},
            ["mirror s3://b/run: checkpoint-10; behind by checkpoint-20, merged (3.00 GiB)"],
        ),
        (
            {"failing": "5m00s", "error": "timed out", "damaged": ["merged is damaged"]},
            [
                "mirror s3://b/run: checkpoint-10",
                "the mirror fails for 5m00s: timed out",
                "not mirrored: merged is damaged",
            ],
        ),
    ],
)
def test_mirror_is_shown_with_what_it_lacks_and_why(
    run: RunStatus, changes: dict[str, Any], lines: list[str]
) -> None:
    found = shown(run, mirror=replace(MIRROR, **changes))
    at = found.index(lines[0])
    assert found[at : at + len(lines)] == lines
    assert found[at + len(lines)].startswith("logs: ")


def test_newest_starts_as_a_job_are_shown_with_what_they_added(run: RunStatus) -> None:
    def started(number: int, **changes: Any) -> JobStart:
        began = time.mktime((2026, 3, 4, 5, 6, 0, 0, 0, -1))
        same = JobStart("7", number, "n1", began, began + 90, 143, 1000, 2000, "requeued")
        return replace(same, **changes)

    starts = [started(number) for number in range(9)]
    starts.append(started(9, ended_at=None, exit_code=None, last_step=None, then=None))
    found = shown(run, starts=starts)
    at = found.index("starts as a job (10)")
    rows = [line.split() for line in found[at + 3 : at + 11]]
    assert rows[0] == ["7.2", "03-04", "05:06", "1m30s", "1,000", "→", "2,000", "143,", "requeued"]
    assert rows[-1] == ["7.9", "03-04", "05:06", "1,000", "→", "runs,", "or", "was", "killed"]
    assert "starts as a job" not in "\n".join(shown(run))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", "rank 3 is slow: it costs 25% of each step (data)"),
        ("hang", "rank 3 was slow at the end: it cost 25% of each step (data)"),
    ],
)
def test_slow_rank_is_named(run: RunStatus, state: str, words: str) -> None:
    assert words in shown(run, state=state, slow_rank=SlowRank(3, "data", 0.25))


def test_run_of_another_machine_names_the_first_one_and_its_end(run: RunStatus) -> None:
    found = shown(run, first_machine="node1:/runs/a", owner="pid 7 on node2", problem="rank 1 was killed")
    assert found[:2] == [
        f"{run.run_dir}: {run.state} (pid 7 on node2); metrics, events and the end of the run are in "
        "node1:/runs/a",
        "ended with: rank 1 was killed",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"planned_reserved_gib": None}, "9.00 GiB reserved"),
        ({"planned_reserved_gib": 10.0}, "9.00 GiB reserved, 10.00 GiB planned (-10%)"),
        ({"peak_reserved_gib": None, "peak_host_gib": 2.0}, "2.00 GiB of host memory"),
        ({"peak_reserved_gib": None}, None),
    ],
)
def test_memory_is_that_of_the_gpu_or_of_the_host(
    run: RunStatus, changes: dict[str, Any], line: str | None
) -> None:
    found = shown(run, tokens_per_second_per_device=None, **changes)
    assert [each for each in found if "GiB" in each] == ([] if line is None else [line])


def test_ranks_and_checkpoints_that_are_not_complete_are_listed(run: RunStatus) -> None:
    ranks = [
        RankStatus(0, "running", None, "training", 12, 7, "1s ago", "-"),
        RankStatus(1, "lost", None, None, 11, None, None, "-"),
    ]
    bad = [RejectedCheckpoint("/runs/a/checkpoint-9", "a file is missing")]
    found = shown(run, ranks=ranks, rejected_checkpoints=bad, merged="/runs/a/merged", state="running")
    at = next(number for number, line in enumerate(found) if line.split()[:2] == ["rank", "state"])
    assert [line.split() for line in found[at + 2 : at + 4]] == [
        ["0", "running", "training", "12", "7", "1s", "ago"],
        ["1", "lost", "11"],
    ]
    assert "not complete: /runs/a/checkpoint-9: a file is missing" in found
    assert "merged model of an earlier run to its end: /runs/a/merged" in found
    assert "merged model: /runs/a/merged" in shown(run, merged="/runs/a/merged", state="finished")


def test_losses_that_are_not_numbers_are_reported(run: RunStatus) -> None:
    losses = EvaluationLosses(None, 30, None, None, [])
    found = shown(
        run, loss=None, recent_losses=[None], evaluation=losses, step=None, last_line_age_seconds=None
    )
    assert "step 0 of 60, no line yet, loss not finite" in found
    assert "evaluation loss not finite at step 30" in found


WAY = "`fsdp-tune train --config a.yaml --resume auto` continues from checkpoint-10"


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, [f"  {WAY}"]),
        (len(WAY) + 2, [f"  {WAY}"]),
        (
            len(WAY) + 1,
            ["  fsdp-tune train --config a.yaml --resume auto", "    continues from checkpoint-10"],
        ),
        (46, ["fsdp-tune train --config a.yaml --resume auto", "    continues from checkpoint-10"]),
    ],
)
def test_command_of_a_way_on_can_be_copied_from_a_narrow_terminal(
    width: int | None, lines: list[str]
) -> None:
    found = list[str]()
    screen = SimpleNamespace(wrap_width=width, message=lambda text, **_: found.append(text))
    status_view._show_way(cast(Screen, screen), WAY)
    assert found == lines
    found.clear()
    status_view._show_way(cast(Screen, screen), "`fsdp-tune status`")
    assert found == ["  `fsdp-tune status`"]
