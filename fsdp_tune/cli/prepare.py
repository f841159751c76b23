"""`prepare`: tokenise and pack once, and show what is trained, on the terminal and as an HTML page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fsdp_tune
from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.terminal_text import printable
from fsdp_tune.cli.verbs import NamedRecipe, given, verb
from fsdp_tune.core.command import Option
from fsdp_tune.jobs.options import PrepareOptions

if TYPE_CHECKING:
    from fsdp_tune.data.preparation import Prepared
    from fsdp_tune.data.report import BeginTokens, DataReport, DecodedExample, ReportedExample

LONGEST_RUN = 600
"""Characters of one part of an example that are shown; the middle of a longer one is left out."""
BEGIN, END = "⟦", "⟧"
SAMPLES = 10
"""Decoded examples of each source."""


@verb
def prepare(
    screen: Screen,
    recipe: NamedRecipe,
    options: PrepareOptions,
    ids: Annotated[bool, Option("Print the token ids of shown rows, for each part.")] = False,
    html: Annotated[
        Path | None,
        Option(
            "Write a page: lengths, truncation, trained share and sampled rows by source.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Tokenise and pack the data of a recipe into the cache, and show what is trained. Needs no GPU.

    \b
    Examples:
        fsdp-tune prepare --config gpt2_smoke --show 3
        fsdp-tune prepare my.yaml --html rows.html
        fsdp-tune prepare my.yaml --download       (before a job on machines without network)
    """
    from fsdp_tune.core.atomic import check_output_file, write_file
    from fsdp_tune.jobs.validate import PrepareAnswer, PrepareShownAnswer

    if html is not None:
        check_output_file(html, replaces=True)
    loaded = recipe.load()
    options = replace(options, show=max(options.show, 1) if ids else options.show)
    done = fsdp_tune.prepare(
        loaded, **given(options), samples=SAMPLES if html is not None else 0, observer=screen
    )
    data = done.data
    found = PrepareAnswer(data.path, data.key, data.reused, data.train, data.evals, data.report.as_dict())
    screen.document(PrepareShownAnswer(**given(found), shown=done.rows) if done.rows else found)
    show_data(screen, data)
    for example in (example for row in done.rows for example in row):
        show_example(screen, example)
        if ids:
            show_ids(screen, example)
    if not done.rows and data.report.example is not None:
        show_example(screen, data.report.example)
    if html is not None:
        from fsdp_tune.cli.rows_page import rows_page

        write_file(
            html, rows_page(loaded.recipe.name or "data", data.report, data.as_notices(), done.samples)
        )
        screen.message(f"the page is {html}")


def show_data(screen: Screen, data: Prepared) -> None:
    """Print the account as a table and a few lines."""
    report = data.report
    rows = [
        [
            name,
            f"{account.rows:,}",
            f"{account.examples:,}",
            f"{account.tokens:,}",
            f"{account.supervised_tokens:,}",
            str(account.supervised_tokens_per_example),
            str(account.tokens_per_example),
            f"{100 * account.fill:.1f} %",
        ]
        for name, account in report.sets.items()
    ]
    columns = [
        "set",
        "rows",
        "examples",
        "tokens",
        "trained",
        "trained each ¹",
        "tokens each ¹",
        "of max_length",
    ]
    screen.table(f"data ({'from the cache' if data.reused else 'prepared'}: {data.path})", columns, rows)
    screen.message("¹ of an example: least / median / most")
    for line in _lines(report):
        screen.message(line)


def _lines(report: DataReport) -> list[str]:
    from fsdp_tune.data.account import duplicate_lines, key_lines, source_lines

    kinds = [f"{given.path}: {given.format}, loss on {given.loss_on}" for given in report.inputs]
    left_out = (
        report.rows_bad.rows
        + report.rows_untrained.rows
        + sum(account.dropped for account in report.sets.values())
    )
    eos, bos = report.eos, report.bos
    cut = sum(account.truncated for account in report.sets.values())
    before_cut = (
        ", before the cut" if cut or any(account.cut_by_packing for account in report.sets.values()) else ""
    )
    return [
        *kinds,
        *key_lines(report),
        *source_lines(report),
        f"{report.rows_read:,} rows read, {left_out:,} left out, {cut:,} cut at max_length",
        *duplicate_lines(report),
        f"end of sequence `{eos.token}` trained in {eos.supervised:,} of {eos.examples:,} "
        f"examples{before_cut}",
        f"beginning of sequence: {of_bos(bos)}",
    ]


def of_bos(bos: BeginTokens | None) -> str:
    """Describe how often examples have the token; of three numbers, only those that are not 0."""
    if bos is None:
        return "none in this tokenizer"
    counts = {"once": bos.once, "more than once": bos.more, "not at all": bos.examples - bos.once - bos.more}
    found = {name: count for name, count in counts.items() if count}
    if len(found) == 1:
        return f"{next(iter(found))} in all {bos.examples:,} examples"
    return (
        f"{', '.join(f'{name} in {count:,}' for name, count in found.items())} of {bos.examples:,} examples"
    )


def show_example(screen: Screen, example: DecodedExample | ReportedExample) -> None:
    """Print a decoded example: trained text is green on a terminal, in brackets elsewhere."""
    screen.message(f"{example.where} (trained: {'green' if screen.is_live else BEGIN + '…' + END})")
    runs = [(_shortened(text), trained) for text, trained in example.runs]
    if screen.is_live:
        typer.echo(
            "".join(
                typer.style(printable(text), fg="green") if trained else printable(text)
                for text, trained in runs
            ),
            file=screen.talk,
        )
    else:
        screen.message(
            "".join(f"{BEGIN}{text}{END}" if trained else text for text, trained in runs), wraps=False
        )


def show_ids(screen: Screen, example: DecodedExample) -> None:
    """Print the token ids of each part of an example."""
    for (_, trained), ids in zip(example.runs, example.ids, strict=True):
        screen.message(f"  {'trained' if trained else 'context'}: {_shortened(' '.join(map(str, ids)))}")


def _shortened(text: str) -> str:
    half = LONGEST_RUN // 2
    return (
        text
        if len(text) <= LONGEST_RUN
        else f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
    )
