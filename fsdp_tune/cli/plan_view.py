"""Show a plan: on the terminal, and as one HTML page without scripts or external files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.units import GIB, format_figure, format_seconds
from fsdp_tune.pages.html_pages import html_document, html_table
from fsdp_tune.planner.predict.memory import Timeline
from fsdp_tune.planner.predict.predict import FigureError, Plan, ScalingRow

if TYPE_CHECKING:
    from fsdp_tune.cli.terminal import Terminal


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
    order = sorted(
        components, key=lambda name: float(components[name].min()), reverse=True
    )  # permanent components at the bottom
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
            _place(other),
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


def describe_error(error: FigureError) -> str:
    if error.median_percent is None:
        return "not measured"
    return (
        f"median error {error.median_percent:.1f} %, nine of ten below {error.p90_percent:.1f} % "
        f"({error.rows} published runs)"
    )


def describe_changes(changes: dict[str, object]) -> str:
    """Describe changes, such as `FULL_SHARD, activation_checkpointing full`; the requested recipe has
    none."""
    if not changes:
        return "your recipe, unchanged"
    return ", ".join(
        f"{key.split('.')[1]} {str(value).lower() if isinstance(value, bool) else value}"
        for key, value in changes.items()
    )


def _place(plan: Plan) -> str:
    """Return the place in the ranking: `3`, or `3 = 1` for a recipe that is equal to the first within the
    error."""
    return f"{plan.place}" if plan.equal_from in (None, plan.place) else f"{plan.place} = {plan.equal_from}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{format_figure(seconds)} s"


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


BAR_CELLS = 40
PIPE_WIDTH = 120
"""Columns of a table that is not written to a terminal."""


def show_plan(screen: Terminal, plan: Plan) -> None:
    from fsdp_tune.core.gpus import CPU

    one, outside = ("rank", "the process itself") if plan.gpu == CPU else ("GPU", "CUDA and NCCL")
    screen.message(
        f"{plan.recipe} on {plan.num_processes} × {plan.gpu}, {_machines(plan.num_machines)}: fits: "
        f"{plan.fits} ({plan.fits_because})"
    )
    screen.message(f"batch: {plan.batch}")
    screen.message(f"rate: {plan.rate}")
    for key, what in plan.decided.items():
        screen.message(f"{key}: {what}")
    largest = max(plan.components.values(), default=0.0)
    rows = [(name, f"{size:.2f}", bar(size, largest)) for name, size in plan.components.items()]
    screen.table(
        f"memory of one {one} at the peak: {plan.where}",
        ["component", "GiB", ""],
        rows,
        pipe_width=PIPE_WIDTH,
    )
    memory = f"{plan.peak_allocated_gib:.2f} GiB allocated, {plan.peak_reserved_gib:.2f} reserved"
    screen.message(f"peak: {memory}, {plan.device_gib:.2f} with {outside}, of {plan.usable_gib:.2f}")
    screen.message(f"time: {time_line(plan)}")
    for line in _other_lines(plan):
        screen.message(line)
    if plan.experts:
        screen.table(_EXPERTS_TITLE, list(_EXPERTS_HEAD), _expert_rows(plan), pipe_width=PIPE_WIDTH)
        screen.message(f"experts: {plan.experts_because}")


_EXPERTS_TITLE = (
    "expert parallelism: the experts of a layer divided among neighbouring ranks; seconds of a step, "
    "hidden ones included"
)
_EXPERTS_HEAD = (
    "ranks",
    "fits",
    "GiB",
    "s/step",
    "tokens/s/GPU",
    "gathers",
    "all-to-all",
    "products",
    "rows of an expert",
)


def _expert_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            f"{row.ep_size} (yours)" if row.is_yours else str(row.ep_size),
            row.fits,
            f"{row.device_gib:.1f}",
            format_figure(row.step_seconds),
            f"{row.tokens_per_second_per_device:,.0f}",
            f"{row.gather_seconds:.3f}",
            f"{row.exchange_seconds:.3f}",
            f"{row.product_seconds:.3f}",
            f"{row.rows_of_expert:,.0f}",
        )
        for row in plan.experts
    ]


def _experts(plan: Plan) -> str:
    if not plan.experts:
        return ""
    table = html_table(_EXPERTS_HEAD, _expert_rows(plan))
    return f"<h2>Expert parallelism</h2><p>{escape(_EXPERTS_TITLE)}</p>{table}<p>{escape(str(plan.experts_because))}</p>"  # noqa: E501


def show_errors(screen: Terminal, plan: Plan) -> None:
    """Print the errors of such predictions, the assumptions, and what is unknown."""

    for name, error in plan.accuracy.items():
        screen.message(f"error of {name}: {describe_error(error)}")
    for text in plan.assumptions:
        screen.message(f"assumed: {text}")
    for text in plan.unknown:
        screen.message(f"unknown: {text}")


def bar(size: float, largest: float) -> str:
    """Return a bar in proportion, of at least one cell for a component above zero."""
    return "█" * max(1, round(BAR_CELLS * size / largest)) if largest > 0 and size > 0 else ""


def time_line(plan: Plan) -> str:
    if plan.step_seconds is None or plan.tokens_per_second_per_device is None or plan.time is None:
        return "unknown"
    share = f", MFU {plan.mfu:.1%}" if plan.mfu is not None else ""
    step = (
        f"{format_figure(plan.step_seconds)} s a step, {plan.tokens_per_second_per_device:,.0f} tokens a "
        f"second and GPU{share}"
    )
    exposed = plan.time.exposed_seconds / plan.step_seconds
    return f"{step}; {exposed:.0%} of it waiting for communication"


def show_ranking(screen: Terminal, plan: Plan) -> None:

    if not plan.alternatives:
        return
    rows = [
        (
            _place(other) if other.recipe_changes else f"{_place(other)} →",
            other.fits,
            f"{other.device_gib:.1f}",
            "unknown" if other.step_seconds is None else format_figure(other.step_seconds),
            "unknown"
            if other.tokens_per_second_per_device is None
            else f"{other.tokens_per_second_per_device:,.0f}",
            describe_changes(other.recipe_changes),
        )
        for other in plan.alternatives
    ]
    screen.table(
        "ranked recipes",
        ["", "fits", "GiB", "s/step", "tokens/s/GPU", "changes to your recipe"],
        rows,
        pipe_width=PIPE_WIDTH,
    )
    if plan.best_because:
        screen.message(f"why the first: {plan.best_because}")
    if plan.smallest_hardware is not None:
        screen.message(
            f"nothing fits; the smallest that does: {plan.smallest_hardware.num_processes} × "
            f"{plan.smallest_hardware.gpu}"
        )
    _show_other_trainings(screen, plan)


_MEASURED_HEAD = (
    "changes to your recipe",
    "",
    "s/step (planned)",
    "tokens/s/device",
    "GiB reserved (planned)",
)


def _measured_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            describe_changes(each.recipe_changes),
            each.outcome,
            _pair(each.step_seconds, each.predicted_step_seconds, format_figure),
            "" if each.tokens_per_second_per_device is None else f"{each.tokens_per_second_per_device:,.0f}",
            _pair(each.peak_reserved_gib, each.predicted_peak_reserved_gib, "{:.1f}".format),
        )
        for each in plan.measured
    ]


def _measured(plan: Plan) -> str:
    if not plan.measured:
        return ""
    rows = [tuple(escape(cell) for cell in row) for row in _measured_rows(plan)]
    return f"<h2>Measured on this machine</h2>{html_table(_MEASURED_HEAD, rows)}"


def show_measured(screen: Terminal, plan: Plan) -> None:
    rows = [(*others, changes) for changes, *others in _measured_rows(plan)]
    screen.table(
        "measured on this machine", [*_MEASURED_HEAD[1:], _MEASURED_HEAD[0]], rows, pipe_width=PIPE_WIDTH
    )
    for each in plan.measured:
        if each.problem is not None:
            screen.message(f"{describe_changes(each.recipe_changes)}: {each.outcome}: {each.problem}")


def _pair(measured: float | None, predicted: float | None, form: Callable[[float], str]) -> str:
    """Return `0.61 (0.58)`; what is unknown is left out."""
    return f"{'' if measured is None else form(measured)}{'' if predicted is None else f' ({form(predicted)})'}".strip()  # noqa: E501


def _show_other_trainings(screen: Terminal, plan: Plan) -> None:
    from fsdp_tune.planner.search.search import adapter_method

    rows = [
        (
            adapter_method(other.recipe_changes),
            other.fits,
            f"{other.device_gib:.1f}",
            "unknown"
            if other.tokens_per_second_per_device is None
            else f"{other.tokens_per_second_per_device:,.0f}",
            _as_yaml(other.recipe_changes),
        )
        for other in plan.other_trainings
    ]
    if rows:
        head = ["", "fits", "GiB", "tokens/s/GPU", "write in the recipe"]
        screen.table("adapters: another training, not another layout", head, rows, pipe_width=PIPE_WIDTH)


def _as_yaml(changes: dict[str, object]) -> str:
    """Return keys as a recipe has them: `lora: {target_modules:
    all-linear}, fsdp: {offload_params: true}`."""
    sections: dict[str, list[str]] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, []).append(
            f"{name}: {str(value).lower() if isinstance(value, bool) else value}"
        )
    return ", ".join(f"{section}: {{{', '.join(keys)}}}" for section, keys in sections.items())


def show_scaling(screen: Terminal, plan: Plan) -> None:
    if not plan.scaling:
        return
    rows = [
        (
            str(row.num_processes),
            "unknown" if row.step_seconds is None else format_figure(row.step_seconds),
            "unknown" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            "unknown" if row.efficiency is None else f"{row.efficiency:.0%}",
            row.fits,
            f"{row.peak_reserved_gib:.1f}",
        )
        for row in plan.scaling
    ]
    head = ["GPUs", "s/step", "tokens/s", "efficiency", "fits", "GiB reserved"]
    screen.table("more GPUs, as many sequences on each", head, rows, pipe_width=PIPE_WIDTH)


def _other_lines(plan: Plan) -> list[str]:
    sent, disk, host, run = plan.communication_gib, plan.disk_gib, plan.host_gib_per_machine, plan.run
    lines: list[str] = []
    if sent.within_machine is not None and sent.between_machines is not None:
        lines.append(
            f"sent by each GPU in a step: {sent.within_machine:.2f} GiB in the machine, "
            f"{sent.between_machines:.2f} to others"
        )
    lines.append(f"host memory of a machine: {host.peak:.1f} GiB, besides Python, torch and CUDA themselves")
    most = (
        "all are kept"
        if disk.checkpoints_at_most is None
        else f"at most {disk.checkpoints_at_most:.1f} GiB at a time"
    )
    lines.append(f"disk: {disk.checkpoint:.1f} GiB a checkpoint, {most}; {disk.merged:.1f} GiB merged")
    if run.seconds is not None:
        cost = "" if run.dollars is None else f", {run.dollars:,.0f} dollars"
        lines.append(f"the run: {run.steps:,.0f} steps, {format_seconds(run.seconds)}{cost}")
    return lines


def _machines(number: int) -> str:
    return "one machine" if number == 1 else f"{number} machines"
