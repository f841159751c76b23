"""Write a program for jq that makes the prompts of axolotl's `type: {format: …}` part of the rows: no key of
a recipe has such a format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_FIELDS = ("system", "instruction", "input", "output")


def prompt_program(prompter: Mapping[str, object]) -> str | None:
    """Return the program; None if a format has more than the names of its fields in braces."""
    fields = {name: str(prompter.get(f"field_{name}") or name) for name in _FIELDS}
    with_input = _text(str(prompter["format"]), fields)
    without = _text(str(prompter.get("no_input_format") or prompter["format"]), fields)
    system = str(prompter.get("system_prompt") or "")
    head = _text(
        str(prompter.get("system_format") or "{system}").replace("{system}", system) if system else "", fields
    )
    if with_input is None or without is None or head is None:
        return None
    key = _key(fields["input"])
    prompt = (
        with_input
        if with_input == without
        else f'(if ({key} // "") == "" then {without} else {with_input} end)'
    )
    prompt = prompt if head == '""' else f"({head} + {prompt})"
    return f"{{prompt: {prompt}, completion: {_key(fields['output'])}}}"


def _text(format_: str, fields: Mapping[str, str]) -> str | None:
    """Return a text of jq that has the value of a field in place of its name in braces."""
    parts = re.split(r"\{(\w*)\}", format_)
    if any(name not in fields for name in parts[1::2]):
        return None
    texts = [json.dumps(part, ensure_ascii=False)[1:-1] for part in parts[::2]]
    values = [f'\\({_key(fields[name])} // "")' for name in parts[1::2]] + [""]
    return f'"{"".join(text + value for text, value in zip(texts, values, strict=True))}"'


def _key(column: str) -> str:
    return f".{column}" if re.fullmatch(r"[A-Za-z_]\w*", column) else f".[{json.dumps(column)}]"
