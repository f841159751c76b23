"""Leave keys of the recipe open for which the file of another tool has a value that is not known.

Such a value is a question that names the keys, and they get no default of the tool: a default is for a file
that says nothing about them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.migrate.ledger import AccountRow, Ledger
from fsdp_tune.migrate.read import python_script
from fsdp_tune.migrate.rules import Inside, Rules
from fsdp_tune.migrate.settle_keys import settle_all
from fsdp_tune.migrate.tools import unsloth
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Fate

_SAMPLES: tuple[object, ...] = (2, "x", True, False, 0.5, ["x"])
"""Values with which a key is tried, to find out which keys of the recipe it sets."""
_NO_LIMIT = (
    "null is no limit there, and a recipe has one: write the length of the longest row, at most the "
    "positions of the model"
)
_NULL = "null is not the default, and there is no such value here: write one or leave the key out"


def settle_computed(ledger: Ledger, computed: Mapping[KeyPath, str], rules: Rules) -> None:
    """Make questions of keys whose values are not known; `computed` has why, `rules` are of the whole file.

    A key that is dropped for one reason whatever its value is no question.
    """
    for path, words in computed.items():
        if (path[-1] in unsloth.OBJECTS and ledger.tool == python_script.TOOL) or not ledger.is_open(path):
            continue
        tried = list(trials(ledger, path, rules, _SAMPLES))
        reasons = {
            row.reason if row.fate is Fate.DROPPED else ""
            for each in tried
            for row in each.rows
            if row.path == path
        }
        if len(tried) == len(_SAMPLES) and len(reasons) == 1 and (reason := reasons.pop()):
            ledger.drop(path, reason)
            continue
        targets = list(dict.fromkeys(target for each in tried for target in each.settings))
        ledger.ask(path, words, targets[0] if targets else ())
        ledger.rows[-1].targets = tuple(targets)


def is_asked(ledger: Ledger, target: KeyPath) -> bool:
    """Return whether a value of the file that is not known would set a key of the recipe."""
    return (
        any(row.fate is Fate.QUESTION and target in row.targets for row in ledger.rows)
        and ledger.get(*target) is None
    )


def leave_open(ledger: Ledger, rules: Rules, defaults: dict[str, Any], *, null_is_default: bool) -> None:
    """Take out the defaults of keys that a question or a null of the file is about. A null becomes a
    question."""
    for row in ledger.rows:
        is_null = row.value is None and row.fate is Fate.DROPPED
        if not is_null and row.fate is not Fate.QUESTION:
            continue
        for key in [
            key for key in defaults if not is_null or key == "data.max_length" or not null_is_default
        ]:
            target = tuple(key.split("."))
            if (
                ledger.get(*target) is not None
                or ledger.is_answered(target)
                or not _is_about(ledger, row, target, defaults[key], rules)
            ):
                continue
            del defaults[key]
            if is_null:
                row.fate, row.targets, row.reason = (
                    Fate.QUESTION,
                    (target,),
                    _NO_LIMIT if key == "data.max_length" else _NULL,
                )
            elif target not in row.targets:
                row.targets = (*row.targets, target)


def _is_about(ledger: Ledger, row: AccountRow, target: KeyPath, default: object, rules: Rules) -> bool:
    """Return whether the key of a row sets a key of the recipe, as the default's own value, written there,
    would."""
    if target in row.targets:
        return True
    if str(row.path[-1]).startswith("**"):  # arguments that a script computes
        return target[0] in python_script.SECTIONS.get(str(row.path[0]), ())
    return target in _targets(ledger, row.path, rules, (default,))


def _targets(ledger: Ledger, path: KeyPath, rules: Rules, values: tuple[object, ...]) -> Iterator[KeyPath]:
    """Yield the keys of the recipe that a key of the file sets with one of the values."""
    for each in trials(ledger, path, rules, values):
        yield from each.settings


def trials(ledger: Ledger, path: KeyPath, rules: Rules, values: tuple[object, ...]) -> Iterator[Ledger]:
    """Yield the account of a file with this key alone, for each value that its rule takes."""
    for value in values:
        tree: Any = value
        for part in reversed(path):
            tree = [*({} for _ in range(part)), tree] if isinstance(part, int) else {part: tree}
        tried = Ledger(tree, {}, ledger.tool, ledger.templates)
        try:
            settle_all(tried, (), Inside(rules))
        except (
            AttributeError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AssertionError,
            FsdpTuneError,
        ):
            continue  # the rule needs other keys, or another kind of value
        yield tried
