"""Charts and tables of the report.

The charts of a report: which fields of metrics.jsonl share a chart, and each chart as JSON for the script that draws it.

The tables of a report: figures of the runs, plans and measurements, data by source, events, samples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pydantic import JsonValue

from fsdp_tune.core.secrets import mask_text
from fsdp_tune.core.units import format_figure, format_seconds
from fsdp_tune.data.account import spread_indices
from fsdp_tune.data.inputs import TRAIN
from fsdp_tune.data.report import InputAccount
from fsdp_tune.pages.run_record import Curve, RunRecord
from fsdp_tune.run.events import AnyEvent, SamplesGenerated, SpikeEvent

MAX_POINTS, MIN_POINTS = 2000, 50
ALL_POINTS = 45_000
"""Of all curves of a page, so that it stays below its size: a point is a dozen bytes."""
NAMED_SERIES = 6
"""Curves that the description of a chart for screen readers has with their numbers."""
LOSS_UNIT = "nats per token"


@dataclass(frozen=True, slots=True)
class Kind:
    """A chart before it has curves: its place on the page, and the fields that it shows, as patterns of complete names."""

    group: str
    title: str
    unit: str
    fields: tuple[str, ...]
    planned: bool = False
    """Whether the figures of plan.json with the names of the fields are shown as levels."""
    percent: bool = False
    marked: bool = False


KINDS = (
    Kind("Learning", "Loss", LOSS_UNIT, ("loss",), marked=True),
    Kind("Learning", "Evaluation loss", LOSS_UNIT, ("eval_loss", r"eval_.+_loss"), marked=True),
    Kind("Learning", "Learning rate", "", ("learning_rate",)),
    Kind("Learning", "Gradient norm before clipping", "", ("grad_norm",), marked=True),
    Kind("Speed", "Throughput", "tokens a second and device", ("tokens_per_second_per_device",)),
    Kind("Speed", "Model FLOPs utilisation (MFU)", "%", ("mfu",), percent=True),
    Kind("Speed", "Time of a step", "seconds", ("step_seconds",), planned=True),
    Kind("Speed", "Waiting and updating", "seconds a step", ("data_wait_seconds", "exposed_communication_seconds", "optimizer_seconds")),
    Kind("Memory", "GPU memory of rank 0, peak so far", "GiB", ("peak_reserved_gib", "peak_allocated_gib"), planned=True),
    Kind("Memory", "Host memory of rank 0, peak so far", "GiB", ("peak_host_gib",)),
    Kind("Data by source", "Loss by source", LOSS_UNIT, (r"source_.+_loss",), marked=True),
    Kind("Data by source", "Trained tokens by source", "tokens", (r"source_.+_tokens",)),
    Kind("Data by source", "Passes over each source", "passes", (r"source_.+_passes",)),
    Kind("Other measurements", "Load of experts over the mean", "", ("expert_load_max", "expert_load_min")),
)
NOT_DRAWN = re.compile(
    r"step|epoch|time|tokens|supervised_tokens|last_step_seconds|checkpoint_stall_seconds|eval_seconds|eval_(.+_)?perplexity|expert_layer"
    r"|slow_rank(_part|_share)?"
)
"""Fields that are an axis, that follow from a drawn one, or that the text of the page has."""
PART_NAMES = {
    "eval_loss": "all",
    "data_wait_seconds": "waiting for data",
    "exposed_communication_seconds": "waiting for communication",
    "optimizer_seconds": "optimizer",
    "peak_reserved_gib": "reserved",
    "peak_allocated_gib": "allocated",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a chart. `colour` and `dash` count from 0."""

    label: str
    colour: int
    dash: int
    curve: Curve


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line: a figure of a plan."""

    label: str
    colour: int
    dash: int
    value: float


@dataclass(frozen=True, slots=True)
class Chart:
    group: str
    title: str
    unit: str
    series: list[Series]
    levels: list[Level] = field(default_factory=list[Level])
    marks: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Steps with an event, and its name."""

    def description(self) -> str:
        """Return the chart in words, for readers who do not see it."""
        shown = [_in_words(series) for series in self.series[:NAMED_SERIES]]
        more = len(self.series) - len(shown)
        unit = f", {self.unit}," if self.unit else ""
        return f"{self.title}{unit} by step. {' '.join(shown)}{f' And {more} more curves.' if more else ''}"

    def gaps(self) -> str:
        """Return which curves have values that are not finite or unknown; empty if every value is a number."""
        found = [(series.label, [step for step, value in _points(series.curve) if value is None]) for series in self.series]
        return "; ".join(f"{label}: {len(steps):,} not finite or unknown, first at step {steps[0]:,}" for label, steps in found if steps)

    def marks_in_words(self) -> str:
        """Return the first marked events; empty without any."""
        shown = ", ".join(f"{name} at step {step:,}" for step, name in self.marks[:NAMED_SERIES])
        return f"{shown} …" if len(self.marks) > NAMED_SERIES else shown

    def as_json(self, limit: int) -> dict[str, Any]:
        """Return what the script draws: at most `limit` points a curve, steps as differences, values with six digits."""
        curves = [(series, series.curve.thinned(limit)) for series in self.series]
        return {
            "title": self.title,
            "unit": self.unit,
            "series": [
                {
                    "label": series.label,
                    "colour": series.colour,
                    "dash": series.dash,
                    "x": [step - before for step, before in zip(curve.steps, [0, *curve.steps], strict=False)],
                    "y": [None if value is None else float(f"{value:.6g}") for value in curve.values],
                }
                for series, curve in curves
            ],
            "levels": [{"label": each.label, "colour": each.colour, "dash": each.dash, "value": each.value} for each in self.levels],
            "marks": self.marks,
        }


