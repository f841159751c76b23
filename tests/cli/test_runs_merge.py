"""What `merge-checkpoint` prints about its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.cli.runs import show_merge
from fsdp_tune.cli.screen import Screen
from fsdp_tune.merge.merging import MergeResult


@pytest.mark.parametrize(
    ("is_new", "lines"),
    [
        (
            True,
            [
                "merged run/checkpoint-5: the newest",
                "3 tensors, 1,000 parameters, bfloat16, 12.11 GiB in 2.0s (6.50 GB/s), verified: quick",
                "the model is in run/merged",
            ],
        ),
        (
            False,
            [
                "run/checkpoint-5: the newest",
                "3 tensors, 1,000 parameters, bfloat16, 12.11 GiB",
                "the model is in run/merged",
            ],
        ),
    ],
)
def test_model_that_was_merged_before_has_no_speed(
    is_new: bool, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = MergeResult(
        output=Path("run/merged"),
        source=Path("run/checkpoint-5"),
        step=5,
        reason="the newest",
        dtype="bfloat16",
        dtypes={"bfloat16": 3},
        files=(),
        tensors=3,
        parameters=1000,
        size_bytes=13 * 10**9,
        seconds=2.0 if is_new else 0.0,
        verified="quick",
        is_new=is_new,
    )
    show_merge(Screen(json_output=False), result)
    assert capsys.readouterr().out.splitlines() == lines
