"""Output of `train`: the inputs before the start, a line for each logged step, and the card at the end."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from fsdp_tune.cli.progress import ScreenBar
from fsdp_tune.cli.terminal import TREND, Terminal, trend
from fsdp_tune.core.errors import ExitReason
from fsdp_tune.core.secrets import masked
from fsdp_tune.core.units import format_bytes, format_seconds
from fsdp_tune.data.account import duplicate_lines, key_lines, source_lines
from fsdp_tune.data.report import DataReport
from fsdp_tune.data.token_budget import filling_lines
from fsdp_tune.jobs.answers import PreviewAnswer, StartPoint, WrittenAnswer
from fsdp_tune.jobs.observer import TrainingInputs, TrainResult
from fsdp_tune.jobs.train import Preview, WrittenRun
from fsdp_tune.launch.command.resume import commands_after, commands_to_resume, merge_command
from fsdp_tune.model.model_files import ModelFacts
from fsdp_tune.planner.predict.memory import total_steps
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.schedule import rate_line
from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.reference import passed_defaults
from fsdp_tune.recipe.world import batch_arithmetic
from fsdp_tune.run.directory import RunDir, checkpoint_step
from fsdp_tune.run.events import FirstStep, SamplesGenerated, Stopping, TrainStarted, number, read_event
from fsdp_tune.run.metrics_event import AnyEvent
from fsdp_tune.run.metrics_file import read_metrics, seconds_in_steps
from fsdp_tune.run.records import Prediction
from fsdp_tune.run.time_left import TimeLeft

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
    parts = [
        f"{len(checkpoints)} checkpoint{'' if len(checkpoints) == 1 else 's'} {held}"
        if checkpoints
        else "no checkpoint"
    ]
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


ENDED_PHASES = ("finished", "failed")
TRAINING_PHASES = ("training", "forward", "backward", "optimizer step")
_KERNEL_NAMES = {"quantization.train": "emulated", "model.attn_implementation": "attention"}
"""Keys that the kernels line does not name by their last word."""


def show_preview(screen: Terminal, preview: Preview, *, full: bool) -> None:
    """Print the resolved recipe, the reason for each resolved key, the first step, the environment and the
    command.

    Without `full` only the keys that differ from their defaults are printed. The JSON document always has the
    complete recipe.
    """
    resolution, plan, start = preview.resolution, preview.plan, preview.start
    recipe = resolution.recipe.model_dump(mode="json", by_alias=True)
    screen.notices(start.notices)
    begins = StartPoint(start.step, str(start.checkpoint.path) if start.checkpoint else None)
    changes = [each.answer() for each in start.trajectory_changes]
    screen.document(PreviewAnswer(recipe, resolution.reasons, begins, changes, **plan.to_json()))
    screen.message(
        "# the resolved recipe"
        + ("" if full else ": keys that differ from their defaults (`--full` prints all keys)")
    )
    shown = resolution.recipe.model_dump(mode="json", by_alias=True, exclude_defaults=not full)
    if full:
        shown["training"] |= {
            name: value for name, value in passed_defaults().items() if name not in shown["training"]
        }
    screen.message(
        yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=140).rstrip(), wraps=False
    )
    screen.message("\n# why")
    for key, reason in sorted(resolution.reasons.items()):
        screen.message(f"#   {key}: {reason}")
    screen.message("\n# where it starts")
    screen.message(
        f"#   {'already finished, ' if start.is_finished else ''}step {start.step} in {plan.run.path}"
    )
    for change in start.trajectory_changes:
        screen.message(f"#   from step {start.step} on {change}")
    screen.message(f"#   {rate_line(resolution.recipe, total_steps(resolution.recipe, None))}")
    screen.message(
        "\n# the environment that is set" + (f"; removed: {', '.join(plan.removed)}" if plan.removed else "")
    )
    for name, value in sorted(plan.settings.items()):
        screen.message(f"{name}={masked(name, value)}", wraps=False)
    screen.message("\n# the command")
    screen.message(" ".join(plan.quoted_argv()), wraps=False)
    screen.message("\n# nothing was started or written")


def model_line(facts: ModelFacts) -> str:
    trained, total = facts.trained_parameters, facts.parameters
    share = "all trained" if trained == total else f"{trained:,} trained"
    classes = ", ".join(facts.layer_classes) or "no layers found"
    return f"model: {facts.architecture}, {total:,} parameters ({share}), {facts.layers} × {classes}"


def adapter_lines(facts: ModelFacts) -> list[str]:
    """Return the lines on LoRA adapters, if the recipe has them: where they are, what is trained, and what is
    in 4 bits."""
    if (adapter := facts.adapter) is None:
        return []
    modules = ", ".join(f"{count} {name}" for name, count in adapter.modules.items())
    return [
        f"lora: adapters on {modules}; {adapter.trained_parameters:,} parameters trained "
        f"({adapter.share:.2%} of the base), "
        f"{format_bytes(adapter.trained_bytes)}",
        *([f"quantization: {facts.quantization}"] if facts.quantization is not None else []),
    ]


def kernels_line(facts: ModelFacts) -> str:
    """Return the chosen kernels in one line; those that are off are left out."""
    values = {_KERNEL_NAMES.get(key, key.split(".")[-1]): each.value for key, each in facts.kernels.items()}
    on = {name: value for name, value in values.items() if value not in ("false", "null")}
    return "kernels: " + ", ".join(
        name if value == "true" else f"{name} {value}" for name, value in on.items()
    )


def show_decided(screen: Terminal, resolution: Resolution, facts: ModelFacts | None) -> None:
    """Print each key that the recipe leaves unset, and each kernel, with the chosen value and the reason."""
    rows = [
        (key, _word(value_of(resolution.recipe, key)), reason)
        for key, reason in resolution.reasons.items()
        if "[" not in key
    ]
    kernels = facts.kernels if facts is not None else {}
    rows += [
        (key, choice.value, choice.reason) for key, choice in kernels.items() if key not in resolution.reasons
    ]
    screen.table("decided for you", ["key", "value", "because"], rows)


def _word(value: object) -> str:
    """Format a value as YAML does."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def data_lines(report: DataReport, *, reused: bool) -> list[str]:
    """Return one line for each set, with what of it is trained and what was cut, and one for each of several
    training sources."""
    lines: list[str] = []
    for name, account in sorted(report.sets.items(), key=lambda item: item[0] != "train"):
        trained = f"{account.supervised_tokens:,} trained ({account.trained_share:.0%})"
        parts = [f"{account.rows:,} rows, {account.tokens:,} tokens, {trained}"]
        parts += [f"{account.truncated:,} truncated"] if account.truncated else []
        parts += [f"{account.dropped:,} dropped"] if account.dropped else []
        lines.append(f"data {name}: {', '.join(parts)}{' (from the cache)' if reused else ''}")
    lines += [f"data keys: {line}" for line in key_lines(report)]
    return [*lines, *(f"data train: {line}" for line in (*source_lines(report), *duplicate_lines(report)))]


