"""Entries of a list of data sets: `datasets` of axolotl and TRL, and the entries of `dataset_info.json`."""

from __future__ import annotations

from fsdp_tune.migrate.rules import FileKey, Inside, Outcome, Rule, Rules, each, outcome_of, renamed
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Fate, Write, by_path
from fsdp_tune.recipe.synonyms import OF_A_SOURCE

_SAME = ("path", "name", "split", "data_files", "data_dir", "revision", "columns")
_COLUMNS = frozenset(
    name for name, synonym in OF_A_SOURCE.items() if synonym.key == "data.train.rename_columns"
)


def source(place: KeyPath, named: Rules) -> Rule:
    """Return a rule for an entry, the name of a data set or a mapping: the source at `place`. `named`: rules
    of the tool."""
    rules = {**each(_SAME, lambda key: Write({(*key.place, key.name): key.value}, fate=Fate.KEPT)), **named}

    def rule(key: FileKey) -> Outcome:
        if not isinstance(key.value, dict):
            return Write({(*place, "path"): str(key.value)})
        return Inside({name: rules.get(name, _by_synonym) for name in key.mapping}, place)

    return rule


def sources(place: KeyPath, named: Rules, *, hint: str = "") -> Rule:
    """Return a rule for a list of entries from `place` on; one that is not a list is an entry, or a question
    if there is a `hint`."""

    def rule(key: FileKey) -> Outcome:
        if isinstance(key.value, list):
            return Inside({index: source((*place, index), named) for index in range(len(key.items))})
        return Ask(hint, place) if hint else outcome_of(source((*place, 0), named), key)

    return rule


def _by_synonym(key: FileKey) -> Outcome:
    synonym = OF_A_SOURCE.get(key.name)
    if synonym is None:
        return Ask(f"`{key.name}` of a data set is not known here", key.place)
    outcome = synonym.outcome(key.value)
    if not isinstance(outcome, Write):
        return Ask(outcome.words, key.place) if isinstance(outcome, Ask) else outcome
    found = in_entry(outcome)
    if key.name in _COLUMNS:
        (name,) = (str(value) for target, value in found.items() if target[0] == "rename_columns")
        return renamed(str(key.value), name, key.place)
    is_place = synonym.key == "data.train.path"  # else the path is a placeholder
    return Write(
        {(*key.place, *target): value for target, value in found.items() if is_place or target != ("path",)}
    )


def in_entry(outcome: Write) -> dict[KeyPath, object]:
    """Return what a synonym writes into an entry of `data.train`, by the keys of the entry."""
    return {target[3:]: value for target, value in by_path(outcome.settings)}
