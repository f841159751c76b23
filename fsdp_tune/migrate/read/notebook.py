"""Read the cells of a notebook: its code, and the commands of its shell as a script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from fsdp_tune.core.errors import Where, usage_error

_SHELL_CELL = re.compile(r"%%(?:bash|sh|script\s+(?:ba)?sh)\b")
_FILE_CELL = re.compile(r"%%(?:writefile|file)\s+(-a\s+)?(\S+)\s*$")
_ENVIRONMENT = re.compile(r"%(?:set_)?env\s+([A-Za-z_]\w*)[ =](.*)$")
_COMMAND = re.compile(r"\s*!+\s*(.*)$", re.DOTALL)
_BOUND = re.compile(r"^\s*([A-Za-z_]\w*)\s*(?::[^=]+)?[-+*/|]?=[^=]")
_PYTHON = re.compile(r"(?<![$\\])\{([A-Za-z_][\w.]*)\}")
"""An expression of Python in a command, which IPython replaces."""
_END = "END_OF_CELL"


def code_cells(text: str, path: Path) -> list[str]:
    """Return the sources of the code cells. Raises: usage error for a file that is not a notebook."""
    try:
        cells = json.loads(text)["cells"]
        code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise usage_error(
            "yaml-syntax", "the file is not a notebook: it has no `cells`", where=Where(str(path))
        ) from error
    return [source if isinstance(source, str) else "".join(source) for source in code]


def shell_script(cells: list[str]) -> str:
    """Return the `!` lines, the cells of the shell and the files that cells write as one shell script, in
    their order.

    Each command has a shell of its own, so its variables end with it. A name that Python binds has no value
    in the script.
    """
    return "".join(line for cell in cells for line in _script_of(cell))


def _script_of(cell: str) -> Iterator[str]:
    first, _, rest = cell.lstrip().partition("\n")
    if _SHELL_CELL.match(first):
        yield f"(\n{rest}\n)\n"
    elif match := _FILE_CELL.match(first):
        yield f"cat >{'>' if match[1] else ''} {match[2]} <<'{_END}'\n{rest}\n{_END}\n"
    elif not first.startswith("%%") or first.startswith(("%%capture", "%%time")):
        yield from _lines(cell)


def _lines(cell: str) -> Iterator[str]:
    lines = iter(cell.splitlines())
    for line in lines:
        if match := _COMMAND.match(line):
            command = match[1]
            while command.endswith("\\"):
                command += f"\n{next(lines, '')}"
            expanded = _PYTHON.sub(r"${\1}", command)
            yield f"(\n{expanded}\n)\n"
        elif match := _ENVIRONMENT.match(line):
            yield f"export {match[1]}={_quoted(match[2].strip())}\n"
        elif match := _BOUND.match(line):
            yield f"read {match[1]}\n"


def _quoted(text: str) -> str:
    """Return the value of `%env` as a word of the shell; one with a `$` or `{` is of Python."""
    return '"$(python)"' if re.search(r"[${]", text) else "'" + text.replace("'", "'\\''") + "'"