class StepView:
    """Print a line for each step and event of metrics.jsonl, above the bar on a terminal."""

    def __init__(self, screen: Terminal, bar: ScreenBar) -> None:
        self._screen = screen
        self._bar = bar
        self._total = 0
        self._at = 0
        self._start = 0
        """Finished steps when the ranks started."""
        self._has_started = False
        self._detail = ""
        """Text next to the bar."""
        self._loss, self._last_evaluation = "", ""
        self._losses: deque[float] = deque(maxlen=TREND)
        self._evaluations: list[float] = []
        """Losses that are numbers, oldest first."""
        self._left = TimeLeft()
        bar.estimate_by(lambda: self._left.seconds_left(self._at))
        bar.enter("starting the ranks")

    def show(self, line: dict[str, object]) -> None:
        """Show a line of metrics.jsonl: an event, a step or an evaluation."""
        self._left.add(line)
        if (event := read_event(line)) is not None:
            self._event(event)
        elif "loss" in line:
            self._step(line)
        elif "eval_loss" in line:
            self._evaluated(line)

    def _evaluated(self, line: dict[str, object]) -> None:
        """Show an evaluation next to the bar, and print it with the loss of each set if there are several."""
        self._last_evaluation = f"eval loss {_number(line['eval_loss'], '.4f')}"
        if (value := number(line["eval_loss"])) is not None:
            self._evaluations.append(value)
        self._detail = self._beside_the_bar()
        self._bar.at(self._at, self._detail, self._losses)
        sets = [
            f"{name.removeprefix('eval_').removesuffix('_loss')} {each:.4f}"
            for name, each in line.items()
            if _is_eval_of_a_set(name)
        ]
        self._screen.message(
            f"step {line['step']}: {self._last_evaluation}"
            + (f" ({', '.join(sets)})" if len(sets) > 1 else "")
        )

    def _beside_the_bar(self) -> str:
        """Return the loss, and last, best and trend of the evaluation loss."""
        if not self._last_evaluation:
            return self._loss
        best = f" (best {min(self._evaluations):.4f})" if self._evaluations else ""
        drawn = trend(self._evaluations, is_narrow=True) if self._screen.draws else ""
        return "  ".join(part for part in (self._loss, f"{self._last_evaluation}{best}", drawn) if part)

    def move(self, step: int, phase: str, done: int, planned: int) -> None:
        """Move the bar to the step of the first rank, and show its phase if that is not the training
        itself."""
        if self._total:  # heartbeats are read later than lines
            self._at = min(max(step, self._at), self._total)
            self._left.see(self._at)
            self._bar.at(self._at, self._detail, self._losses)
        if phase in TRAINING_PHASES:
            phase = "first step" if self._at == self._start else ""
        elif phase in ENDED_PHASES:
            phase = "ending the ranks"
        self._bar.enter(f"{phase} {done}/{planned} batches" if planned else phase)

    def _event(self, event: AnyEvent) -> None:
        shown = event.shown() if event.is_shown else []
        if isinstance(event, TrainStarted):
            self._total, self._at, self._start = event.total_steps, event.step, event.step
            self._bar.enter("first step")
            self._bar.start(self._at, self._total)
        elif isinstance(event, FirstStep) and not self._has_started:
            # The ranks count from their launch; every other time on the screen is that of the command.
            self._has_started = True
            elapsed = time.monotonic() - self._screen.began - (time.time() - (event.time or time.time()))
            shown = event.shown(max(0.0, elapsed - sum(event.phase_seconds.values())))
        elif isinstance(event, Stopping):
            self._bar.at(event.step, self._detail, self._losses)
        write = self._screen.warn if event.level == "alarm" else self._screen.message
        for text in shown:
            write(text)

    def _step(self, line: dict[str, Any]) -> None:
        """Print one line: the step, the time left and the loss first, then what a narrow terminal leaves
        out."""
        step = int(line["step"])
        loss = f"loss {_number(line['loss'], '.4f')}"
        if self._at == self._start:
            self._bar.enter("")
        self._at, self._loss = step, loss
        self._detail = self._beside_the_bar()
        self._losses.append(float(line["loss"]))
        self._bar.at(step, self._detail, self._losses)
        left, end = self._bar.left(), self._bar.end()
        ends = [end] if end and step < self._total else []
        first = [
            f"step {step}{f'/{self._total}' if self._total else ''}",
            *([left] if left and step < self._total else []),
            loss,
        ]
        norm, rate = _number(line.get("grad_norm"), ".3f"), f"lr {_number(line.get('learning_rate'), '.2e')}"
        speed = _number(line.get("tokens_per_second_per_device"), ",.0f")
        mfu = [f"MFU {line['mfu']:.0%}"] if line.get("mfu") is not None else []
        memory = line.get("peak_reserved_gib") or line.get("peak_host_gib")
        gib = [f"{_number(memory, '.2f')} GiB"] if memory is not None else []
        shares = _shares(line)
        wide = [", ".join(f"{name} {share:.0%}" for name, share in shares.items())] if shares else []
        short = (
            [" ".join(f"{SHORT_SHARES[name]} {share:.0%}" for name, share in shares.items())]
            if shares
            else []
        )
        slow = (
            [f"rank {line['slow_rank']} costs {line['slow_rank_share']:.0%} ({line['slow_rank_part']})"]
            if "slow_rank" in line
            else []
        )
        first += slow
        self._screen.fields(
            [
                *first,
                f"grad norm {norm}",
                rate,
                f"{speed} tokens/s/device",
                *mfu,
                *gib,
                *(f"({text})" for text in wide),
                *ends,
            ],
            narrow=[*first, f"{speed} tok/s", *short, *gib, *mfu, f"grad {norm}", rate],
        )


