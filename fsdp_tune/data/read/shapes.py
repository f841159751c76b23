"""Find out what a file holds that is not rows, and return the command that makes rows of it.

It is read only after a refusal, and as a whole, so that files above a limit get no such hint.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import cast

_MOST_BYTES = 64 << 20
_UNPACKED_BY = {".gz": "gzip -dc", ".zst": "zstd -dc"}
"""Ending of a compressed file → the command that writes its contents to stdout."""
_TAB = "\t"
_COLUMNS = "to_entries as $c | ($c[0].value | keys_unsorted[]) as $i | $c | map({(.key): .value[$i]}) | add"
"""jq's program that makes rows of columns, each a list or an object by index."""
_OF_MESSAGES = frozenset({"role", "from"})
_DELIMITED = (
    "import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(open({name!r}, newline=''), "
    "delimiter={sign!r}))"
)


def shape_hint(
    path: Path | str, kind: str, is_row: Callable[[Collection[str]], bool], split: str = "train"
) -> str | None:
    """Return how to make rows of a file of JSON; None if it holds rows, or is not JSON or too large.

    `is_row`: whether columns fit a format; `split`: the part that is read of a document with several.
    """
    if (
        kind not in ("lines", "json")
        or isinstance(path, str)
        or path.suffix in _UNPACKED_BY
        or path.stat().st_size > _MOST_BYTES
    ):
        return None
    try:
        text = path.read_text(encoding="utf-8-sig")
        value, end = json.JSONDecoder().raw_decode(text.lstrip())
    except (OSError, ValueError, RecursionError):
        return None
    if text.lstrip()[end:].strip():
        is_multi_line = "\n" in text.lstrip()[:end]
        return f"write each object on one line: {_jq('.', path)}" if is_multi_line else None
    if isinstance(value, list):
        return (
            f"it is one list, which `{{path: json, data_files: {path}}}` reads; or rename it to end in .json"
            if kind == "lines"
            else None
        )
    return (
        _hint_of_object(cast("dict[str, object]", value), path, is_row, split)
        if isinstance(value, dict) and value
        else None
    )


def _hint_of_object(
    value: Mapping[str, object], path: Path, is_row: Callable[[Collection[str]], bool], split: str
) -> str | None:
    lists = {
        key: cast("list[object]", each) for key, each in value.items() if isinstance(each, list) and each
    }
    inside = [
        key
        for key, each in lists.items()
        if all(isinstance(item, dict) and not item.keys() & _OF_MESSAGES for item in each)
    ]
    if is_row(value) and not _are_columns(value):
        return None  # a file of one row
    if inside:
        key = split if split in inside else inside[0]
        others = (
            f" (and the same for {', '.join(f'`{each}`' for each in inside if each != key)})"
            if len(inside) > 1
            else ""
        )
        return f"its rows are the list `{key}`: {_jq(f'.[{json.dumps(key)}][]', path)}{others}"
    objects = [cast("dict[str, object]", each) for each in value.values() if isinstance(each, dict)]
    if objects and len(objects) == len(value) and is_row(objects[0]):
        return f"its rows are the values of one object: {_jq('.[]', path)}"
    return f"it holds columns and not rows: {_jq(_COLUMNS, path)}" if _are_columns(value) else None


def _are_columns(value: Mapping[str, object]) -> bool:
    """Return whether every value is a column: a list, or an object by index as pandas writes it, of the same
    length."""
    columns = cast(
        "list[list[object] | dict[str, object]]",
        [each for each in value.values() if isinstance(each, list | dict)],
    )
    items: list[object] = []
    for column in columns:
        items += column.values() if isinstance(column, dict) else column
    shapes = {(isinstance(column, dict), len(column)) for column in columns}
    return (
        len(columns) == len(value) and len(shapes) == 1 and not any(isinstance(item, dict) for item in items)
    )


def delimiter_hint(path: Path | str, sign: str) -> str:
    """Return how to read a table whose fields are separated by another sign than its ending says.

    `path`: a local file, or the URL of one. What is compressed or elsewhere is made a plain file first, whose
    own refusal then says the rest.
    """
    fields = f"its fields are separated by {'tabs' if sign == _TAB else f'`{sign}`'}"
    if isinstance(path, str):
        return f"{fields}: download it, and give its path"
    if path.suffix in _UNPACKED_BY:
        command = f"{_UNPACKED_BY[path.suffix]} {shlex.quote(str(path))}"
        new = path.with_suffix("")
    elif sign == _TAB:
        renamed = shlex.quote(str(path.with_suffix(".tsv")))
        return f"{fields}: `mv {shlex.quote(str(path))} {renamed}`, and read that file"
    else:
        program = _DELIMITED.format(name=str(path), sign=sign)
        quoted = shlex.quote(program) if re.search(r'["$`\\\\]', program) else f'"{program}"'
        command = f"python -c {quoted}"
        new = path.with_name(f"{path.stem}-comma.csv")
    return f"{fields}: `{command} > {shlex.quote(str(new))}`, and read that file"


def _jq(program: str, path: Path) -> str:
    """Return the command that writes rows to a new file."""
    new = path.with_name(f"{path.stem}-rows.jsonl")
    return (
        f"`jq -c {shlex.quote(program)} {shlex.quote(str(path))} > {shlex.quote(str(new))}`, and read "
        "that file"
    )
