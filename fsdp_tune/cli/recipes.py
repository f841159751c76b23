"""The commands about recipes: the catalogue (`recipes list|show|copy|new|schema`), `import`, and the chat
templates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

import fsdp_tune
from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.verbs import given, verb
from fsdp_tune.core.command import Argument, Option
from fsdp_tune.jobs.recipe_options import ImportOptions, NewRecipeOptions

if TYPE_CHECKING:
    from fsdp_tune.jobs.answers import TemplateAnswer
    from fsdp_tune.jobs.compare_answer import CompareAnswer
    from fsdp_tune.jobs.import_recipe import Import
    from fsdp_tune.jobs.options import Allowed


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
    from fsdp_tune.recipe.read.catalogue import catalogue, headline

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
        screen.message(text.rstrip("\n"), wraps=False)


@recipes.command("copy")
@verb
def copy_recipe(
    screen: Screen,
    name: Name,
    to: Annotated[
        Path | None, Argument("The file to write [default: ./NAME.yaml].", metavar="[FILE]")
    ] = None,
) -> None:
    """Copy a recipe of the catalogue to a file; an existing file is never replaced.

    \b
    Example:
        fsdp-tune recipes copy gpt2_smoke my_run.yaml
    """
    from fsdp_tune.core import atomic
    from fsdp_tune.jobs.answers import RecipeFileAnswer

    _, text = _read(name)
    target = Path(f"{name}.yaml") if to is None else to / f"{name}.yaml" if to.is_dir() else to
    atomic.check_output_file(target)
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
        screen.message(json.dumps(schema, indent=2), wraps=False)


@recipes.command("new")
@verb
def write_new_recipe(
    screen: Screen,
    model: Annotated[str, Argument("A hub id or a model directory.", metavar="MODEL")],
    data: Annotated[str, Argument("Rows: a file, a directory, a hub id or builtin:NAME.", metavar="DATA")],
    options: NewRecipeOptions,
) -> None:
    """Write the fastest recipe that fits the GPUs, as `plan` ranks them, with a comment at each key.

    \b
    Example:
        fsdp-tune recipes new Qwen/Qwen3-8B chats.jsonl --gpu H100-SXM --num-gpus 8
    """
    from fsdp_tune.jobs.answers import NewRecipeAnswer
    from fsdp_tune.jobs.make_recipe import new_recipe

    made = new_recipe(model, data, options, screen)
    text = made.path.read_text(encoding="utf-8")
    screen.document(NewRecipeAnswer(made.path.stem, str(made.path), text, made.method, made.refused))
    if not screen.json_output:
        screen.result(text)
    screen.message(
        f"wrote {made.path}; look at rows and keys with `fsdp-tune prepare --config {made.path} "
        f"--show 3`, then `fsdp-tune train --config {made.path}`"
    )


def _read(name: str) -> tuple[Path, str]:
    from fsdp_tune.core.errors import usage_error
    from fsdp_tune.recipe.read.catalogue import catalogue, find_recipe

    path = catalogue().get(name)
    if path is None:
        find_recipe(name)  # raises with the closest name
        raise usage_error(
            "recipe-not-found", f"`{name}` is not in the catalogue", hint="`fsdp-tune recipes list` shows it"
        )
    return path, path.read_text(encoding="utf-8")


@verb
def import_config(
    screen: Screen,
    file: Annotated[
        Path,
        Argument(
            "A configuration of axolotl, TRL, LLaMA-Factory, ms-swift, torchtune, NeMo Automodel, Soup, "
            "fms-hf-tuning, Accelerate or DeepSpeed (YAML or JSON), a script or notebook with the command "
            "that starts one of them or transformers' `run_clm.py`, or with the calls of unsloth. Scripts "
            "and notebooks are parsed, never run.",
            metavar="FILE",
        ),
    ],
    options: ImportOptions,
) -> None:
    """Convert a configuration of another trainer into a recipe, and list what becomes of every key of the
    file.

    Each key is kept, converted, computed from several keys, or dropped with the reason. What cannot be
    decided is a
    question: a `# DECIDE:` line in the recipe.

    With --check, exit code 1 means that the comparison found a difference, and 6 that too little could be
    compared. The recipe is written in both cases.

    \b
    Examples:
        fsdp-tune import axolotl.yaml --output recipe.yaml
        fsdp-tune import axolotl.yaml --output recipe.yaml --check
        fsdp-tune import fsdp.yaml --set model.name_or_path=Qwen/Qwen3-8B --set 'data.train=[{path: chats.jsonl}]'
    """  # noqa: E501
    from fsdp_tune.jobs.import_recipe import nothing_to_check

    if options.check and options.output is None:
        raise nothing_to_check()
    found = fsdp_tune.import_recipe(file, **given(replace(options, check=False)))
    if not screen.json_output:
        if options.output is None:
            screen.result(found.imported.text)
        _show(screen, found, options.output)
    if options.check and options.output:  # after the account, which is there when the comparison fails
        found = replace(found, check=_compared(screen, found, options.output, options.allowed))
    if screen.json_output:
        from fsdp_tune.jobs.import_answer import import_answer

        screen.document(import_answer(found))
    if found.check is not None:
        from fsdp_tune.cli.compare import EXIT_CODES, show_comparison

        show_comparison(screen, found.check)
        if found.check.verdict != "equal":
            raise typer.Exit(EXIT_CODES[found.check.verdict])


def _compared(screen: Screen, found: Import, written: Path, allowed: Allowed) -> CompareAnswer:
    # an import without `--check` loads nothing that compares
    from fsdp_tune.jobs.import_check import check_import

    return check_import(
        found.imported,
        written,
        num_gpus=found.num_gpus,
        overrides=found.overrides,
        allowed=allowed,
        observer=screen,
    )


PIPE_WIDTH = 100
"""Columns of the account of keys that is not written to a terminal."""


def _show(screen: Screen, found: Import, output: Path | None) -> None:
    from fsdp_tune.recipe.read.loader import DECIDE

    imported = found.imported
    rows = [
        (row.key, row.fate.value, ": ".join(filter(None, (", ".join(row.as_dict()["to"]), row.reason))))
        for row in imported.rows
    ]
    screen.table(
        f"{imported.path} is a configuration of {imported.tool}",
        ["key", "became", "key here: remark"],
        rows,
        pipe_width=PIPE_WIDTH,
    )
    counts = ", ".join(f"{count} {fate}" for fate, count in imported.counts.items())
    screen.message(f"keys: {len(imported.rows)} ({counts})")
    for key, words in imported.decisions:
        screen.message(f"to decide: {f'{key}: ' if key else ''}{words}")
    for line in found.unchecked:
        screen.message(f"not checked: {line}")
    name = output or "recipe.yaml"
    to_do = (
        f"look for `{DECIDE.strip()}` in it, or answer with `import --set KEY=VALUE`; then "
        if DECIDE in imported.text
        else ""
    )
    screen.message(
        f"{f'wrote {output}; ' if output else ''}{to_do}`fsdp-tune validate --config {name}` checks it"
    )


Tokenizer = Annotated[
    str | None,
    Option(
        "Mark the templates whose tokens this tokenizer has: a hub id, a directory or `builtin:NAME`.",
        metavar="NAME",
    ),
]


PARTS = ("system", "tools", "thinking")


templates = typer.Typer(
    name="templates", help="List and show the chat templates of the package.", invoke_without_command=True
)


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
def show_template(
    screen: Screen, name: Annotated[str, Argument("A name from `fsdp-tune templates`.", metavar="NAME")]
) -> None:
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
        screen.message(text.rstrip("\n"), wraps=False)


def _list(screen: Screen, tokenizer: str | None) -> None:
    from fsdp_tune.data.format.templates import BUNDLED, fitting_templates
    from fsdp_tune.jobs.answers import FittedTemplateAnswer, TemplatesAnswer

    found = TemplatesAnswer([_described(name) for name in BUNDLED])
    columns = ["name", "for", *PARTS, "tokens"]
    if tokenizer is not None:
        from fsdp_tune.data.tokenise.tokenizer import load_encoder
        from fsdp_tune.recipe.schema.recipe import Recipe

        encoder = load_encoder(Recipe.model_validate({"model": {"tokenizer": tokenizer}}))
        fitting = fitting_templates(encoder.encode)
        found = TemplatesAnswer(
            [FittedTemplateAnswer(**given(each), fits=each.name in fitting) for each in found.templates]
        )
        columns.insert(2, "fits")
    screen.document(found)
    if not screen.json_output:
        rows = [[_cell(each.as_dict()[column]) for column in columns] for each in found.templates]
        screen.table("chat templates (data.chat_template: NAME)", columns, rows)


def _cell(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, cast("list[object]", value)))
    return ("yes" if value else "") if isinstance(value, bool) else str(value)


def _described(name: str) -> TemplateAnswer:
    from fsdp_tune.data.format.templates import BUNDLED
    from fsdp_tune.jobs.answers import TemplateAnswer

    template = BUNDLED[name]
    system, tools, thinking = (part in template.parts for part in PARTS)
    return TemplateAnswer(
        name,
        for_=template.purpose,
        system=system,
        tools=tools,
        thinking=thinking,
        tokens=list(template.tokens),
    )
