"""Values that an import writes read back as they are, by the rules of a recipe."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.migrate.recipe_text import scalar
from fsdp_tune.recipe.read.yaml_source import MappingNode, compose, plain_value

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = st.one_of(
    TEXT,
    st.integers(-(10**15), 10**15),
    st.booleans(),
    st.floats(1e-9, 1e9),
    st.sampled_from(["no", "1_0", "0o7", "1e5"]),
)


def read_back(value: Any) -> Any:
    root, problems = compose(f"key: {scalar(value)}  # from x\n", "recipe.yaml")
    assert isinstance(root, MappingNode)
    assert problems == []
    return plain_value(root)["key"]  # type: ignore[index]


@given(st.one_of(SCALARS, st.lists(SCALARS, max_size=4)))
def test_value_reads_back_as_it_was(value: Any) -> None:
    assert read_back(value) == value


@pytest.mark.parametrize(
    "value",
    ["model.[\\d]+.(a|b)", "a, b", "{x}", "# not a comment", "- x", "key: value", "\u202eabc", "a\nb", ""],
)
def test_text_with_a_meaning_in_yaml_stays_text(value: str) -> None:
    assert read_back(value) == value
    assert read_back([value, "x"]) == [value, "x"]
    assert scalar(value).isprintable()
