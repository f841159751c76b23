"""The text of a recipe as a tree in which every value knows its line and column. Built from PyYAML's events.

Not PyYAML's loader: that one forgets positions, follows YAML 1.1, lets duplicate keys win silently, expands aliases
without limit and calls itself once per nesting level. Nothing here recurses over the input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import yaml

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where
from fsdp_tune.recipe.read.yaml_mistakes import SPACES, UNSPACED, explain_syntax, space_mistake, unspaced
from fsdp_tune.recipe.scalars import ScalarError, Value, parse_plain, shown

MAX_NODES = 10_000
MAX_DEPTH = 32
MERGE_KEY = "<<"


@dataclass(slots=True)
class ScalarNode:
    value: Value
    text: str
    plain: bool
    where: Where
    suspicion: str | None = None
    broken: bool = False
    """True where a problem was already found here: the value means nothing."""


@dataclass(slots=True)
class Entry:
    where: Where
    """Of the key; the node knows where the value stands."""
    node: Node


@dataclass(slots=True)
class MappingNode:
    entries: dict[str, Entry]
    where: Where
    partial: bool = False
    """True for a mapping that only leads to another key (`a` in `--set a.b=1`): it is merged, not put in whole."""


@dataclass(slots=True)
class ListNode:
    items: list[Node]
    where: Where


Node = ScalarNode | MappingNode | ListNode


def entries_of(node: Node | None) -> dict[str, Entry]:
    """The keys of a mapping; none for anything else."""
    return node.entries if isinstance(node, MappingNode) else {}


def copy_tree(node: Node) -> Node:
    """An independent copy; at most MAX_DEPTH deep, as every tree here."""
    if isinstance(node, MappingNode):
        return MappingNode(
            {key: Entry(entry.where, copy_tree(entry.node)) for key, entry in node.entries.items()}, node.where, node.partial
        )
    if isinstance(node, ListNode):
        return ListNode([copy_tree(item) for item in node.items], node.where)
    return replace(node)


def plain_value(node: Node) -> object:
    """dict, list and scalars, as `yaml.safe_load` would give them."""
    if isinstance(node, MappingNode):
        return {key: plain_value(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, ListNode):
        return [plain_value(item) for item in node.items]
    return node.value


def compose(text: str, source: str, *, line: int | None = 1) -> tuple[Node | None, list[Problem]]:
    """The tree of the one document in `text` (None when empty), and the problems that leave a tree to go on with.

    With `line=None` positions name the source alone (for `--set`). FsdpTuneError for what leaves no tree.
    """
    composer = _Composer(source, positions=line is not None)
    parser = cast(Any, yaml).parse(text, Loader=yaml.SafeLoader)  # PyYAML comes without types
    try:
        composer.consume(parser)
    except yaml.MarkedYAMLError as error:
        last = _syntax_problem(error, text, composer)
        before = [problem for problem in composer.problems if problem.message != last.message]  # a no-break space may be found twice
        raise FsdpTuneError(*before, last) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML lets ValueError out of an escape such as "\UFFFFFFFF".
        problem = Problem("yaml-syntax", f"the recipe is not YAML: {error}", composer.latest)
        raise FsdpTuneError(*composer.problems, problem) from error
    return composer.root, composer.problems


@dataclass(slots=True)
class _Frame:
    node: MappingNode | ListNode
    anchor: str | None
    tagged: bool = False
    key: ScalarNode | None = None
    merged: list[tuple[Entry, str]] = field(default_factory=list[tuple[Entry, str]])


class _Composer:
    def __init__(self, source: str, *, positions: bool) -> None:
        self.source = source
        self.positions = positions
        self.problems: list[Problem] = []
        self.root: Node | None = None
        self.latest = Where(source)
        self._frames: list[_Frame] = []
        self._anchors: dict[str, Node] = {}
        self._nodes = 0
        self._documents = 0

    def where(self, mark: Any) -> Where:
        return Where(self.source, mark.line + 1, mark.column + 1) if mark is not None and self.positions else Where(self.source)

    def consume(self, events: Iterator[Any]) -> None:
        for event in events:
            self.latest = self.where(event.start_mark)
            if isinstance(event, yaml.DocumentStartEvent):
                self._documents += 1
                if self._documents > 1:
                    self._fail(
                        Problem("two-documents", "the file holds two documents (`---`); a recipe is one", self.latest, "make it two files")
                    )
            elif isinstance(event, yaml.ScalarEvent):
                self._refuse_tag(event)
                self._place(self._scalar(event), event.anchor)
            elif isinstance(event, yaml.AliasEvent):
                self._place(self._alias(event), None)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                self._open(event)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                self._close()

    def _fail(self, last: Problem) -> None:
        raise FsdpTuneError(*self.problems, last)

    def _refuse_tag(self, event: Any) -> None:
        if (tag := event.tag) is not None:
            name = tag.replace("tag:yaml.org,2002:", "!!")
            hint = "leave it out; a value in double quotes is text"
            self.problems.append(
                Problem("yaml-tag", f"the YAML tag `{shown(name)}` is not taken: a recipe holds plain values", self.latest, hint)
            )

    def _scalar(self, event: Any) -> ScalarNode:
        self._count(1)
        text, plain = str(event.value), bool(event.implicit[0]) and not event.style
        node = ScalarNode(text, text, plain, self.latest, broken=event.tag is not None)
        if any("\ud800" <= character <= "\udfff" for character in text):
            self.problems.append(Problem("recipe-not-text", "the text holds half a surrogate pair, which no file can store", self.latest))
            node.value, node.broken = None, True
        elif plain and (mistake := space_mistake(0, 0, text)) is not None:
            place = self.latest
            if place.column is not None and event.start_mark.line == event.end_mark.line:
                place = replace(place, column=place.column + mistake.column)
            self.problems.append(Problem("yaml-syntax", mistake.message, place, mistake.hint))
            node.text, node.broken = "".join(character for character in text if character not in SPACES), True
        elif plain:
            try:
                node.value, node.suspicion = parse_plain(text)
            except ScalarError as error:
                self.problems.append(Problem("not-a-number", str(error), self.latest, "write a finite number"))
                node.value, node.broken = None, True
        return node

    def _alias(self, event: Any) -> Node:
        name = str(event.anchor)
        if any(frame.anchor == name for frame in self._frames):
            self._fail(Problem("yaml-alias", f"the alias `*{shown(name)}` stands inside the value that it names", self.latest))
        if name not in self._anchors:
            message = f"the alias `*{shown(name)}` has no anchor `&{shown(name)}` above it"
            self._fail(Problem("yaml-alias", message, self.latest, f'a text that begins with `*` needs quotes: `"*{shown(name)}"`'))
        node = self._anchors[name]
        size, depth = _measure(node)
        self._count(size)
        if len(self._frames) + depth > MAX_DEPTH:
            self._fail(Problem("yaml-too-deep", f"more than {MAX_DEPTH} levels of nesting", self.latest))
        return copy_tree(node)

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            self._fail(Problem("yaml-too-large", f"the recipe holds more than {MAX_NODES:,} values, aliases expanded", self.latest))

    def _open(self, event: Any) -> None:
        self._refuse_tag(event)
        self._count(1)
        if len(self._frames) >= MAX_DEPTH:
            self._fail(Problem("yaml-too-deep", f"more than {MAX_DEPTH} levels of nesting", self.latest))
        node = MappingNode({}, self.latest) if isinstance(event, yaml.MappingStartEvent) else ListNode([], self.latest)
        self._frames.append(_Frame(node, event.anchor, tagged=event.tag is not None))

    def _close(self) -> None:
        frame = self._frames.pop()
        if isinstance(frame.node, MappingNode):
            for entry, key in frame.merged:
                self._insert(frame.node, key, entry, through_merge=True)
        broken = ScalarNode(None, "", plain=True, where=frame.node.where, broken=True)
        self._place(broken if frame.tagged else frame.node, frame.anchor)

    def _place(self, node: Node, anchor: str | None) -> None:
        """Puts a finished node where it belongs: the root, a list, or a mapping (as its key or as the key's value)."""
        if anchor is not None:
            self._anchors[anchor] = node
        if not self._frames:
            self.root = node
            return
        frame = self._frames[-1]
        if isinstance(frame.node, ListNode):
            frame.node.items.append(node)
        elif frame.key is None:
            if not isinstance(node, ScalarNode):
                self.latest = node.where
                self._fail(Problem("yaml-key", "a mapping or a list cannot be a key", self.latest))
            else:
                frame.key = node
        else:
            key, frame.key = frame.key, None
            if key.plain and key.text == MERGE_KEY:
                self._merge(frame, node)
            else:
                name = self._key_name(key, node)
                if key.broken:
                    node = ScalarNode(None, "", plain=True, where=node.where, broken=True)
                self._insert(frame.node, name, Entry(key.where, node), through_merge=False)

    def _key_name(self, key: ScalarNode, node: Node) -> str:
        """The text of a key; of `path:x`, which YAML takes for a key without a value, the part before the colon."""
        found = UNSPACED.fullmatch(key.text) if key.plain else None
        if found is None or not isinstance(node, ScalarNode) or not node.plain or node.text:
            return key.text
        message, hint = unspaced(found["key"], found["value"])
        self.problems.append(Problem("yaml-syntax", message, key.where, hint))
        node.broken = True
        return found["key"]

    def _merge(self, frame: _Frame, node: Node) -> None:
        for mapping in node.items if isinstance(node, ListNode) else [node]:
            if isinstance(mapping, MappingNode):
                frame.merged.extend((entry, key) for key, entry in mapping.entries.items())
            else:
                self.problems.append(Problem("yaml-merge", "`<<` takes a mapping, or a list of mappings", mapping.where))

    def _insert(self, mapping: MappingNode, key: str, entry: Entry, *, through_merge: bool) -> None:
        first = mapping.entries.setdefault(key, entry)
        if first is entry:
            return
        later, earlier = (first, entry) if through_merge else (entry, first)
        other = f"line {earlier.where.line}" if self.positions else "the same text"
        how = f"here and, through `<<`, on {other}" if through_merge else f"here and on {other}"
        where = Where(later.where.source, later.where.line, later.where.column, key)
        self.problems.append(Problem("duplicate-key", f"`{shown(key)}` is given twice: {how}", where, "keep one of them"))


def _measure(node: Node) -> tuple[int, int]:
    """Number of nodes, and of levels below this one."""
    if isinstance(node, ScalarNode):
        return 1, 0
    children = [entry.node for entry in node.entries.values()] if isinstance(node, MappingNode) else node.items
    measured = [_measure(child) for child in children]
    return 1 + sum(size for size, _ in measured), max((depth + 1 for _, depth in measured), default=0)


_SYNTAX = (
    ("cannot start any token", "this character cannot begin a value", "put the value in double quotes"),
    ("mapping values are not allowed here", "a `: ` where no key can stand", "check the indentation, or quote a text that holds `: `"),
    ("could not find expected ':'", "this line is neither `key: value` nor a list item", "write `key: value`"),
    ("expected <block end>", "the indentation does not fit the lines above", "align the line with the other keys of its section"),
    ("expected '<document start>'", "something stands after the end of the value", "check the brackets and the indentation"),
)


def _syntax_problem(error: yaml.MarkedYAMLError, text: str, composer: _Composer) -> Problem:
    mark = error.problem_mark or error.context_mark
    where = composer.where(mark)
    detail = error.problem or "unreadable"
    if (mistake := explain_syntax(error, text)) is not None:
        place = Where(composer.source, mistake.line + 1, mistake.column + 1) if composer.positions else where
        if mistake.message.startswith("a tab"):
            return Problem("yaml-tab", mistake.message, place, mistake.hint)
        return Problem("yaml-syntax", mistake.message, place, mistake.hint)
    opened = composer.where(error.context_mark)
    since = f" opened on line {opened.line}, column {opened.column}," if opened.line is not None else ""
    if bracket := re.match("expected ',' or '(.)'", detail):
        hint = "close it, or put the text in double quotes if the bracket is part of one"
        return Problem("yaml-syntax", f"the bracket{since} is not closed by `{bracket[1]}` here", where, hint)
    if "unexpected end of stream" in detail and error.context_mark is not None:
        return Problem("yaml-syntax", f"the text in quotes{since} has no end", where, "close the quotes")
    for pattern, message, hint in _SYNTAX:
        if pattern in detail:
            return Problem("yaml-syntax", message, where, hint)
    message = f"the recipe is not YAML: {error.context + ', ' if error.context else ''}{detail}"
    return Problem("yaml-syntax", message, where, "put a text with special characters in double quotes")
