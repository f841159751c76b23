"""Parse a recipe's text into a tree in which every value has its line and column.

The tree is built from the events of PyYAML's parser. `yaml.compose` keeps positions too, but it stops at the
first problem, loses the position of an alias, and recurses as deep as the text is nested. `yaml.safe_load`
follows YAML 1.1, and the last of two equal keys wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import yaml

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where
from fsdp_tune.core.library_errors import YAML_SYNTAX
from fsdp_tune.core.units import ScalarError, Value, parse_plain, shown
from fsdp_tune.recipe.read.yaml_mistakes import SPACES, UNSPACED, explain_syntax, space_mistake, unspaced

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
    """A problem was already found here, and the value is to be ignored."""


@dataclass(slots=True)
class MappingEntry:
    where: Where
    """Position of the key; the node has that of the value."""
    node: Node


@dataclass(slots=True)
class MappingNode:
    entries: dict[str, MappingEntry]
    where: Where
    partial: bool = False
    """Only leads to another key (`a` in `--set a.b=1`), so that it is merged into the recipe's mapping
    instead of replacing it."""


@dataclass(slots=True)
class ListNode:
    items: list[Node]
    where: Where


Node = ScalarNode | MappingNode | ListNode


def entries_of(node: Node | None) -> dict[str, MappingEntry]:
    """Return the entries of a mapping; {} for any other node."""
    return node.entries if isinstance(node, MappingNode) else {}


def plain_value(node: Node) -> object:
    """Return a node as dicts, lists and scalars."""
    if isinstance(node, MappingNode):
        return {key: plain_value(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, ListNode):
        return [plain_value(item) for item in node.items]
    return node.value


def compose(text: str, source: str, *, line: int | None = 1) -> tuple[Node | None, list[Problem]]:
    """Return the tree of the only document in `text` (None if it is empty), and the problems that still leave
    a tree.

    With `line=None`, positions consist of the source alone (for `--set`). Raises: FsdpTuneError for text that
    has no tree.
    """
    composer = _Composer(text, source, positions=line is not None)
    with _syntax_problems(text, composer):
        return composer.document(), composer.problems


def compose_all(text: str, source: str) -> list[Node]:
    """Return the trees of all documents of a file that is not a recipe, within the limits of one recipe
    together.

    Its keys may replace those of `<<`, and spaces of any kind may be in its texts.

    Raises: FsdpTuneError for text that has no trees, for a tag, and for a key that is written twice.
    """
    composer = _Composer(text, source, positions=True, is_recipe=False)
    with _syntax_problems(text, composer):
        found = [root for root in composer.documents() if root is not None]
    wrong = [problem for problem in composer.problems if problem.code != "recipe-not-text"]
    if wrong:
        raise FsdpTuneError(*wrong)
    return found


@contextmanager
def _syntax_problems(text: str, composer: _Composer) -> Iterator[None]:
    """Report an error of the parser as a problem, after those that were found before. Raises:
    FsdpTuneError."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        last = _syntax_problem(error, text, composer)
        # a no-break space may be found twice
        before = [problem for problem in composer.problems if problem.message != last.message]
        raise FsdpTuneError(*before, last) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML raises ValueError for an escape such as "\UFFFFFFFF".
        problem = Problem("yaml-syntax", f"the recipe is not YAML: {error}", composer.latest)
        raise FsdpTuneError(*composer.problems, problem) from error


