"""The text of an imported recipe: sections in the order of the schema, and the origin of each value next to
it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import cast

import yaml

from fsdp_tune.core.secrets import mask_text
from fsdp_tune.core.units import ScalarError, parse_plain, printable
from fsdp_tune.core.values import as_list, as_mapping, is_list
from fsdp_tune.migrate.ledger import Ledger, Setting
from fsdp_tune.migrate.read.foreign_file import END, ForeignFile
from fsdp_tune.recipe.key_paths import KeyPath, dotted
from fsdp_tune.recipe.outcome import Fate
from fsdp_tune.recipe.read.loader import BY_IMPORT, DECIDE, IMPORTED_FROM
from fsdp_tune.recipe.schema.recipe import Recipe

_WIDTH = 100


def recipe_text(ledger: Ledger, found: ForeignFile) -> str:
    """Return the text of the recipe. Each question is a comment in the section that it is about, those about
    none are at the end."""
    lines = [
        f"{IMPORTED_FROM}{printable(found.path.name)} ({found.tool}){BY_IMPORT}",
        *_comment(found.above.get((), [])),
    ]
    questions = _questions(ledger)
    order = [field.alias or name for name, field in Recipe.model_fields.items()]
    tree = _tree(ledger)
    comments = _Comments(ledger, found)
    for name in order:
        if name in tree:
            lines += comments.entry((name,), tree[name], 0)
        asked = questions.pop(name, [])
        if asked and name not in tree:
            lines.append(f"# {name}:")
        lines += [f"  {DECIDE}{words}" for words in asked]
    lines += [f"{DECIDE}{words}" for words in questions.pop("", [])]
    lines += _comment(comments.left(found.path.name))
    return "\n".join(lines) + "\n"


def _questions(ledger: Ledger) -> dict[str, list[str]]:
    """Return the questions by the section that they are about; "" for none."""
    found: dict[str, list[str]] = {}
    for row in ledger.rows:
        if row.fate is Fate.QUESTION:
            section = str(row.targets[0][0]) if row.targets else ""
            found.setdefault(section, []).append(
                f"`{row.key}: {_shortened(row.shown_value)}`: {printable(row.reason)}"
            )
    for target, words in ledger.decisions:
        near = f"`{dotted(target)}`: " if target else ""
        found.setdefault(str(target[0]) if target else "", []).append(f"{near}{printable(words)}")
    return found


def _shortened(value: object) -> str:
    text = printable(
        yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
        .removesuffix("...\n")
        .strip()
    )
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def _comment(words: list[str]) -> list[str]:
    return [f"# {mask_text(printable(line))}" if line else "#" for line in words]


def _tree(ledger: Ledger) -> dict[str, object]:
    """Return the settings as mappings and lists, with a `Setting` for each value."""
    tree: dict[str, object] = {}
    for target in sorted(ledger.settings, key=len):
        setting = ledger.settings[target]
        if setting.value == {} and any(
            other[: len(target)] == target for other in ledger.settings if other != target
        ):
            continue
        holder: object = tree
        for part, following in zip(target, (*target[1:], None), strict=True):
            default: object = setting if following is None else [] if isinstance(following, int) else {}
            holder = _child(holder, part, default)
    return tree


def _child(holder: object, part: str | int, default: object) -> object:
    if isinstance(part, str):
        return cast("dict[str, object]", holder).setdefault(part, default)
    items = cast("list[object]", holder)
    while len(items) <= part:
        items.append({})
    return items[part]


class _Comments:
    """Writes the entries of a recipe with their origins, and hands out each comment of the source once."""

    def __init__(self, ledger: Ledger, found: ForeignFile) -> None:
        self._rows = ledger.rows
        self._above = {path: words for path, words in found.above.items() if path}
        self._beside = dict(found.beside)
        self._explained: set[int] = set()
        """Rows whose reason stands beside another value already."""

    def entry(self, target: KeyPath, node: object, indent: int) -> Iterator[str]:
        space, key = "  " * indent, _key(str(target[-1]))
        if isinstance(node, Setting):
            above, beside = self._of(node)
            yield from (f"{space}{line}" for line in _comment(above))
            yield f"{space}{key}: {scalar(node.value)}  # {beside}"
            return
        yield f"{space}{key}:"
        for name, inner in as_mapping(node).items():
            yield from self.entry((*target, name), inner, indent + 1)
        for index, item in enumerate(as_list(node)):
            yield from self._item((*target, index), as_mapping(item), indent)

    def _item(self, target: KeyPath, item: Mapping[str, object], indent: int) -> Iterator[str]:
        """An entry of a list: its first key has the dash."""
        lines = [
            line for name, inner in item.items() for line in self.entry((*target, name), inner, indent + 2)
        ]
        space = "  " * (indent + 1)
        lines = lines or [f"{space}  {{}}"]
        first = next(number for number, line in enumerate(lines) if not line.lstrip().startswith("#"))
        yield from (f"{space}{line.lstrip()}" for line in lines[:first])
        yield f"{space}- {lines[first].lstrip()}"
        yield from lines[first + 1 :]

    def _of(self, setting: Setting) -> tuple[list[str], str]:
        """Return the comments above the source's keys, and the origin with the comments beside them."""
        above: list[str] = []
        beside: list[str] = []
        reasons: list[str] = []
        for row in setting.rows:
            for path in [path for path in self._above if path[: len(row.path)] == row.path]:
                above += self._above.pop(path)
            for path in [path for path in self._beside if path[: len(row.path)] == row.path]:
                beside.append(self._beside.pop(path))
            reasons += (
                [row.reason]
                if row.reason and row.reason not in setting.origins and id(row) not in self._explained
                else []
            )
            self._explained.add(id(row))
        origins = ", ".join(dict.fromkeys(setting.origins))
        is_key = bool(setting.rows) and setting.origins[0] in {row.key for row in setting.rows}
        words = [f"from {origins}" if is_key else origins, *dict.fromkeys(reasons), *beside]
        return above, mask_text(printable("; ".join(each for each in words if each)))

    def left(self, name: str) -> list[str]:
        """Return the comments of the source that belong to keys without a value here, and those at its end,
        with what they are about."""
        return [
            f"{f'`{dotted(path)}` of {name}' if path != (END,) else f'at the end of {name}'}: {line}"
            for path, words in self._above.items()
            for line in words
        ]


def _key(name: str) -> str:
    return scalar(name)


def scalar(value: object) -> str:
    """Return a value on one line of YAML, which reads back as the same value by the rules of a recipe."""
    if isinstance(value, str):
        text = (
            yaml.safe_dump(value, width=10**6, allow_unicode=True, default_flow_style=True)
            .removesuffix("\n")
            .removesuffix("\n...")
        )
        try:
            is_same = text.startswith(('"', "'")) or (parse_plain(text) == (value, None))
        except ScalarError:
            is_same = False
        return (
            text
            if is_same and text.isprintable()
            else yaml.safe_dump(value, default_style='"', width=10**6).strip()
        )
    if is_list(value):
        return f"[{', '.join(_inner(item) for item in value)}]"
    text = yaml.safe_dump(value, width=10**6, default_flow_style=True, sort_keys=False).strip()
    return text.removesuffix("...").strip()


def _inner(value: object) -> str:
    """Return an entry of a list in brackets, where a comma or a bracket needs quotes."""
    text = scalar(value)
    is_plain = isinstance(value, str) and not text.startswith(('"', "'"))
    return (
        json.dumps(value, ensure_ascii=False)
        if is_plain and any(character in text for character in ",[]{}")
        else text
    )
