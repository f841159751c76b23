"""Read the commands of a shell script, with the variables that have one value, without running it.

A variable has a value at a command if the script binds it once, by a plain assignment that every path to the
command passes. Every other word with a `$` stays as it is written, as an `Unexpanded`, with what is known of
its value.
"""

from __future__ import annotations

import ast
import operator
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fsdp_tune.core.units import enumerated
from fsdp_tune.migrate.read.shell_syntax import NAME, Lexer, Statement, Word, WordPart

_REFERENCE = re.compile(rf"\$(?:({NAME})|\{{({NAME})\}}|\{{({NAME})\[[@*]\]\}})")
_DEFAULT = re.compile(rf"\$\{{({NAME}):?[-=](.*)\}}", re.DOTALL)
_CHANGES = re.compile(rf"({NAME})\s*(?:(?:[-+*/%&|^]|<<|>>)=|\+\+|--)|(?:\+\+|--)({NAME})")
"""A name that arithmetic changes."""
_OPERATES = re.compile(r"(?:[-+*/%&|^]|<<|>>)=|(?:\+\+|--)$")
_READERS = frozenset(
    {
        "cat",
        "echo",
        "head",
        "ls",
        "axolotl",
        "llamafactory-cli",
        "swift",
        "trl",
        "tune",
        "accelerate",
        "torchrun",
    }
)
"""Programs that do not change a file that they are given."""
_DECLARES = frozenset({"export", "declare", "typeset", "local", "readonly"})
_READS = frozenset({"for", "printf", "read", "unset", "mapfile", "readarray", "getopts", "let"})
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # towards 0
    ast.Div: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
}


class Unexpanded(str):
    """A word whose value the script does not give. `why`: what is known of it."""

    __slots__ = ("why",)

    def __new__(cls, text: str, why: str) -> Unexpanded:
        word = super().__new__(cls, text)
        word.why = why
        return word

    why: str


@dataclass(frozen=True, slots=True)
class _Assigned:
    statement: Statement
    value: Word | None
    """None if it is not a plain assignment."""