class _Composer:
    """Build a tree by recursive descent over the parser's events, at most `MAX_DEPTH` deep."""

    def __init__(self, text: str, source: str, *, positions: bool, is_recipe: bool = True) -> None:
        self.source = source
        self._is_recipe = is_recipe
        self.positions = positions
        self.problems: list[Problem] = []
        self.latest = Where(source)
        self._parser: Any = yaml.SafeLoader(text)
        self._anchors: dict[str | None, Node | None] = {}
        """None while the anchored node is not finished."""
        self._nodes = 0
        self._depth = 0

    def where(self, mark: Any) -> Where:
        return (
            Where(self.source, mark.line + 1, mark.column + 1)
            if mark is not None and self.positions
            else Where(self.source)
        )

    def documents(self) -> Iterator[Node | None]:
        while self._parser.check_node():
            self._parser.get_event()
            self._anchors = {}
            yield self._node()
            self._parser.get_event()

    def document(self) -> Node | None:
        if not self._parser.check_node():
            return None
        self._parser.get_event()  # the start of the document
        root = self._node()
        self._parser.get_event()  # and its end
        if self._parser.check_node():
            self.latest = self.where(self._parser.peek_event().start_mark)
            self._fail(
                Problem(
                    "two-documents",
                    "the file holds two documents (`---`); a recipe is one document",
                    hint="split it into two files",
                )
            )
        return root

    def _fail(self, problem: Problem) -> NoReturn:
        raise FsdpTuneError(*self.problems, problem.at(self.latest))

    def _node(self) -> Node:
        event = self._parser.get_event()
        self.latest = where = self.where(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor))
        self._count()
        if event.tag is not None:
            name, hint = (
                event.tag.replace("tag:yaml.org,2002:", "!!"),
                "leave it out; a value in double quotes is text",
            )
            message = f"the YAML tag `{shown(name)}` is not supported: a recipe holds plain values"
            self.problems.append(Problem("yaml-tag", message, where, hint))
        self._anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event)
        else:
            self._descend()
            node = self._mapping(where) if isinstance(event, yaml.MappingStartEvent) else self._list(where)
            self._depth -= 1
            node = node if event.tag is None else _broken(where)
        self._anchors[event.anchor] = node
        return node

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._fail(
                Problem(
                    "yaml-too-large", f"the recipe holds more than {MAX_NODES:,} values, aliases expanded"
                )
            )

    def _descend(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(Problem("yaml-too-deep", f"more than {MAX_DEPTH} levels of nesting"))

    def _alias(self, name: str) -> Node:
        if name not in self._anchors:
            message, hint = (
                f"the alias `*{shown(name)}` has no anchor `&{shown(name)}` above it",
                "a text that begins with `*` needs quotes",
            )
            self._fail(Problem("yaml-alias", message, hint=f'{hint}: `"*{shown(name)}"`'))
        if (node := self._anchors[name]) is None:
            self._fail(Problem("yaml-alias", f"the alias `*{shown(name)}` is inside the value that it names"))
        return self._copy(node)

    def _copy(self, node: Node) -> Node:
        self._count()
        if isinstance(node, ScalarNode):
            return replace(node)
        self._descend()
        if isinstance(node, ListNode):
            copied: Node = ListNode([self._copy(item) for item in node.items], node.where)
        else:
            copied = MappingNode(
                {
                    key: MappingEntry(entry.where, self._copy(entry.node))
                    for key, entry in node.entries.items()
                },
                node.where,
            )
        self._depth -= 1
        return copied

    def _scalar(self, event: Any) -> ScalarNode:
        text, plain = str(event.value), bool(event.implicit[0]) and not event.style
        node = ScalarNode(text, text, plain, self.latest, broken=event.tag is not None)
        if any("\ud800" <= character <= "\udfff" for character in text):
            self.problems.append(
                Problem(
                    "recipe-not-text",
                    "the text holds half a surrogate pair, which no file can store",
                    self.latest,
                )
            )
            node.value, node.broken = None, True
        elif plain and self._is_recipe and (mistake := space_mistake(0, 0, text)) is not None:
            place = self.latest
            if place.column is not None and event.start_mark.line == event.end_mark.line:
                place = replace(place, column=place.column + mistake.column)
            self.problems.append(Problem("yaml-syntax", mistake.message, place, mistake.hint))
            node.text, node.broken = "".join(character for character in text if character not in SPACES), True
        elif plain:
            try:
                node.value, node.suspicion = parse_plain(text)
            except ScalarError as error:
                self.problems.append(
                    Problem("not-a-number", str(error), self.latest, "write a finite number")
                )
                node.value, node.broken = None, True
        return node

    def _list(self, where: Where) -> ListNode:
        items: list[Node] = []
        while not self._parser.check_event(yaml.SequenceEndEvent):
            items.append(self._node())
        self._parser.get_event()
        return ListNode(items, where)

    def _mapping(self, where: Where) -> MappingNode:
        mapping = MappingNode({}, where)
        merged: list[tuple[str, MappingEntry]] = []
        while not self._parser.check_event(yaml.MappingEndEvent):
            key = self._node()
            if not isinstance(key, ScalarNode):
                self.latest = key.where
                self._fail(Problem("yaml-key", "a mapping or a list cannot be a key"))
            node = self._node()
            if key.plain and key.text == MERGE_KEY:
                merged += self._merged(node)
                continue
            name = self._key_name(key, node)
            self._insert(
                mapping,
                name,
                MappingEntry(key.where, _broken(node.where) if key.broken else node),
                through_merge=False,
            )
        self._parser.get_event()
        for name, entry in merged:
            self._insert(mapping, name, entry, through_merge=True)
        return mapping

    def _key_name(self, key: ScalarNode, node: Node) -> str:
        """Return the text of a key; of `path:x`, which is a key without a value to YAML, the part before the
        colon."""
        found = UNSPACED.fullmatch(key.text) if key.plain else None
        if found is None or not isinstance(node, ScalarNode) or not node.plain or node.text:
            return key.text
        message, hint = unspaced(found["key"], found["value"])
        self.problems.append(Problem("yaml-syntax", message, key.where, hint))
        node.broken = True
        return found["key"]

    def _merged(self, node: Node) -> list[tuple[str, MappingEntry]]:
        mappings = node.items if isinstance(node, ListNode) else [node]
        wrong = [mapping.where for mapping in mappings if not isinstance(mapping, MappingNode)]
        self.problems += [
            Problem("yaml-merge", "`<<` takes a mapping, or a list of mappings", where) for where in wrong
        ]
        return [found for mapping in mappings for found in entries_of(mapping).items()]

    def _insert(self, mapping: MappingNode, key: str, entry: MappingEntry, *, through_merge: bool) -> None:
        first = mapping.entries.setdefault(key, entry)
        if first is entry or (through_merge and not self._is_recipe):
            return
        later, earlier = (first, entry) if through_merge else (entry, first)
        other = f"line {earlier.where.line}" if self.positions else "the same text"
        how = f"here and, through `<<`, on {other}" if through_merge else f"here and on {other}"
        where = Where(later.where.source, later.where.line, later.where.column, key)
        self.problems.append(
            Problem("duplicate-key", f"`{shown(key)}` is written twice: {how}", where, "keep one of them")
        )


def _broken(where: Where) -> ScalarNode:
    return ScalarNode(None, "", plain=True, where=where, broken=True)


def _syntax_problem(error: yaml.MarkedYAMLError, text: str, composer: _Composer) -> Problem:
    where = composer.where(error.problem_mark or error.context_mark)
    detail = error.problem or "unreadable"
    if (mistake := explain_syntax(error, text)) is not None:
        place = Where(composer.source, mistake.line + 1, mistake.column + 1) if composer.positions else where
        return Problem(
            "yaml-tab" if mistake.message.startswith("a tab") else "yaml-syntax",
            mistake.message,
            place,
            mistake.hint,
        )
    opened = composer.where(error.context_mark)
    since = f" opened on line {opened.line}, column {opened.column}," if opened.line is not None else ""
    if bracket := re.match("expected ',' or '(.)'", detail):
        hint = "close it, or put the text in double quotes if the bracket is part of one"
        return Problem("yaml-syntax", f"the bracket{since} is not closed by `{bracket[1]}` here", where, hint)
    if "unexpected end of stream" in detail and error.context_mark is not None:
        return Problem("yaml-syntax", f"the text in quotes{since} has no end", where, "close the quotes")
    for pattern, message, hint in YAML_SYNTAX:
        if pattern in detail:
            return Problem("yaml-syntax", message, where, hint)
    message = f"the recipe is not YAML: {error.context + ', ' if error.context else ''}{detail}"
    return Problem("yaml-syntax", message, where, "put a text with special characters in double quotes")
