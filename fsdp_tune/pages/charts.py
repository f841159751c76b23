"""The charts of a report: which fields of metrics.jsonl share a chart, and each chart as JSON for the script that draws it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_tune.core.units import format_figure
from fsdp_tune.pages.curves import Curve
from fsdp_tune.pages.run_record import RunRecord
from fsdp_tune.run.events import EVENTS

MAX_POINTS, MIN_POINTS = 2000, 50
ALL_POINTS = 45_000
"""Of all curves of a page, so that it stays below its size: a point is a dozen bytes."""
NAMED_SERIES = 6
"""Curves that the description of a chart for screen readers has with their numbers."""
MARKED = frozenset(name for name, kind in EVENTS.items() if kind.marks_curves)
"""Events that are vertical lines in the charts of a loss."""
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
    events = [line for run in runs for line in run.lines.events if kind.marked and line["event"] in MARKED]
    marks = sorted({(line["step"], str(line["event"])) for line in events if isinstance(line.get("step"), int)})
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
