"""Account for an import: record what became of each key of the other tool's file, and the values that the
recipe gets from it.

The account is closed: `Ledger.close` fails unless each value of the file is in exactly one row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from fsdp_tune.core.secrets import MASK, has_secret_shape, mask_values
from fsdp_tune.core.values import is_list, is_mapping
from fsdp_tune.migrate.tool_keys import is_default_of
from fsdp_tune.recipe.key_paths import KeyPath, dotted, flattened
from fsdp_tune.recipe.outcome import Fate, Settings, Weight, by_path
from fsdp_tune.recipe.schema.keys import default_at, has_default

_PLACE = re.compile(r" \([^()]* on line \d+[^()]*\)| on line \d+")
_HUB_TOKENS = frozenset({"hub_token", "hf_token", "token", "HF_TOKEN"})
_TOKENS = _HUB_TOKENS | {"wandb_api_key", "swanlab_api_key", "api_key", "WANDB_API_KEY"}
_LOGINS = {
    "wandb": "WANDB_API_KEY, or log in with `wandb login`",
    "swanlab": "SWANLAB_API_KEY, or log in with `swanlab login`",
}
_HUB_LOGIN = "HF_TOKEN, or log in with `hf auth login`"


DEFAULT_OF = "the default of"
"""Beginning of the reason of a key that says what the tool does without it."""


_ORDER = list(Weight)


@dataclass(slots=True)
class AccountRow:
    """One key of the other tool, or a mapping or list that has one meaning."""

    path: KeyPath
    value: Any
    fate: Fate
    targets: tuple[KeyPath, ...]
    """Keys of the recipe that got a value, or that a question is about."""
    reason: str
    line: int | None

    @property
    def key(self) -> str:
        return dotted(self.path)

    @property
    def shown_value(self) -> object:
        """The value with secrets replaced. Of a key that is known, as of a special token, the name says
        nothing about secrets."""
        return mask_values(self.value, str(self.path[-1]) if self.fate is Fate.QUESTION else "")

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "line": self.line,
            "value": self.shown_value,
            "fate": self.fate.value,
            "to": [dotted(target) for target in self.targets],
            "reason": self.reason or None,
        }


@dataclass(slots=True)
class Setting:
    """A value of the recipe, with the keys that it comes from."""

    value: Any
    weight: Weight
    origins: list[str]
    rows: list[AccountRow] = field(default_factory=list[AccountRow])


def leaves(value: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Return the path of each value: a scalar, an empty mapping or list, or a list of scalars."""
    if is_mapping(value) and value:
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif is_list(value) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path


class LedgerView(Protocol):
    """What a rule reads of an account; it has nothing to write with."""

    @property
    def tool(self) -> str: ...
    @property
    def templates(self) -> Collection[str]: ...
    @property
    def settings(self) -> Mapping[KeyPath, Setting]: ...
    def value(self, *path: str | int) -> Any: ...
    def get(self, *target: str | int) -> object: ...
    def has_answer(self, target: KeyPath) -> bool: ...
    def decided(self, target: KeyPath, of_the_file: object) -> Any: ...


