"""Settle the keys of a file: find the rule of each, and carry its outcome out in the account."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from fsdp_tune.core.units import shown
from fsdp_tune.core.values import as_list, as_mapping
from fsdp_tune.migrate.general import by_name
from fsdp_tune.migrate.ledger import DEFAULT_OF, Ledger, leaves
from fsdp_tune.migrate.rules import (
    Also,
    AskEach,
    At,
    Decide,
    FileKey,
    Inside,
    Outcome,
    Rule,
    Step,
    outcome_of,
    steps,
)
from fsdp_tune.migrate.tool_keys import tool_keys
from fsdp_tune.recipe.key_paths import KeyPath, as_path
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Write

_UNKNOWN = AskEach()


def settle_all(ledger: Ledger, prefix: KeyPath, inside: Inside, place: KeyPath = ()) -> None:
    """Settle the keys or items at `prefix` in the order of the file; those that include another file are the
    last. With `inside.only`, settle just the keys that have a rule, in the order of the rules.

    `place`: the source of the recipe that they are about, unless `inside` has one.
    """
    value = ledger.value(*prefix)
    place = place if inside.place is None else inside.place
    rules = cast("Mapping[str | int, Rule]", inside.rules)
    for name in (
        rules if inside.only else _in_order(ledger, prefix, [*range(len(as_list(value))), *as_mapping(value)])
    ):
        settle_key(ledger, (*prefix, name), rules.get(name, by_name), place, nulls=inside.nulls)


def _in_order(ledger: Ledger, prefix: KeyPath, names: list[str | int]) -> list[str | int]:
    included = [path for path in ledger.included if path[: len(prefix)] == prefix]
    return sorted(
        names, key=lambda name: any(path[: len(prefix) + 1] == (*prefix, name) for path in included)
    )


def settle_key(
    ledger: Ledger, path: KeyPath, rule: Rule, place: KeyPath = (), *, nulls: bool = False
) -> None:
    """Settle one key by its rule, unless it is settled.

    A list or mapping where the tool has a number or a name, or the other way round, is a question, since no
    rule expects it. The tool's default, written out, is never a question.
    """
    if not ledger.is_open(path):
        return
    key = FileKey(ledger, path, ledger.value(*path), place)
    outcome: Outcome = Drop("no value")
    if nulls or (key.value is not None and key.value != ""):
        try:
            outcome = outcome_of(rule, key)
        except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError):
            outcome = Ask(f"not the kind of value that {ledger.tool} has here")
    for step in steps(outcome):
        _carry_out(ledger, key, step)
    if (
        ledger.rows
        and ledger.rows[-1].path == path
        and ledger.rows[-1].fate is Fate.QUESTION
        and ledger.is_default(path)
    ):
        row = ledger.rows[-1]
        row.fate, row.targets, row.reason = Fate.DROPPED, (), f"{DEFAULT_OF} {ledger.tool}"


def _carry_out(ledger: Ledger, key: FileKey, step: Step) -> None:
    path = key.path
    match step:
        case Write():
            ledger.write(path, step.settings, step.fate, step.reason, weight=step.weight)
        case Ask():
            ledger.ask(path, step.words, as_path(step.near))
        case Drop():
            ledger.drop(path, step.reason)
        case Inside():
            settle_all(ledger, path, step, key.place)
        case AskEach():
            ask_each(ledger, path, step)
        case Also():
            ledger.set(as_path(step.target), step.value, step.origin, step.weight)
        case Decide():
            ledger.decide(as_path(step.target), step.words)
        case At():
            settle_key(ledger, step.path, step.rule, step.place)


def ask_each(ledger: Ledger, path: KeyPath, asked: AskEach = _UNKNOWN) -> None:
    """Settle each open value below a path as a question; the default of the tool, written out, is none."""
    for leaf in [leaf for leaf in leaves(ledger.value(*path), path) if ledger.is_open(leaf)]:
        if ledger.is_default(leaf):
            ledger.drop(leaf, f"{DEFAULT_OF} {ledger.tool}")
        elif asked.words:
            ledger.ask(leaf, asked.words, as_path(asked.near))
        else:
            is_of_tool = str(leaf[0]) in tool_keys(ledger.tool)
            words = (
                "has no counterpart: leave it out, or keep what it does"
                if is_of_tool
                else "is not known here"
            )
            ledger.ask(leaf, f"`{shown(str(leaf[-1]))}` of {ledger.tool} {words}")