SHORT_SHARES = {"data": "data", "communication": "comm", "optimizer": "opt"}
"""Names of the shares on a narrow terminal."""


def _shares(line: dict[str, Any]) -> dict[str, float]:
    """Return the shares of a step that are not forward and backward."""
    named = (
        ("data", "data_wait_seconds", "step_seconds"),
        ("communication", "exposed_communication_seconds", "last_step_seconds"),
        ("optimizer", "optimizer_seconds", "last_step_seconds"),
    )
    return {
        name: line[part] / line[whole]
        for name, part, whole in named
        if line.get(part) is not None and line.get(whole)
    }


def _is_eval_of_a_set(name: str) -> bool:
    return name.startswith("eval_") and name.endswith("_loss") and name != "eval_loss"


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-" if value is None else str(value)


def show_inputs(screen: Terminal, inputs: TrainingInputs, *, verbose: bool) -> None:
    """Print model, data, batch and plan; with `verbose` also every value and kernel that was chosen."""
    if verbose:
        show_decided(screen, inputs.resolution, inputs.model)
    recipe = inputs.resolution.recipe
    for line in (
        model_line(inputs.model),
        *adapter_lines(inputs.model),
        kernels_line(inputs.model),
        *data_lines(inputs.data.report, reused=inputs.data.reused),
        batch_arithmetic(recipe),
        rate_line(recipe, inputs.steps),
        *filling_lines(recipe, inputs.data.train),
        *(f"{key}: {value}" for key, value in inputs.decided.items()),
        *([predicted_line(inputs.plan)] if inputs.plan else []),
    ):
        screen.message(line)


