"""Values whose type is not known are narrowed, and others become empty."""

from __future__ import annotations

from fsdp_tune.core.values import as_items, as_list, as_mapping


def test_other_kinds_of_values_are_empty() -> None:
    values = ([1], {"a": 1}, "x", None)
    assert [as_list(value) for value in values] == [[1], [], [], []]
    assert [as_mapping(value) for value in values] == [{}, {"a": 1}, {}, {}]
    assert [as_items(value) for value in values] == [[1], [{"a": 1}], ["x"], [None]]
