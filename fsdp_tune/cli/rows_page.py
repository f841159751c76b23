"""The rows of a recipe as an HTML page: lengths, truncation, trained share and decoded examples of each
source."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from fsdp_tune.cli.terminal_text import printable
from fsdp_tune.core.errors import Notice
from fsdp_tune.data.account import SourceSample
from fsdp_tune.data.format.row_account import describe_use
from fsdp_tune.data.report import DataReport, DecodedExample
from fsdp_tune.pages.html_pages import html_document, html_table

BINS, BAR_WIDTH, BAR_HEIGHT = 32, 6, 40


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
    rows = [
        [_text(source.path), _text(each.key), _text(describe_use(each.how, each.meaning)), f"{each.rows:,}"]
        for source in report.inputs
        for each in source.keys
    ]
    return "<h2>Keys of the rows</h2>\n" + html_table(("source", "key", "use", "rows"), rows) if rows else ""


def _spread(sample: SourceSample) -> str:
    if not len(sample.lengths):
        return "none"
    return " / ".join(f"{value:,.0f}" for value in np.quantile(sample.lengths, [0.5, 0.95, 1.0]))


def _histogram(sample: SourceSample, longest: int) -> str:
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
