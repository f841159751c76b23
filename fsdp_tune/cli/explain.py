"""`explain`: the documentation of a recipe key or an error code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.verbs import verb
from fsdp_tune.core.command import Argument

if TYPE_CHECKING:
    from fsdp_tune.jobs.answers import CodeExplanation, KeyExplanation


_SHOWN = 10
"""Messages of a code on the terminal."""


_ON_RESUME = {
    "free": "may change when a run is resumed",
    "trajectory": "may change when a run is resumed; the change is reported, since the next steps compute "
    "something else",
    "refused": "may not change when a run is resumed: the completed steps depend on it",
}


@verb
def explain(
    screen: Screen,
    word: Annotated[
        str,
        Argument(
            "A key, such as `training.learning_rate` or `learning_rate`, or the code of an error.",
            metavar="KEY|CODE",
        ),
    ],
) -> None:
    """Explain a recipe key (meaning, values, default, effects) or the code of an error or notice.

    \b
    Examples:
        fsdp-tune explain data.packing
        fsdp-tune explain data-changed
    """
    from fsdp_tune.jobs.answers import CodeExplanation
    from fsdp_tune.jobs.explain import explain as explanation_of

    found = explanation_of(word)
    screen.document(found)
    if isinstance(found, CodeExplanation):
        _show_code(screen, found)
    else:
        _show_key(screen, found)


def _show_code(screen: Screen, found: CodeExplanation) -> None:
    screen.message(found.code)
    if found.text:
        screen.message(f"\n{found.text}")
    for each in found.messages[:_SHOWN]:
        screen.message(f"\nmessage: {each.message}" + (f"\nhint:    {each.hint}" if each.hint else ""))
    if len(found.messages) > _SHOWN:
        screen.message(f"\nand {len(found.messages) - _SHOWN} more messages, which `--json` lists")


def _show_key(screen: Screen, found: KeyExplanation) -> None:
    default = (
        "none: the key is required" if found.is_required else json.dumps(found.default, ensure_ascii=False)
    )
    works = [json.dumps(value) for value in found.in_this_release]
    screen.message(found.key)
    if found.meaning:
        screen.message(f"\n{found.meaning}\n")
    if found.keys:
        screen.message(f"keys:     {', '.join(key.rpartition('.')[2] for key in found.keys)}", indent=10)
    else:
        screen.message(
            f"values:   {found.takes}" + (f"; in this release: {', '.join(works)}" if works else ""),
            indent=10,
        )
        screen.message(f"default:  {default}", indent=10)
        screen.message(f"affects:  {', '.join(found.affects) or 'nothing that is computed'}", indent=10)
        screen.message(f"resume:   {_ON_RESUME[found.on_resume]}", indent=10)
