"""Keys that differ, and those of them that cause a difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fsdp_tune.comparison.causes import (
    by_likelihood,
    causing,
    different_key,
    different_paths,
    value_at,
    with_values,
    yaml_value,
)
from fsdp_tune.core.errors import Where
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.read.overrides import _value
from fsdp_tune.recipe.read.yaml_source import plain_value

A: dict[str, Any] = {
    "data": {"train": [{"path": "a"}, {"path": "b"}], "packing": True},
    "lora": None,
    "training": {"seed": 1},
}
B: dict[str, Any] = {
    "data": {"train": [{"path": "a"}, {"path": "c"}], "packing": True},
    "lora": {"r": 8},
    "training": {"seed": 1, "x": 2},
}


def test_paths_enter_lists_of_one_length_and_stop_at_a_missing_section() -> None:
    assert list(different_paths(A, B)) == [("data", "train", 1, "path"), ("lora",), ("training", "x")]
    assert list(different_paths({"a": [1]}, {"a": [1, 2]})) == [("a",)]
    # a recipe does not take one for the other
    assert list(different_paths({"a": True}, {"a": 1})) == [("a",)]


def test_values_of_another_document_are_copied_and_missing_keys_removed() -> None:
    made = with_values(B, A, [("data", "train", 1, "path"), ("lora",), ("training", "x")])
    assert made == A
    assert B["lora"] == {"r": 8}
    assert value_at(A, ("data", "train", 5, "path")) is None


def needing(*needed: KeyPath) -> Any:
    tried: list[Sequence[KeyPath]] = []

    def vanishes(chosen: Sequence[KeyPath]) -> bool:
        tried.append(chosen)
        return set(needed) <= set(chosen)

    return vanishes


def test_one_key_is_found_alone_and_several_are_reduced_to_those_needed() -> None:
    keys: list[KeyPath] = [("a",), ("b",), ("c",), ("d",)]
    assert causing(keys, needing(("c",))) == (("c",),)
    assert causing(keys, needing(("a",), ("d",))) == (("a",), ("d",))
    assert causing(keys, lambda _: False) == ()
    assert causing([], lambda _: True) == ()


def test_no_cause_can_be_left_out_where_keys_undo_each_other_and_nothing_is_computed_twice() -> None:
    keys: list[KeyPath] = [("a",), ("b",), ("c",), ("d",)]
    tried: list[frozenset[KeyPath]] = []

    def vanishes(chosen: Sequence[KeyPath]) -> bool:
        tried.append(frozenset(chosen))
        # d undoes it, unless a is there
        return {("b",), ("c",)} <= set(chosen) and ((("a",) in chosen) or (("d",) not in chosen))

    assert causing(keys, vanishes) == (("b",), ("c",))
    assert len(tried) == len(set(tried))


def test_keys_that_affect_the_stage_are_tried_first_and_others_not_at_all() -> None:
    paths: list[KeyPath] = [
        ("output_dir",),
        ("launch", "num_processes"),
        ("training", "weight_decay"),
        ("data", "packing"),
    ]
    assert by_likelihood(paths, is_data_stage=True) == [
        ("data", "packing"),
        ("training", "weight_decay"),
        ("launch", "num_processes"),
    ]
    assert by_likelihood(paths, is_data_stage=False)[0] == ("training", "weight_decay")


def test_key_says_what_it_affects_and_hides_secrets() -> None:
    key = different_key(("training", "seed"), 1, 2)
    assert key.changes_numbers
    assert key.affects == ["the rows and their order", "losses and weights computed from the same rows"]
    assert key.meaning.startswith("Seed of initial weights")
    assert different_key(("launch", "env", "API_KEY"), "hunter2", "x").a != "hunter2"
    assert "hf_" not in str(
        different_key(("data", "train"), [{"path": "https://u:hf_" + "a" * 30 + "@h/x"}], []).a
    )
    assert not different_key(("output_dir",), "a", "b").changes_numbers


VALUES = [
    "cosine",
    "a b",
    "a: b",
    "# a",
    "- a",
    "&a",
    "*a",
    "[x",
    "{x",
    '"',
    "'",
    " a",
    "yes",
    "0x",
    "012",
    "1_000",
    "null",
    "~",
    "1e3",
    ".nan",
    "1e999",
]


@pytest.mark.parametrize(
    "value", [*VALUES, "", "é", "a\nb", 1, 0.5, True, None, [1, "a"], {"path": "yes"}], ids=repr
)
def test_value_is_written_as_set_reads_it(value: Any) -> None:
    assert plain_value(_value(yaml_value(value), Where("--set"))) == value
