"""`templates list|show`: the chat templates of the package, for `data.chat_template`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fsdp_tune.cli.options import JsonOption
from fsdp_tune.cli.output import command

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A name from `fsdp-tune templates`.", show_default=False)]

PARTS = ("system", "tools", "thinking")

templates = typer.Typer(name="templates", help="List and show the chat templates of the package.", invoke_without_command=True)


@templates.callback()
def list_by_default(context: typer.Context, json_output: JsonOption = False) -> None:
    """List and show the chat templates of the package.

    \b
    Example:
        fsdp-tune templates
    """
    if context.invoked_subcommand is None:
        _list(json_output)


@templates.command("list")
def list_templates(json_output: JsonOption = False) -> None:
    """List the chat templates of the package: for which models, and what each renders.

    \b
    Example:
        fsdp-tune templates list
    """
    _list(json_output)


@templates.command("show")
def show_template(name: NameArgument, json_output: JsonOption = False) -> None:
    """Print the Jinja text of a chat template.

    \b
    Example:
        fsdp-tune templates show qwen3 > mine.jinja
    """
    with command(json_output) as screen:
        from fsdp_tune.data.format.templates import BUNDLED, bundled_text, not_bundled

        if name not in BUNDLED:
            raise not_bundled(name)
        text = bundled_text(name)
        screen.document(_described(name) | {"text": text})
        if not json_output:
            screen.message(text.rstrip("\n"))


def _list(json_output: bool) -> None:
    with command(json_output) as screen:
        from fsdp_tune.data.format.templates import BUNDLED

        found = [_described(name) for name in BUNDLED]
        screen.document({"templates": found})
        if not json_output:
            rows = [
                [each["name"], each["for"], *("yes" if each[part] else "" for part in PARTS), " ".join(each["tokens"])] for each in found
            ]
            screen.table("chat templates (data.chat_template: NAME)", ["name", "for", *PARTS, "tokens"], rows)


def _described(name: str) -> dict[str, Any]:
    from fsdp_tune.data.format.templates import BUNDLED

    template = BUNDLED[name]
    parts = {part: part in template.parts for part in PARTS}
    return {"name": name, "for": template.purpose, **parts, "tokens": list(template.tokens)}
