"""Check the account of the data: refuse data that cannot be trained on, and return notices about the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_tune.core.errors import Notice, usage_error
from fsdp_tune.data.format.row_account import IGNORE_KEY, ignored_by_none, listed_keys
from fsdp_tune.data.inputs import TRAIN, Input
from fsdp_tune.data.report import DataReport, NamedRows
from fsdp_tune.data.sets import Examples
from fsdp_tune.recipe.schema.recipe import Recipe

SHOWN_DETAILS = 8


POOR_FILL = 0.8


MANY_REPEATS = 4
"""Muennighoff et al. 2023 (Scaling Data-Constrained Language Models): data repeated up to 4 times train
almost as well as new data."""


def refuse_nothing(
    examples: Examples, names: Sequence[str], *, rows: int, bad: int, untrained: Sequence[tuple[int, int]]
) -> None:
    """Refuse data without a trained token. Training would otherwise appear to work, with a finite loss and an
    unchanged model."""
    if len(examples):
        return
    first = ", ".join(f"{names[file]}:{row}" for file, row in untrained[:3])
    raise usage_error(
        "no-supervised-tokens",
        f"no row has a token to train: {rows:,} were read, {bad:,} cannot be used, "
        f"{len(untrained):,} are empty or entirely masked",
        hint=f"check {first}" if first else None,
    )


def refuse_empty_set(name: str, rows: int, examples: int, max_length: int, *, drops: bool) -> None:
    """Refuse a set without rows. `examples`: those before cutting; `drops`: whether `overlong: drop` left any
    out."""
    if rows:
        return
    if not examples:
        raise usage_error(
            "no-supervised-tokens",
            f"the set `{name}` has no row that can be used",
            hint="check its entries: their rows are empty, entirely masked, duplicates, or left out as bad",
        )
    hint = "raise `data.max_length`, or change `data.overlong`"
    if drops:
        raise usage_error(
            "no-supervised-tokens",
            f"the set `{name}` has no row left: `overlong: drop` leaves out examples of more than "
            f"{max_length} tokens, and no other of {examples:,} has a trained token",
            hint=hint,
        )
    raise usage_error(
        "no-supervised-tokens",
        f"the set `{name}` has no row left: of {examples:,} examples none has a trained token within "
        f"{max_length} tokens",
        hint=hint,
    )


def data_notices(
    recipe: Recipe, inputs: Sequence[Input], report: DataReport, *, bad_rows_name: str
) -> list[dict[str, object]]:
    """Return notices about conditions that are allowed but may be unintended, as JSON for the manifest of the
    cache."""
    notices = [
        *_row_notices(report, bad_rows_name),
        *_key_notices(recipe, report),
        *_split_notices(report),
        *_repeat_notices(recipe, report),
        *_eval_notices(recipe, report),
        *_length_notices(recipe, report),
        *_end_notices(inputs, report),
        *_text_notices(report),
        *_note_notices(report.notes),
    ]
    return [notice_fields(notice) for notice in notices]


def notice_fields(notice: Notice) -> dict[str, object]:
    """Return a notice about data as JSON for a manifest or data.json."""
    return {"code": notice.code, "message": notice.message, "hint": notice.hint}


def _row_notices(report: DataReport, bad_rows_name: str) -> Iterator[Notice]:
    read = report.rows_read
    if bad := report.rows_bad.rows:
        yield Notice(
            "bad-rows-skipped",
            f"{bad:,} of {read:,} rows cannot be used and were left out",
            hint=f"`{bad_rows_name}` in the directory of the prepared data lists them",
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
            f"{split.rows:,} conversations were split into {split.examples:,} examples, each with the "
            "context of its answers at inference: the chat template renders earlier messages differently "
            "once more follow (it may drop their reasoning)",
            hint="each example repeats its context, which costs tokens; `data.loss_on: last_assistant` "
            "trains the last answer only",
        )


def _repeat_notices(recipe: Recipe, report: DataReport) -> Iterator[Notice]:
    if recipe.data.streaming:  # only the first rows are known here, so that their repeats say nothing
        return
    for account in report.inputs:
        if account.repeats > MANY_REPEATS:
            yield Notice(
                "source-repeated",
                f"`{account.path}`: each of its {account.rows:,} rows is drawn {account.repeats:.1f} times "
                f"an epoch; the source makes up {account.share:.0%} of the training tokens",
                hint="lower its `weight`, or set `data.mixture.stopping_strategy: first_exhausted` or "
                "`data.mixture.weight_by: tokens`",
            )
        if account.rows and not account.rows_drawn:
            yield Notice(
                "source-not-drawn",
                f"`{account.path}`: none of its {account.rows:,} rows is drawn: its share of an epoch is "
                "less than half a row",
                hint="raise its `weight`, or set `data.mixture.stopping_strategy: all_exhausted`",
            )


def _eval_notices(recipe: Recipe, report: DataReport) -> Iterator[Notice]:
    if isinstance(recipe.data.eval, list):
        remedy = "remove them from one of the two sets"
    else:
        remedy = (
            "files write them differently, and a split is by content: `data.drop_duplicates: true` "
            "leaves out the training rows"
        )
    for name, account in report.sets.items():
        if account.also_trained.rows:
            yield Notice(
                "eval-rows-trained",
                f"{name}: {account.also_trained} with the content or the tokens of a training row: "
                "the loss on them measures memorization",
                hint=f"{remedy}; {account.also_trained.describe_first()}",
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
                yield Notice(
                    "rows-dropped", f"{name}: {dropped} left out: {why}", hint=dropped.describe_first()
                )
    train = report.sets[TRAIN]
    if recipe.data.packing and train.fill < POOR_FILL and train.rows > 1:
        fill = f"packed rows are filled to {100 * train.fill:.0f} % only"
        yield Notice("poor-fill", fill, hint="a larger `data.max_length` packs better")


def _end_notices(inputs: Sequence[Input], report: DataReport) -> Iterator[Notice]:
    eos = report.eos
    if missing := eos.examples - eos.supervised:
        yield Notice(
            "eos-untrained",
            f"{missing:,} of {eos.examples:,} examples do not train the token `{eos.token}` (EOS): "
            "the model may not learn to stop",
            hint="`data.append_eos: true` adds it",
        )
    if appended := eos.appended_to_chats:
        yield Notice(
            "eos-not-in-template",
            f"the chat template does not end answers with `{eos.token}`, so it was appended to "
            f"{appended:,} conversations",
            hint="if answers end with another token, set it as `model.tokens.eos`, or generation will not "
            "stop there",
        )
    if repeated := report.bos_repeated_in_text:
        yield Notice(
            "bos-twice",
            f"{repeated:,} examples contain the beginning-of-sequence token more than once",
            hint="check the texts",
        )
    if missing := report.bos_missing_in_chat:
        yield Notice(
            "bos-not-in-template",
            f"the chat template does not write the beginning-of-sequence token in {missing:,} conversations; "
            "this tokenizer adds it to other texts",
            hint="use the model's own template, or begin yours with `{{ bos_token }}`",
        )
    if any(
        opened.settings.template is not None and "strftime_now" in opened.settings.template
        for opened in inputs
    ):
        yield Notice(
            "dated-template",
            "the chat template writes today's date: the prepared data contain the date of their preparation",
        )


def _text_notices(report: DataReport) -> Iterator[Notice]:
    kept = report.eos.examples
    if count := report.joined_without_space:
        yield Notice(
            "no-space",
            f"in {count:,} of {kept:,} rows there is no white space between prompt and completion",
            hint='add a separator (`data.separator: "\\n"`), unless the prompt itself marks the beginning '
            "of the answer",
        )
    for prompt in sorted({account.alpaca_prompt for account in report.inputs if account.alpaca_prompt}):
        yield Notice("alpaca-prompt", f"alpaca rows are formatted with {prompt}")


_NOTES = (
    Notice(
        "not-rendered",
        "the chat template omits",
        hint="choose another `data.chat_template` if the model needs them",
    ),
    Notice("unanswered-turns", "turns after the last answer were left out, in conversations that end with"),
    Notice(
        "tools-missing",
        "rows have calls and no column `tools`, so the template cannot describe the functions",
        hint="add their schemas as `tools`, unless the system prompt has them",
    ),
    Notice(
        "arguments-not-an-object",
        "the arguments of calls are not an object, so the template writes them as they are",
        hint="write them as an object or its JSON text, as with `json.dumps`, unless the function takes "
        "plain text",
    ),
    Notice(
        "mark-without-effect",
        "marks such as `train` and `weight` only exclude messages; marked as trained, but not "
        "selected by `loss_on`",
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
        "special tokens in rows cannot be encoded as text with this tokenizer and template and "
        "remain special",
        hint="remove them from the rows",
    ),
    Notice(
        "tokenised-apart",
        "a token would span the text that the model receives and the answer that it must generate, so these "
        "were tokenised separately, as at inference",
        hint="no change is needed; white space that ends a prompt or begins an answer causes it",
    ),
    Notice(
        "text-changed",
        "the trained text is not the text of the row, because the tokenizer writes a space before every text",
        hint="begin completions with white space",
    ),
)
"""Message and hint for each kind of note on rows (`data.format.row_account`), to which details and rows are
appended."""


def _note_notices(notes: dict[str, dict[str, NamedRows]]) -> Iterator[Notice]:
    for kind in _NOTES:
        if details := notes.get(kind.code):
            first = next(iter(details.values())).describe_first()
            yield Notice(
                kind.code,
                f"{kind.message}: {_listed(details)}",
                hint=f"{kind.hint}; {first}" if kind.hint else first,
            )


def _listed(details: dict[str, NamedRows]) -> str:
    listed = [f"{detail} ({rows})" for detail, rows in details.items()]
    return ", ".join(listed[:SHOWN_DETAILS]) + (
        f" and {len(listed) - SHOWN_DETAILS} more" if len(listed) > SHOWN_DETAILS else ""
    )
