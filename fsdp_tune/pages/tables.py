"""The tables of a report: figures of the runs, plans and measurements, data by source, events, samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from fsdp_tune.core.secrets import mask_text
from fsdp_tune.core.units import format_figure, format_seconds
from fsdp_tune.data.account import spread_indices
from fsdp_tune.data.inputs import TRAIN
from fsdp_tune.pages.curves import Line, number
from fsdp_tune.pages.run_record import RunRecord
from fsdp_tune.run.events import SAMPLES, names_of

UNKNOWN = "–"
EVENT_CHARACTERS = 4000
ROUTINE = names_of("routine")
"""Left out first where there are too many."""
WARNINGS = names_of("warning", "alarm")


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def summary_table(runs: Sequence[RunRecord]) -> Table:
    """Return one row for each figure that a run has, one column for each run."""
    found = [(run, run.summary()) for run in runs]
    rows = {
        "state": [str(each["state"]) for _, each in found],
        "steps": [f"{each['steps']:,}{f' of {total:,}' if (total := each['total_steps']) else ''}" for _, each in found],
        "time in steps": [format_seconds(each["seconds_in_steps"]) for _, each in found],
        "tokens": [_count(each["tokens"]) for _, each in found],
        "loss": [_ends(each["loss"]) for _, each in found],
        "evaluation loss": [_ends(each["eval_loss"]) for _, each in found],
        "tokens a second and device": [_figure(each["tokens_per_second_per_device"], ", median") for _, each in found],
        "MFU": [_percent(each["mfu"], ", median") for _, each in found],
        "peak GPU memory, reserved": [_figure(each["peak_reserved_gib"], " GiB") for _, each in found],
        "peak host memory": [_figure(each["peak_host_gib"], " GiB") for _, each in found],
        "ended with": [str(each["problem"] or UNKNOWN) for _, each in found],
        "differs from the recipe": ["; ".join(run.readback.differences) if run.readback else UNKNOWN for run in runs],
        "directory": [str(run.run.path) for run in runs],
    }
    kept = [[name, *cells] for name, cells in rows.items() if any(cell not in (UNKNOWN, "") for cell in cells)]
    return Table(["", *(run.label for run in runs)], kept)


def _ends(ends: Mapping[str, Any] | None) -> str:
    if ends is None:
        return UNKNOWN
    best = f", lowest {_figure(ends['best'])} at step {ends['best_step']:,}" if ends["best"] is not None else ""
    lost = f", {ends['not_finite']:,} not finite" if ends["not_finite"] else ""
    return f"{_figure(ends['first'])} → {_figure(ends['last'])}{best}{lost}"


def _figure(value: float | None, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:.4g}{unit}" if abs(value) < 1000 else f"{value:,.0f}{unit}"


def _percent(value: float | None, more: str = "") -> str:
    return UNKNOWN if value is None else f"{value:.1%}{more}"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else UNKNOWN


def plan_table(runs: Sequence[RunRecord]) -> Table:
    """Return predicted and measured figures of the runs that have a plan, from the last training line."""
    rows = [
        [run.label, name, f"{format_figure(predicted)} {unit}", f"{format_figure(measured)} {unit}", f"{predicted / measured - 1:+.1%}"]
        for run in runs
        if run.plan is not None and run.lines.losses
        for name, unit, predicted, measured in run.plan.compared(run.lines.losses[-1])
    ]
    return Table(["run", "figure", "predicted", "measured", "predicted over measured"], rows)


def source_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """Return the sources of each run; runs with the same rows share a table."""
    by_key: dict[str, list[RunRecord]] = {}
    for run in runs:
        if run.data is not None:
            by_key.setdefault(run.data.key, []).append(run)
    head = ["set", "source", "format", "loss on", "rows", "passes an epoch", "tokens", "trained tokens", "share of tokens"]
    tables: list[Table] = []
    for same in by_key.values():
        assert same[0].data is not None
        rows = [_source(given) for given in same[0].data.report.get("inputs", [])]
        names = ", ".join(run.label for run in same) if len(runs) > 1 else ""
        sample = same[0].data.report.get("stream_sample_rows")
        stream = f"a stream: these figures are of the first rows of each source, at most {sample:,}" if sample else ""
        tables.append(Table(head, rows, ": ".join(part for part in (names, stream) if part)))
    return tables


def _source(given: Mapping[str, Any]) -> list[str]:
    repeats = number(given.get("repeats")) if given.get("set") == TRAIN else None
    return [
        str(given.get("set", UNKNOWN)),
        mask_text(str(given.get("label") or given.get("path") or UNKNOWN)),
        str(given.get("format") or UNKNOWN),
        str(given.get("loss_on") or UNKNOWN),
        *(
            _count(given.get(name)) if name != "repeats" else _figure(repeats)
            for name in ("rows", "repeats", "tokens", "supervised_tokens")
        ),
        _percent(number(given.get("share"))),
    ]


@dataclass(frozen=True, slots=True)
class RunEvent:
    step: str
    time: str
    name: str
    text: str
    is_warning: bool


@dataclass(frozen=True, slots=True)
class RunEvents:
    """The events of a run that are shown, in order, and how many are not."""

    label: str
    shown: Sequence[RunEvent]
    left_out: int


def events_of(run: RunRecord, limit: int) -> RunEvents:
    """Return at most `limit` events: routine ones are left out first, and of the others the oldest."""
    lines = [line for line in run.lines.events if line["event"] != SAMPLES.name]  # they have a section of their own
    rank = sorted(range(len(lines)), key=lambda at: (lines[at]["event"] in ROUTINE, -at))
    kept = [lines[at] for at in sorted(rank[:limit])]
    return RunEvents(run.label, [_event(line) for line in kept], len(lines) - len(kept))


def _event(line: Line) -> RunEvent:
    name, step, time = str(line["event"]), line.get("step"), number(line.get("time"))
    has_message = "message" in line  # with the numbers in it
    details = {
        key: value
        for key, value in line.items()
        if key not in ("event", "step", "time", "message") and not (has_message and isinstance(value, str | int | float | None))
    }
    text = "\n".join(part for part in (str(line.get("message", "")), *(_labelled(key, value) for key, value in details.items())) if part)
    return RunEvent(
        f"{step:,}" if isinstance(step, int) else UNKNOWN, _time(time), name, mask_text(_cut(text, EVENT_CHARACTERS)), name in WARNINGS
    )


def _time(seconds: float | None) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds is not None else UNKNOWN
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def _labelled(key: str, value: Any) -> str:
    return f"{key}: {_detail(value)}".replace(": \n", ":\n")


def _detail(value: Any) -> str:
    """Return a field of an event as text: numbers rounded, mappings as `key: value`, lists of texts or mappings a line each."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_detail(inner)}" for key, inner in cast(dict[str, Any], value).items())
    if isinstance(value, list):
        items = cast(list[Any], value)
        has_lines = any(isinstance(item, dict | str) for item in items)
        return "".join(f"\n  {_detail(item)}" for item in items) if has_lines else ", ".join(map(_detail, items))
    if isinstance(value, float):
        return f"{value:.4g}"
    return (
        f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value if isinstance(value, str) else json.dumps(value)
    )


