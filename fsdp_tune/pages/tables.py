"""The tables of a report: figures of the runs, plans and measurements, data by source, events, samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import JsonValue

from fsdp_tune.core.secrets import mask_text
from fsdp_tune.core.units import format_bytes, format_figure, format_seconds
from fsdp_tune.data.account import spread_indices
from fsdp_tune.data.inputs import TRAIN
from fsdp_tune.data.report import InputAccount
from fsdp_tune.pages.run_record import RunRecord
from fsdp_tune.run.events import SamplesGenerated
from fsdp_tune.run.metrics_event import AnyEvent, SpikeEvent

UNKNOWN = "–"
EVENT_CHARACTERS = 4000
WARNING_LEVELS = ("warning", "alarm")
KEY_ROWS = 4
"""Runs that are columns of a table of keys."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


def summary_table(runs: Sequence[RunRecord]) -> Table:
    """Return one row for each figure of a single run; of several one row for each run, and one column for
    each figure that one has."""
    found = [(run, run.summary()) for run in runs]
    rows = {
        "state": [str(each["state"]).replace("_", " ") for _, each in found],
        "ended with": [str(each["problem"] or UNKNOWN) for _, each in found],
        "steps": [
            f"{each['steps']:,}{f' of {total:,}' if (total := each['total_steps']) else ''}"
            for _, each in found
        ],
        "time in steps": [format_seconds(each["seconds_in_steps"]) for _, each in found],
        "tokens": [_count(each["tokens"]) for _, each in found],
        "loss": [_ends(each["loss"]) for _, each in found],
        "evaluation loss": [_ends(each["eval_loss"]) for _, each in found],
        "tokens a second and device": [
            _figure(each["tokens_per_second_per_device"], ", median") for _, each in found
        ],
        "MFU": [_percent(each["mfu"], ", median") for _, each in found],
        "peak GPU memory, reserved": [_figure(each["peak_reserved_gib"], " GiB") for _, each in found],
        "peak host memory": [_figure(each["peak_host_gib"], " GiB") for _, each in found],
        "differs from the recipe": [
            "; ".join(run.readback.differences) if run.readback else UNKNOWN for run in runs
        ],
        "directory": [str(run.run.path) for run in runs],
    }
    kept = {name: cells for name, cells in rows.items() if any(cell not in (UNKNOWN, "") for cell in cells)}
    if len(runs) == 1:
        return Table([], [[name, *cells] for name, cells in kept.items()])
    return Table(
        ["run", *kept], [[run.label, *(cells[at] for cells in kept.values())] for at, run in enumerate(runs)]
    )


def _ends(ends: Mapping[str, Any] | None) -> str:
    if ends is None:
        return UNKNOWN
    best = (
        f", lowest {_figure(ends['best'])} at step {ends['best_step']:,}" if ends["best"] is not None else ""
    )
    lost = f", {ends['not_finite']:,} not finite" if ends["not_finite"] else ""
    return f"{_figure(ends['first'])} → {_figure(ends['last'])}{best}{lost}"


def _figure(value: float | None, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:.4g}{unit}" if abs(value) < 1000 else f"{value:,.0f}{unit}"


def _percent(value: float | None, more: str = "") -> str:
    return UNKNOWN if value is None else f"{value:.1%}{more}"


