"""The text of a recipe: a regular UTF-8 file of limited size, or an error. Reading never blocks."""

from __future__ import annotations

import difflib
import errno
import re
from pathlib import Path

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.files import UnsuitableFileError, read_regular

MAX_FILE_BYTES = 256 << 10
_UTF16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_UTF8_BOM = b"\xef\xbb\xbf"
# C0 controls except tab and line ends, DEL, C1 controls, byte order marks, and the line ends that only YAML
# 1.1 has: an editor does not count those, so every later line number would be wrong.
_REFUSED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def read_text(path: Path, *, most_bytes: int = MAX_FILE_BYTES, may_have_mark: bool = False) -> str:
    """Return the decoded contents, without a byte order mark if there may be one.

    Raises: FsdpTuneError if the path is not a readable text file.
    """
    where = Where(str(path))
    raw = _read_bytes(path, where, most_bytes)
    raw = raw.removeprefix(_UTF8_BOM) if may_have_mark else raw
    if raw.startswith(_UTF16_OR_32) or b"\0" in raw[:4]:
        raise _not_utf8("is UTF-16 or UTF-32", where)
    if raw.startswith(_UTF8_BOM):
        raise _not_utf8("begins with a byte order mark", where)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(
            f"is not UTF-8: byte 0x{raw[error.start]:02x}", _position(raw[: error.start].decode(), where)
        ) from error
    return check_characters(text, where)


def check_characters(text: str, where: Where) -> str:
    """Return `text` unchanged. Raises: FsdpTuneError with the position of the first character that breaks
    YAML or line numbers."""
    if found := _REFUSED.search(text):
        position = _position(text[: found.start()], where)
        hint = f'remove it; inside a text write "\\u{ord(found[0]):04x}" in double quotes'
        raise usage_error(
            "recipe-not-text",
            f"the recipe holds the control character U+{ord(found[0]):04X}",
            hint=hint,
            where=position,
        )
    return text


def _not_utf8(what: str, where: Where) -> FsdpTuneError:
    return usage_error(
        "recipe-not-text",
        f"the recipe {what}",
        hint="save it as UTF-8 without a byte order mark",
        where=where,
    )


def _position(before: str, where: Where) -> Where:
    lines = re.split("\r\n|\r|\n", before)
    return Where(where.source, len(lines), len(lines[-1]) + 1)


def _read_bytes(path: Path, where: Where, most_bytes: int) -> bytes:
    try:
        return read_regular(path, most_bytes=most_bytes)
    except UnsuitableFileError as error:
        code = "recipe-too-large" if error.errno == errno.EFBIG else "recipe-not-readable"
        raise usage_error(code, f"`{path}` {error.strerror}", where=where) from error
    except FileNotFoundError as error:
        dangling = path.is_symlink()
        message = (
            f"`{path}` is a link to `{path.readlink()}`, which does not exist"
            if dangling
            else f"there is no file `{path}`"
        )
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.y*ml")], n=1)
        hint = (
            f"did you mean `{path.with_name(near[0])}`?"
            if near
            else "`fsdp-tune recipes copy gpt2_smoke` copies a recipe to start from"
        )
        raise usage_error("recipe-not-found", message, where=where, hint=hint) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise usage_error("recipe-not-readable", f"`{path}` cannot be read: {reason}", where=where) from error
