"""Output of `train` before the ranks start and after they have ended: the preview, the inputs, and where the
model is."""

from __future__ import annotations

import time

import yaml

from fsdp_tune.cli.run_card import card, show_card
from fsdp_tune.cli.terminal import Terminal
from fsdp_tune.core.errors import ExitReason
from fsdp_tune.core.secrets import masked
from fsdp_tune.core.units import format_bytes
from fsdp_tune.data.account import duplicate_lines, key_lines, source_lines
from fsdp_tune.data.report import DataReport
from fsdp_tune.data.token_budget import filling_lines
from fsdp_tune.jobs.answers import PreviewAnswer, StartPoint, WrittenAnswer
from fsdp_tune.jobs.observer import TrainingInputs, TrainResult
from fsdp_tune.jobs.train import Preview, WrittenRun
from fsdp_tune.launch.command.next_commands import commands_after, commands_to_resume, merge_command
from fsdp_tune.model.model_files import ModelFacts
from fsdp_tune.planner.predict.memory import total_steps
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.schedule import rate_line
from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.reference import passed_defaults
from fsdp_tune.recipe.world import batch_arithmetic

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
        f"({adapter.share:.2%} of the base), {format_bytes(adapter.trained_bytes)}",
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
        else f"`{merge_command(run, recipe, str(run.path))}` merges it"
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
