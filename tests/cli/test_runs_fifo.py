"""A FIFO, a device or a huge file in the place of a file of a run: no command waits for it, and what needs it
names it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_data
from fsdp_tune.run.rank_files import Outcome, Verdict
from tests.cli.in_process import errors, invoke
from tests.pages.written import training_line, written
from tests.time_limit import limited


def run_with_every_file(folder: Path) -> RunDir:
    """Return a run with a checkpoint and every document that `status` and `report` read."""
    run = written(
        folder,
        [
            training_line(1),
            {"step": 1, "eval_loss": 2.0},
            {"event": "loss_spike", "step": 1, "message": "high"},
        ],
    )
    run.plan_json.write_text("{}")
    run.readback_json.write_text('{"ranks": [], "differences": [], "warnings": []}')
    for rank in range(2):
        run.rank_heartbeat(rank).parent.mkdir(exist_ok=True)
        run.rank_heartbeat(rank).write_text("{}")
        Outcome(0, ExitReason.FINISHED, rank=rank).write(run.rank_outcome(rank))
    Verdict(ExitCode.OK, ExitReason.FINISHED, 1).write(run.outcome_json)
    for path in (run.machines_json, run.lock, run.resume_json, run.mirror_json):
        path.write_text("{}")
    checkpoint = run.checkpoint(1)
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    (checkpoint / "damage.json").write_text("{}")
    manifest = Manifest(CHECKPOINT_KIND, {"trainer_state.json": digest_data(b"{}")}, {"step": 1})
    (checkpoint / MANIFEST_NAME).write_text(manifest.to_json())
    return run


def files_of(run: RunDir) -> list[Path]:
    return sorted(path for path in run.path.rglob("*") if path.is_file())


@contextmanager
def replaced_by_a_fifo(path: Path) -> Iterator[None]:
    kept = path.with_name("kept")
    shutil.move(path, kept)
    os.mkfifo(path)
    try:
        yield
    finally:
        path.unlink()
        shutil.move(kept, path)


def test_no_fifo_in_a_run_delays_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file in turn. A file that a command needs is named with exit 2; one that it does not need changes
    nothing."""
    monkeypatch.setattr("fsdp_tune.pages.report_page.report_page", lambda *_, **__: "")  # it reads nothing
    run = run_with_every_file(tmp_path / "runs" / "one")
    commands = (
        ("status", run.path),
        ("report", run.path, "--output", tmp_path / "page.html"),
        ("merge-checkpoint", run.path, "--best"),
    )
    needed = set[str]()
    for path in files_of(run):
        with replaced_by_a_fifo(path):
            for words in commands:
                with limited((path.name, words[0])):
                    done = invoke(*words)
                assert done.exit_code in (0, 1, 2)
                assert "Traceback" not in done.output
                if "is a FIFO, not a regular file" in done.output:
                    assert path.name in done.output
                    needed.add(path.name)
    assert {
        "recipe.json",
        "launch.json",
        "metrics.jsonl",
        "plan.json",
        "data.json",
        "recipe.yaml",
        "environment.json",
        "manifest.json",
    } <= needed


def test_device_is_named_with_a_remedy(tmp_path: Path) -> None:
    run = run_with_every_file(tmp_path / "one")
    run.metrics_jsonl.unlink()
    run.metrics_jsonl.symlink_to("/dev/null")
    for words in (("status", run.path), ("report", run.path, "--output", tmp_path / "page.html")):
        with limited(words):
            (error,) = errors(*words)
        assert (error["code"], error["file"]) == ("run-unreadable", str(run.metrics_jsonl))
        assert error["message"] == "is a device, not a regular file"
        assert error["hint"] == "move it away, or put back the file that the run wrote"


def test_metrics_of_forty_gigabytes_are_read_at_their_end_or_refused(tmp_path: Path) -> None:
    run = run_with_every_file(tmp_path / "one")
    with open(run.metrics_jsonl, "r+b") as file:
        file.truncate(40_000_000_000)
        file.seek(0, 2)
        file.write(b"\n" + json.dumps(training_line(7)).encode() + b"\n")
    with limited("status"):
        assert "step 7" in invoke("status", run.path).output
    with limited("report"):
        (error,) = errors("report", run.path, "--output", tmp_path / "page.html")
    assert error["file"] == str(run.metrics_jsonl)
    assert error["message"].startswith("has 37.25 GiB")
    assert "tail -n" in error["hint"]
