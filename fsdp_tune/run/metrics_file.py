"""metrics.jsonl: one JSON object per line, and the table of the events among them.

Rank 0 writes it while ranks run, the launcher between launches. It is read as it grows, even if it is truncated or replaced meanwhile. What
writes events, the terminal, the report and the reference all read the table.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from fsdp_tune.core.atomic import json_safe
from fsdp_tune.core.units import format_bytes, format_seconds
from fsdp_tune.run.directory import RunDir

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
    """Return the phases of the start. `seconds_before`, which a command may add, is its own time before it launched the ranks."""
    phases: dict[str, float] = line["phase_seconds"]
    before: float | None = line.get("seconds_before")
    every = phases if before is None else {"checking": before, **phases}
    named = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in every.items() if seconds >= SHOWN_PHASE_SECONDS)
    return [f"first step {sum(every.values()):.1f} s after the {'launch' if before is None else 'start'} ({named})"]


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
    "slow_rank",
    ("rank", "part", "share", "behind_seconds", "message"),
    "for a minute, the others have waited for this rank for more than 5 % of each step; `part`: for its `data`, `computing` or `saving`",
    "alarm",
    _warning,
)
RANK_RECOVERED = EventKind("rank_recovered", ("rank", "message"), "a rank that was slow is not any more")
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
CHECKPOINT_REJECTED = EventKind(
    "checkpoint_rejected",
    ("checkpoint", "message"),
    "an automatic restart passes over a newer checkpoint, which is damaged or not complete",
    "warning",
    show=None,
    is_of_run=True,
)
MACHINES_CHANGED = EventKind(
    "machines_changed",
    ("machines", "ranks", "gradient_accumulation_steps", "message"),
    "the run continues on other machines (`launch.min_machines`): their numbers, and the ranks and micro-batches of a step from here on",
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


# ---- The file


class Follower:
    """Return the new complete lines of `path` at each call of `read`, without those that existed when this was created.

    A resumed run truncates metrics.jsonl to its checkpoint, in place or by a new file of the same name; reading then continues
    after the lines that were known before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = self._content()
        self._identity = self._stat()
        self._offset = len(self._known)

    def read(self) -> list[dict[str, Any]]:
        identity = self._stat()
        if identity is None:
            self._identity, self._offset = None, 0
            return []
        if self._identity is not None and (identity[0] != self._identity[0] or identity[1] < self._offset):
            self._offset = _known_lines_bytes(self._known, self._content())
            self._known = b""  # rank 0 truncates once, at its start; the lines of a restarted group are returned again
        self._identity = identity
        if identity[1] == self._offset:
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            fresh = file.read()
        end = fresh.rfind(b"\n") + 1
        self._offset += end
        return json_objects(fresh[:end])

    def _stat(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size

    def _content(self) -> bytes:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return b""


def _known_lines_bytes(old: bytes, new: bytes) -> int:
    """Return the length of the longest prefix of `new` whose lines are all in `old`."""
    known = set(old.splitlines(keepends=True))
    length = 0
    for line in new.splitlines(keepends=True):
        if line not in known or not line.endswith(b"\n"):
            break
        length += len(line)
    return length


class MetricsFile:
    """Append lines; on resume, truncate the file to the checkpoint's step so that each step occurs once.

    A disk error ends the run after a save: the lines that are `unwritten` are stored in the checkpoint, and the resumed run writes
    them.
    """

    def __init__(self, run: RunDir, *, resume_step: int | None, enabled: bool) -> None:
        self._path = run.metrics_jsonl
        self._file: IO[bytes] | None = None
        self.failure: OSError | None = None
        self.unwritten: list[str] = []
        if enabled:
            self._truncate(resume_step)
            # Unbuffered: data that a full disk has refused must not be written again when the file is closed.
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  open for the whole run

    def _truncate(self, resume_step: int | None) -> None:
        if not self._path.exists():
            return
        kept: list[str] = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                fields = json.loads(line)
                step, kind = fields.get("step", 0), EVENTS.get(fields.get("event"))
            except (ValueError, AttributeError):
                continue  # a line torn by a crash
            if isinstance(step, int) and step <= (resume_step or 0) and (resume_step is not None or (kind is not None and kind.is_of_run)):
                kept.append(line)
        stage = self._path.with_suffix(".jsonl.tmp")
        stage.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        stage.replace(self._path)

    def write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._append(json.dumps(json_safe(line), allow_nan=False))

    def write_missing(self, lines: list[str]) -> None:
        """Write the lines that an earlier launch could not write, unless an attempt in between has."""
        if self._file is not None and lines:
            present = set(self._path.read_text(encoding="utf-8").splitlines())
            for line in lines:
                if line not in present:
                    self._append(line)

    def _append(self, line: str) -> None:
        assert self._file is not None
        if self.failure is None:
            try:
                _write_all(self._file, f"{line}\n".encode())
                return
            except OSError as error:
                self.failure = error
        self.unwritten.append(line)

    def event(self, kind: EventKind, step: int, **details: Any) -> None:
        self.write({"event": kind.name, "step": step, "time": time.time(), **details})

    def close(self) -> None:
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
                self._file.close()
            except OSError as error:
                self.failure = self.failure or error
            self._file = None


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Write all of `data` to an unbuffered file, which may accept only a part of it at once."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def append_event(run: RunDir, kind: EventKind, step: int, **details: Any) -> None:
    """Append an event of the launcher. Rank 0, which appends to the same file, keeps it when it truncates the file."""
    line = {"event": kind.name, "step": step, "time": time.time(), **details}
    with open(run.metrics_jsonl, "a+b") as file:
        if file.tell() > 0 and not _ends_a_line(run):
            file.write(b"\n")  # a rank that was killed may have left half a line
        file.write(json.dumps(line).encode() + b"\n")


def _ends_a_line(run: RunDir) -> bool:
    with open(run.metrics_jsonl, "rb") as file:
        file.seek(-1, 2)
        return file.read() == b"\n"


def read_metrics(run: RunDir) -> list[dict[str, Any]]:
    """Return the objects of metrics.jsonl, oldest first: losses, evaluations and events; [] if the file does not exist."""
    try:
        return json_objects(run.metrics_jsonl.read_bytes())
    except FileNotFoundError:
        return []


def json_objects(raw: bytes) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file, without lines that are not JSON objects (torn by a crash)."""
    found: list[dict[str, Any]] = []
    for line in raw.split(b"\n"):
        try:
            value: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(cast(dict[str, Any], value))
    return found


def number(value: object) -> float | None:
    """Return a finite number as it is, and None for everything else: null, text such as "nan", NaN, infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def seconds_in_steps(lines: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds of all steps of a run from its training lines in order: evaluations and saves excluded."""
    total, before = 0.0, 0
    for line in lines:
        total += float(line.get("step_seconds") or 0.0) * (line["step"] - before)
        before = line["step"]
    return total
