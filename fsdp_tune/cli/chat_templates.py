"""`templates list|show`: the chat templates of the package, for `data.chat_template`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import given, verb
from fsdp_tune.core.option import Argument, Option

if TYPE_CHECKING:
    from fsdp_tune.jobs.answers import TemplateAnswer

Tokenizer = Annotated[
    str | None,
    Option("Mark the templates whose tokens this tokenizer has: a hub id, a directory or `builtin:NAME`.", metavar="NAME"),
]
PARTS = ("system", "tools", "thinking")

templates = typer.Typer(name="templates", help="List and show the chat templates of the package.", invoke_without_command=True)


@templates.callback()
@verb
def list_by_default(screen: Screen, context: typer.Context, tokenizer: Tokenizer = None) -> None:
    """List and show the chat templates of the package.

    \b
    Example:
        fsdp-tune templates
    """
    if context.invoked_subcommand is None:
        _list(screen, tokenizer)
    else:
        screen.json_output = False  # the document is that of the subcommand


@templates.command("list")
@verb
def list_templates(screen: Screen, tokenizer: Tokenizer = None) -> None:
    """List the chat templates of the package: for which models, and what each renders.

    \b
    Examples:
        fsdp-tune templates list
        fsdp-tune templates list --tokenizer ./my_model
    """
    _list(screen, tokenizer)


@templates.command("show")
@verb
def show_template(screen: Screen, name: Annotated[str, Argument("A name from `fsdp-tune templates`.", metavar="NAME")]) -> None:
    """Print the Jinja text of a chat template.

    \b
    Example:
        fsdp-tune templates show qwen3 > mine.jinja
    """
    from fsdp_tune.data.format.templates import BUNDLED, bundled_text, not_bundled
    from fsdp_tune.jobs.answers import TemplateTextAnswer

    if name not in BUNDLED:
        raise not_bundled(name)
    text = bundled_text(name)
    screen.document(TemplateTextAnswer(**given(_described(name)), text=text))
    if not screen.json_output:
        screen.message(text.rstrip("\n"))


def _list(screen: Screen, tokenizer: str | None) -> None:
    from fsdp_tune.data.format.templates import BUNDLED, fitting_templates
    from fsdp_tune.jobs.answers import FittedTemplateAnswer, TemplatesAnswer

    found = TemplatesAnswer([_described(name) for name in BUNDLED])
    columns = ["name", "for", *PARTS, "tokens"]
    if tokenizer is not None:
        from fsdp_tune.data.tokenise.tokenizer import load_encoder
        from fsdp_tune.recipe.schema import Recipe

        encoder = load_encoder(Recipe.model_validate({"model": {"tokenizer": tokenizer}}))
        fitting = fitting_templates(encoder.encode)
        found = TemplatesAnswer([FittedTemplateAnswer(**given(each), fits=each.name in fitting) for each in found.templates])
        columns.insert(2, "fits")
    screen.document(found)
    if not screen.json_output:
        rows = [[_cell(each.as_dict()[column]) for column in columns] for each in found.templates]
        screen.table("chat templates (data.chat_template: NAME)", columns, rows)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, cast("list[Any]", value)))
    return ("yes" if value else "") if isinstance(value, bool) else str(value)


def _described(name: str) -> TemplateAnswer:
    from fsdp_tune.data.format.templates import BUNDLED
    from fsdp_tune.jobs.answers import TemplateAnswer

    template = BUNDLED[name]
    system, tools, thinking = (part in template.parts for part in PARTS)
    return TemplateAnswer(name, for_=template.purpose, system=system, tools=tools, thinking=thinking, tokens=list(template.tokens))
