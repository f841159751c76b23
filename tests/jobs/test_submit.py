"""One command at a time submits a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.ownership import HeldError
from fsdp_tune.jobs import submit
from fsdp_tune.jobs.submit_options import SlurmOptions, SubmitOptions
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from tests.launch.recipes import BASE


@pytest.mark.parametrize("is_certain", [True, False])
def test_lock_of_a_live_process_is_not_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_certain: bool
) -> None:
    @contextmanager
    def held(_: Path) -> Iterator[None]:
        raise HeldError(None, is_certain=is_certain)
        yield

    monkeypatch.setattr(submit, "owned", held)
    monkeypatch.setattr(submit, "LOCK_SECONDS", -1.0)
    files: Any = SimpleNamespace(lock=tmp_path / "lock")
    with pytest.raises(FsdpTuneError) as caught, submit._alone(files):
        pass
    [problem] = caught.value.problems
    assert problem.code == "submit-in-progress"
    assert any("remove" in way for way in problem.ways_out) != is_certain


def test_error_while_the_lock_is_held_is_not_taken_for_the_locks(tmp_path: Path) -> None:
    files: Any = SimpleNamespace(lock=tmp_path / "lock")
    with pytest.raises(HeldError), submit._alone(files):
        raise HeldError(None, is_certain=True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, None),
        ("90", "90"),
        ("1-12:00:00", "1-12:00:00"),
        ("11h30m", "0-11:30:00"),
        ("2d", "2-00:00:00"),
        ("90s", "0-00:01:30"),
    ],
)
def test_time_is_given_as_in_a_recipe_or_as_slurm_writes_it(text: str | None, found: str | None) -> None:
    assert submit._slurm_time(text) == found


def test_time_that_neither_reads_is_refused() -> None:
    with pytest.raises(FsdpTuneError, match="`--time soon` is not a time"):
        submit._slurm_time("soon")


def submission(tmp_path: Path, **changes: Any) -> submit.Submission:
    loaded = parse_recipe(BASE, tmp_path / "mine.yaml", [f"output_dir={tmp_path}/run"])
    return submit.Submission(loaded, SubmitOptions(), SlurmOptions(), **changes)


def saved(run: RunDir, *seconds: float) -> RunDir:
    """A run whose checkpoints took this long."""
    run.path.mkdir(parents=True)
    lines = [
        {"event": "checkpoint_saved", "step": step, "seconds": each, "stall_seconds": 0.0, "size_bytes": 1}
        for step, each in enumerate(seconds, 1)
    ]
    run.metrics_jsonl.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run


def test_job_is_told_to_stop_in_time_for_the_slowest_save_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a save, the size of a checkpoint is traced."""
    traced = list[object]()
    monkeypatch.setattr(submit, "checkpoint_bytes", lambda recipe: traced.append(recipe))
    assert submission(tmp_path)._lead(Recipe()).reason.endswith("the size of a checkpoint is unknown")
    assert len(traced) == 1
    runs = [
        saved(RunDir(tmp_path / name), *seconds) for name, seconds in (("a", [200.0]), ("b", [900.0, 1.0]))
    ]
    sweep: Any = [SimpleNamespace(run=RunDir(tmp_path / "new")), *(SimpleNamespace(run=run) for run in runs)]
    lead = submission(tmp_path, sweep=sweep)._lead(Recipe())
    assert "(slowest of 2 saves)" in lead.reason
    assert lead.seconds > 900
    assert len(traced) == 1


def test_run_that_has_finished_is_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "queued_jobs", lambda _files: [])
    monkeypatch.setattr(submit, "call_slurm", lambda *_: pytest.fail("Slurm was called"))
    answer: Any = SimpleNamespace(state="finished")
    monkeypatch.setattr(submit.Submission, "_script", lambda *_: answer)
    made = submission(tmp_path)
    assert made.submit() is answer
    assert not made.files.script.exists()
    assert not list(made.files.folder.glob("recipe/**/*.yaml"))
