from __future__ import annotations

import hashlib
import json

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.read.file_access import (
    EOS,
    builtin_rows,
    builtin_tokenizer,
    held_out_prompts,
    spelled_out,
)

NAME = "builtin:arithmetic"


def test_numbers_are_spelled_out() -> None:
    assert [spelled_out(number) for number in (0, 7, 13, 20, 21, 99, 100, 105, 120, 199)] == [
        "zero",
        "seven",
        "thirteen",
        "twenty",
        "twenty one",
        "ninety nine",
        "one hundred",
        "one hundred five",
        "one hundred twenty",
        "one hundred ninety nine",
    ]


def test_builtin_sums_are_correct_and_in_one_split() -> None:
    number = {spelled_out(value): value for value in range(200)}
    train, test = builtin_rows(NAME, "train"), builtin_rows(NAME, "test")
    for row in (*train, *test):
        left, right = row["prompt"].removesuffix(" is").split(" plus ")
        assert number[left] + number[right] == number[row["completion"].removeprefix(" ")]
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert (len(train), len(test)) == (889, 111)


def test_builtin_rows_have_a_fixed_digest() -> None:
    text = json.dumps([builtin_rows(NAME, "train"), builtin_rows(NAME, "test"), held_out_prompts()])
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "ec2a71db4e685086ad01e465eee8f48bc2613a38b7011dde7da9ccfdafeb0a89"
    )


def test_held_out_prompts_equal_test_split() -> None:
    assert sorted(held_out_prompts()) == sorted(
        (row["prompt"], row["completion"]) for row in builtin_rows(NAME, "test")
    )
    assert held_out_prompts(5) == held_out_prompts()[:5]


def test_each_task_word_is_one_token() -> None:
    tokenizer = builtin_tokenizer(NAME)
    for row in builtin_rows(NAME, "train"):
        text = row["prompt"] + row["completion"]
        assert len(tokenizer.encode(text).ids) == len(text.split())


@pytest.mark.parametrize(
    "text", ["one plus two", " leading", "two  spaces\n\ttabs ", "wörld 😀", "seventh", "\u2028"]
)
def test_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = builtin_tokenizer(NAME)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_are_single_and_the_vocabulary_is_small() -> None:
    tokenizer = builtin_tokenizer(NAME)
    assert len(tokenizer.encode(f"one{EOS}").ids) == 2
    assert tokenizer.get_vocab_size() < 384


def test_unknown_name_error_lists_available_names() -> None:
    with pytest.raises(FsdpTuneError) as caught:
        builtin_tokenizer("builtin:poems")
    assert caught.value.problems[0].hint == "the package has: builtin:arithmetic"
