"""The events of metrics.jsonl. Each is one class: its fields, when it is written, its level, and how the
terminal shows it.

Events are written and read through these classes. The reference, the JSON Schema, the terminal and the report
are made from them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import cast

from pydantic import JsonValue, TypeAdapter, ValidationError

from fsdp_tune.core.units import format_bytes, format_seconds
from fsdp_tune.run.event_parts import ChangedKey, CheckpointScore, GeneratedSample, shown_scores
from fsdp_tune.run.metrics_event import (
    COMMON,
    DECLARED,
    AnyEvent,
    MessageEvent,
    MetricsEvent,
    OtherEvent,
    SpikeEvent,
    event,
)

SHOWN_PHASE_SECONDS = 0.1
NAMED_ROWS = 200
"""Rows that the event of a spike names at most."""


def read_event(line: Mapping[str, object]) -> AnyEvent | None:
    """Return the event of a line of metrics.jsonl; None if the line is not an event. Fields that are not of
    this version are ignored."""
    if "event" not in line:
        return None
    name = str(line["event"])
    if (kind := EVENTS.get(name)) is not None:
        absent = {each.name.rstrip("_"): None for each in fields(kind)}
        try:
            return _validator(kind).validate_python(absent | dict(line))
        except ValidationError:
            pass
    rest = cast(
        dict[str, JsonValue], {key: value for key, value in line.items() if key not in ("event", *COMMON)}
    )
    step, time = line.get("step"), line.get("time")
    whole = step if isinstance(step, int) and not isinstance(step, bool) else None
    return OtherEvent(name, whole, number(time), rest)


def number(value: object) -> float | None:
    """Return a finite number as it is, and None for everything else: null, text such as "nan", NaN,
    infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


@cache
def _validator(kind: type[MetricsEvent]) -> TypeAdapter[MetricsEvent]:
    return TypeAdapter(kind)


@event("train_started")
class TrainStarted(MetricsEvent):
    """The live model was read back and matches the recipe."""

    total_steps: int

    def shown(self) -> list[str]:
        begun = f" from step {self.step}" if self.step else ""
        return [f"the live model matches the recipe; training to step {self.total_steps}{begun}"]


@event("first_step", "routine")
class FirstStep(MetricsEvent):
    """The first step has ended; seconds of each phase of the start."""

    phase_seconds: dict[str, float]

    def shown(self, seconds_before: float | None = None) -> list[str]:
        """Return the phases of the start. `seconds_before` is the time of the command before it launched the
        ranks."""
        before = {} if seconds_before is None else {"checking": seconds_before}
        every = before | self.phase_seconds
        named = ", ".join(
            f"{phase} {seconds:.1f}" for phase, seconds in every.items() if seconds >= SHOWN_PHASE_SECONDS
        )
        return [
            f"first step {sum(every.values()):.1f} s after the {'start' if before else 'launch'} ({named})"
        ]


@event("samples")
class SamplesGenerated(MetricsEvent):
    """`training.sample` has generated: for each prompt, `prompt` and `text`. The seconds are not part of
    `step_seconds`."""

    seconds: float
    samples: list[GeneratedSample]

    def shown(self) -> list[str]:
        return [f"step {self.step}: {sample}" for sample in self.samples]


@event("checkpoint_probed", "routine", is_shown=False)
class CheckpointProbed(MetricsEvent):
    """The test save after step 1 was read back and removed."""

    seconds: float


@event("witnessed", "routine", is_shown=False)
class Witnessed(MetricsEvent):
    """The first update was compared on all ranks; CPU seconds of the checks so far."""

    cpu_seconds: float


@event("witness_cost", "routine", is_shown=False)
class WitnessCost(MetricsEvent):
    """After 100 steps: cost of these checks, and of training."""

    cpu_seconds: float
    training_cpu_seconds: float
    steps: int


@event("checkpoint_saved", "routine")
class CheckpointSaved(MetricsEvent):
    """A checkpoint is complete; `seconds` is the wall time since its request, `stall_seconds` how long
    training stopped for it."""

    seconds: float
    stall_seconds: float
    size_bytes: int

    def shown(self) -> list[str]:
        return [
            f"checkpoint-{self.step} saved: {format_bytes(self.size_bytes)} in {format_seconds(self.seconds)}"
        ]


