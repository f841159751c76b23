"""The events of metrics.jsonl, a row each: what writes them, the terminal, the report and the reference all read this table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_tune.core.units import format_bytes, format_seconds

Line = Mapping[str, Any]
EventLevel = Literal["routine", "news", "warning", "alarm"]
"""`routine`: every healthy run has it. `warning`: the report marks it. `alarm`: a warning that the terminal prints on stderr."""

SHOWN_PHASE_SECONDS = 0.1
NAMED_ROWS = 200
"""Rows that the event of a spike names at most."""
SHOWN_SPIKE_ROWS = 3
SAMPLE_CHARACTERS = 60


def describe(line: Line) -> list[str]:
    """Return `step 7: loss scale backed off: message (field value, …)`."""
    details = ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("event", "step", "time", "message"))
    message = f": {line['message']}" if "message" in line else ""
    return [f"step {line.get('step')}: {line['event'].replace('_', ' ')}{message}" + (f" ({details})" if details else "")]


@dataclass(frozen=True, slots=True)
class EventKind:
    """A kind of event; its lines have `event`, `step`, `time` and `fields`."""

    name: str
    fields: tuple[str, ...]
    when: str
    """For the reference."""
    level: EventLevel = "news"
    show: Callable[[Line], list[str]] | None = describe
    """The lines of the terminal; None: it prints none."""
    marks_curves: bool = False
    """Whether it is a vertical line in the charts of a loss."""
    is_of_run: bool = False
    """Written by the command between launches, and kept when the run starts over at step 0."""


def _started(line: Line) -> list[str]:
    step = line.get("step")
    return [f"the live model matches the recipe; training to step {line['total_steps']}" + (f" from step {step}" if step else "")]


def _first_step(line: Line) -> list[str]:
    phases: dict[str, float] = line["phase_seconds"]
    named = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items() if seconds >= SHOWN_PHASE_SECONDS)
    return [f"first step {sum(phases.values()):.1f} s after the launch ({named})"]


def sample_line(sample: dict[str, str]) -> str:
    """Return the end of a prompt and the beginning of the generated text on one line."""
    prompt, text = (json.dumps(sample[name], ensure_ascii=False)[1:-1] for name in ("prompt", "text"))
    shown = f"… {prompt[-SAMPLE_CHARACTERS:]}" if len(prompt) > SAMPLE_CHARACTERS else prompt
    return f"{shown} → {text[: 2 * SAMPLE_CHARACTERS]}{' …' if len(text) > 2 * SAMPLE_CHARACTERS else ''}"


def _samples(line: Line) -> list[str]:
    return [f"step {line.get('step')}: {sample_line(sample)}" for sample in line["samples"]]


def _saved(line: Line) -> list[str]:
    return [f"checkpoint-{line.get('step')} saved: {format_bytes(line['size_bytes'])} in {format_seconds(line['seconds'])}"]


def _not_saved(line: Line) -> list[str]:
    return [f"warning: checkpoint-{line.get('step')} was NOT saved: {line['message']}"]


def _mirrored(line: Line) -> list[str]:
    return [f"{line['folder']} mirrored: {format_bytes(line['size_bytes'])} sent in {format_seconds(line['seconds'])}"]


def _mirror_failed(line: Line) -> list[str]:
    return [f"warning: the mirror is behind: {line['message']}"]


def _warning(line: Line) -> list[str]:
    return [f"warning: step {line.get('step')}: {line['message']}"]


def _stopping(line: Line) -> list[str]:
    return [f"step {line.get('step')}: stopping ({line['reason']})"]


def spike_line(line: Line) -> str | None:
    """Return the rows of the micro-batch with the highest loss of a spike in one line; None if it names none."""
    rows: list[dict[str, Any]] = line.get("rows") or []
    if not rows:
        return None
    places = ("step", "rank", "micro_batch")
    worst = [row for row in rows if all(row[name] == rows[0][name] for name in places)]
    shown = ", ".join(f"{row['file']}:{row['row']} ({row['tokens']:,} tokens)" for row in worst[:SHOWN_SPIKE_ROWS])
    hidden = len(worst) - SHOWN_SPIKE_ROWS
    more = f" and {hidden:,} more row{'' if hidden == 1 else 's'}" if hidden > 0 else ""
    loss = f" with loss {rows[0]['loss']:.4f}" if isinstance(rows[0].get("loss"), int | float) else ""
    place = f"step {rows[0]['step']}, rank {rows[0]['rank']}, micro-batch {rows[0]['micro_batch']}"
    return f"highest of {line.get('rows_total', len(rows)):,} rows: {place}{loss}: {shown}{more}"


def _spike(line: Line) -> list[str]:
    named = spike_line(line)
    bare = {key: value for key, value in line.items() if key not in ("rows", "rows_total")}
    return [*describe(bare), *([f"  {named}"] if named else [])]


def _profile(line: Line) -> list[str]:
    """Return the milliseconds a step of rank 0: a row for each phase, and one for their sum."""
    seconds: dict[str, dict[str, float]] = line["seconds"]
    columns = list(next(iter(seconds.values())))
    total = {column: sum(share[column] for share in seconds.values()) for column in columns}
    return [
        f"{'profile':<10}" + "".join(f"{column.replace('_', '-'):>16}" for column in columns),
        *(
            f"{phase:<10}" + "".join(f"{share[column] / line['steps'] * 1000:>13.2f} ms" for column in columns)
            for phase, share in {**seconds, "step": total}.items()
        ),
        f"profile: {line['trace']} (open it in https://ui.perfetto.dev)",
    ]


TRAIN_STARTED = EventKind("train_started", ("total_steps",), "the live model was read back and matches the recipe", show=_started)
FIRST_STEP = EventKind(
    "first_step", ("phase_seconds",), "the first step has ended; seconds of each phase of the start", "routine", _first_step
)
SAMPLES = EventKind(
    "samples",
    ("seconds", "samples"),
    "`training.sample` has generated: for each prompt, `prompt` and `text`. The seconds are not part of `step_seconds`",
    show=_samples,
)
CHECKPOINT_PROBED = EventKind(
    "checkpoint_probed", ("seconds",), "the test save after step 1 was read back and removed", "routine", show=None
)
WITNESSED = EventKind(
    "witnessed", ("cpu_seconds",), "the first update was compared on all ranks; CPU seconds of the checks so far", "routine", show=None
)
WITNESS_COST = EventKind(
    "witness_cost",
    ("cpu_seconds", "training_cpu_seconds", "steps"),
    "after 100 steps: cost of these checks, and of training",
    "routine",
    show=None,
)
CHECKPOINT_SAVED = EventKind(
    "checkpoint_saved",
    ("seconds", "stall_seconds", "size_bytes"),
    "a checkpoint is complete; `stall_seconds` is how long training stopped for it",
    "routine",
    _saved,
)
CHECKPOINT_FAILED = EventKind("checkpoint_failed", ("message",), "a save failed", "alarm", _not_saved)
MIRRORED = EventKind(
    "mirrored",
    ("folder", "seconds", "size_bytes"),
    "the mirror has a complete copy of a checkpoint or a model; bytes that were sent now",
    "routine",
    _mirrored,
)
MIRROR_FAILED = EventKind(
    "mirror_failed",
    ("message",),
    "sending to the mirror failed, and is repeated; written once until it succeeds again",
    "alarm",
    _mirror_failed,
)
ROTATION_FAILED = EventKind("rotation_failed", ("message",), "old checkpoints could not be removed", "warning")
COMPILED = EventKind(
    "compiled",
    ("seconds", "graphs"),
    "the compiler has worked; seconds since the last such event, graphs in total",
    "routine",
)
COMPILE_FALLBACK = EventKind(
    "compile_fallback", ("message",), "a function was compiled too often and runs uncompiled where no graph fits", "warning"
)
PROFILED = EventKind("profiled", ("trace", "steps", "seconds"), "the profile of `--profile` was written", "routine", _profile)
SLOW_RANK = EventKind(
    "slow_rank", ("rank", "ratio", "behind_seconds", "message"), "the others wait for this rank in each step", "alarm", _warning
)
LOSS_SPIKE = EventKind(
    "loss_spike",
    ("message", "rows", "rows_total"),
    "the loss is more than six standard deviations above the last 50 lines. `rows` are those of the steps since the last line, on all "
    f"ranks, at most {NAMED_ROWS}, and `rows_total` is their number: for each example `file`, `row` in it (its line), `tokens`, `step`, "
    "`rank`, `micro_batch` (from 1), `sequence` (packed examples share one) and `loss`, the mean token loss of its micro-batch, highest "
    "first. Of a rank the last 1,024 micro-batches are known",
    "warning",
    _spike,
    marks_curves=True,
)
GRADIENT_SPIKE = EventKind(
    "gradient_spike",
    ("message", "rows", "rows_total"),
    "the gradient norm is more than six standard deviations above the last 50 lines, and three times their mean, and the loss is not; "
    "`rows` as in `loss_spike`, of the last step alone",
    "warning",
    _spike,
    marks_curves=True,
)
SPIKES = (LOSS_SPIKE.name, GRADIENT_SPIKE.name)
ZERO_GRADIENT = EventKind("zero_gradient", ("message",), "the gradient norm is exactly zero", "warning", marks_curves=True)
WEIGHTS_LOOK_RANDOM = EventKind(
    "weights_look_random",
    ("message",),
    "the first loss is that of a random model, and the model should be pretrained",
    "warning",
)
PRECISION_WARNING = EventKind(
    "precision_warning", ("message",), "an operator of the first micro-batch ran in an unexpected dtype", "warning"
)
LOSS_SCALE_BACKED_OFF = EventKind("loss_scale_backed_off", ("loss_scale",), "fp16 overflowed; the new scale", "warning")
STEP_SKIPPED = EventKind("step_skipped", ("reason",), "`training.on_nonfinite: skip` left out an update", "warning", marks_curves=True)
TRACKER_FAILED = EventKind("tracker_failed", ("message",), "a tracker was disabled", "alarm", _warning)
STOPPING = EventKind("stopping", ("reason",), "a signal or `launch.max_runtime` stops the run after this step", show=_stopping)
EARLY_STOPPED = EventKind("early_stopped", ("message",), "`training.early_stopping` ends the run after this step")
TRAIN_FINISHED = EventKind("train_finished", (), "the last checkpoint of this start is complete", show=None)
RESTARTED = EventKind(
    "restarted",
    ("restart", "max_restarts", "failed_after_step", "code", "message"),
    "the command starts the ranks again after a failure",
    "warning",
    show=None,
    marks_curves=True,
    is_of_run=True,
)
RECIPE_CHANGED = EventKind(
    "recipe_changed",
    ("changes",),
    "a resume changed keys: for each `key`, `old`, `new`, `class`",
    show=None,
    marks_curves=True,
    is_of_run=True,
)
EVENTS = {each.name: each for each in list(globals().values()) if isinstance(each, EventKind)}


def names_of(*levels: EventLevel) -> frozenset[str]:
    """Return the names of the events of these levels."""
    return frozenset(name for name, each in EVENTS.items() if each.level in levels)


def reference_rows() -> list[str]:
    """Return the rows of the table in docs/reference/metrics.md."""
    fields = {each: ", ".join(f"`{name}`" for name in each.fields) for each in EVENTS.values()}
    return [f"| `{each.name}` | {f'{named} ' if named else ''}| {each.when} |" for each, named in fields.items()]
