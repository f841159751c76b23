"""Read the commands of a shell script, with the variables that have one value, without running it.

A variable has a value at a command if the script binds it once, by a plain assignment that every path to the command passes. Every other
word with a `$` stays as it is written, as an `Unexpanded`, with what is known of its value.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fsdp_tune.core.units import enumerated

_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=")
_REFERENCE = re.compile(rf"\$(?:({_NAME})|\{{({_NAME})\}}|\{{({_NAME})\[[@*]\]\}})")
_DEFAULT = re.compile(rf"\$\{{({_NAME}):?[-=](.*)\}}", re.DOTALL)
_OPENING = frozenset({"if", "while", "until", "for", "case", "select", "{", "("})
_NEXT = frozenset({"then", "else", "elif", "do"})
_CLOSING = {"fi": ("if",), "done": ("while", "until", "for", "select"), "esac": ("case",), "}": ("{",), ")": ("(",)}
_SKIPPED = frozenset({"!", "time", "exec", "function"})
_OPERATOR = re.compile(r"\d*(?:<<<|<<-?|>>|>\||>&|<&|&>>?|<|>)|&&|\|\||;;|[;&|()\n]")
_DECLARES = frozenset({"export", "declare", "typeset", "local", "readonly"})
_READS = frozenset({"read", "unset", "mapfile", "readarray", "getopts", "let"})
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left // right,
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
class WordPart:
    """A piece of a word: literal text, or an expansion, which is split at spaces unless it is in quotes."""

    text: str
    is_expansion: bool = False
    is_quoted: bool = False


@dataclass(slots=True)
class Word:
    parts: list[WordPart] = field(default_factory=list[WordPart])
    items: list[Word] | None = None
    """The words of an array, `NAME=(…)`."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def assigned(self) -> re.Match[str] | None:
        """The name and `+` of an assignment, if the word is one."""
        first = self.parts[0] if self.parts else WordPart("")
        return None if first.is_expansion or first.is_quoted else _ASSIGNMENT.match(first.text)

    def after(self, length: int) -> Word:
        """Return the word without its first `length` characters, which are text."""
        first, *rest = self.parts
        return Word([WordPart(first.text[length:]), *rest], self.items)


@dataclass(slots=True)
class Statement:
    words: list[Word]
    line: int
    order: int
    blocks: tuple[int, ...]
    """The branches, loops and functions that it is in, from the outside."""
    is_conditional: bool
    """Whether it follows `&&` or `||`."""

    @property
    def is_assignment(self) -> bool:
        return all(word.assigned for word in self.words)


@dataclass(frozen=True, slots=True)
class _Assigned:
    statement: Statement
    value: Word | None
    """None if it is not a plain assignment."""