@event("checkpoint_failed", "alarm")
class CheckpointFailed(MessageEvent):
    """A save failed."""

    def shown(self) -> list[str]:
        return [f"warning: checkpoint-{self.step} was NOT saved: {self.message}"]


@event("checkpoint_evaluated")
class CheckpointEvaluated(MetricsEvent):
    """`evaluation:` has scored the model of the checkpoint of this step, which `checkpoint` identifies;
    scores by name."""

    checkpoint: str
    seconds: float
    scores: dict[str, CheckpointScore]
    definition: str | None = None
    """Digest of what decides the scores: their rows, metrics and tasks."""
    warnings: list[str] | None = None
    ranks_waited_seconds: float | None = None
    """With `evaluation.when: between_steps`."""

    def shown(self) -> list[str]:
        scores = f"checkpoint-{self.step} evaluated: {shown_scores(self.scores)}"
        return [scores, *(f"warning: checkpoint-{self.step}: {warning}" for warning in self.warnings or ())]


@event("checkpoint_evaluation_failed", "alarm")
class CheckpointEvaluationFailed(MetricsEvent):
    """`evaluation:` could not score the model of the checkpoint of this step. The next start of the run tries
    it again."""

    checkpoint: str
    code: str
    message: str
    command: str | None = None
    """Identifies the start of the run, as evaluation.json does."""
    ranks_waited_seconds: float | None = None

    @property
    def problem(self) -> str:
        return f"checkpoint-{self.step} was not evaluated: {self.message}"

    def shown(self) -> list[str]:
        return [f"warning: {self.problem}"]


@event("mirrored", "routine")
class Mirrored(MetricsEvent):
    """The mirror has a complete copy of a checkpoint or a model; bytes that were sent now. `verified`: how
    they were compared there."""

    folder: str
    seconds: float
    size_bytes: int
    verified: str | None

    def shown(self) -> list[str]:
        how = "" if self.verified is None else f", verified by {self.verified}"
        return [
            f"{self.folder} mirrored: {format_bytes(self.size_bytes)} sent in "
            f"{format_seconds(self.seconds)}{how}"
        ]


@event("mirror_failed", "alarm")
class MirrorFailed(MessageEvent):
    """Sending to the mirror failed, and is repeated; written once until it succeeds again."""

    def shown(self) -> list[str]:
        return [f"warning: the mirror is behind: {self.message}"]


@event("rotation_failed", "warning")
class RotationFailed(MessageEvent):
    """Old checkpoints could not be removed."""


@event("files_moved", "warning")
class FilesMoved(MessageEvent):
    """Something else that had the name of this checkpoint was renamed."""


@event("compiled", "routine")
class Compiled(MetricsEvent):
    """The compiler has worked; seconds since the last such event, graphs in total."""

    seconds: float
    graphs: int


@event("compile_fallback", "warning")
class CompileFallback(MessageEvent):
    """A function was compiled too often and runs uncompiled where no graph fits."""


@event("profiled", "routine")
class Profiled(MetricsEvent):
    """The profile of `--profile` was written."""

    trace: str
    steps: int
    seconds: dict[str, dict[str, float]]
    """Phase of the step → what of it was spent how, of all `steps`."""

    def shown(self) -> list[str]:
        """Return the milliseconds a step of rank 0: a row for each phase, and one for their sum."""
        columns = list(dict.fromkeys(column for share in self.seconds.values() for column in share))
        total = {column: sum(share.get(column, 0.0) for share in self.seconds.values()) for column in columns}
        return [
            f"{'profile':<10}" + "".join(f"{column.replace('_', '-'):>16}" for column in columns),
            *(
                f"{phase:<10}"
                + "".join(
                    f"{share.get(column, 0.0) / max(1, self.steps) * 1000:>13.2f} ms" for column in columns
                )
                for phase, share in {**self.seconds, "step": total}.items()
            ),
            f"profile: {self.trace} (open it in https://ui.perfetto.dev)",
        ]


@event("slow_rank", "alarm")
class RankSlowed(MetricsEvent):
    """For a minute, the others have waited for this rank for more than 5 % of each step; `part`: for its
    `data`, `computing` or `saving`."""

    rank: int
    part: str | None
    share: float | None
    """Of a step that it costs, 0 to 1."""
    behind_seconds: float
    message: str

    def shown(self) -> list[str]:
        return [f"warning: step {self.step}: {self.message}"]


