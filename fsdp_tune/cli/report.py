"""`report`: one page about one or several runs, from their files alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import fsdp_tune
from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import verb
from fsdp_tune.core.option import Argument, Option

if TYPE_CHECKING:
    from fsdp_tune.jobs.run_report import RunReport


@verb
def report(
    screen: Screen,
    runs: Annotated[list[Path], Argument("Run directories; several are drawn on the same axes.", metavar="RUN…")],
    output: Annotated[Path, Option("The page; an existing one is replaced.", flags=("--output", "-o"), metavar="FILE")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about runs: losses, speed, memory, data, samples, events, recipe, environment, and how the runs differ.

    The page is a single file that opens from disk, without network. Reads files only; a run that is training is not affected.

    \b
    Examples:
        fsdp-tune report runs/gpt2_smoke
        fsdp-tune report runs/one runs/two --output comparison.html
    """
    done = fsdp_tune.report(runs, output=output)
    screen.document(done.as_dict())
    show(screen, done)


def show(screen: Screen, done: RunReport) -> None:
    rows = [
        [str(each["label"]), str(each["state"]), f"{each['steps']:,}", _last(each["loss"]), _last(each["eval_loss"])]
        for each in (run.summary() for run in done.runs)
    ]
    screen.table("", ["run", "state", "steps", "loss", "evaluation loss"], rows)
    if changed := done.differences.recipe:
        screen.table(
            "recipes", ["key", *(run.label for run in done.runs)], [[key, *(value or "" for value in row)] for key, row in changed.items()]
        )
    screen.message(f"the page is {done.page}")


def _last(ends: dict[str, Any] | None) -> str:
    return "" if ends is None else "not finite" if ends["last"] is None else f"{ends['last']:.4f}"