def _count(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else UNKNOWN


def plan_table(runs: Sequence[RunRecord]) -> Table:
    """Return predicted and measured figures of the runs that have a plan, from the last training line."""
    rows = [
        [
            run.label,
            name,
            f"{format_figure(predicted)} {unit}",
            f"{format_figure(measured)} {unit}",
            f"{predicted / measured - 1:+.1%}",
        ]
        for run in runs
        if run.plan is not None and run.metrics.losses.last
        for name, unit, predicted, measured in run.plan.compared(run.metrics.losses.last)
    ]
    return Table(["run", "figure", "predicted", "measured", "predicted over measured"], rows)


def source_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """Return the sources of each run; runs with the same rows share a table."""
    by_key: dict[str, list[RunRecord]] = {}
    for run in runs:
        if run.data is not None:
            by_key.setdefault(run.data.key, []).append(run)
    head = [
        "set",
        "source",
        "format",
        "loss on",
        "rows",
        "passes an epoch",
        "tokens",
        "trained tokens",
        "share of tokens",
    ]
    tables: list[Table] = []
    for same in by_key.values():
        assert same[0].data is not None
        rows = [_source(given) for given in same[0].data.report.inputs]
        names = ", ".join(run.label for run in same) if len(runs) > 1 else ""
        sample = same[0].data.report.stream_sample_rows
        stream = (
            f"a stream: these figures are of the first rows of each source, at most {sample:,}"
            if sample
            else ""
        )
        tables.append(Table(head, rows, ": ".join(part for part in (names, stream) if part)))
    return tables


def _source(given: InputAccount) -> list[str]:
    return [
        given.set or UNKNOWN,
        mask_text(given.name or UNKNOWN),
        given.format or UNKNOWN,
        given.loss_on or UNKNOWN,
        _count(given.rows),
        _figure(given.repeats if given.set == TRAIN else None),
        _count(given.tokens),
        _count(given.supervised_tokens),
        _percent(given.share),
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
    warnings: int
    """Also among those that are not shown."""


def events_of(run: RunRecord, limit: int) -> RunEvents:
    """Return at most `limit` events: routine ones are left out first, and of the others the oldest."""
    # they have a section of their own
    events = [event for event in run.metrics.events if not isinstance(event, SamplesGenerated)]
    rank = sorted(range(len(events)), key=lambda at: (events[at].level == "routine", -at))
    kept = [events[at] for at in sorted(rank[:limit])]
    warnings = sum(event.level in WARNING_LEVELS for event in events)
    return RunEvents(run.label, [_event(event) for event in kept], len(events) - len(kept), warnings)


def _event(event: AnyEvent) -> RunEvent:
    every = event.details()
    has_message = "message" in every  # with the numbers in it
    hidden = ("message", "rows") if isinstance(event, SpikeEvent) else ("message",)
    details = {
        key: value
        for key, value in every.items()
        if key not in hidden and not (has_message and isinstance(value, str | int | float | None))
    }
    short = ", ".join(
        _labelled(key, value) for key, value in details.items() if not isinstance(value, list | dict)
    )
    long = [_labelled(key, value) for key, value in details.items() if isinstance(value, list | dict)]
    text = "\n".join(part for part in (str(every.get("message", "")), short, *long) if part)
    step = f"{event.step:,}" if event.step is not None else UNKNOWN
    return RunEvent(
        step,
        _time(event.time),
        event.name,
        mask_text(_cut(text, EVENT_CHARACTERS)),
        event.level in WARNING_LEVELS,
    )


def spike_tables(runs: Sequence[RunRecord], limit: int) -> list[Table]:
    """Return a table of rows for each run with spikes, the newest spike first, with at most `limit` rows
    each."""
    tables: list[Table] = []
    for run in runs:
        found = [event for event in reversed(run.metrics.events) if isinstance(event, SpikeEvent)]
        rows = [
            [
                f"{row.step:,}",
                mask_text(row.file),
                f"{row.row:,}",
                f"{row.tokens:,}",
                str(row.rank),
                str(row.micro_batch),
                _figure(row.loss),
            ]
            for spike in found
            for row in spike.rows or []
        ]
        if rows:
            total = sum(spike.rows_total or 0 for spike in found)
            shown = (
                f"{min(limit, len(rows)):,} of {total:,} rows, those with the highest losses of the "
                "newest spike first"
            )
            caption = f"{run.label}: {shown}" if len(runs) > 1 else shown
            tables.append(
                Table(
                    ["step", "file", "row", "tokens", "rank", "micro-batch", "loss of the micro-batch"],
                    rows[:limit],
                    caption,
                )
            )
    return tables


def _time(seconds: float | None) -> str:
    try:
        return (
            datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
            if seconds is not None
            else UNKNOWN
        )
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def _labelled(key: str, value: JsonValue) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        if key.endswith("_bytes"):
            return f"{key.removesuffix('_bytes')}: {format_bytes(int(value))}"
        if key == "seconds" or key.endswith("_seconds"):
            return f"{key.removesuffix('seconds').rstrip('_') or 'time'}: {format_seconds(value)}"
    return f"{key}: {_detail(value)}".replace(": \n", ":\n")


def _detail(value: JsonValue) -> str:
    """Return a field of an event as text: numbers rounded, mappings as `key: value`, lists of texts or
    mappings a line each."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_detail(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        has_lines = any(isinstance(item, dict | str) for item in value)
        return (
            "".join(f"\n  {_detail(item)}" for item in value) if has_lines else ", ".join(map(_detail, value))
        )
    if isinstance(value, float):
        return f"{value:.4g}"
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else value
        if isinstance(value, str)
        else json.dumps(value)
    )


@dataclass(frozen=True, slots=True)
class PromptSamples:
    """What the runs generated for one prompt, by step: (step, run, text)."""

    prompt: str
    texts: Sequence[tuple[str, str, str]]
    left_out: int


def samples_of(runs: Sequence[RunRecord], *, steps: int, characters: int) -> list[PromptSamples]:
    """Return the generated texts of each prompt: of each run at most `steps` times, first and last included,
    cut to `characters`."""
    found: dict[str, list[tuple[int, str, str]]] = {}
    left_out: dict[str, int] = {}
    for run in runs:
        events = [event for event in run.metrics.events if isinstance(event, SamplesGenerated)]
        kept = (
            {0, len(events) - 1, *spread_indices(len(events), steps - 2)}
            if len(events) > steps
            else range(len(events))
        )
        for at, event in enumerate(events):
            for sample in event.samples:
                if at in kept:
                    found.setdefault(sample.prompt, []).append(
                        (event.step, run.label, _cut(sample.text, characters))
                    )
                else:
                    left_out[sample.prompt] = left_out.get(sample.prompt, 0) + 1
    return [
        PromptSamples(
            _cut(prompt, characters),
            [(f"{step:,}", label, text) for step, label, text in sorted(texts, key=lambda each: each[0])],
            left_out.get(prompt, 0),
        )
        for prompt, texts in found.items()
    ]


def _cut(text: str, characters: int) -> str:
    return (
        text
        if len(text) <= characters
        else f"{text[:characters]} … ({len(text) - characters:,} more characters)"
    )


def difference_table(found: Mapping[str, Sequence[str | None]], runs: Sequence[RunRecord]) -> Table:
    """Return a row for each key; of more than `KEY_ROWS` runs one for each run, which are wider than high
    otherwise."""
    rows = [[key, *(UNKNOWN if each is None else each for each in row)] for key, row in found.items()]
    if len(runs) <= KEY_ROWS or not rows:
        return Table(["key", *(run.label for run in runs)], rows)
    head, *turned = zip(*rows, strict=True)
    return Table(["run", *head], [[run.label, *row] for run, row in zip(runs, turned, strict=True)])
