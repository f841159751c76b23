"""The form of a rule: what becomes of a key of another tool's file, as an outcome or as a function of the key
that returns one.

A rule reads the file and the settings so far, and writes nothing: `settle_keys.py` carries its outcome out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdp_tune.core.values import as_items, as_mapping
from fsdp_tune.migrate.ledger import LedgerView
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Ask, Drop, Fate, Settings, Weight, Write
from fsdp_tune.recipe.synonyms import SYNONYMS

TRAIN: KeyPath = ("data", "train")


@dataclass(frozen=True, slots=True)
class FileKey:
    """A key of the other tool's file, with its value and what is around it."""

    ledger: LedgerView
    path: KeyPath
    value: Any
    place: KeyPath = ()
    """The source of the recipe that the key is about; () outside of the entry of a data set."""

    @property
    def name(self) -> str:
        return str(self.path[-1])

    @property
    def tool(self) -> str:
        return self.ledger.tool

    @property
    def items(self) -> list[Any]:
        """The items of a list; a list of the value if it is none."""
        return as_items(self.value)

    @property
    def mapping(self) -> dict[str, object]:
        """The keys and values of a mapping; none if the value is not a mapping."""
        return as_mapping(self.value)

    def of_file(self, *path: str | int) -> Any:
        """Return the value at a path of the file; None if there is none."""
        return self.ledger.value(*path)

    def beside(self, *path: str | int) -> object:
        """Return the value at a path that starts where this key is; None if there is none."""
        return self.ledger.value(*self.path[:-1], *path)

    def below(self, *path: str | int) -> object:
        """Return the value at a path below this key; None if there is none."""
        return self.ledger.value(*self.path, *path)

    def of_recipe(self, *target: str | int) -> object:
        """Return the value that the recipe has so far; None if it has none."""
        return self.ledger.get(*target)


@dataclass(frozen=True, slots=True)
class Inside:
    """Each key of the mapping, or item of the list, is settled by its rule, or by its name if it has none.

    `place`: the source that they are about, if it is another one. `only`: keys without a rule are left open,
    and become questions at the end; the others are settled in the order of the rules. `nulls`: the rules
    decide about null too.
    """

    rules: Mapping[str, Rule] | Mapping[int, Rule]
    place: KeyPath | None = None
    only: bool = False
    nulls: bool = False


@dataclass(frozen=True, slots=True)
class AskEach:
    """Each value below the key is a question of its own. Without words: nothing knows the key."""

    words: str = ""
    near: str | KeyPath = ()


@dataclass(frozen=True, slots=True)
class Also:
    """A value that follows from a key about something else; its origin is not the key itself."""

    target: str | KeyPath
    value: object
    origin: str
    weight: Weight = Weight.IMPLIED


@dataclass(frozen=True, slots=True)
class Decide:
    """Something that a person has to decide, whatever the value of the key is."""

    target: str | KeyPath
    words: str


@dataclass(frozen=True, slots=True)
class At:
    """Another key of the file is settled, unless it is settled already."""

    path: KeyPath
    rule: Rule
    place: KeyPath = ()


Step = Write | Ask | Drop | Inside | AskEach | Also | Decide | At
Outcome = Step | list[Step]
"""One step, or several in their order, of which one is about the key itself."""
Rule = Write | Ask | Drop | AskEach | Inside | Callable[[FileKey], Outcome]
Rules = Mapping[str, Rule]


def outcome_of(rule: Rule, key: FileKey) -> Outcome:
    return rule(key) if callable(rule) else rule


def steps(outcome: Outcome) -> list[Step]:
    return outcome if isinstance(outcome, list) else [outcome]


def remarked(outcome: Write | Ask | Drop, remark: str) -> Write | Ask | Drop:
    """Return an outcome with a remark after its own words; unchanged if the remark is empty."""
    if not remark:
        return outcome
    own = outcome.words if isinstance(outcome, Ask) else outcome.reason
    both = f"{own}. {remark}" if own else remark
    return replace(outcome, words=both) if isinstance(outcome, Ask) else replace(outcome, reason=both)