class Ledger:
    """The rows and settings of one import. Each method that settles a key takes it, with all below it, from
    the open ones."""

    def __init__(
        self,
        values: dict[str, object],
        lines: Mapping[KeyPath, int],
        tool: str,
        templates: Collection[str] = (),
        answers: Mapping[KeyPath, object] | None = None,
    ) -> None:
        self.values, self.tool, self.templates = values, tool, templates
        self.answers = answers or {}
        """Values of `--set`, None for the default. They are known from the start, and written by
        `write_answers`."""
        self._given = {
            path: value for target, answer in self.answers.items() for path, value in _keys_of(target, answer)
        }
        self._lines = lines
        self._open = dict.fromkeys(leaves(values)) if values else {}
        self.rows: list[AccountRow] = []
        self.settings: dict[KeyPath, Setting] = {}
        self.included: list[KeyPath] = []
        """Places of other files' content. What a file or command says itself comes before what it
        includes."""
        self.decisions: list[tuple[KeyPath, str]] = []
        """What a person has to decide and no single key of the file asks: (key of the recipe, words)."""
        self._has_written_answers = False

    def value(self, *path: str | int) -> Any:
        """Return the value at a path; None if there is none."""
        found: object = self.values
        for part in path:
            if isinstance(found, dict):
                found = cast("dict[object, object]", found).get(part)
            elif is_list(found) and isinstance(part, int) and part < len(found):
                found = found[part]
            else:
                return None
        return found

    def is_default(self, path: KeyPath) -> bool:
        """Return whether the value of a key is what the tool does without the key."""
        return len(path) == 1 and is_default_of(self.tool, str(path[0]), self.value(*path))

    def is_open(self, path: KeyPath) -> bool:
        return any(each[: len(path)] == path for each in self._open)

    def include(self, path: KeyPath, value: Any) -> None:
        """Add the content of another file, in the place of its name if the file has one."""
        if self.is_open(path):
            self._take(path)
        self.included.append(path)
        holder = self.value(*path[:-1])
        holder[path[-1]] = value
        self._open |= dict.fromkeys(leaves(value, path))

    def write(
        self,
        path: KeyPath,
        settings: Settings,
        fate: Fate,
        reason: str = "",
        *,
        weight: Weight = Weight.GIVEN,
    ) -> None:
        """Settle a key by values of the recipe, by dotted key or path.

        A value of equal weight that is there already and differs makes it a question. The tool's default,
        written out, is a default.
        """
        weight = Weight.DEFAULT if self.is_default(path) else weight
        if _is_secret(path, self.value(*path)):
            self.drop(path, "")
            return
        found = list(by_path(settings))
        clash = next(filter(None, (self._clash(target, value, weight) for target, value in found)), None)
        if clash is not None:
            words = f"`{dotted(clash)}` has another value from `{self._at_or_below(clash).origins[0]}`"
            if any(path[: len(place)] == place for place in self.included):
                self.drop(path, f"{words}, which comes first")
            else:
                self.ask(path, f"{words}; keep one", clash)
            return
        row = self._row(path, fate, tuple(target for target, _ in found), reason)
        for target, value in found:
            self.set(target, value, dotted(path), weight, row)

    def _clash(self, target: KeyPath, value: object, weight: Weight) -> KeyPath | None:
        """Return the key that has another value, or is of another kind than is needed: a value, a mapping or
        a list."""
        there = self.settings.get(target)
        if (
            weight is Weight.GIVEN
            and there is not None
            and there.weight is Weight.GIVEN
            and there.value != value
        ):
            return target
        return self._of_another_kind(target, value)

    def _of_another_kind(self, target: KeyPath, value: object) -> KeyPath | None:
        for other, setting in self.settings.items():
            shared = next(
                (index for index, (one, two) in enumerate(zip(target, other, strict=False)) if one != two),
                None,
            )
            if shared is not None:
                if isinstance(target[shared], int) is not isinstance(other[shared], int):
                    return target[:shared]
            elif (len(other) < len(target) and setting.value != {}) or (
                len(other) > len(target) and value != {}
            ):
                return min(target, other, key=len)
        return None

    def _at_or_below(self, target: KeyPath) -> Setting:
        return next(setting for other, setting in self.settings.items() if other[: len(target)] == target)

    def set(
        self, target: KeyPath, value: object, origin: str, weight: Weight, row: AccountRow | None = None
    ) -> None:
        """Give a key of the recipe a value, unless it has one that is meant more strongly, or one of another
        kind is there."""
        there = self.settings.get(target)
        if self.is_answered(target) or (there is None and self._of_another_kind(target, value) is not None):
            return
        if there is None or _ORDER.index(weight) > _ORDER.index(there.weight):
            self.settings[target] = there = Setting(
                value, weight, [origin], there.rows if there is not None else []
            )
        elif there.value == value and weight is there.weight:
            there.origins.append(origin)
        if row is not None:
            there.rows.append(row)

    def ask(self, path: KeyPath, words: str, near: KeyPath = ()) -> None:
        """Settle a key as a question. `near` is the key of the recipe that it is about."""
        self._row(path, Fate.QUESTION, (near,) if near else (), words)

    def drop(self, path: KeyPath, reason: str) -> None:
        self._row(path, Fate.DROPPED, (), reason)

    def decide(self, target: KeyPath, words: str) -> None:
        if not (self._has_written_answers and any(_is_below(target, each) for each in self.answers)):
            self.decisions.append((target, words))

    def write_answers(self) -> None:
        """Write the values of `--set` in place of what the file gives or leaves unset. Nothing replaces
        them."""
        for target, value in self.answers.items():
            self._write_answer(target, value)
        self._has_written_answers = True

    def _write_answer(self, target: KeyPath, value: object) -> None:
        words = f"`--set {dotted(target)}` decides"
        for other in [other for other in self.settings if _is_below(other, target)]:
            self._remove(other, words)
        found = [] if value is None and has_default(target) else list(_keys_of(target, value))
        while found and (place := self._of_another_kind(target, value)) is not None:
            self._remove(next(other for other in self.settings if _is_below(other, place)), words)
        for row in self.rows:
            if row.fate is Fate.QUESTION and any(_is_below(near, target) for near in row.targets):
                row.fate, row.targets, row.reason = Fate.DROPPED, (), words
        self.decisions = [(near, words) for near, words in self.decisions if not _is_below(near, target)]
        self.settings |= {path: Setting(inner, Weight.GIVEN, ["--set"]) for path, inner in found}

    def is_answered(self, target: KeyPath) -> bool:
        """Return whether an answer to a key, or to one above or below it, is written: nothing replaces it."""
        return self._has_written_answers and any(
            _is_below(target, each) or _is_below(each, target) for each in self.answers
        )

    def withdraw(self, target: KeyPath, words: str) -> None:
        """Take back a setting that the recipe does not accept: the keys that it came from become
        questions."""
        assert not self.is_answered(target), f"`{dotted(target)}` is of `--set`"
        setting = self.settings.pop(target)
        words = without_places(words)
        for row in setting.rows:
            row.fate, row.reason, row.targets = Fate.QUESTION, words, (target,)
        if not setting.rows:
            self.decide(target, words)

    def discard(self, target: KeyPath, reason: str) -> None:
        """Remove a setting that has no effect, if there is one: keys that have set nothing else are
        dropped."""
        if not self.is_answered(target):
            self._remove(target, reason)

    def _remove(self, target: KeyPath, reason: str) -> None:
        setting = self.settings.pop(target, None)
        for row in setting.rows if setting is not None else []:
            row.targets = tuple(each for each in row.targets if each != target)
            if not row.targets:
                row.fate, row.reason = Fate.DROPPED, reason

    def get(self, *target: str | int) -> object:
        """Return the value that the recipe has so far, or that `--set` gives; None if it has none."""
        if any(value is None and _is_below(target, each) for each, value in self.answers.items()):
            return None
        if target in self._given:
            return self._given[target]
        found = self.settings.get(target)
        return None if found is None else found.value

    def has_answer(self, target: KeyPath) -> bool:
        """Return whether `--set` gives the value of a key, also before answers are written."""
        return target in self._given

    def decided(self, target: KeyPath, of_the_file: object) -> Any:
        """Return the value of `--set`, or the default if it is null; else that of the file, which is not
        settled yet."""
        if target not in self._given:
            return of_the_file
        value = self._given[target]
        return default_at(target) if value is None else value

    def close(self) -> None:
        """Check that each value of the file has its row, and sort the rows by their place in the file."""
        assert not self._open, f"keys without an account: {[dotted(path) for path in self._open]}"
        order = {path: number for number, path in enumerate(leaves(self.values))}
        self.rows.sort(
            key=lambda row: min(
                (number for path, number in order.items() if path[: len(row.path)] == row.path), default=-1
            )
        )

    def _row(self, path: KeyPath, fate: Fate, targets: tuple[KeyPath, ...], reason: str) -> AccountRow:
        value = self.value(*path)
        if _is_secret(path, value):
            fate, targets, value = Fate.DROPPED, (), MASK
            reason = f"a recipe never contains a secret: {_login(path, str(self.value(*path)))}"
        self._take(path)
        row = AccountRow(path, value, fate, targets, reason, self._lines.get(path))
        self.rows.append(row)
        return row

    def _take(self, path: KeyPath) -> None:
        found = [each for each in self._open if each[: len(path)] == path]
        assert found, f"`{dotted(path)}` is settled already, or is not in the file"
        for each in found:
            del self._open[each]


def without_places(words: str) -> str:
    """Return a message of the reader of recipes without the lines of the text that was tried."""
    return _PLACE.sub("", words)


def _keys_of(target: KeyPath, value: object) -> Iterator[tuple[KeyPath, object]]:
    """Return each key that an answer gives, with its value."""
    return iter([(target, None)]) if value is None else flattened(value, target)


def _is_below(path: KeyPath, other: KeyPath) -> bool:
    """Return whether a path is `other`, or leads to a part of it."""
    return path[: len(other)] == other


def _login(path: KeyPath, value: str) -> str:
    """Return what to do in place of writing a secret."""
    name = str(path[-1]).lower()
    tracker = next((words for tracker, words in _LOGINS.items() if name.startswith(tracker)), None)
    if tracker is not None:
        return f"set {tracker}"
    return (
        f"set {_HUB_LOGIN}"
        if path[-1] in _HUB_TOKENS or value.startswith("hf_")
        else "set the variable that its reader takes"
    )


def _is_secret(path: KeyPath, value: object) -> bool:
    return isinstance(value, str) and bool(value) and (path[-1] in _TOKENS or has_secret_shape(value))
