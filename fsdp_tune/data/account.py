"""The account of the training data: rows read, kept and left out with reasons, supervised tokens, EOS and BOS tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_tune.core.errors import Notice, usage_error
from fsdp_tune.data.format.row_account import IGNORE_KEY, account_line, ignored_by_none, listed_keys
from fsdp_tune.data.inputs import TRAIN, Input
from fsdp_tune.data.report import DataReport, DecodedExample, InputAccount, NamedRows, SetAccount, Spread
from fsdp_tune.data.sets import NAMED_ROWS, Cut, Examples, PackedRows
from fsdp_tune.data.store import IGNORE_INDEX, Int64, Row, RowStore
from fsdp_tune.data.tokenise.encoder import Encoder
from fsdp_tune.recipe.schema.recipe import Recipe


def set_account(cut: Cut, packed: PackedRows, names: Sequence[str], max_length: int) -> SetAccount:
    rows = len(packed.rows) - 1
    tokens = int(cut.segments[:, 1].sum())
    return SetAccount(
        rows=rows,
        examples=len(cut.segments),
        tokens=tokens,
        supervised_tokens=int(cut.supervised.sum()),
        supervised_tokens_per_example=spread(cut.supervised),
        tokens_per_example=spread(cut.segments[:, 1]),
        cut_by_packing=len(packed.cuts),
        truncated=len(cut.truncated),
        first_truncated=rows_named(cut.truncated, names).first,
        split=cut.split,
        dropped_too_long=rows_named(cut.dropped, names),
        dropped_nothing_left=rows_named(cut.emptied, names),
        fill=tokens / (rows * max_length) if rows else 0.0,
    )


def source_accounts(count: int, available: Examples, drawn: Examples, pieces: Cut) -> list[InputAccount]:
    """Return the share of each of `count` sources in an epoch: rows, repeats of each row, tokens and their share of the set.

    `available` are the examples of a set, `drawn` those of one epoch, `pieces` the segments of `drawn` after cutting.
    """
    rows = np.bincount(available.sources, minlength=count)
    drawn_rows = np.bincount(drawn.sources, minlength=count)
    tokens = np.bincount(pieces.sources, pieces.segments[:, 1], minlength=count)
    supervised = np.bincount(pieces.sources, pieces.supervised, minlength=count)
    return [
        InputAccount(
            rows=int(rows[source]),
            rows_drawn=int(drawn_rows[source]),
            repeats=float(drawn_rows[source] / max(rows[source], 1)),
            tokens=int(tokens[source]),
            supervised_tokens=int(supervised[source]),
            share=float(tokens[source] / max(tokens.sum(), 1)),
        )
        for source in range(count)
    ]


def mean_tokens(report: DataReport) -> list[float]:
    """Return the tokens of a mean row of each training source."""
    return [account.tokens / max(account.rows, 1) for account in report.inputs if account.set == TRAIN]


def source_lines(report: DataReport) -> list[str]:
    """Return one line for each training source about its share of an epoch; no lines for a single source, and for a stream one line on
    what was read of it."""
    sources = [given for given in report.inputs if given.set == TRAIN]
    if rows := report.stream_sample_rows:
        return [f"a stream: these figures are of the first rows of each source, at most {rows:,}"]
    if len(sources) < 2:
        return []
    return [
        f"{given.name}: {given.rows:,} rows, each drawn {given.repeats:,.4g} times an epoch, "
        f"{given.tokens:,} tokens ({given.share:.1%} of the training tokens)"
        for given in sources
    ]


def key_lines(report: DataReport) -> list[str]:
    """Return one line for each source: which keys of its rows are read, and which are ignored."""
    stored = [(given, account_line(given.keys)) for given in report.inputs]
    return [f"{given.name}: {line}" for given, line in stored if line]


def spread(values: Int64) -> Spread:
    """Return minimum, median and maximum; zeros if there are no values."""
    return Spread(int(values.min()), float(np.median(values)), int(values.max())) if len(values) else Spread()


def rows_named(origins: Int64, names: Sequence[str]) -> NamedRows:
    return NamedRows(len(origins), tuple(f"{names[file]}:{row}" for file, row in origins[:NAMED_ROWS].tolist()))


@dataclass(frozen=True, slots=True)
class SourceSample:
    """Examples of one training source, as packing and `overlong` left them."""

    account: InputAccount
    lengths: Int64
    """Number of tokens of each example or part of one."""
    cut: int
    """Number of them that are a part of an example."""
    examples: list[DecodedExample]
    """Some of them."""


def sample_sources(train: Path | str, inputs: Sequence[InputAccount], encoder: Encoder, count: int) -> list[SourceSample]:
    """Return `count` examples of each training source, spread evenly; `inputs` are those of the report."""
    store = RowStore(train)
    segments = store.segments()
    first_of_row = np.searchsorted(segments.rows, np.arange(len(store)))
    samples: list[SourceSample] = []
    files = 0
    for account in inputs:
        own = np.flatnonzero((segments.files >= files) & (segments.files < files + account.files))
        files += account.files
        if account.set != TRAIN:
            continue
        examples: list[DecodedExample] = []
        for at in spread_indices(len(own), count):
            segment = int(own[at])
            row = int(segments.rows[segment])
            examples.append(decoded_row(store, row, encoder)[segment - int(first_of_row[row])])
        samples.append(SourceSample(account, segments.lengths[own], int(segments.is_cut[own].sum()), examples))
    return samples


def spread_indices(length: int, count: int) -> list[int]:
    """Return at most `count` indices below `length`, spread evenly."""
    count = min(count, length)
    return [(2 * at + 1) * length // (2 * count) for at in range(count)]


def decoded_row(store: RowStore, row: int, encoder: Encoder) -> list[DecodedExample]:
    examples = zip(store.origins(row), examples_of(store[row]), strict=True)
    return [_decoded(example, encoder, f"{file}:{number}") for (file, number), example in examples]


def _decoded(row: Row, encoder: Encoder, where: str) -> DecodedExample:
    """Return the row as text, in runs that are trained or not, with their ids. Joined, the runs are the decoded row.

    Tokens are decoded from the beginning of the row each time, because some tokenizers write the space of a token only if
    another token precedes it.
    """
    flags = row.labels != IGNORE_INDEX
    runs: list[tuple[str, bool]] = []
    ids: list[list[int]] = []
    tokens: list[int] = row.input_ids.tolist()
    done, begin = "", 0
    for trained, run in groupby(flags.tolist()):
        end = begin + sum(1 for _ in run)
        text = encoder.decode(tokens[:end])
        runs.append((text[len(done) :], trained))
        ids.append(tokens[begin:end])
        done, begin = text, end
    return DecodedExample(where, runs, ids)


def examples_of(row: Row) -> list[Row]:
    """Return the examples of a packed row, each as a row."""
    ends = np.cumsum(row.lengths)
    return [
        Row(row.input_ids[end - length : end], row.labels[end - length : end], (length,), row.row_id)
        for end, length in zip(ends.tolist(), row.lengths, strict=True)
    ]


# ---- Check the account of the data: refuse data that cannot be trained on, and return notices about the rest.

SHOWN_DETAILS = 8
POOR_FILL = 0.8
MANY_REPEATS = 4
"""Muennighoff et al. 2023 (Scaling Data-Constrained Language Models): data repeated up to 4 times train almost as well as new data."""


def refuse_nothing(examples: Examples, names: Sequence[str], *, rows: int, bad: int, untrained: Sequence[tuple[int, int]]) -> None:
    """Refuse data without a trained token. Training would otherwise appear to work, with a finite loss and an unchanged model."""
    if len(examples):
        return
    first = ", ".join(f"{names[file]}:{row}" for file, row in untrained[:3])
    raise usage_error(
        "no-supervised-tokens",
        f"no row has a token to train: {rows:,} were read, {bad:,} cannot be used, {len(untrained):,} are empty or entirely masked",
        hint=f"check {first}" if first else None,
    )


def refuse_empty_set(name: str, rows: int, examples: int, max_length: int) -> None:
    if not rows:
        raise usage_error(
            "no-supervised-tokens",
            f"the set `{name}` has no row left: of {examples:,} examples none has a trained token within {max_length} tokens",
            hint="raise `data.max_length`, or change `data.overlong`",
        )


def data_notices(recipe: Recipe, inputs: Sequence[Input], report: DataReport, *, bad_rows_name: str) -> list[dict[str, Any]]:
    """Return notices about conditions that are allowed but may be unintended, as JSON for the manifest of the cache."""
    notices = [
        *_row_notices(report, bad_rows_name),
        *_key_notices(recipe, report),
        *_split_notices(report),
        *_repeat_notices(recipe, report),
        *_eval_notices(report),
        *_length_notices(recipe, report),
        *_end_notices(inputs, report),
        *_text_notices(report),
        *_note_notices(report.notes),
    ]
    return [notice_fields(notice) for notice in notices]


def notice_fields(notice: Notice) -> dict[str, Any]:
    """Return a notice about data as JSON for a manifest or data.json."""
    return {"code": notice.code, "message": notice.message, "hint": notice.hint}


def _row_notices(report: DataReport, bad_rows_name: str) -> Iterator[Notice]:
    read = report.rows_read
    if bad := report.rows_bad.rows:
        yield Notice(
            "bad-rows-skipped",
            f"{bad:,} of {read:,} rows cannot be used and were left out",
            hint=f"`{bad_rows_name}` next to the data lists them",
        )
    if untrained := report.rows_untrained.rows:
        message = f"{untrained:,} of {read:,} rows have no token to train and were left out"
        yield Notice("rows-untrained", message, hint=report.rows_untrained.describe_first())


def _key_notices(recipe: Recipe, report: DataReport) -> Iterator[Notice]:
    unknown = ignored_by_none(recipe.data.ignore_columns, (given.keys for given in report.inputs))
    if unknown and not recipe.data.streaming:  # only the first rows of a stream are known here
        keys = [each.key for given in report.inputs for each in given.keys]
        yield Notice(
            "nothing-to-ignore",
            f"`{IGNORE_KEY}` names {listed_keys(unknown)}, which no row has",
            hint=f"rows have {listed_keys(sorted(set(keys)))}",
        )


def _split_notices(report: DataReport) -> Iterator[Notice]:
    split = report.rows_split
    if split.rows:
        yield Notice(
            "chats-split",
            f"{split.rows:,} conversations were split into {split.examples:,} examples, each with the context of its answers at "
            "inference: the chat template renders earlier messages differently once more follow (it may drop their reasoning)",
            hint="each example repeats its context, which costs tokens; `data.loss_on: last_assistant` trains the last answer only",
        )


def _repeat_notices(recipe: Recipe, report: DataReport) -> Iterator[Notice]:
    if recipe.data.streaming:  # only the first rows are known here, so that their repeats say nothing
        return
    for account in report.inputs:
        if account.repeats > MANY_REPEATS:
            yield Notice(
                "source-repeated",
                f"`{account.path}`: each of its {account.rows:,} rows is drawn {account.repeats:.1f} times an epoch; "
                f"the source makes up {account.share:.0%} of the training tokens",
                hint="lower its `weight`, or set `data.mixture.stopping_strategy: first_exhausted` or `data.mixture.weight_by: tokens`",
            )


def _eval_notices(report: DataReport) -> Iterator[Notice]:
    for name, account in report.sets.items():
        if account.also_trained.rows:
            yield Notice(
                "eval-rows-trained",
                f"{name}: {account.also_trained} with the content of a training row: the loss on them measures memorization",
                hint=f"remove them from one of the two sets; {account.also_trained.describe_first()}",
            )


def _length_notices(recipe: Recipe, report: DataReport) -> Iterator[Notice]:
    limit = f"data.max_length ({recipe.data.max_length} tokens)"
    for name, account in report.sets.items():
        cut = NamedRows(account.truncated, account.first_truncated)
        if cut.rows:
            message = f"{name}: {cut} truncated at {limit}: the text after it is not trained"
            yield Notice("rows-truncated", message, hint=cut.describe_first())
        for dropped, why in (
            (account.dropped_too_long, f"longer than {limit}"),
            (account.dropped_nothing_left, f"all trained tokens come after {limit}"),
        ):
            if dropped.rows:
                yield Notice("rows-dropped", f"{name}: {dropped} left out: {why}", hint=dropped.describe_first())
    train = report.sets[TRAIN]
    if recipe.data.packing and train.fill < POOR_FILL and train.rows > 1:
        fill = f"packed rows are filled to {100 * train.fill:.0f} % only"
        yield Notice("poor-fill", fill, hint="a larger `data.max_length` packs better")


def _end_notices(inputs: Sequence[Input], report: DataReport) -> Iterator[Notice]:
    eos = report.eos
    if missing := eos.examples - eos.supervised:
        yield Notice(
            "eos-untrained",
            f"{missing:,} of {eos.examples:,} examples do not train the token `{eos.token}` (EOS): the model may not learn to stop",
            hint="`data.append_eos: true` adds it",
        )
    if appended := eos.appended_to_chats:
        yield Notice(
            "eos-not-in-template",
            f"the chat template does not end answers with `{eos.token}`, so it was appended to {appended:,} conversations",
            hint="if answers end with another token, set it as `model.tokens.eos`, or generation will not stop there",
        )
    if repeated := report.bos_repeated_in_text:
        yield Notice("bos-twice", f"{repeated:,} examples contain the beginning-of-sequence token more than once", hint="check the texts")
    if missing := report.bos_missing_in_chat:
        yield Notice(
            "bos-not-in-template",
            f"the chat template does not write the beginning-of-sequence token in {missing:,} conversations; "
            "this tokenizer adds it to other texts",
            hint="use the model's own template, or begin yours with `{{ bos_token }}`",
        )
    if any(opened.settings.template is not None and "strftime_now" in opened.settings.template for opened in inputs):
        yield Notice("dated-template", "the chat template writes today's date: the prepared data contain the date of their preparation")


def _text_notices(report: DataReport) -> Iterator[Notice]:
    kept = report.rows_kept
    if count := report.joined_without_space:
        yield Notice(
            "no-space",
            f"in {count:,} of {kept:,} rows there is no white space between prompt and completion",
            hint='add a separator (`data.separator: "\\n"`), unless the prompt itself marks the beginning of the answer',
        )
    for prompt in sorted({account.alpaca_prompt for account in report.inputs if account.alpaca_prompt}):
        yield Notice("alpaca-prompt", f"alpaca rows are formatted with {prompt}")


_NOTES = (
    Notice("not-rendered", "the chat template omits", hint="choose another `data.chat_template` if the model needs them"),
    Notice("unanswered-turns", "turns after the last answer were left out, in conversations that end with"),
    Notice(
        "tools-missing",
        "rows have calls and no column `tools`, so the template cannot describe the functions",
        hint="add their schemas as `tools`, unless the system prompt has them",
    ),
    Notice(
        "arguments-not-an-object",
        "the arguments of calls are not an object, so the template writes them as they are",
        hint="write them as an object or its JSON text, as with `json.dumps`, unless the function takes plain text",
    ),
    Notice(
        "mark-without-effect", "marks such as `train` and `weight` only exclude messages; marked as trained, but not selected by `loss_on`"
    ),
    Notice(
        "special-tokens-as-text",
        "rows contain special tokens, which are encoded as ordinary text",
        hint="`data.special_tokens_in_content: control` encodes them as special tokens",
    ),
    Notice(
        "special-tokens-as-control",
        "rows contain special tokens, which are encoded as such",
        hint="`data.special_tokens_in_content: text` encodes them as ordinary text",
    ),
    Notice(
        "special-tokens-inseparable",
        "special tokens in rows cannot be encoded as text with this tokenizer and template and remain special",
        hint="remove them from the rows",
    ),
    Notice(
        "tokenised-apart",
        "a token would span the text that the model receives and the answer that it must generate, so these were tokenised "
        "separately, as at inference",
        hint="no change is needed; white space that ends a prompt or begins an answer causes it",
    ),
    Notice(
        "text-changed",
        "the trained text is not the text of the row, because the tokenizer writes a space before every text",
        hint="begin completions with white space",
    ),
)
"""Message and hint for each kind of note on rows (`data.format.row_account`), to which details and rows are appended."""


def _note_notices(notes: dict[str, dict[str, NamedRows]]) -> Iterator[Notice]:
    for kind in _NOTES:
        if details := notes.get(kind.code):
            first = next(iter(details.values())).describe_first()
            yield Notice(kind.code, f"{kind.message}: {_listed(details)}", hint=f"{kind.hint}; {first}" if kind.hint else first)


def _listed(details: dict[str, NamedRows]) -> str:
    listed = [f"{detail} ({rows})" for detail, rows in details.items()]
    return ", ".join(listed[:SHOWN_DETAILS]) + (f" and {len(listed) - SHOWN_DETAILS} more" if len(listed) > SHOWN_DETAILS else "")
