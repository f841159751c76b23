"""What `train` prints of its data, kernels and decisions before the first step, and the card at its end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from fsdp_tune.cli import prepare
from fsdp_tune.cli.run_card import card, show_card, spans_of
from fsdp_tune.cli.screen import Screen, command
from fsdp_tune.cli.train_view import data_lines, kernels_line, show_decided
from fsdp_tune.data.report import DataReport
from fsdp_tune.launch.command.next_commands import commands_after, commands_of_finished
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.run.directory import RunDir
from tests.cli.forked import lines_on_a_terminal
from tests.model.recipes import model_facts
from tests.planner.recipes import resolved

KERNELS = model_facts(
    kernels={
        "model.attn_implementation": {"value": "sdpa", "reason": "flash-attn is not installed"},
        "kernels.loss": {"value": "chunked", "reason": "the logits are larger than one slice"},
        "kernels.liger": {"value": "false", "reason": "Liger is for GPUs"},
        "kernels.compile": {"value": "true", "reason": "the recipe requests it"},
        "kernels.mlp_slice_tokens": {"value": "null", "reason": "the recipe does not set it"},
    }
)


def test_kernels_line_names_the_chosen_kernels() -> None:
    assert kernels_line(KERNELS) == "kernels: attention sdpa, loss chunked, compile"


def test_every_resolved_value_is_printed_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    show_decided(
        Screen(json_output=False),
        Resolution(resolved(), {"fsdp.reshard_after_forward": "FULL_SHARD"}, ()),
        KERNELS,
    )
    shown = capsys.readouterr().out
    assert re.search(r"kernels.liger +false +Liger is for GPUs", shown)
    assert re.search(r"fsdp.reshard_after_forward +true +FULL_SHARD", shown)


def test_data_lines_start_with_the_training_set() -> None:
    account = {"rows": 9, "tokens": 100, "supervised_tokens": 25, "truncated": 2}
    account |= {"dropped_too_long": {"rows": 1}, "dropped_nothing_left": {"rows": 0}}
    lines = data_lines(
        DataReport.model_validate({"sets": {"held_out": account, "train": account}}), reused=True
    )
    assert (
        lines[0]
        == "data train: 9 rows, 100 tokens, 25 trained (25%), 2 truncated, 1 dropped (from the cache)"
    )


@pytest.mark.parametrize("columns", [80, 120])
def test_account_of_prepared_data_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_lines", lambda _: [])
    spread = {"min": 2, "median": 300, "max": 4096}
    account: dict[str, Any] = {
        "rows": 889,
        "examples": 889,
        "tokens": 6686123,
        "supervised_tokens": 2492,
        "fill": 0.235,
    }
    account |= {"supervised_tokens_per_example": spread, "tokens_per_example": spread}
    report = DataReport.model_validate({"sets": {"train": account, "held_out": account}})

    def program() -> None:
        with command(False) as screen:
            prepare.show_data(screen, SimpleNamespace(report=report, reused=False, path="/c"))  # type: ignore[arg-type]

    lines = lines_on_a_terminal(program, columns)
    assert max(map(len, lines)) <= columns
    assert sum("6,686,123" in line for line in lines) == 2
    assert sum(" ".join(line.split()).endswith("23.5 %") for line in lines) == 2


def run_with(folder: Path, lines: list[dict[str, object]]) -> RunDir:
    run = RunDir(folder)
    run.metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


LINES: list[dict[str, object]] = [
    {"event": "train_started", "step": 0, "total_steps": 30},
    {
        "step": 10,
        "loss": 3.0,
        "tokens": 1000,
        "step_seconds": 2.0,
        "peak_reserved_gib": 12.0,
        "peak_host_gib": 3.0,
    },
    {"step": 10, "eval_loss": 3.5},
    {
        "step": 20,
        "loss": 1.5,
        "tokens": 2000,
        "step_seconds": 1.0,
        "peak_reserved_gib": 13.0,
        "peak_host_gib": 3.0,
    },
    {"step": 30, "loss": "nan", "tokens": 3000, "step_seconds": 1.0, "peak_reserved_gib": 12.5},
    {"step": 30, "eval_loss": 2.5},
]


def test_card_has_losses_tokens_time_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(tmp_path, LINES)
    run.plan_json.write_text(json.dumps({"peak_reserved_gib": 10.0}))
    with command(False) as screen:
        show_card(
            screen, card(run, {"seconds": 60.0, "tokens": 3000}, ["first command", "second command"], 75.0)
        )
    shown = capsys.readouterr().out.splitlines()
    assert shown[:6] == [
        "  time          1m15s since the start, 40.0s in the run's 30 steps",
        "  tokens        3,000",
        "  loss          first 3.0000 (mean of steps 1 to 10), last nan (steps 21 to 30), best "
        "1.5000 (steps 11 to 20)",
        "  eval loss     first 3.5000 (step 10), last and best 2.5000 (step 30)",
        "  peak memory   13.00 GiB of GPU memory reserved on rank 0",
        "  plan          peak_reserved_gib: 10 GiB predicted, 12.5 measured (-20.0%)",
    ]
    assert shown[-2:] == ["  next          first command", "                second command"]


def test_loss_of_a_line_that_is_one_step_names_it() -> None:
    assert spans_of([{"step": step} for step in (1, 2, 12)]) == ["step 1", "step 2", "steps 3 to 12"]


def test_card_shows_the_last_samples(tmp_path: Path) -> None:
    long = {"prompt": "a", "text": " b" * 90}
    events = [
        {
            "event": "samples",
            "step": step,
            "seconds": 1.0,
            "samples": [{"prompt": "one is", "text": f" {step}"}, long],
        }
        for step in (10, 20)
    ]
    shown = card(run_with(tmp_path, [*LINES, *events]), {}, [], 1.0)
    assert [text for name, text in shown if name == "sample"] == ["one is →  20", f"a → {' b' * 60} …"]


def test_card_shows_sizes_of_checkpoints_and_merged_model(tmp_path: Path) -> None:
    run = run_with(tmp_path, [])
    assert dict(card(run, {}, [], 1.0))["size on disk"].endswith("(no checkpoint)")
    for folder, size in ((run.checkpoint(1), 1 << 20), (run.checkpoint(2), 1 << 20), (run.merged, 512 << 10)):
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(size))
    assert card(run, {}, [], 1.0)[1:] == [
        ("size on disk", "2.50 MiB (2 checkpoints 2.00 MiB, merged 512.00 KiB)")
    ]


def test_card_of_deleted_run_directory_has_no_sizes(tmp_path: Path) -> None:
    assert card(RunDir(tmp_path / "gone"), {"tokens": 5}, [], 1.0) == [
        ("time", "1.0s since the start"),
        ("tokens", "5"),
    ]


def test_next_commands_merge_or_continue_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    by_epochs = commands_after(run, resolved(training={"max_steps": -1, "num_train_epochs": 1.5}), None)
    assert by_epochs == [
        f"fsdp-tune merge-checkpoint {run.path}",
        "fsdp-tune train … --resume auto --set training.num_train_epochs=3",
    ]
    run.merged.mkdir(parents=True)  # of an earlier end
    (again, _) = commands_after(run, resolved(training={"max_steps": -1, "num_train_epochs": 1.5}), None)
    assert again == f"fsdp-tune merge-checkpoint {run.path} --overwrite"
    merged = commands_after(run, resolved(training={"max_steps": 50}), run.merged)
    assert merged == [
        f"fsdp-tune chat {run.path}",
        f"vllm serve {run.merged}",
        f"fsdp-tune push {run.path}",
        "fsdp-tune train … --resume auto --set training.max_steps=100",
    ]


def test_status_of_a_finished_run_has_at_most_four_next_commands(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    recipe = resolved(training={"max_steps": 50})
    assert [each.split("`")[1].split()[1] for each in commands_of_finished(run, recipe)] == [
        "merge-checkpoint",
        "report",
        "train",
    ]
    run.merged.mkdir(parents=True)
    assert [each.split("`")[1].split()[1] for each in commands_of_finished(run, recipe)] == [
        "chat",
        "report",
        "train",
    ]
    with_eval = resolved(training={"max_steps": 50}, data={**recipe.data.model_dump(), "eval": {"rows": 5}})
    assert [each.split("`")[1].split()[1] for each in commands_of_finished(run, with_eval)] == [
        "chat",
        "evaluate",
        "report",
        "train",
    ]


def test_adapter_is_served_on_its_base(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    recipe = resolved(
        model={"name_or_path": "org/base"}, training={"max_steps": 50}, lora={}, merge={"adapter": "adapter"}
    )
    found = commands_after(run, recipe, run.adapter)
    assert found[:3] == [
        f"fsdp-tune chat {run.path}",
        f"vllm serve org/base --enable-lora --lora-modules tuned={run.adapter}",
        f"fsdp-tune push {run.path} --adapter",
    ]
    assert commands_after(run, recipe, None)[:2] == [
        f"fsdp-tune merge-checkpoint {run.path}",
        f"fsdp-tune chat {run.path}",
    ]


def test_load_best_model_at_end_merges_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdp_tune.jobs import training_end
    from fsdp_tune.merge import merging

    asked: list[bool] = []

    def merge(_source: Path, options: merging.MergeOptions, **_: object) -> MagicMock:
        asked.append(options.best)
        return MagicMock()

    for loads_best in (False, True):
        recipe = resolved(training={"load_best_model_at_end": loads_best, "max_steps": 50})
        monkeypatch.setattr(training_end, "merge_checkpoint", merge)
        training_end.merge(MagicMock(), recipe, MagicMock())
        assert commands_after(RunDir(tmp_path), recipe, None)[0].endswith(" --best") == loads_best
    assert asked == [False, True]
