"""The charts of a report: which fields of metrics.jsonl share a chart, and each chart as JSON for the script
that draws it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fsdp_tune.core.units import format_figure
from fsdp_tune.pages.metrics_table import Curve
from fsdp_tune.pages.run_record import RunRecord
from fsdp_tune.run.events import MachinesChanged, RecipeChanged, Restarted, TrainStarted
from fsdp_tune.run.metrics_event import AnyEvent

MAX_POINTS, MIN_POINTS = 2000, 50


ALL_POINTS = 45_000
"""Of all curves of a page, so that it stays below its size: a point is a dozen bytes."""


MARKS = 100
"""Of a run in a chart, the newest ones."""


NAMED_SERIES = 6
"""Curves that the description of a chart for screen readers has with their numbers, and marks that are named
below it."""


RESUMED = "resumed"
STARTING = {each.name.replace("_", " ") for each in (Restarted, MachinesChanged, RecipeChanged)}
"""Marks of events after which the run starts again at their step."""


LOSS_UNIT = "nats per token"


@dataclass(frozen=True, slots=True)
class Kind:
    """A chart before it has curves: its place on the page, and the fields that it shows, as patterns of
    complete names."""

    group: str
    title: str
    unit: str
    fields: tuple[str, ...]
    planned: bool = False
    """Whether the figures of plan.json with the names of the fields are shown as levels."""
    percent: bool = False
    marked: bool = False
    smooth: bool = False
    """Whether its curves may be smoothed: those of measurements that scatter."""


KINDS = (
    Kind("Learning", "Loss", LOSS_UNIT, ("loss",), marked=True, smooth=True),
    Kind("Learning", "Evaluation loss", LOSS_UNIT, ("eval_loss", r"eval_.+_loss"), marked=True),
    Kind("Learning", "Exact match of checkpoints", "%", (r".+/exact_match",), percent=True),
    Kind("Learning", "Loss of evaluated checkpoints", LOSS_UNIT, (r".+/loss",)),
    Kind("Learning", "Learning rate", "", ("learning_rate",)),
    Kind("Learning", "Gradient norm before clipping", "", ("grad_norm",), marked=True, smooth=True),
    Kind("Speed", "Throughput", "tokens a second and device", ("tokens_per_second_per_device",), smooth=True),
    Kind("Speed", "Model FLOPs utilisation (MFU)", "%", ("mfu",), percent=True, smooth=True),
    Kind("Speed", "Time of a step", "seconds", ("step_seconds",), planned=True, smooth=True),
    Kind(
        "Speed",
        "Waiting and updating",
        "seconds a step",
        ("data_wait_seconds", "exposed_communication_seconds", "optimizer_seconds"),
        smooth=True,
    ),
    Kind(
        "Memory",
        "GPU memory of rank 0, peak so far",
        "GiB",
        ("peak_reserved_gib", "peak_allocated_gib"),
        planned=True,
    ),
    Kind("Memory", "Host memory of rank 0, peak so far", "GiB", ("peak_host_gib",)),
    Kind("Data by source", "Loss by source", LOSS_UNIT, (r"source_.+_loss",), marked=True, smooth=True),
    Kind("Data by source", "Trained tokens by source", "tokens", (r"source_.+_tokens",)),
    Kind("Data by source", "Passes over each source", "passes", (r"source_.+_passes",)),
    Kind("Other measurements", "Load of experts over the mean", "", ("expert_load_max", "expert_load_min")),
)


NOT_DRAWN = re.compile(
    r"step|epoch|time|tokens|supervised_tokens|last_step_seconds|checkpoint_stall_seconds|eval_seconds|eval_(.+_)?perplexity|expert_layer"
    r"|slow_rank(_part|_share)?|.+/perplexity"
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
    """One curve of a chart. `number` counts runs, or the fields of a single run, from 0: it decides colour
    and dash."""

    label: str
    number: int
    curve: Curve


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line: a figure of a plan, with the number of its series."""

    label: str
    number: int
    value: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A step with an event, and the number of its run; None if there is only one run."""

    step: int
    name: str
    run: int | None
    label: str
    """Of the run; empty if there is only one."""

    def __str__(self) -> str:
        return f"{self.name} at step {self.step:,}{f' ({self.label})' if self.label else ''}"


@dataclass(frozen=True, slots=True)
class Chart:
    group: str
    title: str
    unit: str
    series: list[Series]
    levels: list[Level] = field(default_factory=list[Level])
    marks: list[Mark] = field(default_factory=list[Mark])
    by_run: bool = False
    """Whether its series are runs, which the legend of the page hides and shows; else they are fields of one
    run."""
    smooth: bool = False

    def description(self) -> str:
        """Return the chart in words, for readers who do not see it."""
        shown = [_in_words(series) for series in self.series[:NAMED_SERIES]]
        more = len(self.series) - len(shown)
        unit = f", {self.unit}," if self.unit else ""
        return f"{self.title}{unit} by step. {' '.join(shown)}{f' And {more} more curves.' if more else ''}"

    def gaps(self) -> str:
        """Return which curves have values that are not finite; empty if every value is a number."""
        found = [(series.label, series.curve.steps[np.isnan(series.curve.values)]) for series in self.series]
        return "; ".join(
            f"{label}: {len(steps):,} not finite, first at step {steps[0]:,}"
            for label, steps in found
            if len(steps)
        )

    def marks_in_words(self) -> str:
        """Return the first marked events; empty without any."""
        shown = ", ".join(map(str, self.marks[:NAMED_SERIES]))
        more = len(self.marks) - NAMED_SERIES
        return f"{shown} and {more:,} more" if more > 0 else shown

    def as_json(self, limit: int) -> dict[str, object]:
        """Return what the script draws: at most `limit` points a curve, steps as differences, values with six
        digits.

        A value that is not finite is null.
        """
        span = (
            min(int(each.curve.steps[0]) for each in self.series),
            max(int(each.curve.steps[-1]) for each in self.series),
        )
        curves = [(series, series.curve.thinned(limit, span)) for series in self.series]
        return {
            "title": self.title,
            "unit": self.unit,
            "byRun": self.by_run,
            "smooth": self.smooth,
            "series": [
                {
                    "label": series.label,
                    "number": series.number,
                    "x": np.diff(curve.steps, prepend=0).tolist(),
                    "y": [
                        None if value != value else float(f"{value:.6g}") for value in curve.values.tolist()
                    ],
                }
                for series, curve in curves
            ],
            "levels": [
                {"label": each.label, "number": each.number, "value": each.value} for each in self.levels
            ],
            "marks": [
                {"step": each.step, "name": each.name, "run": each.run, "label": each.label}
                for each in self.marks
            ],
        }


def _in_words(series: Series) -> str:
    points = series.curve.finite()
    begin, end, least, most = (
        format_figure(float(each))
        for each in (*points.values[[0, -1]], points.values.min(), points.values.max())
    )
    return (
        f"{series.label}: {begin} at step {points.steps[0]:,} to {end} at step {points.steps[-1]:,}, "
        f"between {least} and {most}."
    )


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts that have a value, in the order of the page. A number that no chart names has a chart
    of its own.

    Of a single run a chart has the fields of its kind. Of several each field has a chart, so that a curve is
    a run on the whole page.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names))
    curves = {
        (at, name): run.metrics.curve(name)
        for at, run in enumerate(runs)
        for name in names
        if not NOT_DRAWN.fullmatch(name)
    }
    used = [
        name
        for name in names
        if any(len(curves[at, name].finite()) for at in range(len(runs)) if (at, name) in curves)
    ]
    drawn, kinds = set[str](), list[tuple[Kind, list[str]]]()
    for kind in KINDS:
        own = [
            name
            for pattern in kind.fields
            for name in used
            if re.fullmatch(pattern, name) and name not in drawn
        ]
        drawn.update(own)
        kinds.append((kind, own))
    kinds += [
        (Kind("Other measurements", name, "", (name,), smooth=True), [name])
        for name in used
        if name not in drawn
    ]
    if len(runs) > 1:
        kinds = [
            (replace(kind, title=_title(kind, name, own)), [name]) for kind, own in kinds for name in own
        ]
    marks = [mark for at, run in enumerate(runs) for mark in _marks(run, at if len(runs) > 1 else None)]
    marks.sort(key=lambda mark: mark.step)
    return [_chart(kind, own, runs, curves, marks) for kind, own in kinds if own]


def _chart(
    kind: Kind,
    names: Sequence[str],
    runs: Sequence[RunRecord],
    curves: Mapping[tuple[int, str], Curve],
    marks: list[Mark],
) -> Chart:
    """Return a chart of fields that have a value."""
    series, levels = list[Series](), list[Level]()
    for at, run in enumerate(runs):
        for part, name in enumerate(names):
            curve, index = curves[at, name], at if len(runs) > 1 else part
            label = _part(name) if len(names) > 1 else run.label
            if len(curve.finite()):
                series.append(Series(label, index, _in_percent(curve) if kind.percent else curve))
            planned = getattr(run.plan, name, None) if kind.planned else None
            if planned is not None:
                levels.append(Level(f"{label}, planned", index, planned))
    own = marks if kind.marked else []
    return Chart(
        kind.group, kind.title, kind.unit, series, levels, own, by_run=len(runs) > 1, smooth=kind.smooth
    )


def _title(kind: Kind, name: str, names: Sequence[str]) -> str:
    return kind.title if len(names) == 1 or name == "eval_loss" else f"{kind.title}: {_part(name)}"


def _part(name: str) -> str:
    return PART_NAMES.get(name) or re.sub(
        r"^(?:source|eval)_(.+)_(?:loss|tokens|passes)$|^(.+)/(?:loss|exact_match)$", r"\1\2", name
    )


def _marks(run: RunRecord, index: int | None) -> list[Mark]:
    """Return the marked events of a run in the order of steps, each once a step. An event that explains a
    resume replaces it."""
    named = {
        (event.step, name)
        for event in run.metrics.events
        if event.step is not None and (name := _mark_name(event))
    }
    explained = {step for step, name in named if name in STARTING}
    named -= {(step, RESUMED) for step in explained}
    label = run.label if index is not None else ""
    return [Mark(step, name, index, label) for step, name in sorted(named)][-MARKS:]


def _mark_name(event: AnyEvent) -> str:
    """Return the name of a mark; empty for events without one. A start after step 0 is a resume, by hand or
    by the command."""
    if isinstance(event, TrainStarted):
        return RESUMED if event.step else ""
    return event.name.replace("_", " ") if event.marks_curves else ""


def _in_percent(curve: Curve) -> Curve:
    return Curve(curve.steps, 100 * curve.values)


def points_each(charts: Sequence[Chart]) -> int:
    """Return how many points a curve may have, so that all together stay below `ALL_POINTS`."""
    series = sum(len(chart.series) for chart in charts)
    return max(MIN_POINTS, min(MAX_POINTS, ALL_POINTS // max(series, 1)))