@event("rank_recovered")
class RankRecovered(MetricsEvent):
    """A rank that was slow is not any more."""

    rank: int
    message: str


@event("loss_spike", "warning", marks_curves=True)
class LossSpike(SpikeEvent):
    """The loss is more than six standard deviations above the last 50 lines. `rows` are those of the steps
    since the last line, on all ranks, at most 200, and `rows_total` is their number: for each example `file`,
    `row` in it (its line), `tokens`, `step`, `rank`, `micro_batch` (from 1), `sequence` (packed examples
    share one) and `loss`, the mean token loss of its micro-batch, highest first. Of a rank the last 1,024
    micro-batches are known."""


@event("gradient_spike", "warning", marks_curves=True)
class GradientSpike(SpikeEvent):
    """The gradient norm is more than six standard deviations above the last 50 lines, and three times their
    mean, and the loss is not; `rows` as in `loss_spike`, of the last step alone."""


@event("zero_gradient", "warning", marks_curves=True)
class ZeroGradient(MessageEvent):
    """The gradient norm is exactly zero."""


@event("weights_look_random", "warning")
class WeightsLookRandom(MessageEvent):
    """The first loss is that of a random model, and the model should be pretrained."""


@event("precision_warning", "warning")
class PrecisionWarning(MessageEvent):
    """An operator of the first micro-batch ran in an unexpected dtype."""


@event("loss_scale_backed_off", "warning")
class LossScaleBackedOff(MetricsEvent):
    """Fp16 overflowed; the new scale."""

    loss_scale: float


@event("step_skipped", "warning", marks_curves=True)
class StepSkipped(MetricsEvent):
    """`training.on_nonfinite: skip` left out an update."""

    reason: str


@event("tracker_failed", "alarm")
class TrackerFailed(MessageEvent):
    """A tracker was disabled."""

    def shown(self) -> list[str]:
        return [f"warning: step {self.step}: {self.message}"]


@event("stopping")
class Stopping(MetricsEvent):
    """A signal or `launch.max_runtime` stops the run after this step."""

    reason: str

    def shown(self) -> list[str]:
        return [f"step {self.step}: stopping ({self.reason})"]


@event("early_stopped")
class EarlyStopped(MessageEvent):
    """`training.early_stopping`, or a callback of the user at an evaluation, ends the run after this step."""


@event("best_restarted")
class BestRestarted(MessageEvent):
    """Another `metric_for_best_model`, or other evaluation rows, since the start before: the best of later
    evaluations counts."""


@event("train_finished", is_shown=False)
class TrainFinished(MetricsEvent):
    """The last checkpoint of this start is complete."""


@event("restarted", "warning", is_shown=False, marks_curves=True, is_of_run=True)
class Restarted(MetricsEvent):
    """The command starts the ranks again after a failure."""

    restart: int
    max_restarts: int
    failed_after_step: int
    code: str
    message: str


@event("checkpoint_rejected", "warning", is_shown=False, is_of_run=True)
class CheckpointRejected(MetricsEvent):
    """An automatic restart passes over a newer checkpoint, which is damaged or not complete."""

    checkpoint: str
    message: str


@event("machines_changed", "warning", is_shown=False, marks_curves=True, is_of_run=True)
class MachinesChanged(MetricsEvent):
    """The run continues on other machines (`launch.min_machines`): their numbers, and ranks and micro-batches
    of a step from here on."""

    machines: list[int]
    ranks: int
    gradient_accumulation_steps: int
    message: str


@event("continued", "warning", is_shown=False, is_of_run=True)
class Continued(MetricsEvent):
    """The whole job was stopped or suspended for a time, which no limit counts, and continued."""

    seconds: float
    message: str


@event("recipe_changed", is_shown=False, marks_curves=True, is_of_run=True)
class RecipeChanged(MetricsEvent):
    """A resume changed keys: for each `key`, `old`, `new`, `class`."""

    changes: list[ChangedKey]


EVENTS: dict[str, type[MetricsEvent]] = dict(DECLARED)
"""Name → its class, in the order of the reference."""
