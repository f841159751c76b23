"""The card at the end of a training: a few rows of figures from the run directory, and the next commands."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fsdp_tune.cli.terminal import Terminal
from fsdp_tune.core.units import counted, format_bytes, format_seconds
from fsdp_tune.run.directory import RunDir, checkpoint_step
from fsdp_tune.run.events import SamplesGenerated, read_event
from fsdp_tune.run.metrics_file import read_metrics, seconds_in_steps
from fsdp_tune.run.records import Prediction

Line = dict[str, Any]
CARD_SAMPLES = 3


def card(
    run: RunDir, facts: dict[str, object], next_commands: Sequence[str], seconds: float
) -> list[tuple[str, str]]:
    """Return the rows of the card, each a label and a text. `facts` are those of rank 0's outcome; the rest
    is read from the run directory.

    `seconds`: since the start of the command.
    """
    lines = read_metrics(run)
    steps = [line for line in lines if "loss" in line]
    rows = [
        ("time", _time(seconds, steps)),
        ("tokens", _tokens(facts, steps)),
        ("loss", _losses(steps, "loss", spans_of(steps))),
        ("rate", _rates(steps)),
        (
            "eval loss",
            _losses(
                evals := [line for line in lines if "eval_loss" in line],
                "eval_loss",
                [f"step {line['step']}" for line in evals],
            ),
        ),
        *(("sample", each) for each in _samples(lines)),
        ("peak memory", _memory(steps)),
        *(("plan", each) for each in predicted_and_measured(run, steps)),
        ("size on disk", _sizes(run)),
        *(("next", each) for each in next_commands),
    ]
    return [(name, text) for name, text in rows if text]


CARD_INDENT = 16


def show_card(screen: Terminal, rows: Sequence[tuple[str, str]]) -> None:
    """Print the rows of the card. Commands are not broken, so that they can be copied."""
    label = ""
    for name, text in rows:
        screen.message(
            f"  {name if name != label else '':<13} {text}", indent=CARD_INDENT, wraps=name != "next"
        )
        label = name


def spans_of(steps: Sequence[Line]) -> list[str]:
    """Return the steps of each training line, of whose tokens its loss is the mean: those since the line
    before."""
    ends = [0, *(int(line["step"]) for line in steps)]
    return [
        f"step {end}" if end - start <= 1 else f"steps {start + 1} to {end}" for start, end in pairwise(ends)
    ]


def _time(seconds: float, steps: Sequence[Line]) -> str:
    """Return the seconds of this command and of the steps of all launches."""
    last = steps[-1]["step"] if steps else 0
    parts = [f"{format_seconds(seconds)} since the start"]
    return ", ".join(
        [
            *parts,
            *([f"{format_seconds(seconds_in_steps(steps))} in the run's {last:,} steps"] if last else []),
        ]
    )


def _tokens(facts: dict[str, object], steps: Sequence[Line]) -> str:
    tokens = facts.get("tokens") or (steps[-1].get("tokens") if steps else None)
    return f"{tokens:,}" if tokens is not None else ""


def _rates(steps: Sequence[Line]) -> str:
    """Return the highest learning rate that was logged, and the last one."""
    logged = [
        (line["learning_rate"], line["step"])
        for line in steps
        if isinstance(line.get("learning_rate"), float | int)
    ]
    if not logged:
        return ""
    highest, step = max(logged, key=lambda each: each[0])
    return f"highest logged {highest:.3g} (step {step:,}), last {logged[-1][0]:.3g} (step {logged[-1][1]:,})"


def _losses(lines: Sequence[Line], name: str, spans: Sequence[str]) -> str:
    """Return the first, last and best value with the steps of each; values such as `nan` are text and never
    the best."""
    if not lines:
        return ""

    def shown(at: int) -> str:
        value = lines[at][name]
        return f"{f'{value:.4f}' if isinstance(value, int | float) else value} ({spans[at]})"

    numbers = [at for at, line in enumerate(lines) if isinstance(line[name], int | float)]
    best = min(numbers, key=lambda at: float(lines[at][name]), default=None)
    first = shown(0).replace("(steps", "(mean of steps")
    if best == len(lines) - 1:
        return f"first {first}, last and best {shown(-1)}"
    return f"first {first}, last {shown(-1)}{f', best {shown(best)}' if best is not None else ''}"


def _samples(lines: Sequence[Line]) -> list[str]:
    """Return the first generated texts of the last time that `training.sample` generated."""
    generated = [event for line in lines if isinstance(event := read_event(line), SamplesGenerated)]
    return [str(sample) for sample in generated[-1].samples[:CARD_SAMPLES]] if generated else []


def _memory(steps: Sequence[Line]) -> str:
    for name, kind in (("peak_reserved_gib", "GPU memory reserved"), ("peak_host_gib", "host memory")):
        values = [float(line[name]) for line in steps if line.get(name)]
        if values:
            return f"{max(values):.2f} GiB of {kind} on rank 0"
    return ""


def predicted_and_measured(run: RunDir, steps: Sequence[Line]) -> list[str]:
    """Compare plan.json with the last step, one line for each figure that both have."""
    plan = Prediction.read(run.plan_json)
    if plan is None or not steps:
        return []
    return [
        f"{name}: {predicted:.3g} {unit} predicted, {measured:.3g} measured ({predicted / measured - 1:+.1%})"
        for name, unit, predicted, measured in plan.compared(steps[-1])
    ]


def _sizes(run: RunDir) -> str:
    try:
        checkpoints = [path for path in run.path.iterdir() if checkpoint_step(path) is not None]
    except OSError:
        return ""
    held = format_bytes(sum(map(_bytes_below, checkpoints)))
    parts = [f"{counted(len(checkpoints), 'checkpoint')} {held}" if checkpoints else "no checkpoint"]
    if run.merged.is_dir():
        parts.append(f"merged {format_bytes(_bytes_below(run.merged))}")
    return f"{format_bytes(_bytes_below(run.path))} ({', '.join(parts)})"


def _bytes_below(root: Path) -> int:
    """Return the bytes of the files below `root`; a file that disappears meanwhile is not counted."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += Path(folder, name).lstat().st_size
            except OSError:
                continue
    return total
