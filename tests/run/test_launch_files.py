"""The command that starts a run again, from the arguments that launch.json records."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

import pytest

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import LaunchRecord, disk_refusal, train_command


def typed(run: RunDir, *words: str, cwd: Path | None = None) -> RunDir:
    LaunchRecord(command=["train", *words], cwd=str(cwd or Path.cwd())).write(run.launch_json)
    return run


@pytest.mark.parametrize(
    ("words", "resumed"),
    [
        (["my recipe.yaml"], "train 'my recipe.yaml' --resume auto"),
        (
            ["-c", "a.yaml", "--resume", "runs/a/checkpoint-3", "--name", "b"],
            "train -c a.yaml --name b --resume auto",
        ),
        (
            ["a.yaml", "--resume=never", "--overwrite", "--no-start", "--verbose"],
            "train a.yaml --verbose --resume auto",
        ),
        (
            ["a.yaml", "--machine-rank", "0", "--", "--monitor_interval", "1"],
            "train a.yaml --machine-rank 0 --resume auto -- --monitor_interval 1",
        ),
        (
            ["a.yaml", "--set", "data.train=[{path: x.jsonl}]"],
            "train a.yaml --set 'data.train=[{path: x.jsonl}]' --resume auto",
        ),
    ],
)
def test_run_is_resumed_by_the_typed_arguments(words: list[str], resumed: str, tmp_path: Path) -> None:
    assert train_command(typed(RunDir(tmp_path), *words), "--resume", "auto") == f"fsdp-tune {resumed}"


def test_stored_override_is_replaced_by_same_key(tmp_path: Path) -> None:
    run = typed(
        RunDir(tmp_path),
        "a.yaml",
        "--set",
        "training.max_steps=5",
        "--set=training.save_steps=2",
        "--set",
        "training.seed=7",
    )
    longer = train_command(run, "--resume", "auto", "--set", "training.max_steps=10")
    assert (
        longer == "fsdp-tune train a.yaml --set=training.save_steps=2 --set training.seed=7 --resume auto "
        "--set training.max_steps=10"
    )
    assert train_command(run, "--set", "training.save_steps=4").count("save_steps") == 1


def test_other_machines_get_the_same_command_with_their_number(tmp_path: Path) -> None:
    run = typed(RunDir(tmp_path), "a.yaml", "--resume", "auto", "--machine-rank=0")
    assert (
        train_command(run, "--machine-rank", "N") == "fsdp-tune train a.yaml --resume auto --machine-rank N"
    )


def test_command_from_another_directory_includes_cd(tmp_path: Path) -> None:
    elsewhere = tmp_path / "a b"
    run = typed(RunDir(tmp_path), "a.yaml", cwd=elsewhere)
    assert (
        train_command(run, "--resume", "auto")
        == f"cd {shlex.quote(str(elsewhere))} && fsdp-tune train a.yaml --resume auto"
    )


def test_command_in_a_directory_that_was_removed_includes_cd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    run = typed(RunDir(tmp_path), "a.yaml", cwd=gone)
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert train_command(run, "--resume", "auto") == f"cd {gone} && fsdp-tune train a.yaml --resume auto"


@pytest.mark.parametrize("content", [None, "{}", '{"argv": ["python"]}', "damaged", '{"version": 99}'])
def test_missing_command_line_is_an_ellipsis(content: str | None, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    if content is not None:
        run.launch_json.write_text(content)
    assert train_command(run, "--resume", "auto") == "fsdp-tune train … --resume auto"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_logs_that_cannot_be_looked_at_cannot_be_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    assert disk_refusal(run) is None, "there are none"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "stat", refuse)
    assert disk_refusal(run) == f"{run.logs} cannot be written ({os.strerror(number)})"