@dataclass(frozen=True, slots=True)
class PromptSamples:
    """What the runs generated for one prompt, by step: (step, run, text)."""

    prompt: str
    texts: Sequence[tuple[str, str, str]]
    left_out: int


def samples_of(runs: Sequence[RunRecord], *, steps: int, characters: int) -> list[PromptSamples]:
    """Return the generated texts of each prompt: of each run at most `steps` times, first and last included, cut to `characters`."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    left_out: dict[str, int] = {}
    for run in runs:
        lines = [line for line in run.lines.events if line["event"] == SAMPLES.name and isinstance(line.get("step"), int)]
        kept = {0, len(lines) - 1, *spread_indices(len(lines), steps - 2)} if len(lines) > steps else range(len(lines))
        for at, line in enumerate(lines):
            for sample in cast(list[dict[str, Any]], line.get("samples") or []):
                prompt = str(sample.get("prompt", ""))
                if at in kept:
                    found.setdefault(prompt, []).append((line["step"], run.label, _cut(str(sample.get("text", "")), characters)))
                else:
                    left_out[prompt] = left_out.get(prompt, 0) + 1
    return [
        PromptSamples(
            _cut(prompt, characters),
            [(f"{step:,}", label, text) for step, label, text in sorted(texts, key=lambda each: each[0])],
            left_out.get(prompt, 0),
        )
        for prompt, texts in found.items()
    ]


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]} … ({len(text) - characters:,} more characters)"


def difference_table(found: Mapping[str, Sequence[str | None]], runs: Sequence[RunRecord]) -> Table:
    return Table(
        ["key", *(run.label for run in runs)], [[key, *(UNKNOWN if each is None else each for each in row)] for key, row in found.items()]
    )
