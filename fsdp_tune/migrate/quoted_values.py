"""Read a number or a boolean that a file has in quotes as its tool does: converted, or as a text whose
meaning is not known here."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_tune.core.units import ScalarError, parse_plain
from fsdp_tune.migrate.ledger import Ledger, leaves
from fsdp_tune.migrate.open_keys import trials
from fsdp_tune.migrate.read.foreign_file import ForeignFile
from fsdp_tune.migrate.rules import Rules
from fsdp_tune.recipe.key_paths import KeyPath
from fsdp_tune.recipe.outcome import Fate
from fsdp_tune.recipe.read.tool_detection import AXOLOTL, EXAMPLES, LLAMA_FACTORY, TORCHTUNE, TRL
from fsdp_tune.recipe.schema.keys import field_at, field_words
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS

_CONVERTING = frozenset({TRL, AXOLOTL})
"""Their parsers convert text to the type of a key: argparse that of a default, which a key of TRL's file is,
and pydantic."""
_KEEPING = frozenset({LLAMA_FACTORY, TORCHTUNE, EXAMPLES})
"""Text stays text: `HfArgumentParser.parse_dict` and OmegaConf. Of a boolean, `"false"` is then true."""
_ENVIRONMENT: KeyPath = ("launch", "env")


def read_quoted(found: ForeignFile, rules: Rules) -> dict[KeyPath, str]:
    """Convert what the tool converts, in place. Return why each other key has no known value."""
    if found.tool not in _CONVERTING | _KEEPING:
        return {}
    unknown: dict[KeyPath, str] = {}
    ledger = Ledger(found.values, {}, found.tool)
    for path, text in [(path, ledger.value(*path)) for path in leaves(found.values)]:
        plain = _plain(text)
        if plain is None or path in found.computed or not _takes(ledger, path, rules, text, plain):
            continue
        if found.tool in _CONVERTING:
            ledger.value(*path[:-1])[path[-1]] = plain
        else:
            unknown[path] = (
                f"in quotes it is a text, which {found.tool} does not convert: write it without "
                "quotes, or what it should be"
            )
    return unknown


def _plain(text: object) -> int | float | bool | None:
    """Return what a text is without its quotes; None unless that is a number or a boolean."""
    if not isinstance(text, str):
        return None
    try:
        value = parse_plain(text)[0]
    except ScalarError:
        return None
    return value if isinstance(value, int | float) else None


def _takes(ledger: Ledger, path: KeyPath, rules: Rules, text: str, plain: float) -> bool:
    """Return whether a key takes a number or a boolean, and no text: by what its rule makes of each."""
    as_text, as_plain = (next(trials(ledger, path, rules, (value,)), None) for value in (text, plain))
    if as_plain is None or as_text is None:
        return as_plain is not None
    if [(row.fate, row.reason) for row in as_text.rows] != [(row.fate, row.reason) for row in as_plain.rows]:
        return True
    if any(
        type(value) is type(plain) and value == plain and _is_number(target)
        for target, value in _settings(as_plain)
    ):
        return True
    other = next(trials(ledger, path, rules, (not plain,)), None) if isinstance(plain, bool) else None
    return other is not None and _switched(other) != _switched(as_plain)


def _switched(ledger: Ledger) -> tuple[list[Fate], dict[KeyPath, object]]:
    """Return what a boolean switches: the fates of the keys, and the settings other than the boolean
    itself."""
    settings = {
        target: value for target, value in _settings(ledger) if str(value).lower() not in ("true", "false")
    }
    return [row.fate for row in ledger.rows], settings


def _settings(ledger: Ledger) -> Iterator[tuple[KeyPath, object]]:
    """Yield the settings other than variables of the environment, which are text."""
    return (
        (target, setting.value) for target, setting in ledger.settings.items() if target[:2] != _ENVIRONMENT
    )


def _is_number(target: KeyPath) -> bool:
    """Return whether a key of the recipe takes numbers or booleans, and no text."""
    field = field_at(target)
    if field is not None:
        words = field_words(field)
        return ("number" in words or "true or false" in words) and "text" not in words
    known = TRAINING_FIELDS.fields.get(str(target[-1])) if target[0] == "training" else None
    return known is not None and not set(known.types) & {"str"}
