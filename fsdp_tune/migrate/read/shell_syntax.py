"""Split a shell script into statements: words with their expansions, blocks, redirections and
here-documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({NAME})(\+?)=")
_OPENING = frozenset({"if", "while", "until", "for", "case", "select", "{", "("})
_NEXT = frozenset({"then", "else", "elif", "do"})
_CLOSING = {
    "fi": ("if",),
    "done": ("while", "until", "for", "select"),
    "esac": ("case",),
    "}": ("{",),
    ")": ("(",),
}
_SKIPPED = frozenset({"!", "time", "exec", "function"})
_OPERATOR = re.compile(r"\d*(?:<<<|<<-?|>>|>\||>&|<&|&>>?|<|>)|&&|\|\||;;|[;&|()\n]")


def script_of_shell(words: list[str]) -> str | None:
    """Return the script in the words of `bash -c SCRIPT`; None if they start no shell with one.

    The script is the first word after the options: bash takes `-c -- SCRIPT`, `-ce SCRIPT` and `-c -e SCRIPT`
    too.
    """
    if not words or re.fullmatch(r"(?:.*/)?(?:ba|z|da)?sh", words[0]) is None:
        return None
    at = next((at for at, word in enumerate(words[1:], 1) if re.fullmatch(r"-[a-z]*c[a-z]*", word)), None)
    if at is None:
        return None
    rest = words[at + 1 :]
    while rest and re.fullmatch(r"--|[-+][a-z]+", rest[0]):
        ended = rest.pop(0) == "--"
        if ended:
            break
    return rest[0] if rest else None


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
class WrittenFile:
    """A text that a statement writes into a file."""

    statement: Statement
    target: Word
    text: Word | None
    """None if it is not a here-document, or is appended."""


class Lexer:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._line = text.replace("\r\n", "\n"), 0, 1
        self._blocks: list[tuple[str, int]] = []
        self._statements: list[Statement] = []
        self._comments: list[tuple[int, str]] = []
        self._ends: list[tuple[str, bool]] = []
        """The lines that end the here-documents of the current line, and whether their text is quoted."""
        self._target: tuple[Word, bool] | None = None
        """The file into which the current statement is redirected, and whether it is appended."""
        self._text_of_document: Word | None = None
        self.documents: list[WrittenFile] = []
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
            self._target = None
            self._text_of_document = None if token != "|" else self._text_of_document
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
            self._note_document(self._statements[-1])

    def _note_document(self, statement: Statement) -> None:
        """Note the file that a statement writes: `cat > FILE <<END`, `tee FILE <<END`, and any other
        redirection."""
        names = [word for word in statement.words[1:] if not word.text.startswith("-")]
        first = statement.words[0].text
        text = self._text_of_document if first in ("cat", "tee") else None
        if self._target is not None:
            target, is_appended = self._target
            self.documents.append(
                WrittenFile(statement, target, None if is_appended or (first == "cat" and names) else text)
            )
        elif first == "tee" and names:
            self.documents.append(
                WrittenFile(
                    statement, names[0], text if len(names) == 1 and len(statement.words) == 2 else None
                )
            )

    def _open(self, kind: str) -> None:
        self._count += 1
        self._blocks.append((kind, self._count))

    def _close(self, word: str) -> None:
        if self._blocks and self._blocks[-1][0] in _CLOSING[word]:
            self._blocks.pop()

    def _tokens(self) -> Iterator[Word | str]:
        """Yield words and operators. Comments are left out; redirections and here-documents are noted."""
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
                    self._read_documents()
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
            self._ends.append((word.text, any(part.is_quoted for part in word.parts)))
        elif mark in (">", "1>", ">|", ">>", "1>>", "&>", "&>>"):
            self._target = (word, mark.endswith(">>"))

    def _read_documents(self) -> None:
        while self._ends:
            end, is_quoted = self._ends.pop(0)
            lines: list[str] = []
            while self._at < len(self._text):
                stop = self._end_of_line()
                line = self._text[self._at : stop]
                self._skip(stop + 1 - self._at)
                if line.strip() == end:
                    break
                lines.append(f"{line}\n")
            text = "".join(lines)
            self._text_of_document = Word([WordPart(text, is_quoted=True)]) if is_quoted else _expanding(text)

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
            elif (
                character == "("
                and word.assigned is not None
                and word.text.endswith("=")
                and word.items is None
            ):
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

    def quoted_text(self) -> Word:
        """Read all of the text as if it were in double quotes."""
        word = Word()
        self._text = f'"{self._text}'
        self._quoted(word, len(self._text))
        return word

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


def _expanding(text: str) -> Word:
    """Return the text of a here-document in which variables are expanded; a quotation mark has no meaning in
    it."""
    return Lexer(text.replace('\\"', '\\\\"')).quoted_text()


_PLAIN_EXPANSION = re.compile(rf"\$(?:{NAME}|[0-9@*#?!-])")


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
