"""A plan as one HTML page without scripts or external files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

from fsdp_tune.cli.plan_rows import (
    EXPERTS_HEAD,
    EXPERTS_TITLE,
    MEASURED_HEAD,
    describe_changes,
    describe_error,
    expert_rows,
    measured_rows,
    place,
)
from fsdp_tune.core.units import GIB, format_figure
from fsdp_tune.pages.html_pages import html_document, html_table
from fsdp_tune.planner.predict.memory import Timeline
from fsdp_tune.planner.predict.predict import Plan, ScalingRow

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 360, 56, 34
COLOURS = (
    "#4477aa",
    "#66ccee",
    "#228833",
    "#ccbb44",
    "#ee6677",
    "#aa3377",
    "#bbbbbb",
    "#225555",
    "#997700",
    "#994455",
    "#004488",
    "#77aadd",
)
Points = npt.NDArray[np.float64]


def html_page(plan: Plan) -> str:
    """Return a complete document. Every name from a recipe, a model or a file is escaped."""
    title = f"{plan.recipe} on {plan.num_processes} × {plan.gpu}"
    parts = [
        _verdict(plan),
        _timeline(plan),
        _components(plan),
        _experts(plan),
        _measured(plan),
        _ranking(plan),
        _scaling(plan.scaling),
        _footer(plan),
    ]
    return html_document(title, parts)


def _verdict(plan: Plan) -> str:
    speed = _number(plan.tokens_per_second_per_device, ",.0f")
    rows = [
        ("fits", f'<b class="{escape(plan.fits)}">{escape(plan.fits)}</b>: {escape(plan.fits_because)}'),
        (
            "peak allocated / reserved",
            f"{plan.peak_allocated_gib:.2f} / {plan.peak_reserved_gib:.2f} GiB, at {escape(plan.where)}",
        ),
        (
            "step",
            f"{escape(_seconds(plan.step_seconds))}, {speed} tokens a second and GPU, MFU "
            f"{_number(plan.mfu, '.1%')}",
        ),
        ("batch", escape(plan.batch)),
        ("learning rate", escape(plan.rate)),
    ]
    return html_table(("", ""), rows)


def _timeline(plan: Plan) -> str:
    if plan.memory is None or len(plan.memory.timeline.at) == 0:
        return ""
    timeline = plan.memory.timeline
    components = {name: values for name, values in timeline.components.items() if values.any()}
    top = (
        max(float(timeline.reserved_bytes.max()) / GIB, plan.usable_gib if plan.fits != "yes" else 0.0) * 1.05
    )
    x = np.linspace(LEFT, WIDTH, len(timeline.at))
    below = np.zeros(len(x))
    areas: list[str] = []
    keys: list[str] = []
    # permanent components at the bottom
    order = sorted(components, key=lambda name: float(components[name].min()), reverse=True)
    for name, colour in zip(order, _cycle(len(order)), strict=True):
        above = below + components[name] / GIB
        areas.append(
            f'<path fill="{colour}" d="{_area(x, below, above, top)}"><title>{escape(name)}</title></path>'
        )
        keys.append(f'<span class="key" style="background:{colour}"></span>{escape(name)}')
        below = above
    reserved = _line(x, timeline.reserved_bytes / GIB, top)
    lines = (
        '<path fill="none" stroke="currentColor" stroke-dasharray="4 3" '
        f'd="{reserved}"><title>reserved</title></path>'
    )
    figure = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img">{"".join(areas)}{lines}{_axes(top)}{_phases(timeline, x)}</svg>'
    )
    caption = '<span class="key" style="border-top:2px dashed;height:0"></span>reserved'
    return f"<h2>Memory of one step</h2>\n{figure}\n<p>{''.join(keys)}{caption}</p>"


def _cycle(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _y(values: Points, top: float) -> Points:
    return (HEIGHT - BOTTOM) * (1 - values / top)


def _area(x: Points, below: Points, above: Points, top: float) -> str:
    forth = _pairs(x, _y(above, top))
    back = _pairs(x[::-1], _y(below, top)[::-1])
    return f"M{' L'.join([*forth, *back])} Z"


def _line(x: Points, values: Points, top: float) -> str:
    return f"M{' L'.join(_pairs(x, _y(values, top)))}"


def _pairs(x: Points, y: Points) -> list[str]:
    return [f"{left:.1f},{up:.1f}" for left, up in zip(x.tolist(), y.tolist(), strict=True)]


def _axes(top: float) -> str:
    step = next(
        size for size in (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 50, 100, 500, 10_000) if top / size <= 8
    )
    marks: list[str] = []
    for index in range(int(top / step) + 1):
        y = (HEIGHT - BOTTOM) * (1 - index * step / top)
        marks.append(
            f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            'stroke-opacity=".13"/>'
        )
        marks.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="12">{index * step:g}</text>'
        )
    return "".join(marks) + f'<text x="4" y="{HEIGHT - 6}" font-size="12">GiB</text>'


def _phases(timeline: Timeline, x: Points) -> str:
    starts = [
        0,
        *(
            index
            for index in range(1, len(timeline.phase))
            if timeline.phase[index] != timeline.phase[index - 1]
        ),
    ]
    marks: list[str] = []
    room = -1.0
    for start in starts:
        marks.append(
            f'<line x1="{x[start]:.1f}" x2="{x[start]:.1f}" y1="0" y2="{HEIGHT - BOTTOM}" '
            'stroke="currentColor" stroke-opacity=".27"/>'
        )
        if x[start] >= room:
            marks.append(
                f'<text x="{x[start] + 3:.1f}" y="{HEIGHT - BOTTOM + 16}" '
                f'font-size="12">{escape(timeline.phase[start])}</text>'
            )
            room = float(x[start]) + 8.0 * (len(timeline.phase[start]) + 1)
    return "".join(marks)


def _components(plan: Plan) -> str:
    rows = [(escape(name), f"{size:.2f}") for name, size in plan.components.items()]
    return "<h2>At the peak</h2>\n" + html_table(("component", "GiB"), rows)


def _ranking(plan: Plan) -> str:
    if not plan.alternatives:
        return ""
    rows = [
        (
            place(other),
            escape(describe_changes(other.recipe_changes)),
            f'<span class="{escape(other.fits)}">{escape(other.fits)}</span>',
            f"{other.device_gib:.1f}",
            escape(_seconds(other.step_seconds)),
            _number(other.tokens_per_second_per_device, ",.0f"),
        )
        for other in plan.alternatives
    ]
    because = f"<p>{escape(plan.best_because)}</p>" if plan.best_because else ""
    head = ("", "changes to your recipe", "fits", "GiB", "step", "tokens/s/GPU")
    return f"<h2>Ranked recipes</h2>\n{because}\n" + html_table(head, rows)


def _scaling(scaling: Sequence[ScalingRow]) -> str:
    if not scaling:
        return ""
    rows = [
        (
            str(row.num_processes),
            f'<span class="{escape(row.fits)}">{escape(row.fits)}</span>',
            escape(_seconds(row.step_seconds)),
            _number(row.tokens_per_second, ",.0f"),
            _number(row.efficiency, ".0%"),
            f"{row.peak_reserved_gib:.1f}",
        )
        for row in scaling
    ]
    return "<h2>Other numbers of GPUs, same sequences per GPU</h2>\n" + html_table(
        ("GPUs", "fits", "step", "tokens/s", "efficiency", "GiB reserved"), rows
    )


def _footer(plan: Plan) -> str:
    notes = "".join(
        f"<li>{escape(text)}</li>"
        for text in [*plan.assumptions, *(f"unknown: {text}" for text in plan.unknown)]
    )
    errors = "".join(
        f"<li>{escape(name)}: {escape(describe_error(error))}</li>" for name, error in plan.accuracy.items()
    )
    return f"<footer><h2>Accuracy and assumptions</h2><ul>{errors}{notes}</ul></footer>"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{format_figure(seconds)} s"


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _experts(plan: Plan) -> str:
    if not plan.experts:
        return ""
    table = html_table(EXPERTS_HEAD, expert_rows(plan))
    return f"<h2>Expert parallelism</h2><p>{escape(EXPERTS_TITLE)}</p>{table}<p>{escape(str(plan.experts_because))}</p>"  # noqa: E501


def _measured(plan: Plan) -> str:
    if not plan.measured:
        return ""
    rows = [tuple(escape(cell) for cell in row) for row in measured_rows(plan)]
    return f"<h2>Measured</h2>{html_table(MEASURED_HEAD, rows)}"
