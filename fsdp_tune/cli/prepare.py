"""`prepare`: tokenise and pack once, and show what is trained, on the terminal and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fsdp_tune
from fsdp_tune.cli.terminal_text import printable
from fsdp_tune.cli.verbs import NamedRecipe, Screen, given, verb
from fsdp_tune.core.command import Option
from fsdp_tune.jobs.options import PrepareOptions
from fsdp_tune.pages.html_pages import html_document, html_table

if TYPE_CHECKING:
    from fsdp_tune.core.errors import Notice
    from fsdp_tune.data.account import SourceSample
    from fsdp_tune.data.preparation import Prepared
    from fsdp_tune.data.report import BeginTokens, DataReport, DecodedExample, ReportedExample

LONGEST_RUN = 600
"""Characters of one part of an example that are shown; the middle of a longer one is left out."""
BEGIN, END = "⟦", "⟧"
SAMPLES = 10
"""Decoded examples of each source."""
BINS, BAR_WIDTH, BAR_HEIGHT = 32, 6, 40


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


# ---- The page: lengths, truncation, trained share and decoded examples of each source


def rows_page(
    name: str, report: DataReport, notices: Sequence[Notice], samples: Sequence[SourceSample]
) -> str:
    """Return a complete document. Every text of a row, a recipe or a file is escaped."""
    longest = max((int(sample.lengths.max()) for sample in samples if len(sample.lengths)), default=1)
    parts = [
        _sets(report),
        _sources(samples, longest),
        _keys(report),
        _notices(notices),
        "<p>Trained text is <mark>marked</mark>.</p>",
        *(_examples(sample) for sample in samples),
    ]
    return html_document(f"Rows of {name}", parts)


def _sets(report: DataReport) -> str:
    rows = [
        [
            escape(name),
            *(f"{number:,}" for number in (account.rows, account.examples, account.tokens)),
            f"{account.trained_share:.1%}",
            f"{account.truncated:,}",
            f"{account.split:,}",
            f"{account.dropped:,}",
            f"{account.fill:.1%}",
        ]
        for name, account in report.sets.items()
    ]
    bad, untrained = report.rows_bad.rows, report.rows_untrained.rows
    read = (
        f"<p>{report.rows_read:,} rows read, {bad:,} cannot be used, {untrained:,} have no token to "
        "train.</p>"
    )
    head = ("set", "rows", "examples", "tokens", "trained", "truncated", "split", "dropped", "of max_length")
    return f"<h2>Sets</h2>\n{read}\n" + html_table(head, rows)


def _sources(samples: Sequence[SourceSample], longest: int) -> str:
    rows = [
        [
            escape(_source_name(sample)),
            f"{len(sample.lengths):,}",
            f"{sample.account.tokens:,}",
            f"{sample.account.supervised_tokens / max(sample.account.tokens, 1):.1%}",
            f"{sample.cut:,}",
            _spread(sample),
            _histogram(sample, longest),
        ]
        for sample in samples
    ]
    head = (
        "source",
        "examples",
        "tokens",
        "trained",
        "cut",
        "tokens each: median / 95 % / most",
        f"lengths, 0 to {longest:,}",
    )
    return "<h2>Training sources</h2>\n" + html_table(head, rows)


def _keys(report: DataReport) -> str:
    """Return the account of the keys of every source: each is read, is metadata, or is ignored."""
    from fsdp_tune.data.format.row_account import describe_use

    rows = [
        [_text(source.path), _text(each.key), _text(describe_use(each.how, each.meaning)), f"{each.rows:,}"]
        for source in report.inputs
        for each in source.keys
    ]
    return "<h2>Keys of the rows</h2>\n" + html_table(("source", "key", "use", "rows"), rows) if rows else ""


def _spread(sample: SourceSample) -> str:
    import numpy as np

    if not len(sample.lengths):
        return "none"
    return " / ".join(f"{value:,.0f}" for value in np.quantile(sample.lengths, [0.5, 0.95, 1.0]))


def _histogram(sample: SourceSample, longest: int) -> str:
    import numpy as np

    counts, _ = np.histogram(sample.lengths, bins=BINS, range=(0, longest))
    heights = BAR_HEIGHT * counts / max(int(counts.max()), 1)
    bars = "".join(
        f'<rect x="{at * BAR_WIDTH}" y="{BAR_HEIGHT - height:.1f}" width="{BAR_WIDTH - 1}" '
        f'height="{height:.1f}" fill="#4477aa"/>'
        for at, height in enumerate(heights.tolist())
    )
    return f'<svg viewBox="0 0 {BINS * BAR_WIDTH} {BAR_HEIGHT}" role="img" style="width:12rem">{bars}</svg>'


def _notices(notices: Sequence[Notice]) -> str:
    if not notices:
        return ""
    lines = (
        f"<li>{_text(notice.message)}{f' ({_text(notice.hint)})' if notice.hint else ''}</li>"
        for notice in notices
    )
    return f"<h2>Notices</h2>\n<ul>{''.join(lines)}</ul>"


def _examples(sample: SourceSample) -> str:
    return "\n".join([f"<h2>{escape(_source_name(sample))}</h2>", *map(_example, sample.examples)])


def _example(example: DecodedExample) -> str:
    runs = list(zip(example.runs, example.ids, strict=True))
    text = "".join(f"<mark>{_text(text)}</mark>" if trained else _text(text) for (text, trained), _ in runs)
    ids = " ".join(f"<mark>{_joined(ids)}</mark>" if trained else _joined(ids) for (_, trained), ids in runs)
    tokens, trained = sum(len(ids) for _, ids in runs), sum(len(ids) for (_, trained), ids in runs if trained)
    facts = f"{_text(example.where)}: {tokens:,} tokens, {trained:,} trained"
    return f"<p>{facts}</p>\n<pre>{text}</pre>\n<details><summary>ids</summary><pre>{ids}</pre></details>"


def _joined(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _text(text: str) -> str:
    """Escape HTML, and show control characters, which could reorder or hide text."""
    return escape(printable(text))


def _source_name(sample: SourceSample) -> str:
    return printable(sample.account.name)
