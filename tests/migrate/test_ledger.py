"""The account of an import is closed: a key is settled once, and none is left."""

from __future__ import annotations

import pytest

from fsdp_tune.migrate.ledger import Ledger, leaves
from fsdp_tune.recipe.outcome import Fate, Weight


def test_key_without_a_row_fails_the_import() -> None:
    ledger = Ledger({"a": 1, "b": {"c": 2}}, {}, "axolotl")
    ledger.drop(("a",), "reason")
    with pytest.raises(AssertionError, match=r"b\.c"):
        ledger.close()


def test_key_is_settled_once() -> None:
    ledger = Ledger({"a": {"b": 1}}, {}, "axolotl")
    ledger.drop(("a",), "reason")
    with pytest.raises(AssertionError, match="settled already"):
        ledger.ask(("a", "b"), "words")


def test_leaves_are_scalars_empty_values_and_lists_of_scalars() -> None:
    assert list(leaves({"a": {"b": 1, "c": {}}, "d": [1, 2], "e": [{"f": None}, 3]})) == [
        ("a", "b"),
        ("a", "c"),
        ("d",),
        ("e", 0, "f"),
        ("e", 1),
    ]


def test_given_value_comes_before_an_implied_one_and_a_default() -> None:
    ledger = Ledger({"a": 1, "b": 2}, {}, "axolotl")
    ledger.write(("a",), {"lora.r": 1}, Fate.CONVERTED, weight=Weight.IMPLIED)
    ledger.write(("b",), {"lora.r": 2}, Fate.CONVERTED)
    ledger.set(("lora", "r"), 3, "default", Weight.DEFAULT)
    assert ledger.get("lora", "r") == 2
    assert [row.fate for row in ledger.rows] == [Fate.CONVERTED, Fate.CONVERTED]


def test_withdrawn_setting_makes_its_keys_questions() -> None:
    ledger = Ledger({"a": 1}, {}, "axolotl")
    ledger.write(("a",), {"training.optim": "x"}, Fate.CONVERTED)
    ledger.withdraw(("training", "optim"), "no such optimizer (`training.optim` on line 3)")
    assert [(row.fate, row.reason) for row in ledger.rows] == [(Fate.QUESTION, "no such optimizer")]
    assert ledger.settings == {}
