"""The commands about runs that exist: `status`, `report`, `evaluate`, `merge-checkpoint`, `push`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

import fsdp_tune
from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.status_view import show_runs, show_status
from fsdp_tune.cli.verbs import Overrides, given, verb
from fsdp_tune.core.command import Argument, Option
from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Notice, usage_error
from fsdp_tune.core.units import format_bytes, format_seconds
from fsdp_tune.jobs.options import EvaluateOptions, PushOptions
from fsdp_tune.merge.merge_options import MergeOptions

if TYPE_CHECKING:
    from fsdp_tune.jobs.evaluate import Evaluation
    from fsdp_tune.jobs.evaluated_sets import SetResult
    from fsdp_tune.jobs.results import RunReport
    from fsdp_tune.launch.run_status import DirectoryStatus, RunStatus
    from fsdp_tune.merge.merging import MergeResult

WATCH_SECONDS = 2.0


@verb
def status(
    screen: Screen,
    run: Annotated[
        Path, Argument("A run directory, or a directory of runs, for a table of all of them.", metavar="RUN")
    ],
    watch: Annotated[
        bool,
        Option("Redraw every two seconds until no process works on the run; without a terminal, only wait."),
    ] = False,
) -> None:
    """Show the status of a run: step, time left, loss, speed, memory, live ranks, newest complete checkpoint,
    logs.

    Reads files only; the run is not affected. Ctrl-C ends `--watch` with exit code 130.

    \b
    Examples:
        fsdp-tune status runs/gpt2_smoke
        fsdp-tune status runs --watch
    """
    answer = _read_status(screen, run)
    if watch and answer.is_active:
        from fsdp_tune.cli.progress import LiveLines
        from fsdp_tune.launch.run_status import RunStatus

        try:
            with LiveLines(screen) as live:
                while answer.is_active:
                    with screen.collected() as lines:
                        _show_answer(screen, answer)
                    live.show(lines)
                    time.sleep(WATCH_SECONDS)
                    answer = _read_status(screen, run)
        except KeyboardInterrupt:
            screen.document(answer)
            screen.message(
                f"no longer watched; {'the run is' if isinstance(answer, RunStatus) else 'the runs are'} not "
                "affected"
            )
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    screen.document(answer)
    _show_answer(screen, answer)


def _read_status(screen: Screen, path: Path) -> RunStatus | DirectoryStatus:
    """Return the status of the run, or of the runs in the directory. A run that cannot be read is a notice
    there."""
    from fsdp_tune.launch.run_status import DirectoryStatus, run_status
    from fsdp_tune.run.directory import RunDir
    from fsdp_tune.run.find_runs import existing_run, runs_in

    if RunDir(path).is_used or not (runs := runs_in(path.resolve())):
        return run_status(existing_run(path))
    found: list[RunStatus] = []
    for run in runs:
        try:
            found.append(run_status(run))
        except FsdpTuneError as error:
            screen.notices(
                [
                    Notice("run-unreadable", problem.message, problem.where, problem.hint)
                    for problem in error.problems
                ]
            )
    return DirectoryStatus(str(path.resolve()), found)


def _show_answer(screen: Screen, answer: RunStatus | DirectoryStatus) -> None:
    from fsdp_tune.launch.run_status import RunStatus

    if isinstance(answer, RunStatus):
        show_status(screen, answer)
    else:
        show_runs(screen, answer.runs)


@verb
def report(
    screen: Screen,
    runs: Annotated[
        list[Path], Argument("Run directories; several are drawn on the same axes.", metavar="RUN…")
    ],
    output: Annotated[
        Path | None,
        Option(
            "The page; an existing one is replaced [default: report.html].",
            flags=("--output", "-o"),
            metavar="FILE",
        ),
    ] = None,
    follow: Annotated[
        bool,
        Option("Serve the page on this machine instead, and update it while the runs write. Ctrl-C ends."),
    ] = False,
    port: Annotated[
        int | None, Option("With --follow: the port [default: a free one].", metavar="N", minimum=1)
    ] = None,
) -> None:
    """Write one HTML page about runs: losses, speed, memory, data, samples, events, recipe, environment,
    differences.

    The page is a single file that opens from disk, without network. Reads files only; a run that is training
    is not affected. Ctrl-C ends `--follow` with exit code 130.

    \b
    Examples:
        fsdp-tune report runs/gpt2_smoke
        fsdp-tune report runs/gpt2_smoke --follow
        fsdp-tune report runs/one runs/two --output comparison.html
    """
    if follow and output is not None:
        raise usage_error(
            "report-output",
            "`--follow` serves the page and writes no file",
            hint="give `--follow` or `--output`",
        )
    if not follow and port is not None:
        raise usage_error(
            "report-output", "`--port` is for `--follow`", hint="add `--follow`, or leave out `--port`"
        )
    if follow:
        _follow(screen, runs, port or 0)
        return
    done = fsdp_tune.report(runs, output=output or Path("report.html"))
    screen.document(done.as_dict())
    show_report(screen, done)


RANKING_DROPPED_FIRST = ("memory (GiB)", "state", "tokens/s/device", "done", "last evaluation loss", "loss")
"""Columns of the ranking that a terminal gets only if they fit, the least important first; the keys that
differ are kept longest."""


def show_report(screen: Screen, done: RunReport) -> None:
    """Print the ranking of several runs, or the figures of one."""
    from fsdp_tune.pages.ranking import ranking_of

    if len(done.runs) > 1:
        ranking = ranking_of(done.runs, done.differences.recipe)
        columns = ["run", *(column.title for column in ranking.columns)]
        rows = [
            [run.label, *(f"{cell.text}{' *' if cell.is_best else ''}" for cell in run.cells)]
            for run in ranking.runs
        ]
        keys = [column.title for column in reversed(ranking.columns) if column.full]
        screen.table("", columns, rows, droppable=(*RANKING_DROPPED_FIRST, *keys))
        marked = (
            "* best of its column" if any(cell.is_best for run in ranking.runs for cell in run.cells) else ""
        )
        hidden = (
            f"keys of the recipes that differ and are not shown: {ranking.hidden_keys}"
            if ranking.hidden_keys
            else ""
        )
        if notes := "; ".join(part for part in (marked, hidden) if part):
            screen.message(notes)
    else:
        (each,) = (run.summary() for run in done.runs)
        cells = [
            str(each["label"]),
            str(each["state"]),
            f"{each['steps']:,}",
            _last(each["loss"]),
            _last(each["eval_loss"]),
        ]
        screen.table("", ["run", "state", "steps", "loss", "evaluation loss"], [cells])
    if done.page is not None:
        screen.message(f"the page is {done.page}")


def _follow(screen: Screen, runs: Sequence[Path], port: int) -> None:
    from fsdp_tune.jobs.results import follow_report
    from fsdp_tune.pages.report_page import forwarding_command

    def serving(found: RunReport, url: str) -> None:
        screen.document(found.as_dict())
        show_report(screen, found)
        screen.message(f"the page is at {url}")
        if "SSH_CONNECTION" in os.environ:
            screen.message(
                f"to open it on your machine, run there: {forwarding_command(urlsplit(url).port or 0)}"
            )
        screen.message("Ctrl-C ends the command; the runs continue")

    def ended(run: Path, state: str, is_last: bool) -> None:
        has_ended = "has finished" if state == ExitReason.FINISHED.value else f"has ended ({state})"
        screen.message(f"{run} {has_ended}" + ("; the page is served until Ctrl-C" if is_last else ""))

    try:
        follow_report(runs, port=port, serving=serving, ended=ended)
    except KeyboardInterrupt:
        screen.message("the page is no longer served; runs are not affected")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _last(ends: dict[str, object] | None) -> str:
    return "" if ends is None else "not finite" if ends["last"] is None else f"{ends['last']:.4f}"


@verb
def evaluate(
    screen: Screen,
    model: Annotated[
        str,
        Argument("A model directory, a run (its merged model), RUN/adapter, or a hub id.", metavar="MODEL"),
    ],
    *,
    config: Annotated[
        str | None,
        Option(
            "Take data format, chat template and eval sets from this recipe: a YAML file or a name of the "
            "catalogue [default: those of the run that wrote the model].",
            flags=("--config", "-c"),
            metavar="RECIPE",
        ),
    ] = None,
    overrides: Overrides = (),
    options: EvaluateOptions,
) -> None:
    """Evaluate a model on rows that are formatted as in training, with a confidence interval.

    Format, template and eval sets come from the recipe of `--config`, else from the run that wrote the model.

    \b
    Examples:
        fsdp-tune evaluate runs/llama7b --base meta-llama/Llama-2-7b-hf
        fsdp-tune evaluate runs/llama7b --data test.jsonl --metric exact_match --answer '#### (.*)'
    """
    if overrides and config is None:
        hint = "add `--config RECIPE`; `--ignore-column NAME` ignores columns of `--data` without one"
        raise usage_error("no-recipe", "`--set` changes a recipe, and none is given", hint=hint)
    loaded = None if config is None else fsdp_tune.load_recipe(config, overrides)
    found = fsdp_tune.evaluate(model, options, recipe=loaded, observer=screen)
    screen.document(found)
    show_evaluation(screen, found)


def show_evaluation(screen: Screen, found: Evaluation) -> None:
    """Print a line for each set and model, and the comparison."""
    rows: list[list[object]] = []
    for label, result in found.sets.items():
        for name, estimate in ((found.model, result.metric), (found.base, result.base)):
            if estimate is not None:
                rows.append(
                    [
                        label,
                        name,
                        f"{result.rows:,}",
                        f"{result.tokens:,}",
                        f"{estimate.value:.4f}",
                        _span(estimate),
                    ]
                )
    screen.table("", ["set", "model", "rows", "tokens", found.metric, "interval"], rows)
    screen.message(f"intervals: {found.interval}")
    for label, result in found.sets.items():
        for line in _notes(found, result):
            screen.message(f"{label}: {line}")
    shared = f", rows shared by {found.processes} processes" if found.processes > 1 else ""
    screen.message(f"evaluated in {format_seconds(found.seconds)} on {found.device}{shared}")
    if found.card is not None:
        screen.message(f"the model card has the result: {found.card}")


def _notes(found: Evaluation, result: SetResult) -> list[str]:
    lines: list[str] = []
    if result.cut_rows:
        left = ", and left out" if found.metric == "exact_match" else ""
        lines.append(
            f"{result.cut_rows:,} rows are longer than `data.max_length`, or divided by packing{left}"
        )
    if result.loss is not None:
        lines.append(f"loss {result.loss.value:.4f} {_span(result.loss)} nats a token")
    if (compared := result.comparison) is not None:
        what = "loss" if result.loss is not None else found.metric
        span = f"[{compared.low:+.4f}, {compared.high:+.4f}]"
        lines.append(
            f"{what} {compared.difference:+.4f} {span} against {found.base}, p = {compared.p:.2g} "
            f"({found.test})"
        )
    return lines


def _span(estimate: Any) -> str:
    return f"[{estimate.low:.4f}, {estimate.high:.4f}]"


@verb
def merge_checkpoint(
    screen: Screen,
    source: Annotated[
        str,
        Argument(
            "A run directory, a `checkpoint-N` of any tool, a folder of `.distcp` shards, or a PEFT "
            "adapter. In a mirror: the URL of a run or of its checkpoint.",
            metavar="SRC",
        ),
    ],
    options: MergeOptions,
    push_to_hub: Annotated[
        str | None,
        Option(
            "Upload the result to a private repository; `fsdp-tune push` has more options.",
            metavar="OWNER/NAME",
        ),
    ] = None,
) -> None:
    """Merge a sharded checkpoint into an ordinary Hugging Face model directory.

    It streams at the speed of the disk in constant memory, runs no code from the checkpoint, and leaves a
    complete output or none.

    \b
    Examples:
        fsdp-tune merge-checkpoint runs/llama7b
        fsdp-tune merge-checkpoint s3://bucket/runs/llama7b/checkpoint-500 -o merged
        fsdp-tune merge-checkpoint checkpoint-500/pytorch_model_fsdp_0 --base meta-llama/Llama-2-7b-hf -o merged --dtype bf16
    """  # noqa: E501
    from fsdp_tune.merge.merge_options import PushedMergeAnswer

    # The merge has its own threads. Those of numpy's BLAS, fixed when numpy is loaded, would wait for them at
    # each small product.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    result = fsdp_tune.merge_checkpoint(source, options, observer=screen)
    screen.document(result.as_dict())
    show_merge(screen, result)
    if push_to_hub is not None:
        pushed = fsdp_tune.push(result.output, to=push_to_hub, observer=screen)
        screen.document(PushedMergeAnswer(**result.as_dict(), pushed=pushed.url))
        screen.message(f"pushed: {pushed.url}")


def show_merge(screen: Screen, result: MergeResult) -> None:
    """Print what was merged, the reason for the choice, its size, how fast it was written, and where it
    is."""
    figures = (
        f"{result.tensors:,} tensors, {result.parameters:,} parameters, {result.dtype}, "
        f"{format_bytes(result.size_bytes)}"
    )
    if result.is_new:
        rate = result.size_bytes / 1e9 / max(result.seconds, 1e-3)
        speed = f" ({rate:.2f} GB/s)" if rate >= 0.01 else ""
        figures += f" in {format_seconds(result.seconds)}{speed}, verified: {result.verified}"
        screen.message(f"merged {result.source}{f': {result.reason}' if result.is_choice else ''}")
    else:
        screen.message(f"{result.source}: {result.reason}")
    screen.message(figures)
    screen.message(
        f"the {'adapter' if result.adapter is not None and result.adapter.is_exported else 'model'} "
        f"is in {result.output}"
    )


@verb
def push(
    screen: Screen,
    source: Annotated[
        Path, Argument("A run with a merged model, or a directory that a merge wrote.", metavar="RUN")
    ],
    options: PushOptions,
) -> None:
    """Upload the merged model or the adapter of a run to the Hugging Face hub, private by default.

    A push that was interrupted continues where it stopped.

    \b
    Examples:
        fsdp-tune push runs/llama7b
        fsdp-tune push runs/llama7b --to my-org/llama7b-gsm8k --adapter
    """
    from fsdp_tune.jobs.answers import PushAnswer

    pushed = fsdp_tune.push(source, **given(options), observer=screen)
    screen.document(PushAnswer(pushed.url))
    screen.message(f"pushed: {pushed.url}")
