"""A plan on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from fsdp_tune.core.units import format_figure, format_seconds
from fsdp_tune.planner.predict.predict import Plan

if TYPE_CHECKING:
    from fsdp_tune.cli.terminal import Terminal


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
        screen.table(EXPERTS_TITLE, list(EXPERTS_HEAD), expert_rows(plan), pipe_width=PIPE_WIDTH)
        screen.message(f"experts: {plan.experts_because}")


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
            place(other) if other.recipe_changes else f"{place(other)} →",
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


def show_measured(screen: Terminal, plan: Plan) -> None:
    rows = [(*others, changes) for changes, *others in measured_rows(plan)]
    machines = "this machine" if plan.num_machines == 1 else _machines(plan.num_machines)
    screen.table(
        f"measured on {machines}", [*MEASURED_HEAD[1:], MEASURED_HEAD[0]], rows, pipe_width=PIPE_WIDTH
    )
    for each in plan.measured:
        if each.problem is not None:
            screen.message(f"{describe_changes(each.recipe_changes)}: {each.outcome}: {each.problem}")


def _show_other_trainings(screen: Terminal, plan: Plan) -> None:
    from fsdp_tune.planner.search.other_trainings import adapter_method

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