def same(target: str) -> Rule:
    """Return a rule for a key with another name and the same value."""
    return lambda key: Write({target: key.value}, fate=Fate.KEPT if key.name == target else Fate.CONVERTED)


def each(names: Collection[str], rule: Rule) -> dict[str, Rule]:
    """Return several keys with one rule."""
    return dict.fromkeys(names, rule)


def variable(name: str) -> Rule:
    """Return a rule for a value that ranks get as a variable of the environment."""
    return lambda key: Write({("launch", "env", name): str(key.value)})


def cases(target: str, names: Mapping[Any, object], otherwise: Rule) -> Rule:
    """Return a rule for values by name: what a value is in a recipe, or its outcome. `otherwise`: the rule of
    other values."""

    def rule(key: FileKey) -> Outcome:
        if key.value not in names:
            return outcome_of(otherwise, key)
        found = names[key.value]
        return found if isinstance(found, Write | Ask | Drop) else Write({target: found})

    return rule


def switch(on: Rule, off: Rule) -> Rule:
    """Return a rule that depends on whether a value switches something on."""
    return lambda key: outcome_of(on if is_on(key.value) else off, key)


def implies(
    lines: Settings, reason: str = "", *, off: str = "off, as it is here", weight: Weight = Weight.GIVEN
) -> Rule:
    """Return a rule for a switch: on, it is these keys of the recipe; off, it is dropped."""
    return switch(Write(lines, reason, weight=weight), Drop(off))


def fine_or(fine: Collection[object], reason: str, words: str, near: str | KeyPath = ()) -> Rule:
    """Return a rule for a key that is dropped with one of the values `fine`, and a question with any
    other."""
    drop, ask = Drop(reason), Ask(words, near)
    return lambda key: (
        drop if any(key.value == value and type(key.value) is type(value) for value in fine) else ask
    )


def off_or(reason: str, words: str, near: str | KeyPath = ()) -> Rule:
    """Return a rule for a switch: off it is dropped, on it is a question."""
    return fine_or((False, 0, "none", "no", "false", "False", [], {}), reason, words, near)


UNSUPPORTED_SWITCH = off_or("off", "it has no counterpart")


def section(rules: Rules) -> Rule:
    """Return a rule for a mapping, whose keys are settled one by one."""

    def rule(key: FileKey) -> Outcome:
        if key.mapping:
            return Inside(rules)
        return Ask("it is read as keys, not as a file") if key.value else Drop("no keys")

    return rule


def by_synonym(name: str) -> Rule:
    """Return a rule that takes a key for a synonym of another name."""
    return lambda key: SYNONYMS[name].outcome(key.value)


def lora_targets(key: FileKey) -> Outcome:
    """Keep the modules that LoRA adapts, or ask what another tool's word for them means."""
    outcome = SYNONYMS["lora_target_modules"].outcome(key.value)
    return replace(outcome, fate=Fate.KEPT) if isinstance(outcome, Write) else outcome


def is_on(value: object) -> bool:
    return value in (True, 1) or str(value).lower() in ("true", "yes", "1", "on")


def in_source(name: str, fate: Fate = Fate.CONVERTED) -> Rule:
    """Return a rule for a key of a data set with the same value in its source."""
    return lambda key: Write({(*key.place, name): key.value}, fate=fate)


def of_the_set(name: str, place: KeyPath = (*TRAIN, 0)) -> Rule:
    """Return a rule for a key of the only data set, or of the one at `place`."""
    return lambda key: Write({(*place, name): key.value})


def renamed(column: str, name: str, place: KeyPath) -> Outcome:
    """Return the outcome of a key that says which column holds what: `name` is the one that a format here has
    for it."""
    if column == name:
        return Drop(f"`{name}` is the name of that column here too")
    return Write({(*place, "rename_columns", column): name})


def rename(name: str) -> Rule:
    """Return a rule for a key of a data set that says which column holds what."""
    return lambda key: renamed(str(key.value), name, key.place)
