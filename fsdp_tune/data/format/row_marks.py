"""Marks in rows that decide what is trained, by the names of several tools: of a row, a message, a part of
`content`, and a token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from fsdp_tune.data.format.row_account import TOKEN_MARKS, ignoring_option, listed_keys
from fsdp_tune.data.read.row_files import ColumnError, RowError, kind_of

MEANING = "a mark of what is trained"


FLAGS = ("train", "training", "trainable", "train_on_turn", "loss")
"""True or false: axolotl (`train`, `training`), verl (`trainable`), ms-swift (`loss`)."""


NUMBERS = ("weight", "loss_weight", "loss_scale", "loss_mask", "sample_weight", "example_weight")
"""1 or 0: OpenAI and axolotl (`weight`), LLaMA-Factory (`loss_weight`), ms-swift (`loss_scale`), verl and
SkyRL (`loss_mask`)."""


MARKS = (*FLAGS, *NUMBERS)


TOKEN_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""A list with 1 for each trained token: TRL (the first two), SkyRL and verl (`loss_mask`)."""


def take_mark(
    values: dict[str, object], names: Sequence[str], where: str, path: str, ignored: Collection[str]
) -> bool | None:
    """Remove the marks `names` from an object and return what they say: trained, not trained, or None if
    there are none.

    `where` begins messages, `path` begins the keys for `data.ignore_columns`. Raises: RowError for a mark
    that is neither.
    """
    found = {name: values.pop(name) for name in names if name in values}
    marks = {
        name: _mark(name, value, where, path, ignored) for name, value in found.items() if value is not None
    }
    if len(set(marks.values())) > 1:
        raise RowError(
            f"{where}{' and '.join(f'`{name}`' for name in marks)} contradict each other",
            hint="remove all but one of them",
        )
    return next(iter(marks.values()), None)


def _mark(name: str, value: object, where: str, path: str, ignored: Collection[str]) -> bool:
    if isinstance(value, (list, dict)):
        raise RowError(
            f"{where}`{name}` holds {kind_of(cast(object, value))} instead of one mark", hint=TOKEN_MARKS
        )
    if value not in (0, 1) or (name in FLAGS and isinstance(value, float)):
        hint = "something is trained or not, and shares of a loss are not possible"
        ignoring = ignoring_option([*ignored, path + name])
        wanted = "true or false" if name in FLAGS else "0 or 1"
        raise RowError(
            f"{where}`{name}` is {value!r}; it is {wanted}",
            hint=f"{hint}; `{ignoring}` trains it as if there were no mark",
        )
    return bool(value)


def mark_of_parts(
    parts: Sequence[bool | None],
    where: str,
    *,
    own: bool | None,
    names: Collection[str],
    of: str,
    is_answer: bool,
) -> bool | None:
    """Return the mark of a message, from its own and those of its parts, whose marks are `names`, in its keys
    `of`.

    Raises: RowError if parts of an answer differ.
    """
    marks = set(parts)
    if own is not None:
        marks = {own if mark is None else mark for mark in marks} | {own}
    if False not in marks:
        return True if True in marks else None
    if marks == {False} or not is_answer:
        return False
    raise RowError(
        f"{where}{listed_keys(names)} of parts of {of} exclude some of the answer, which is trained "
        "as a whole",
        hint="mark the complete message with `train: false`, or write the row tokenized, with `labels`",
    )


def read_token_mask(column: str, value: object, length: int) -> list[bool]:
    """Return a mask of `length` tokens. Raises: ColumnError."""
    if not isinstance(value, list):
        raise ColumnError(column, f"holds {kind_of(value)} instead of a list of 0 and 1")
    marks = cast(list[object], value)
    wrong = next(
        (
            at
            for at, mark in enumerate(marks)
            if not isinstance(mark, (bool, int, float)) or mark not in (0, 1)
        ),
        None,
    )
    if wrong is not None:
        hint = "a token is trained or not; shares of a loss are not possible"
        raise ColumnError(
            column, f"holds {marks[wrong]!r} at position {wrong}: marks of tokens are 0 or 1", hint=hint
        )
    if len(marks) != length:
        raise ColumnError(column, f"holds {len(marks)} marks, and `input_ids` holds {length} ids")
    return [bool(mark) for mark in marks]
