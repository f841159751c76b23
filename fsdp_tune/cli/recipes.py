"""`recipes list|show|copy|schema`: the catalogue in the package, and the JSON Schema for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import verb
from fsdp_tune.core.option import Argument

Name = Annotated[str, Argument("A name from `fsdp-tune recipes list`.", metavar="NAME")]

recipes = typer.Typer(name="recipes", help="Show and copy the recipes of the package.", no_args_is_help=True)


@recipes.command("list")
@verb
def list_recipes(screen: Screen) -> None:
    """List the catalogue: each name with its purpose.

    \b
    Example:
        fsdp-tune recipes list
    """
    from fsdp_tune.jobs.answers import RecipeLine, RecipesAnswer
    from fsdp_tune.recipe.catalogue import catalogue, headline

    lines = [RecipeLine(name, headline(path), str(path)) for name, path in catalogue().items()]
    screen.document(RecipesAnswer(lines))
    if not screen.json_output:
        screen.table("recipes", ["name", "for"], [[line.name, line.headline] for line in lines])


@recipes.command("show")
@verb
def show_recipe(screen: Screen, name: Name) -> None:
    """Print a recipe of the catalogue with its comments.

    \b
    Example:
        fsdp-tune recipes show llama7b_full_shard
    """
    from fsdp_tune.jobs.answers import RecipeTextAnswer

    path, text = _read(name)
    screen.document(RecipeTextAnswer(name, str(path), text))
    if not screen.json_output:
        screen.message(text.rstrip("\n"))


@recipes.command("copy")
@verb
def copy_recipe(
    screen: Screen, name: Name, to: Annotated[Path | None, Argument("Target [default: ./NAME.yaml].", metavar="[FILE]")] = None
) -> None:
    """Copy a recipe of the catalogue to a file; an existing file is never replaced.

    \b
    Example:
        fsdp-tune recipes copy gpt2_smoke my_run.yaml
    """
    from fsdp_tune.core import atomic
    from fsdp_tune.core.errors import usage_error
    from fsdp_tune.jobs.answers import RecipeFileAnswer

    _, text = _read(name)
    target = Path(f"{name}.yaml") if to is None else to / f"{name}.yaml" if to.is_dir() else to
    if target.exists() or target.is_symlink():
        raise usage_error("output-exists", f"`{target}` already exists", hint="give another file name, or remove it")
    if not target.parent.is_dir():
        raise usage_error("no-directory", f"the directory `{target.parent}` does not exist", hint="create it first")
    atomic.write_file(target, text)
    screen.document(RecipeFileAnswer(name, str(target)))
    screen.message(f"wrote {target}; start it with `fsdp-tune train --config {target}`")


@recipes.command("schema")
@verb
def print_schema(screen: Screen) -> None:
    """Print the JSON Schema of a recipe, for completion and checks in editors.

    \b
    Example:
        fsdp-tune recipes schema > recipe.schema.json
    Then start a recipe with the line:
        # yaml-language-server: $schema=recipe.schema.json
    """
    from fsdp_tune.recipe.schema.reference import json_schema

    schema = json_schema()
    screen.document(schema)
    if not screen.json_output:
        screen.message(json.dumps(schema, indent=2))


def _read(name: str) -> tuple[Path, str]:
    from fsdp_tune.core.errors import usage_error
    from fsdp_tune.recipe.catalogue import catalogue, find_recipe

    path = catalogue().get(name)
    if path is None:
        find_recipe(name)  # raises with the closest name
        raise usage_error("recipe-not-found", f"`{name}` is not in the catalogue", hint="`fsdp-tune recipes list` shows it")
    return path, path.read_text(encoding="utf-8")
