"""Read options from the words of a command."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.units import ScalarError, parse_plain
from fsdp_tune.migrate.read.shell_script import Unexpanded
from fsdp_tune.migrate.tool_keys import is_default_of

SWITCHES = frozenset(
    {
        "multi_gpu",
        "standalone",
        "use_fsdp",
        "use_deepspeed",
        "no_python",
        "module",
        "m",
        "no_local_rank",
        "cpu",
    }
)
"""Options of launchers that take no value, before the name of a script."""


def without_negations(options: dict[str, object], tool: str | None) -> dict[str, object]:
    """Return the options with `--no_NAME` as `NAME: false`, which HfArgumentParser has for each key that is
    true by default."""
    negations = {
        name: name[3:]
        for name, value in options.items()
        if name.startswith("no_")
        and value is True
        and name[3:] not in options
        and is_default_of(tool or "", name[3:], True)
    }
    return {
        negations.get(name, name): value if name not in negations else False
        for name, value in options.items()
    }


def torchtune_options(words: list[str]) -> dict[str, object]:
    """Return the words after the recipe's name in `tune run`: `--config FILE`, and `key.inner=value` as in
    OmegaConf.

    Raises: usage error for a key that is given twice.
    """
    values: dict[str, object] = {}
    for before, word in itertools.pairwise(["", *words]):
        if before == "--config":
            values["config"] = word
        elif word.startswith("--config="):
            values["config"] = word.partition("=")[2]
        elif "=" in word and not word.startswith("-"):
            name, _, text = word.partition("=")
            _refuse_second(name, values, name)
            values[name] = part_of(word, text)
        elif word.startswith("~"):
            values[word[1:]] = None
    return values


def options_of(words: list[str], *, is_launcher: bool) -> dict[str, object]:
    """Return the options: `--name value`, `--name=value`, `--name a b`, `--name` alone, which is true, and
    `name=value` of a program.

    The other words that are no value of an option are left out, except a file of options, as
    `llamafactory-cli train FILE` takes it. `--` ends the values of an option. An option of a launcher has one
    value at most.

    Raises: usage error for an option that is given twice.
    """
    values: dict[str, list[object]] = {}
    name: str | None = None
    for word in words:
        if word == "--":
            name = None
        elif word.startswith("-") and not _is_number(word):
            raw, sign, value = word.lstrip("-").partition("=")
            name = raw.replace("-", "_")
            _refuse_second(name, values, f"--{raw}")
            values[name] = [part_of(word, value)] if sign else []
            if sign or (is_launcher and name in SWITCHES):
                name = None
        elif name is not None:
            values[name].append(_scalar(word))
            name = None if is_launcher else name
        elif not is_launcher and "=" in word:
            raw, _, value = word.partition("=")
            _refuse_second(raw, values, raw)
            values[raw] = [part_of(word, value)]
        elif not is_launcher and word.endswith((".yaml", ".yml", ".json")):
            _refuse_second("config", values, "config")
            values["config"] = [word]
    return {
        name: True if not parts else parts[0] if len(parts) == 1 else parts for name, parts in values.items()
    }


def _refuse_second(name: str, values: Mapping[str, object], shown: str) -> None:
    """Raises: usage error for an option that is there already."""
    if name in values:
        raise usage_error("duplicate-key", f"`{shown}` is given twice", hint="keep one of them")


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-[0-9.]+(e[+-]?[0-9]+)?", word, re.IGNORECASE) is not None


def part_of(word: str, text: str) -> object:
    """Return the value in the part of a word after its `=`."""
    return Unexpanded(text, word.why) if isinstance(word, Unexpanded) else _scalar(text)


def _scalar(text: str) -> Any:
    """Return a value as the shell's text is read by argparse: numbers, booleans, JSON, else text."""
    if isinstance(text, Unexpanded):
        return text
    try:
        return parse_plain(text)[0]
    except ScalarError:
        return text
