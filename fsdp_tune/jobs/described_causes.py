"""The cause of a first difference in words, with what to type to make it vanish."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from fsdp_tune.comparison.causes import DifferentKey, yaml_value
from fsdp_tune.core.secrets import MASK
from fsdp_tune.jobs.compare_answer import Cause


def cause_of_keys(
    keys: list[DifferentKey],
    settings: Mapping[str, object],
    sides: tuple[str, str],
    ignored: Mapping[str, bool],
) -> Cause:
    """Return the cause of a difference that vanishes with the values of one side's `keys` in the other.

    `settings`: as `--set` takes them, None for a key that is not written. `sides`: whose values, and where.
    `ignored`: options of the kept side that its tool does not read, and whether the other side has the values
    that they give a recipe.
    """
    kept, changed = sides
    named = ", ".join(f"`{key.key}`" for key in keys)
    text = f"{named}: with {kept}'s value{'s' if len(keys) > 1 else ''} in {changed} the difference vanishes"
    had, others = ([option for option, has in ignored.items() if has is wanted] for wanted in (True, False))
    text = (
        f"{named}: {changed} has it from {', '.join(had)}; with {kept}'s value the difference vanishes"
        if had
        else text
    )
    text += "".join(f"; {kept} is given {option}" for option in others)
    options = " ".join(
        f"--set {shlex.quote(f'{name}={yaml_value(value)}')}"
        for name, value in settings.items()
        if value is not None
    )
    unset = ", ".join(f"`{name}`" for name, value in settings.items() if value is None)
    ways = [*([f"`{options}`"] if options else []), *([f"a recipe without {unset}"] if unset else [])]
    hint = (
        None
        if MASK in options
        else f"{' and '.join(ways)} gives {changed} the numbers of {kept} at this stage"
    )
    return Cause(keys, {}, is_shown=True, text=text, hint=hint)


def cause_in_tool(
    tool: str, name: str, options: Mapping[str, object], open_decisions: Sequence[str]
) -> Cause:
    """Return the cause of a difference from a configuration that no recipe shows: its `options` without which
    it vanishes, if any."""
    if not options:
        text = "; ".join(
            [
                f"no key: {tool} computes this otherwise than the recipe that `import` makes of {name}",
                *open_decisions,
            ]
        )
        return Cause([], {}, is_shown=False, text=text, hint=None)
    named = ", ".join(f"`{key}: {yaml_value(value)}`" for key, value in options.items())
    text = f"{named} of {name}: without it {tool} gives what the other side has"
    return Cause([], {}, is_shown=True, text=text, hint=None)


def cause_of_versions(
    stage: str, versions: dict[str, list[str | None]], keys: Sequence[DifferentKey]
) -> Cause:
    """Return the cause of a difference that vanishes with A's interpreter, and with A's values of `keys`."""
    named = (
        ", ".join(f"{name} {a} / {b}" for name, (a, b) in versions.items())
        or "equal, so it is something else of the interpreter"
    )
    also = f"; and `{'`, `'.join(key.key for key in keys)}`" if keys else ""
    hint = None
    if stage == "defaults":
        hint = (
            "a tool that names no dtype trains in another one: `torch_dtype`/`dtype` decides; a recipe "
            "here always has `model.dtype`"
        )
    text = f"versions: {named}{also}: with A's interpreter{' and values' if keys else ''} B gives the same"
    return Cause(list(keys), versions, is_shown=True, text=text, hint=hint)
