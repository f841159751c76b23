"""Rows are compared as a whole: by the tokens and targets of all their examples, and by the borders between
these."""

from __future__ import annotations

import numpy as np

from fsdp_tune.data.duplicates import repeated, token_hashes

Row = list[list[tuple[int, int]]]
"""Examples of a row, each as (token, whether it is trained)."""


def repeated_rows(*rows: Row) -> list[int]:
    """Return the indices of the rows of which every example is repeated."""
    examples = [(number, example) for number, row in enumerate(rows) for example in row]
    tokens, trained = (
        np.array([pair[at] for _, example in examples for pair in example], dtype)
        for at, dtype in enumerate("iB")
    )
    lengths = np.array([len(example) for _, example in examples], np.int64)
    origins = np.array([(number // 2, number) for number, _ in examples], np.int64)
    flags = repeated(
        origins, token_hashes(tokens.astype(np.int32), trained.astype(np.uint8), lengths, origins)
    )
    of_row = [
        {bool(flag) for flag, (number, _) in zip(flags, examples, strict=True) if number == wanted}
        for wanted in range(len(rows))
    ]
    assert all(len(each) == 1 for each in of_row), "the examples of a row stay together"
    return [number for number, each in enumerate(of_row) if True in each]


def test_row_is_repeated_if_all_its_examples_are_those_of_an_earlier_row() -> None:
    first, second = [(1, 0), (2, 1)], [(3, 0), (4, 1), (5, 1)]
    assert repeated_rows([first], [first, second], [second], [first, second], [second, first], [first]) == [
        3,
        5,
    ]


def test_targets_and_borders_are_part_of_a_row_and_the_flag_of_the_first_token_is_not() -> None:
    row = [(1, 1), (2, 1), (3, 1), (4, 1)]
    other_target = [(1, 1), (2, 1), (3, 0), (4, 1)]
    assert repeated_rows([row], [other_target], [row[:2], row[2:]], [row[:3]], [[(1, 0), *row[1:]]]) == [4]


def test_no_rows_have_no_duplicates() -> None:
    none = np.zeros(0, np.int64)
    origins = none.reshape(0, 2)
    assert not repeated(
        origins, token_hashes(none.astype(np.int32), none.astype(np.uint8), none, origins)
    ).size
