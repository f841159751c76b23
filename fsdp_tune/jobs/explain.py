"""Explain a recipe key or an error code, from the schema and from docs/reference/messages.tsv and
errors.md."""

from __future__ import annotations

import re
from functools import cache

from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.units import enumerated
from fsdp_tune.core.version import shipped
from fsdp_tune.jobs.answers import CodeExplanation, CodeMessage, KeyExplanation
from fsdp_tune.recipe.schema.keys import all_keys, closest, effect_of, unknown_key_hint
from fsdp_tune.recipe.schema.reference import describe_key, described_names

_INDEX = re.compile(r"\[\d*\]")
_HEADING = re.compile(r"^## ([a-z0-9-]+)\n", re.MULTILINE)
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def explain(word: str) -> KeyExplanation | CodeExplanation:
    """Explain a key or a code. The last part of a key is enough if no other key has it.

    Raises: usage error, with the closest names.
    """
    name, names, codes = _INDEX.sub("", word), described_names(), error_codes()
    if word in codes:
        return codes[word]
    found = [name] if name in names else [each for each in names if each.rpartition(".")[2] == name]
    if len(found) == 1:
        return _key(found[0])
    if found:
        raise usage_error(
            "unknown-word",
            f"several keys are named `{name}`",
            hint=f"give one of {enumerated([f'`{each}`' for each in found])}",
        )
    raise _unknown(name, [*names, *codes])


def _key(name: str) -> KeyExplanation:
    facts, effect = describe_key(name), effect_of(name)
    return KeyExplanation(
        key=name,
        meaning=facts.meaning,
        takes=facts.takes,
        default=facts.default,
        is_required=facts.is_required,
        in_this_release=list(facts.works),
        affects=[str(each.name).lower() for each in effect.affects],
        on_resume=effect.on_resume.value,
        keys=[key.name for key in all_keys() if ".".join(key.path[:-1]) == name],
    )


def _unknown(name: str, known: list[str]) -> FsdpTuneError:
    by_end = {each.rpartition(".")[2]: each for each in reversed(known)} | {each: each for each in known}
    near = closest(name, list(by_end))
    end = name.rpartition(".")[2]
    in_another_section = [each for each in known if "." in name and each.endswith(f".{end}")]
    if len(in_another_section) == 1:
        hint = f"did you mean `{in_another_section[0]}`?"
    else:
        hint = None if "-" in name else unknown_key_hint(name.split("."))
        hint = hint or (f"did you mean `{by_end[near]}`?" if near else None)
    fallback = "docs/reference/recipe.yaml lists the keys of a recipe, docs/reference/messages.tsv the codes"
    return usage_error(
        "unknown-word", f"there is no recipe key and no error code `{name}`", hint=hint or fallback
    )


@cache
def error_codes() -> dict[str, CodeExplanation]:
    """Return each code of docs/reference/messages.tsv with its messages and its text in errors.md, without
    marks of Markdown."""
    texts = _texts()
    return {
        code: CodeExplanation(code, texts.get(code, ""), messages) for code, messages in _messages().items()
    }


def _texts() -> dict[str, str]:
    page = shipped("docs/errors.md", "docs/reference/errors.md").read_text(encoding="utf-8")
    _, *parts = _HEADING.split(page)
    texts = (re.split(r"^# ", text, maxsplit=1, flags=re.MULTILINE)[0] for text in parts[1::2])
    return {code: _LINK.sub(r"\1", text).strip() for code, text in zip(parts[::2], texts, strict=True)}


def _messages() -> dict[str, list[CodeMessage]]:
    table = shipped("docs/messages.tsv", "docs/reference/messages.tsv").read_text(encoding="utf-8")
    found: dict[str, list[CodeMessage]] = {}
    for line in table.splitlines()[1:]:
        code, message, hint = line.split("\t")
        messages = found.setdefault(code, [])
        if hint or message != "…":  # a message that only the run decides
            messages.append(CodeMessage(message, hint or None))
    return found
