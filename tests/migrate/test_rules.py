"""Rules return what becomes of a key, for any kind of value, and neither write nor change anything."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest

from fsdp_tune.migrate.ledger import Ledger
from fsdp_tune.migrate.rules import (
    FileKey,
    Step,
    cases,
    fine_or,
    implies,
    outcome_of,
    remarked,
    same,
    steps,
)
from fsdp_tune.migrate.tools.table import TOOLS
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Write

KINDS: tuple[Any, ...] = (1, 0.5, True, False, "x", "auto", [], ["x"], {}, {"a": 1}, [{"a": 1}])
STEPS = get_args(Step)


@pytest.mark.parametrize("tool", TOOLS)
def test_rule_returns_outcomes_and_writes_nothing(tool: str) -> None:
    tried = 0
    for name, rule in TOOLS[tool].rules.items():
        for kind in KINDS:
            ledger = Ledger({name: copy.deepcopy(kind)}, {}, tool)
            try:
                found = steps(
                    outcome_of(rule, FileKey(ledger, (name,), ledger.value(name), ("data", "train", 0)))
                )
            except (
                TypeError,
                AttributeError,
                ValueError,
            ):  # a question: not the kind of value that the tool has there
                continue
            tried += 1
            assert all(isinstance(step, STEPS) for step in found), name
            assert (ledger.rows, ledger.settings, ledger.decisions, ledger.values) == (
                [],
                {},
                [],
                {name: kind},
            ), name
    assert tried > 8 * len(TOOLS[tool].rules)


def _key(value: object) -> FileKey:
    return FileKey(Ledger({"name": value}, {}, "axolotl"), ("name",), value)


def test_rules_by_constants() -> None:
    assert outcome_of(same("name"), _key("a")) == Write({"name": "a"}, fate=Fate.KEPT)
    assert outcome_of(same("data.packing"), _key(True)) == Write({"data.packing": True})
    assert [outcome_of(implies({"kernels.liger": True}, "all"), _key(value)) for value in ("true", 0)] == [
        Write({"kernels.liger": True}, "all"),
        Drop("off, as it is here"),
    ]
    only_1 = fine_or((1,), "fine", "decide", "training.optim")
    assert [outcome_of(only_1, _key(value)) for value in (1, True, 2)] == [
        Drop("fine"),
        *[Ask("decide", "training.optim")] * 2,
    ]
    named = cases("training.loss", {"a": "b", "c": Drop("no")}, Ask("which"))
    assert [outcome_of(named, _key(value)) for value in "acd"] == [
        Write({"training.loss": "b"}),
        Drop("no"),
        Ask("which"),
    ]


def test_remark_follows_the_words_of_an_outcome() -> None:
    outcomes = (Write({"name": "a"}, "why"), Write({"name": "a"}), Drop("off"), Ask("which", "name"))
    assert [remarked(each, "") for each in outcomes] == list(outcomes)
    assert [remarked(each, "also") for each in outcomes] == [
        Write({"name": "a"}, "why. also"),
        Write({"name": "a"}, "also"),
        Drop("off. also"),
        Ask("which. also", "name"),
    ]
