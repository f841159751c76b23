"""Settle the entries of a list of data sets: `datasets` of axolotl and TRL, and the entries of LLaMA-Factory's `dataset_info.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from fsdp_tune.recipe.read.foreign.ledger import Fate, Ledger, Path
from fsdp_tune.recipe.read.synonyms import OF_A_SOURCE

SourceRule = Callable[[Ledger, Path, Path, Any], None]
"""Settles the key at a path by the source at a place of the recipe, given its value."""
TRAIN: Path = ("data", "train")
_SAME = frozenset({"path", "name", "split", "data_files", "data_dir", "revision", "columns"})
_COLUMNS = frozenset(name for name, synonym in OF_A_SOURCE.items() if synonym.key == "data.train.rename_columns")


def leave_here(reason: str) -> SourceRule:
    """Return a rule for a key of a source that has no counterpart and needs none."""
    return lambda ledger, path, _place, _value: ledger.drop(path, reason)


def settle_source(ledger: Ledger, path: Path, place: Path, named: Mapping[str, SourceRule] | None = None) -> None:
    """Settle an entry, which is the name of a data set or a mapping, by the source at `place`. `named`: rules of the tool, which take the
    place too."""
    entry = ledger.value(*path)
    if not isinstance(entry, dict):
        ledger.write(path, {(*place, "path"): str(entry)}, Fate.CONVERTED)
        return
    for name, value in cast("dict[str, Any]", entry).items():
        inner = (*path, name)
        if not ledger.is_open(inner):
            continue
        if value is None or value == "":
            ledger.drop(inner, "no value")
        elif named is not None and name in named:
            named[name](ledger, inner, place, value)
        elif name in _SAME:
            ledger.write(inner, {(*place, name): value}, Fate.KEPT)
        else:
            _by_synonym(ledger, inner, place, value)


def rename(ledger: Ledger, path: Path, place: Path, column: str, name: str) -> None:
    """Settle a key that says which column holds what: `name` is the one that a format here has for it."""
    if column == name:
        ledger.drop(path, f"`{name}` is the name of that column here too")
    else:
        ledger.write(path, {(*place, "rename_columns", column): name}, Fate.CONVERTED)


def _by_synonym(ledger: Ledger, path: Path, place: Path, value: Any) -> None:
    name = str(path[-1])
    synonym = OF_A_SOURCE.get(name)
    if synonym is None:
        ledger.ask(path, f"`{name}` of a data set is not known here", place)
        return
    advice = synonym.advice(value)
    entry = cast("dict[str, Any]", advice.tree["data"]["train"][0]) if advice.tree else {}
    if name in _COLUMNS:
        rename(ledger, path, place, str(value), entry["rename_columns"][str(value)])
    elif written := {(*place, key): inner for key, inner in entry.items() if key != "path" or synonym.key == "data.train.path"}:
        ledger.write(path, written, Fate.CONVERTED)
    else:
        ledger.ask(path, advice.words, place)
