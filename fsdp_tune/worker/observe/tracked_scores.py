"""Send the scores of checkpoints (`evaluation:`) to the trackers, each once: on rank 0 with the lines of the
run, the rest after the ranks.

`python -m fsdp_tune.worker.observe.tracked_scores RUN` sends what is left, and continues the runs of the
trackers for that. The command starts it when the last checkpoint has been evaluated.
RUN/logs/tracked-scores.json has what was sent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.library_errors import typed_line
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.checkpoint_scores import checkpoint_events
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import CheckpointEvaluated, read_event
from fsdp_tune.run.launch_files import read_recipe_json
from fsdp_tune.run.metrics_file import MetricsReader
from fsdp_tune.run.records import Document
from fsdp_tune.worker.observe.step_phases import AttachedCallback
from fsdp_tune.worker.observe.tracker_ids import continue_tracker_runs
from fsdp_tune.worker.observe.trackers import LIMIT_SECONDS, Guarded
from fsdp_tune.worker.rank import set_environment


@dataclass(frozen=True, slots=True)
class TrackedScores(Document):
    """tracked-scores.json: the scores that each tracker has, by the name of its callback: the identities of
    their checkpoints and definitions."""

    trackers: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    checkpoints: list[str] = field(default_factory=list[str])
    """Those that every tracker has, in files of version 0.2."""

    @classmethod
    def of(cls, run: RunDir) -> TrackedScores:
        return cls.read(run.tracked_scores_json) or cls()

    def lacking(self, tracker: str, events: Iterable[CheckpointEvaluated]) -> list[CheckpointEvaluated]:
        """Return those events whose scores a tracker does not have."""
        known = {*self.checkpoints, *self.trackers.get(tracker, [])}
        return [event for event in events if _identity(event) not in known]

    def added(self, run: RunDir, tracker: str, event: CheckpointEvaluated) -> TrackedScores:
        """Return them with an event that a tracker has now, and write them."""
        known = self.trackers.get(tracker, [])
        now = replace(self, trackers={**self.trackers, tracker: [*known, _identity(event)]})
        now.write(run.tracked_scores_json)
        return now


def _identity(event: CheckpointEvaluated) -> str:
    return event.checkpoint if event.definition is None else f"{event.checkpoint}/{event.definition}"


def values_of(event: CheckpointEvaluated) -> dict[str, float]:
    return {name: score.value for name, score in event.scores.items()}


class SendScores(AttachedCallback):
    """Send new scores to the trackers with each line of the run, at the step of their checkpoint. Runs on
    rank 0 and computes nothing.

    No other callback is called: one with a collective would wait for ranks that have no scores. What cannot
    be read or written now, and what a tracker that failed lacks, is sent by the process after the ranks.
    """

    def __init__(self, run: RunDir) -> None:
        self._run, self._reader = run, MetricsReader(run.metrics_jsonl)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if not state.is_world_process_zero:
            return
        with suppress(OSError, FsdpTuneError):
            found = [
                event
                for event in map(read_event, self._reader.read()[0])
                if isinstance(event, CheckpointEvaluated)
            ]
            if found:
                self._send(found, args, state, control)

    def _send(
        self,
        found: Sequence[CheckpointEvaluated],
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
    ) -> None:
        tracked = TrackedScores.of(self._run)
        for tracker in self.trainer.callback_handler.callbacks:
            if isinstance(tracker, Guarded):
                tracked = _send(self._run, tracked, tracker, found, args, state, control)


def _send(
    run: RunDir,
    tracked: TrackedScores,
    tracker: Guarded,
    found: Iterable[CheckpointEvaluated],
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
) -> TrackedScores:
    """Send a tracker the scores that it lacks, until it fails. Returns those that are tracked then."""
    for event in tracked.lacking(tracker.name, found):
        tracker.on_log(args, replace(state, global_step=event.step), control, logs=values_of(event))
        if tracker.has_failed:
            break
        tracked = tracked.added(run, tracker.name, event)
    return tracked


class _SilentArguments(TrainingArguments):
    """Arguments that a tracker does not write over those of the run."""

    def to_dict(self) -> dict[str, object]:
        return {}


def send_rest(run: RunDir, recipe: Recipe, say: Callable[[str], None] = print) -> list[str]:
    """Send the scores that the ranks have not sent. Returns the trackers that failed or did not answer, whose
    errors go to `say`."""
    tracked = TrackedScores.of(run)
    found = [event for event in checkpoint_events(run) if isinstance(event, CheckpointEvaluated)]
    kinds: dict[str, type[TrainerCallback]] = {
        kind.__name__: kind for kind in map(INTEGRATION_TO_CALLBACK.__getitem__, recipe.training.report_to)
    }
    lacking = [name for name in kinds if tracked.lacking(name, found)]
    if not lacking:
        return []
    set_environment(recipe, run)
    continue_tracker_runs(run, recipe.training.report_to, os.environ, say)
    arguments = _SilentArguments(output_dir=str(run.path), run_name=recipe.name, report_to=[], use_cpu=True)
    state, control = TrainerState(), TrainerControl()
    failed: list[str] = []
    for name in lacking:
        try:
            tracker = Guarded(kinds[name](), say, LIMIT_SECONDS)
        except Exception as error:  # noqa: BLE001  the others get their scores whatever is wrong with it
            say(f"{name}: {typed_line(error)}")
            failed.append(name)
            continue
        tracker.on_train_begin(arguments, state, control, model=None)
        tracked = _send(run, tracked, tracker, found, arguments, state, control)
        tracker.on_train_end(arguments, state, control, model=None, processing_class=None)
        failed += [name] if tracker.has_failed else []
    return failed


if __name__ == "__main__":
    its_run = RunDir(Path(sys.argv[1]))
    sys.exit(1 if send_rest(its_run, Recipe.model_validate_json(read_recipe_json(its_run))) else 0)