class ShellScript:
    """The statements of a script, and its variables."""

    def __init__(self, text: str) -> None:
        self.statements, self.comments = _Lexer(text).read()
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
                for match in re.finditer(rf"\$\{{({_NAME}):?=", part.text) if part.is_expansion else ():
                    self._bindings.setdefault(match[1], []).append(_Assigned(statement, None))
        first = words[0].text if words else ""
        if first in (".", "source", "eval"):
            self._sourced.append(statement.order)
        elif first == "for" and len(words) > 1:
            self._bindings.setdefault(words[1].text, []).append(_Assigned(statement, None))
        elif first in _READS:
            for word in words[1:]:
                self._bindings.setdefault(re.split(r"\W", word.text)[0], []).append(_Assigned(statement, None))
        elif first in _DECLARES or statement.is_assignment:
            is_exported = first == "export" or (first in _DECLARES and any(word.text == "-x" for word in words))
            for word in words[1:] if first in _DECLARES else words:
                self._assign(word, statement, is_plain=is_plain)
                if is_exported and (name := (word.assigned or re.match(rf"({_NAME})$", word.text))) is not None:
                    self.exported += [name[1]] if name[1] not in self.exported else []

    def _assign(self, word: Word, statement: Statement, *, is_plain: bool) -> None:
        match = word.assigned
        if match is not None:
            value = word.after(match.end()) if is_plain and not match[2] else None
            self._bindings.setdefault(match[1], []).append(_Assigned(statement, value))
        elif element := re.match(rf"({_NAME})\[", word.text):
            self._bindings.setdefault(element[1], []).append(_Assigned(statement, None))

    # ---- Values

    def words(self, statement: Statement) -> list[str]:
        """Return the words of a statement with its variables replaced. Words that are not known are `Unexpanded`."""
        return [text for word in statement.words for text in self._expanded(word, statement)]

    def value(self, name: str, statement: Statement) -> str:
        """Return the value of a variable at a statement, as one word."""
        return self._joined(Word([WordPart(f"${name}", is_expansion=True, is_quoted=True)]), statement)

    def _joined(self, word: Word, statement: Statement) -> str:
        found = self._expanded(Word([WordPart(part.text, part.is_expansion, is_quoted=True) for part in word.parts]), statement)
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
            if not isinstance(found, str) and any(found) and len(self._bindings[match[1]]) == 1:
                return found
            default = re.sub(r"^([\"'])(.*)\1$", r"\2", match[2])
            return f"`{match[1]}` of the environment decides, and without it `{default}`"
        inner = re.fullmatch(r"\$\(\((.*)\)\)|\$\(\s*expr\s+(.*)\)|`\s*expr\s+(.*)`", text, re.DOTALL)
        number = self._computed(next(each for each in inner.groups() if each is not None), statement) if inner else None
        return [str(number)] if number is not None else f"only running the script gives `{text}`"

    def _variable(self, name: str, statement: Statement) -> list[str] | str:
        bindings = self._bindings.get(name, [])
        if not bindings:
            return f"`{name}` is of the environment"
        if len(bindings) > 1:
            lines = enumerated([str(each.statement.line) for each in bindings], "and")
            return f"`{name}` is bound more than once (lines {lines})"
        bound, value = bindings[0].statement, bindings[0].value
        is_before = bound.order < statement.order and statement.blocks[: len(bound.blocks)] == bound.blocks
        if value is None or not is_before or any(bound.order < order < statement.order for order in self._sourced):
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

        text = re.sub(rf"\$?({_NAME})|\$\{{({_NAME})\}}", replaced, text.replace("\\", ""))
        try:
            return _number(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError("not an expression of whole numbers")


# ---- The syntax


class _Lexer:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._line = text, 0, 1
        self._blocks: list[tuple[str, int]] = []
        self._statements: list[Statement] = []
        self._comments: list[tuple[int, str]] = []
        self._ends: list[str] = []
        """Lines that end the here-documents of the current line."""
        self._count = 0

    def read(self) -> tuple[list[Statement], list[tuple[int, str]]]:
        """Return the statements, and the comments that have a line of their own, each with its line."""
        words: list[Word] = []
        first_line, is_conditional = 1, False
        for token in self._tokens():
            if isinstance(token, Word):
                first_line = first_line if words else self._line
                words.append(token)
                continue
            if re.search("[<>]", token):
                continue  # the word after it is taken by `_tokens`
            self._end(words, first_line, is_conditional=is_conditional)
            words, is_conditional = [], token in ("&&", "||")
            if token == "(":
                self._open("(")
            elif token == ")":
                self._close(")")
        self._end(words, first_line, is_conditional=is_conditional)
        return self._statements, self._comments

    def _end(self, words: list[Word], line: int, *, is_conditional: bool) -> None:
        """Enter a statement, without the reserved words before it."""
        while words:
            text = words[0].text if not words[0].parts[0].is_expansion else ""
            if len(words) == 2 and words[1].text == "{":  # `function name {`
                self._open("{")
                return
            if text in _CLOSING:
                self._close(text)
            elif text in _NEXT:
                kind = self._blocks.pop()[0] if self._blocks else text
                self._open(kind)
            elif text in _OPENING:
                self._open(text)
                if text in ("for", "select", "case"):
                    break
            elif text not in _SKIPPED:
                break
            words = words[1:]
        if words:
            self._count += 1
            blocks = tuple(number for _, number in self._blocks)
            self._statements.append(Statement(words, line, self._count, blocks, is_conditional))

    def _open(self, kind: str) -> None:
        self._count += 1
        self._blocks.append((kind, self._count))

    def _close(self, word: str) -> None:
        if self._blocks and self._blocks[-1][0] in _CLOSING[word]:
            self._blocks.pop()

    def _tokens(self) -> Iterator[Word | str]:
        """Yield words and operators. Comments, redirections and the texts of here-documents are left out."""
        at_start = True
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in " \t\r":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._skip(2)
            elif character == "#":
                end = self._end_of_line()
                if at_start:
                    self._comments.append((self._line, self._text[self._at + 1 : end]))
                self._at = end
            elif match := _OPERATOR.match(self._text, self._at):
                self._skip(len(match[0]))
                if re.search("[<>]", match[0]):
                    self._redirect(match[0])
                elif match[0] == "\n":
                    self._skip_documents()
                at_start = match[0] == "\n"
                yield match[0]
            else:
                at_start = False
                yield self._word()

    def _redirect(self, mark: str) -> None:
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._at += 1
        word = self._word() if self._at < len(self._text) and self._text[self._at] not in "\n;" else Word()
        if mark.lstrip("0123456789") in ("<<", "<<-"):
            self._ends.append(word.text)

    def _skip_documents(self) -> None:
        while self._ends:
            end = self._ends.pop(0)
            while self._at < len(self._text):
                stop = self._end_of_line()
                line = self._text[self._at : stop]
                self._skip(stop + 1 - self._at)
                if line.strip() == end:
                    break

    def _end_of_line(self) -> int:
        end = self._text.find("\n", self._at)
        return len(self._text) if end < 0 else end

    def _skip(self, length: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + length)
        self._at += length

    def _word(self) -> Word:
        word = Word()
        while self._at < len(self._text):
            character = self._text[self._at]
            if self._text.startswith("\\\n", self._at):
                self._skip(2)
            elif character == "(" and word.assigned is not None and word.text.endswith("=") and word.items is None:
                word.items = self._array()
            elif character in " \t\r\n;&|()<>":
                break
            elif character == "\\":
                word.parts.append(WordPart(self._text[self._at + 1 : self._at + 2], is_quoted=True))
                self._skip(2)
            elif character == "'" and (end := self._text.find("'", self._at + 1)) > 0:
                word.parts.append(WordPart(self._text[self._at + 1 : end], is_quoted=True))
                self._skip(end + 1 - self._at)
            elif character == '"' and self._closing_quote(self._at + 1) > 0:
                self._quoted(word, self._closing_quote(self._at + 1))
            elif character in "$`" and (length := _expansion(self._text, self._at)):
                word.parts.append(WordPart(self._text[self._at : self._at + length], is_expansion=True))
                self._skip(length)
            else:
                self._plain(word, character)
        word.parts = word.parts or [WordPart("")]
        return word

    def _plain(self, word: Word, character: str) -> None:
        last = word.parts[-1] if word.parts else None
        if last is not None and not last.is_expansion and not last.is_quoted:
            word.parts[-1] = WordPart(last.text + character)
        else:
            word.parts.append(WordPart(character))
        self._skip(1)

    def _array(self) -> list[Word]:
        """Read the words between the brackets of an array."""
        self._skip(1)
        items: list[Word] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at].isspace():
                self._skip(1)
            elif self._text.startswith("\\\n", self._at):
                self._skip(2)
            elif self._text[self._at] == "#":
                self._skip(self._end_of_line() - self._at)
            else:
                before = self._at
                items.append(self._word())
                self._skip(1 if self._at == before else 0)
        self._skip(1)
        return items

    def _closing_quote(self, at: int) -> int:
        while at < len(self._text):
            if self._text[at] == '"':
                return at
            at += 2 if self._text[at] == "\\" else max(1, _expansion(self._text, at))
        return -1

    def _quoted(self, word: Word, end: int) -> None:
        """Add the text in double quotes, in which variables are expanded."""
        self._skip(1)
        text = ""
        while self._at < end:
            character = self._text[self._at]
            length = _expansion(self._text, self._at) if character in "$`" else 0
            if length:
                word.parts += [
                    WordPart(text, is_quoted=True),
                    WordPart(self._text[self._at : self._at + length], is_expansion=True, is_quoted=True),
                ]
                text = ""
            elif character == "\\" and self._text[self._at + 1] in '$`"\\\n':
                text += "" if self._text[self._at + 1] == "\n" else self._text[self._at + 1]
                length = 2
            else:
                text += character
            self._skip(length or 1)
        word.parts.append(WordPart(text, is_quoted=True))
        self._skip(1)


_PLAIN_EXPANSION = re.compile(rf"\$(?:{_NAME}|[0-9@*#?!-])")


def _expansion(text: str, at: int) -> int:
    """Return the length of the expansion that begins at a position; 0 if none does."""
    pairs = {"${": "{}", "$(": "()"}.get(text[at : at + 2])
    if pairs is not None:
        depth = 0
        for end in range(at + 1, len(text)):
            depth += (text[end] == pairs[0]) - (text[end] == pairs[1])
            if depth == 0:
                return end + 1 - at
        return 0
    if text[at] == "`":
        end = text.find("`", at + 1)
        return end + 1 - at if end > 0 else 0
    match = _PLAIN_EXPANSION.match(text, at)
    return len(match[0]) if match else 0
