"""The commands about a run that is to start: `validate`, `plan`, `rehearse`, `train`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import fsdp_tune
from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.verbs import NamedRecipe, RecipeArgument, given, verb
from fsdp_tune.core.command import Option
from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, FsdpTuneError, failed_error, usage_error
from fsdp_tune.core.units import enumerated, format_seconds
from fsdp_tune.jobs.options import RehearseOptions, TrainOptions, ValidateOptions
from fsdp_tune.jobs.plan_options import MEASURED_STEPS, MeasureOptions, PlanOptions

if TYPE_CHECKING:
    from fsdp_tune.jobs.sweep import SweepAnswer
    from fsdp_tune.jobs.validate import Validation
    from fsdp_tune.planner.predict.predict import Plan
    from fsdp_tune.recipe.read.loader import LoadedRecipe


@verb
def validate(screen: Screen, recipe: NamedRecipe, options: ValidateOptions) -> None:
    """Check a recipe: keys, values, contradictions, batch arithmetic, model and data. Starts nothing.

    \b
    Example:
        fsdp-tune validate --config llama7b_full_shard --strict
    """
    from fsdp_tune.jobs.validate import InvalidRecipeError, ValidateAnswer, validate_file
    from fsdp_tune.planner.predict.memory import total_steps
    from fsdp_tune.recipe.schedule import rate_line
    from fsdp_tune.recipe.world import batch_arithmetic

    try:
        loaded, found = validate_file(
            recipe.source(), recipe.overrides, name=recipe.name, **given(options), observer=screen
        )
    except InvalidRecipeError as error:
        screen.document(error.answer(recipe.source(), recipe.overrides))
        for line in error.unchecked:
            screen.message(f"not checked yet: {line}")
        raise
    arithmetic, rate = (
        batch_arithmetic(found.recipe),
        rate_line(found.recipe, total_steps(found.recipe, None)),
    )
    screen.document(
        ValidateAnswer(
            recipe=str(loaded.path),
            valid=not found.problems,
            resolved=found.recipe.model_dump(mode="json", by_alias=True),
            reasons=found.resolution.reasons,
            overrides=list(loaded.overrides),
            arithmetic=arithmetic,
            rate=rate.removeprefix("rate: "),
            model=found.model.model_copy(update={"adapter_tensors": {}}).as_dict()
            if found.model is not None
            else {},
            data=found.inputs,
            unchecked=list(found.unchecked),
        )
    )
    if found.problems:
        for line in found.unchecked:
            screen.message(f"not checked yet: {line}")
        raise FsdpTuneError(*found.problems)
    _show(screen, loaded, found, arithmetic, rate)


def _show(screen: Screen, loaded: LoadedRecipe, found: Validation, arithmetic: str, rate: str) -> None:
    from fsdp_tune.cli.train_view import adapter_lines, show_decided
    from fsdp_tune.data.format.row_account import account_line

    model = found.model
    show_decided(screen, found.resolution, model)
    if model is not None:
        layers = f"{model.layers} layers ({', '.join(model.layer_classes)})"
        screen.message(f"model: {model.parameters:,} parameters, {layers}, {len(model.units)} FSDP units")
        for line in adapter_lines(model):
            screen.message(line)
    screen.message(f"batch: {arithmetic}")
    screen.message(rate)
    for each in found.inputs:
        rows = f"first {each.rows_looked_at} rows are fine"
        screen.message(f"data: {each.set} from {each.path}: {each.format}, loss on {each.loss_on}; {rows}")
        if each.keys:
            screen.message(f"data keys: {each.path}: {account_line(each.keys)}")
    for line in found.unchecked:
        screen.message(f"not checked: {line}")
    screen.message(f"{loaded.path} is valid")


@verb
def plan(
    screen: Screen,
    recipe: NamedRecipe,
    options: PlanOptions,
    measuring: MeasureOptions,
    html: Annotated[
        Path | None,
        Option("Write a page: the memory of a step over time, the ranked recipes.", metavar="FILE"),
    ] = None,
) -> None:
    """Predict memory, time, communication and disk of a recipe from a traced step, and rank recipes that fit.

    Nothing is trained, unless `--measure` trains the best recipes of the ranking for a few steps on the
    machines of the recipe. The exit code is 0 even if the recipe does not fit; `fits` is yes, tight or no.

    \b
    Examples:
        fsdp-tune plan --config llama7b_full_shard --gpu A100-40GB --num-gpus 4
        fsdp-tune plan my.yaml --gpu H100-SXM --target cheapest --write best.yaml
        fsdp-tune plan my.yaml --measure 3 --write best.yaml
    """
    from fsdp_tune.cli.plan_page import html_page
    from fsdp_tune.cli.plan_view import show_errors
    from fsdp_tune.core.atomic import check_output_file, write_file
    from fsdp_tune.recipe.rules.contradictions import INPUTS

    if html is not None:
        check_output_file(html, replaces=True)
    is_first = True
    if measuring.measure is not None:
        made, is_first = _measured(screen, recipe, options, measuring, measuring.measure)
    elif any(
        each is not None for each in (measuring.measure_steps, measuring.minutes, measuring.machine_rank)
    ):
        message = "`--measure-steps`, `--minutes` and `--machine-rank` need `--measure`"
        raise usage_error("usage", message, hint="--measure 3")
    else:
        made = fsdp_tune.plan(recipe.load(unneeded=INPUTS), **given(options), observer=screen)
    show_errors(screen, made)
    if html is not None and is_first:
        write_file(html, html_page(made))
        screen.message(f"the page is {html}")
    screen.document(made.as_dict())


def _measured(
    screen: Screen, recipe: NamedRecipe, options: PlanOptions, measuring: MeasureOptions, count: int
) -> tuple[Plan, bool]:
    """Return the plan, and whether this is the first machine, which writes files.

    Raises: usage error for options about other machines than those of the recipe.
    """
    from fsdp_tune.jobs.measuring_machines import machine_of

    elsewhere = {
        "--gpu": options.gpu,
        "--num-gpus": options.num_gpus,
        "--calibrate": options.calibrate,
        "--dollars-per-hour": options.dollars_per_hour,
        "--no-search": None if options.search else True,
        "--target": options.target if options.target != "fastest" else None,
    }
    if given_too := [flag for flag, value in elsewhere.items() if value is not None]:
        raise usage_error(
            "usage",
            "`--measure` ranks by the speed on the machines of the recipe: leave out "
            f"{enumerated([f'`{flag}`' for flag in given_too], 'and')}",
        )
    loaded = recipe.load(allowed=options.allowed)
    made = fsdp_tune.measure(
        loaded,
        count=count,
        steps=measuring.measure_steps or MEASURED_STEPS,
        minutes=measuring.minutes,
        exact=options.exact,
        write=options.write,
        machine_rank=measuring.machine_rank,
        allowed=options.allowed,
        observer=screen,
    )
    return made, machine_of(loaded.recipe, measuring.machine_rank) == 0


@verb
def rehearse(screen: Screen, recipe: RecipeArgument, options: RehearseOptions) -> None:
    """Rehearse a full run on CPU ranks with a scaled-down model: train, kill a rank, resume, merge, reload,
    compare.

    The rehearsal uses the code path of the real run. `--parity` trains once for each switch and prints how
    far loss and gradient norm are from a plain PyTorch loop on one device. `--set launch.device=cuda` uses
    the GPUs of this
    machine. Exit code 1: a check failed.

    \b
    Examples:
        fsdp-tune rehearse --config llama7b_full_shard
        fsdp-tune rehearse --config my.yaml --parity
    """
    done = fsdp_tune.rehearse(recipe.load(allowed=options.allowed), **given(options), observer=screen)
    screen.document(done.as_dict())
    if done.failed is not None:
        message = f"{done.failed.name}: {done.failed.detail}"
        raise failed_error(
            "rehearsal-failed", message, hint=f"everything that was written is in {done.folder}"
        )
    screen.message(
        f"all {len(done.checks)} checks passed in {sum(check.seconds for check in done.checks):.0f} s"
    )


def _sweep(
    screen: Screen, recipe: NamedRecipe, sweep: Sequence[str], options: TrainOptions, *, dry_run: bool
) -> NoReturn:
    """Run a sweep, or show its runs; end with its exit code."""
    from fsdp_tune.jobs.sweep import answer_of, plan_sweep, run_sweep, waiting

    planned = plan_sweep(recipe.source(), recipe.overrides, sweep, options, name=recipe.name)
    found = (
        answer_of([waiting(each) for each in planned])
        if dry_run
        else run_sweep(planned, observer=screen, next_run=screen.next_run)
    )
    screen.document(found)
    show_sweep(screen, found, overwrites=options.overwrite)
    raise typer.Exit(found.exit_code)


def show_sweep(screen: Screen, found: SweepAnswer, *, overwrites: bool = False) -> None:
    """Print a row for each run, the best one marked, and the command that compares them."""
    has_eval = any(run.eval_loss is not None for run in found.runs)
    columns = [
        "",
        *(key.rpartition(".")[2] for key in found.runs[0].values),
        "state",
        "loss",
        *(["eval loss"] if has_eval else []),
        "time",
    ]
    folder = os.path.commonpath([Path(run.run_dir).parent for run in found.runs])
    rows = [
        [
            "*" if run.run_dir == found.best else "",
            *run.values.values(),
            run.state,
            _loss(run.loss),
            *([_loss(run.eval_loss)] if has_eval else []),
            format_seconds(run.seconds) if run.steps else "",
            os.path.relpath(run.run_dir, folder),
        ]
        for run in found.runs
    ]
    screen.table("", [*columns, "directory"], rows)
    screen.message(f"the directories are in {folder}")
    if found.best is not None:
        screen.message(f"* lowest {found.metric.replace('_', ' ')}: {found.best}")
    if any(run.steps for run in found.runs):
        screen.message(f"compare: {found.report}")
    if any(run.state != "finished" for run in found.runs) and any(
        run.exit_code is not None for run in found.runs
    ):
        again = "the same command without `--overwrite`" if overwrites else "the same command"
        screen.message(f"{again} continues the runs that have not finished")


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


@verb
def train(
    screen: Screen,
    context: typer.Context,
    recipe: NamedRecipe,
    options: TrainOptions,
    sweep: Annotated[
        Sequence[str],
        Option(
            "Train once for each value of a key, one run after another, each in a directory below "
            "`output_dir`; the same command again continues. Repeatable: all combinations.",
            metavar="KEY=VALUE,VALUE",
        ),
    ] = (),
    dry_run: Annotated[
        bool, Option("Print the resolved recipe, the command and the environment; start and write nothing.")
    ] = False,
    full: Annotated[
        bool, Option("With --dry-run: print every key, not only those that differ from the defaults.")
    ] = False,
    no_start: Annotated[
        bool, Option("Write the run directory and print the commands that start it.")
    ] = False,
    verbose: Annotated[
        bool, Option("Print every value and kernel that was chosen, with the reason.")
    ] = False,
    quiet: Annotated[
        bool,
        Option("Print only notices, warnings and errors; RUN/logs has all lines.", flags=("--quiet", "-q")),
    ] = False,
) -> None:
    """Fine-tune a model as a recipe describes, and merge the result into an ordinary model directory.

    Exit codes: 0 finished, 1 failed, 2 recipe or usage, 3 out of device memory, 4 NaN or infinity, 5 hang or
    lost rank, 130 Ctrl-C after saving, 143 saved and stopped. A sweep ends with the code of its first
    failure. Arguments after `--` go to `accelerate launch`.

    \b
    Examples:
        fsdp-tune train --config gpt2_smoke
        fsdp-tune train my.yaml --set training.learning_rate=1e-4 --resume auto
        fsdp-tune train llama7b_full_shard --dry-run
        fsdp-tune train my.yaml --sweep training.learning_rate=1e-5,2e-5 --sweep lora.r=8,16
    """
    _check_printed(full=full, dry_run=dry_run, quiet=quiet, prints=verbose or dry_run or no_start)
    screen.is_quiet = quiet
    screen.phase("reading the recipe")
    from fsdp_tune.cli.train_view import show_preview
    from fsdp_tune.jobs.train import preview

    options = replace(options, **context.meta["arguments"])
    screen.verbose = verbose
    if sweep:
        _check_single(full=full, no_start=no_start)
        _sweep(screen, recipe, sweep, options, dry_run=dry_run)
    loaded = recipe.load(allowed=options.allowed)
    if dry_run:
        show_preview(screen, preview(loaded, options, observer=screen), full=full)
        return
    _start(screen, loaded, options, no_start=no_start)


def _check_printed(*, full: bool, dry_run: bool, quiet: bool, prints: bool) -> None:
    """Raises: usage error for options of what is printed that contradict each other."""
    if full and not dry_run:
        raise usage_error(
            "usage", "`--full` belongs to `--dry-run`", hint="add `--dry-run`, or leave out `--full`"
        )
    if quiet and prints:
        raise usage_error(
            "usage",
            "`--quiet` leaves out what `--verbose`, `--dry-run` and `--no-start` print",
            hint="leave out `--quiet`",
        )


def _check_single(*, full: bool, no_start: bool) -> None:
    """Raises: usage error for options of a single run, in a sweep."""
    if full or no_start:
        raise usage_error(
            "usage",
            "`--full` and `--no-start` are for a single run",
            hint="leave out `--sweep`, or the other option",
        )


def _start(screen: Screen, loaded: LoadedRecipe, options: TrainOptions, *, no_start: bool) -> None:
    """Start the run, or write its directory alone; end with the exit code of a run."""
    from fsdp_tune.cli import train_view as view
    from fsdp_tune.jobs.train import WrittenRun, write_only

    result = (write_only if no_start else fsdp_tune.train)(loaded, options, observer=screen)
    if not isinstance(result, WrittenRun):
        view.show_end(screen, result)
        raise typer.Exit(EXIT_CODE_OF_REASON[result.exit_reason])
    view.show_commands(screen, result)
