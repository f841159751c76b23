"""What a rank reports of saves, trackers and callbacks, and how it ends where a run has ended before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerState

from fsdp_tune.core.errors import FsdpTuneError, failed_error
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import TRAINER_STATE, RunDir
from fsdp_tune.run.launch_files import ResumeRequest
from fsdp_tune.worker import setup
from fsdp_tune.worker.checkpoint.save import Saved


class Trainer:
    """What the functions of `setup` read of a trainer, and what they call."""

    def __init__(self, run: RunDir) -> None:
        self.events: list[Any] = []
        self.phases: list[str] = []
        metrics = SimpleNamespace(event=self.events.append, close=lambda: None, failure=None)
        beats = SimpleNamespace(beat=lambda phase, _: self.phases.append(phase), during=self._during)
        self.parts = SimpleNamespace(run=run, metrics=metrics, heartbeat=beats)
        self.lines = SimpleNamespace(checkpoint_stall_seconds=1.0)
        self.state = SimpleNamespace(global_step=8, best_global_step=6)
        self.args = SimpleNamespace(load_best_model_at_end=True)
        self.checkpointer: Any = SimpleNamespace(
            wait=lambda: None, last_step=8, is_scattered=True, heartbeat=beats, run=run
        )

    @contextlib.contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        self.phases.append(phase)
        yield


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    return Trainer(RunDir(tmp_path))


def shown(trainer: Any) -> list[str]:
    return [f"{type(event).__name__}: {getattr(event, 'message', '')}" for event in trainer.events]


def test_save_is_an_event_and_what_it_moved_or_could_not_remove_is_a_warning(trainer: Any) -> None:
    said: list[str] = []
    report = setup._reporter(trainer, Recipe(), said.append)
    report(Saved(4, stall_seconds=0.5, seconds=2.0, size_bytes=9))
    assert (shown(trainer), said) == (["CheckpointSaved: "], [])
    assert trainer.lines.checkpoint_stall_seconds == 1.5
    report(Saved(8, 0.5, moved="checkpoint-8 was a file", left="checkpoint-4: Permission denied"))
    assert shown(trainer)[2:] == [
        "FilesMoved: checkpoint-8 was a file",
        "RotationFailed: checkpoint-4: Permission denied",
    ]
    assert said == [
        "WARNING: checkpoint-8 was a file",
        "WARNING: old checkpoints were not removed: checkpoint-4: Permission denied",
    ]


@pytest.mark.parametrize("ends", [True, False])
def test_failed_save_ends_the_run_only_if_the_recipe_says_so(ends: bool, trainer: Any) -> None:
    said: list[str] = []
    error = failed_error("save-failed", "no space left")
    recipe = Recipe.model_validate({"checkpoint": {"save_failure": "stop" if ends else "warn"}})
    report = setup._reporter(trainer, recipe, said.append)
    with pytest.raises(FsdpTuneError) if ends else contextlib.nullcontext():
        report(Saved(4, 0.5, error=error))
    assert shown(trainer) == ["CheckpointFailed: no space left"]
    assert said == ["WARNING: checkpoint-4 was NOT saved: no space left"]
    assert trainer.lines.checkpoint_stall_seconds == 1.0, "nothing was saved"


def test_tracker_that_fails_is_an_event_and_a_warning(trainer: Any) -> None:
    said: list[str] = []
    setup._tracker_reporter(trainer, said.append)("wandb is disabled")
    assert (shown(trainer), said) == (["TrackerFailed: wandb is disabled"], ["WARNING: wandb is disabled"])
    assert trainer.events[0].step == 8


class Mine(TrainerCallback):
    """A callback of an extension."""


@pytest.mark.parametrize(("made", "type_name"), [(Mine, None), (lambda: 7, "int")])
def test_callback_of_an_extension_is_made_or_refused_by_name(
    made: Any, type_name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Extension:
        def load(self) -> Any:
            return made

        def __str__(self) -> str:
            return "`mine` of a package 1.0"

    recipe = Recipe.model_validate({"extensions": {"callbacks": ["mine"]}})
    monkeypatch.setattr(setup, "find_extension", lambda kind, name: Extension())
    if type_name is None:
        [callback] = setup.user_callbacks(recipe)
        assert isinstance(callback, Mine)
        return
    with pytest.raises(FsdpTuneError, match="returned int, which is not a TrainerCallback"):
        setup.user_callbacks(recipe)


def test_run_without_a_complete_checkpoint_gives_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(setup, "from_rank0", lambda act, _what: act())
    recipe = Recipe.model_validate({"model": {"name_or_path": str(tmp_path)}})
    with pytest.raises(FsdpTuneError, match="has no complete checkpoint to start from") as caught:
        setup._start_from_checkpoint(recipe, SimpleNamespace(wrapped=None))  # type: ignore[arg-type]
    assert caught.value.problems[0].code == "run-without-checkpoint"


def test_only_a_checkpoint_at_the_end_of_the_run_is_not_trained_on(trainer: Any, tmp_path: Path) -> None:
    said: list[str] = []
    resume: Any = SimpleNamespace(step=8, path=tmp_path / "checkpoint-8")
    resume.path.mkdir()
    TrainerState(global_step=8, best_metric=0.5).save_to_json(str(resume.path / TRAINER_STATE))
    request = tmp_path / "resume.json"
    assert not setup.is_at_end(trainer, resume, said.append), "there is no request"
    ResumeRequest(str(resume.path), ends_at=9).write(request)
    assert not setup.is_at_end(trainer, resume, said.append)
    assert (trainer.phases, said) == ([], [])
    ResumeRequest(str(resume.path), ends_at=8).write(request)
    assert setup.is_at_end(trainer, resume, said.append)
    assert (trainer.state.global_step, trainer.state.best_metric) == (8, 0.5)
    assert trainer.phases == ["saving"]
    assert said == ["the run has ended at step 8: its weights are brought to the first machine"]


@pytest.mark.parametrize(
    ("loads_best", "best", "is_finished", "steps"),
    [(True, 6, True, [6, 8]), (False, 6, True, [8]), (True, None, True, [8]), (True, 6, False, [])],
)
def test_weights_that_a_merge_reads_are_brought_to_the_first_machine(
    trainer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loads_best: bool,
    best: int | None,
    is_finished: bool,
    steps: list[int],
) -> None:
    brought: list[Path] = []
    monkeypatch.setattr(setup, "weights_to_first_machine", brought.append)
    monkeypatch.setattr(setup, "all_or_none", lambda act, _what: act())
    trainer.args.load_best_model_at_end, trainer.state.best_global_step = loads_best, best
    setup.close(trainer, is_finished=is_finished)
    assert brought == [tmp_path / f"checkpoint-{step}" for step in steps]
    assert shown(trainer) == ["TrainFinished: "]


def test_run_that_is_measured_saves_nothing_at_its_end(trainer: Any, tmp_path: Path) -> None:
    """`plan --measure` removes what it trains."""
    ResumeRequest(saves=False).write(tmp_path / "resume.json")
    trainer.checkpointer.last_step = None
    setup.close(trainer, is_finished=True)
    assert trainer.events == []