class ShellScript:
    """The statements of a script, and its variables."""

    def __init__(self, text: str, known: Mapping[str, str] = MappingProxyType({})) -> None:
        """`known`: values of variables that the script does not bind."""
        self._known = known
        lexer = Lexer(text)
        self.statements, self.comments = lexer.read()
        self._documents = lexer.documents
        self._bindings: dict[str, list[_Assigned]] = {}
        self.exported: list[str] = []
        """Names of variables that the commands of the script inherit, in the order of the script."""
        self._sourced: list[int] = []
        for statement in self.statements:
            self._bind(statement)

    def _bind(self, statement: Statement) -> None:
        words, is_plain = statement.words, not statement.is_conditional
        for word in words:
            for part in (*word.parts, *(each for item in word.items or () for each in item.parts)):
                for match in re.finditer(rf"\$\{{({NAME}):?=", part.text) if part.is_expansion else ():
                    self._bindings.setdefault(match[1], []).append(_Assigned(statement, None))
        first = words[0].text if words else ""
        self._bind_in_arithmetic(statement)
        is_computed = first in _DECLARES and any(word.parts[0].is_expansion for word in words[1:])
        if first in (".", "source", "eval") or is_computed:  # `export $(cat .env)` may bind any name
            self._sourced.append(statement.order)
        elif first in _READS:
            names = words[1:2] if first == "for" else words[1:]
            if first == "printf":  # `printf -v NAME`
                names = words[2:3] if len(words) > 2 and words[1].text == "-v" else []
            for word in names:
                self._bindings.setdefault(re.split(r"\W", word.text)[0], []).append(
                    _Assigned(statement, None)
                )
        elif first in _DECLARES or statement.is_assignment:
            is_exported = first == "export" or (
                first in _DECLARES and any(word.text == "-x" for word in words)
            )
            for word in words[1:] if first in _DECLARES else words:
                self._assign(word, statement, is_plain=is_plain)
                if (
                    is_exported
                    and (name := (word.assigned or re.match(rf"({NAME})$", word.text))) is not None
                ):
                    self.exported += [name[1]] if name[1] not in self.exported else []

    def _bind_in_arithmetic(self, statement: Statement) -> None:
        """Bind the names that `((n *= 2))`, `$((n++))` and the like change."""
        first, *rest = [word.text for word in statement.words]
        texts = [
            part.text
            for word in statement.words
            for part in word.parts
            if part.is_expansion and part.text.startswith("$((")
        ]
        names = [match[1] or match[2] for text in texts for match in _CHANGES.finditer(text)]
        if not statement.is_assignment and (
            match := _CHANGES.match(first + (rest[0] if rest and _OPERATES.match(rest[0]) else ""))
        ):
            names.append(match[1] or match[2])
        for name in names:
            self._bindings.setdefault(name, []).append(_Assigned(statement, None))

    def _assign(self, word: Word, statement: Statement, *, is_plain: bool) -> None:
        match = word.assigned
        if match is not None:
            value = word.after(match.end()) if is_plain and not match[2] else None
            self._bindings.setdefault(match[1], []).append(_Assigned(statement, value))
        elif element := re.match(rf"({NAME})\[", word.text):
            self._bindings.setdefault(element[1], []).append(_Assigned(statement, None))

    def written_file(self, name: str, statement: Statement) -> str | None:
        """Return the text of a file that the script has written before a statement, by one here-document on
        every path to it.

        An expansion whose value is not known is written `${…}`. None if the script writes no such file, or
        may write it otherwise.
        """
        place = posixpath.normpath(name)
        documents = [
            each
            for each in self._documents
            if posixpath.normpath(self._joined(each.target, each.statement)) == place
        ]
        if len(documents) != 1 or documents[0].text is None:
            return None
        (document,) = documents
        bound = document.statement
        is_before = bound.order < statement.order and statement.blocks[: len(bound.blocks)] == bound.blocks
        others = [
            each
            for each in self.statements
            if bound.order < each.order < statement.order
            and any(place in word for word in self.words(each))
            and each.words[0].text not in _READERS
        ]
        if not is_before or bound.is_conditional or others:
            return None
        assert document.text is not None
        return "".join(self._in_document(part, bound) for part in document.text.parts)

    def _in_document(self, part: WordPart, statement: Statement) -> str:
        if not part.is_expansion:
            return part.text
        found = self._value_of(part.text, statement)
        return f"${{{re.sub(r'[${}]', '', part.text)}}}" if isinstance(found, str) else " ".join(found)

    def words(self, statement: Statement) -> list[str]:
        """Return the words of a statement with its variables replaced. Words that are not known are
        `Unexpanded`."""
        return [text for word in statement.words for text in self._expanded(word, statement)]

    def value(self, name: str, statement: Statement) -> str:
        """Return the value of a variable at a statement, as one word."""
        return self._joined(Word([WordPart(f"${name}", is_expansion=True, is_quoted=True)]), statement)

    def _joined(self, word: Word, statement: Statement) -> str:
        found = self._expanded(
            Word([WordPart(part.text, part.is_expansion, is_quoted=True) for part in word.parts]), statement
        )
        return found[0] if found else ""

    def _expanded(self, word: Word, statement: Statement) -> list[str]:
        """Return the words that one word becomes: several, or none, if an unquoted value has spaces."""
        done = [""]
        for part in word.parts:
            if not part.is_expansion:
                done[-1] += part.text
                continue
            found = self._value_of(part.text, statement)
            if isinstance(found, str):
                return [Unexpanded(word.text, found)]
            if part.is_quoted and not part.text.endswith("[@]}"):
                found = [" ".join(found)]
            elif not part.is_quoted:
                found = [piece for each in found for piece in each.split()]
            if not found and len(word.parts) == 1:
                return []
            first, *rest = found or [""]
            done[-1] += first
            done += rest
        return done

    def _value_of(self, text: str, statement: Statement) -> list[str] | str:
        """Return the values of an expansion: several of an array. A text is why it has none."""
        if match := _REFERENCE.fullmatch(text):
            return self._variable(match[1] or match[2] or match[3], statement)
        if match := _DEFAULT.fullmatch(text):
            found = self._variable(match[1], statement)
            if not isinstance(found, str) and any(found) and len(self._bindings.get(match[1], [""])) == 1:
                return found
            default = re.sub(r"^([\"'])(.*)\1$", r"\2", match[2])
            return f"`{match[1]}` of the environment decides, and without it `{default}`"
        inner = re.fullmatch(r"\$\(\((.*)\)\)|\$\(\s*expr\s+(.*)\)|`\s*expr\s+(.*)`", text, re.DOTALL)
        number = (
            self._computed(next(each for each in inner.groups() if each is not None), statement)
            if inner
            else None
        )
        return [str(number)] if number is not None else f"only running the script gives `{text}`"

    def _variable(self, name: str, statement: Statement) -> list[str] | str:
        bindings = self._bindings.get(name, [])
        if not bindings:
            return [self._known[name]] if name in self._known else f"`{name}` is of the environment"
        if len(bindings) > 1:
            lines = enumerated([str(each.statement.line) for each in bindings], "and")
            return f"`{name}` is bound more than once (lines {lines})"
        bound, value = bindings[0].statement, bindings[0].value
        is_before = bound.order < statement.order and statement.blocks[: len(bound.blocks)] == bound.blocks
        if (
            value is None
            or not is_before
            or any(bound.order < order < statement.order for order in self._sourced)
        ):
            return f"`{name}` is not bound by a plain assignment on every path to the command"
        words = [value] if value.items is None else value.items
        found = (
            [self._joined(word, bound) for word in words]
            if value.items is None
            else [each for word in words for each in self._expanded(word, bound)]
        )
        unknown = next((each for each in found if isinstance(each, Unexpanded)), None)
        return found if unknown is None else unknown.why

    def _computed(self, text: str, statement: Statement) -> int | None:
        """Return the value of an arithmetic expression of whole numbers and known variables."""

        def replaced(match: re.Match[str]) -> str:
            found = self._variable(match[1] or match[2], statement)
            return found[0] if isinstance(found, list) and len(found) == 1 else "?"

        text = re.sub(rf"\$?({NAME})|\$\{{({NAME})\}}", replaced, text.replace("\\", ""))
        try:
            return _number(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError("not an expression of whole numbers")