def predicted_line(plan: Plan) -> str:
    speed = plan.tokens_per_second_per_device
    step = (
        ""
        if plan.step_seconds is None or speed is None
        else f"; {plan.step_seconds:.3g} s a step, {speed:,.0f} tokens/s/GPU"
    )
    return (
        f"plan: {plan.peak_reserved_gib:.1f} GiB reserved of {plan.usable_gib:.1f} (fits: {plan.fits}){step}"
    )


def show_commands(screen: Terminal, written: WrittenRun) -> None:
    """Print the commands that start a run directory written by `--no-start`."""
    screen.document(WrittenAnswer(str(written.run.path), list(written.commands), "not_started"))
    screen.message("the run directory is written; start it with one of")
    for line in written.commands:
        screen.message(f"  {line}", wraps=False)


def show_end(screen: Terminal, result: TrainResult) -> None:
    """Print where the model of a finished run is, the card, and the next commands."""
    run, recipe = result.run, result.recipe
    screen.document(result.as_dict())
    where = (
        f"the model is in {result.merged}"
        if result.merged
        else f"`{merge_command(str(run.path), recipe)}` merges it"
    )
    if result.had_finished:
        at_step = f" at step {result.step}; {where}" if result.machine_rank == 0 else ""
        screen.message(f"nothing to do: {run.path} has finished{at_step}")
    elif result.machine_rank == 0:
        is_finished = result.exit_reason is ExitReason.FINISHED
        screen.message(
            f"finished at step {result.step}; {where}"
            if is_finished
            else f"stopped at step {result.step} ({result.exit_reason.value})"
        )
        next_commands = (
            commands_after(run, recipe, result.merged)
            if is_finished
            else commands_to_resume(run, result.checkpoint)
        )
        show_card(screen, card(run, result.outcome, next_commands, time.monotonic() - screen.began))
    if result.pushed is not None:
        screen.message(f"pushed: {result.pushed}")