def _points(curve: Curve) -> Iterable[tuple[int, float | None]]:
    return zip(curve.steps, curve.values, strict=True)


def _in_words(series: Series) -> str:
    points = series.curve.finite()
    (first, begin), (last, end) = points[0], points[-1]
    least, most = (format_figure(extreme(value for _, value in points)) for extreme in (min, max))
    ends = f"{format_figure(begin)} at step {first:,} to {format_figure(end)} at step {last:,}"
    return f"{series.label}: {ends}, between {least} and {most}."


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts that have a value, in the order of the page. A number that no chart names has a chart of its own."""
    names = list(dict.fromkeys(name for run in runs for line in [*run.lines.losses, *run.lines.evals] for name in line))
    drawn, charts = set[str](), list[Chart]()
    for kind in KINDS:
        own = [name for pattern in kind.fields for name in names if re.fullmatch(pattern, name) and name not in drawn]
        drawn.update(own)
        charts.append(_chart(kind, own, runs))
    others = [name for name in names if name not in drawn and not NOT_DRAWN.fullmatch(name)]
    charts += [_chart(Kind("Other measurements", name, "", (name,)), [name], runs) for name in others]
    return [chart for chart in charts if chart.series]


def _chart(kind: Kind, names: Sequence[str], runs: Sequence[RunRecord]) -> Chart:
    """Return a chart of the fields that have a value. Runs differ by colour and fields by dashes; fields of a single run by colour."""
    series, levels = list[Series](), list[Level]()
    used = [name for name in names if any(run.curve(name).finite() for run in runs)]
    for index, run in enumerate(runs):
        for part, name in enumerate(used):
            curve = run.curve(name)
            colour, dash = (part, 0) if len(runs) == 1 else (index, part)
            label = _label(run, name, runs, used)
            if curve.finite():
                series.append(Series(label, colour, dash, _in_percent(curve) if kind.percent else curve))
            planned = getattr(run.plan, name, None) if kind.planned else None
            if planned is not None:
                levels.append(Level(f"{label}, planned", colour, dash, planned))
    events = [event for run in runs for event in run.lines.events if kind.marked and event.marks_curves]
    marks = sorted({(event.step, event.name) for event in events if event.step is not None})
    return Chart(kind.group, kind.title, kind.unit, series, levels, marks)


def _label(run: RunRecord, name: str, runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    part = PART_NAMES.get(name) or re.sub(r"^(?:source|eval)_(.+)_(?:loss|tokens|passes)$", r"\1", name)
    if len(names) == 1:
        return run.label
    return part if len(runs) == 1 else f"{run.label}: {part}"


def _in_percent(curve: Curve) -> Curve:
    return Curve(curve.steps, [None if value is None else 100 * value for value in curve.values])


def points_each(charts: Sequence[Chart]) -> int:
    """Return how many points a curve may have, so that all together stay below `ALL_POINTS`."""
    series = sum(len(chart.series) for chart in charts)
    return max(MIN_POINTS, min(MAX_POINTS, ALL_POINTS // max(series, 1)))


# ---- What a step is made of, as shares of one bar.


@dataclass(frozen=True, slots=True)
class StepPart:
    name: str
    seconds: float
    share: float
    """Of the step and its waiting for data, 0 to 1."""


def step_parts(run: RunRecord) -> list[StepPart]:
    """Return the mean parts of a run's steps; [] if its lines do not have them. The first line, which allocates and compiles, is left out.

    Communication is what the compute stream waits for; where it cannot be observed (DDP, FSDP1), it is in the first part.
    """
    lines = [line for line in run.lines.losses if line.get("last_step_seconds")]
    lines = lines[1:] or lines
    if not lines:
        return []
    data, communication, optimizer, step = (
        sum(float(line.get(name) or 0.0) for line in lines) / len(lines)
        for name in ("data_wait_seconds", "exposed_communication_seconds", "optimizer_seconds", "last_step_seconds")
    )
    is_observed = any(line.get("exposed_communication_seconds") is not None for line in lines)
    first = "forward and backward" if is_observed else "forward, backward and communication"
    parts = {
        first: max(0.0, step - communication - optimizer),
        "waiting for communication": communication,
        "optimizer": optimizer,
        "waiting for data": data,
    }
    total = sum(parts.values())
    return [StepPart(name, seconds, seconds / total) for name, seconds in parts.items() if seconds > 0]


UNKNOWN = "–"
EVENT_CHARACTERS = 4000


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
        rows = [_source(given) for given in same[0].data.report.inputs]
        names = ", ".join(run.label for run in same) if len(runs) > 1 else ""
        sample = same[0].data.report.stream_sample_rows
        stream = f"a stream: these figures are of the first rows of each source, at most {sample:,}" if sample else ""
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


def events_of(run: RunRecord, limit: int) -> RunEvents:
    """Return at most `limit` events: routine ones are left out first, and of the others the oldest."""
    events = [event for event in run.lines.events if not isinstance(event, SamplesGenerated)]  # they have a section of their own
    rank = sorted(range(len(events)), key=lambda at: (events[at].level == "routine", -at))
    kept = [events[at] for at in sorted(rank[:limit])]
    return RunEvents(run.label, [_event(event) for event in kept], len(events) - len(kept))


def _event(event: AnyEvent) -> RunEvent:
    every = event.details()
    has_message = "message" in every  # with the numbers in it
    hidden = ("message", "rows") if isinstance(event, SpikeEvent) else ("message",)
    details = {
        key: value
        for key, value in every.items()
        if key not in hidden and not (has_message and isinstance(value, str | int | float | None))
    }
    text = "\n".join(part for part in (str(every.get("message", "")), *(_labelled(key, value) for key, value in details.items())) if part)
    step = f"{event.step:,}" if event.step is not None else UNKNOWN
    return RunEvent(step, _time(event.time), event.name, mask_text(_cut(text, EVENT_CHARACTERS)), event.level in ("warning", "alarm"))


def spike_tables(runs: Sequence[RunRecord], limit: int) -> list[Table]:
    """Return a table of rows for each run with spikes, the newest spike first, with at most `limit` rows each."""
    tables: list[Table] = []
    for run in runs:
        found = [event for event in reversed(run.lines.events) if isinstance(event, SpikeEvent)]
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
            shown = f"{min(limit, len(rows)):,} of {total:,} rows, those with the highest losses of the newest spike first"
            caption = f"{run.label}: {shown}" if len(runs) > 1 else shown
            tables.append(Table(["step", "file", "row", "tokens", "rank", "micro-batch", "loss of the micro-batch"], rows[:limit], caption))
    return tables


def _time(seconds: float | None) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds is not None else UNKNOWN
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def _labelled(key: str, value: JsonValue) -> str:
    return f"{key}: {_detail(value)}".replace(": \n", ":\n")


def _detail(value: JsonValue) -> str:
    """Return a field of an event as text: numbers rounded, mappings as `key: value`, lists of texts or mappings a line each."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_detail(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        has_lines = any(isinstance(item, dict | str) for item in value)
        return "".join(f"\n  {_detail(item)}" for item in value) if has_lines else ", ".join(map(_detail, value))
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
        events = [event for event in run.lines.events if isinstance(event, SamplesGenerated)]
        kept = {0, len(events) - 1, *spread_indices(len(events), steps - 2)} if len(events) > steps else range(len(events))
        for at, event in enumerate(events):
            for sample in event.samples:
                if at in kept:
                    found.setdefault(sample.prompt, []).append((event.step, run.label, _cut(sample.text, characters)))
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
    return text if len(text) <= characters else f"{text[:characters]} … ({len(text) - characters:,} more characters)"


def difference_table(found: Mapping[str, Sequence[str | None]], runs: Sequence[RunRecord]) -> Table:
    return Table(
        ["key", *(run.label for run in runs)], [[key, *(UNKNOWN if each is None else each for each in row)] for key, row in found.items()]
    )
