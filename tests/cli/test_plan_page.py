from __future__ import annotations

from dataclasses import replace

from fsdp_tune.cli.plan_page import html_page
from fsdp_tune.cli.plan_rows import describe_changes
from fsdp_tune.planner.predict.predict import ScalingRow, plan
from tests.planner.recipes import resolved
from tests.planner.test_predict import A100, step


def test_page_is_complete_and_escapes_every_name() -> None:
    evil = '<script>alert("x")</script>'
    made = plan(resolved(), A100, step(), recipe_changes={"fsdp.sharding_strategy": evil})
    page = html_page(
        replace(
            made,
            recipe=evil,
            gpu=evil,
            alternatives=(made,),
            best_because=evil,
            assumptions=[evil],
            where=evil,
        )
    )
    assert evil not in page
    assert page.startswith("<!doctype html>")
    assert page.count("<path") >= 3, "two components and what is reserved"
    assert "http" not in page
    assert "<script" not in page


def test_page_shows_which_sizes_fit() -> None:
    row = ScalingRow(
        2, 1, step_seconds=None, tokens_per_second=None, fits="no", peak_reserved_gib=99.0, efficiency=None
    )
    assert '<td>2</td><td><span class="no">no</span></td>' in html_page(
        replace(plan(resolved(), A100, step()), scaling=(row,))
    )


def test_page_formats_steps_as_the_screen_does() -> None:
    made = replace(plan(resolved(), A100, step()), step_seconds=61.2)
    page = html_page(
        replace(
            made, alternatives=(made, replace(made, step_seconds=61.0), replace(made, step_seconds=1234.5))
        )
    )
    assert all(f"<td>{seconds} s" in page for seconds in ("61.2", "61", "1,234"))


def test_changes_are_written_as_settings() -> None:
    assert describe_changes({}) == "your recipe, unchanged"
    assert describe_changes({"fsdp.offload_params": True, "training.per_device_train_batch_size": 4}) == (
        "offload_params true, per_device_train_batch_size 4"
    )
