"""Commands made of functions: a parameter that is a group of options (`jobs/options.py`) becomes one option
for each of its fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from fsdp_tune.cli.completion import COMPLETERS
from fsdp_tune.cli.screen import command
from fsdp_tune.core.command import Argument, Only, Option
from fsdp_tune.core.errors import usage_error

if TYPE_CHECKING:
    from fsdp_tune.jobs.options import Allowed
    from fsdp_tune.recipe.read.loader import LoadedRecipe

Typed = Mapping[str, Any]
"""Parameter of the command line → what was typed."""
Made = tuple[list[inspect.Parameter], Callable[[Typed], object]]
"""Parameters of the command line for one argument of a function, and what makes the argument of their
values."""
JSON = Option(
    "Print exactly one JSON document on stdout, on failure too; everything else goes to stderr.",
    flags=("--json",),
)


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of `function`, which gets the command's Screen and then its arguments, inside the error
    boundary.

    A parameter with an `Option`, and each such field of one that is a dataclass, is an option; `--json` is
    added.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    made = {each.name: _argument(each.name, hints[each.name], each.default) for each in parameters}
    json_parameters, _ = _option("json_output", bool, JSON, False)

    def run(*, json_output: bool, **typed: object) -> None:
        with command(json_output) as screen:
            function(screen, **{name: make(typed) for name, (_, make) in made.items()})

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    every = [*(parameter for own, _ in made.values() for parameter in own), *json_parameters]
    vars(run)["__signature__"] = inspect.Signature(every)
    return run


def _argument(name: str, hint: object, default: object) -> Made:
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    option = next((each for each in extras if isinstance(each, Option)), None)
    if option is not None:
        return _option(name, kind, option, default)
    group = next((each for each in (kind, *extras) if isinstance(each, type) and is_dataclass(each)), None)
    if group is None:  # Typer's context
        return [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint)
        ], lambda typed: typed[name]
    names = next((each.names for each in extras if isinstance(each, Only)), None)
    hints = get_type_hints(group, include_extras=True)
    inner = {
        each.name: _argument(each.name, hints[each.name], each.default)
        for each in fields(group)
        if (get_origin(hints[each.name]) is Annotated or is_dataclass(hints[each.name]))
        and (names is None or each.name in names)
    }

    def make(typed: Typed) -> object:
        values = {name: make_field(typed) for name, (_, make_field) in inner.items()}
        return (
            group(**values)
            if kind is group
            else {name: value for name, value in values.items() if value is not None}
        )

    return [parameter for own, _ in inner.values() for parameter in own], make


def _option(name: str, kind: Any, option: Option, default: object) -> Made:
    is_required = default in (MISSING, inspect.Parameter.empty)
    is_repeatable = get_origin(kind) in (Sequence, tuple, list)
    if option.read is not None:
        kind, shown = option.typed | None, False if option.typed is bool else None
    elif is_repeatable:
        kind, shown = list[get_args(kind)[0]], None
    else:
        shown = default
    declare = typer.Argument if isinstance(option, Argument) else typer.Option
    flags = () if isinstance(option, Argument) else option.flags or (f"--{name.replace('_', '-')}",)
    info = declare(
        ... if is_required else shown,
        *flags,
        help=option.help,
        metavar=option.metavar,
        min=option.minimum,
        autocompletion=COMPLETERS.get(option.metavar or ""),
    )

    def make(typed: Typed) -> object:
        value = typed[name]
        if option.read is not None:
            return default if value in (None, False, []) else option.read(value)
        return tuple(value or ()) if is_repeatable else value

    return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)], make


def given(options: Any) -> dict[str, Any]:
    """Return the fields of a group of options, for a job that takes them as keywords."""
    return {each.name: getattr(options, each.name) for each in fields(options)}


Overrides = Annotated[
    Sequence[str],
    Option(
        "Override a key: `--set training.learning_rate=1e-4`. Repeatable.",
        flags=("--set",),
        metavar="KEY=VALUE",
    ),
]


@dataclass(frozen=True, slots=True)
class RecipeArgument:
    """The recipe of a command, with its overrides."""

    recipe: Annotated[
        str | None,
        Argument(
            "A recipe: a YAML file, or the name of one in the catalogue (`fsdp-tune recipes list`).",
            metavar="RECIPE",
        ),
    ] = None
    config: Annotated[
        str | None, Option("Same as the argument RECIPE.", flags=("--config", "-c"), metavar="RECIPE")
    ] = None
    overrides: Overrides = ()
    name: str | None = None

    def load(self, *, unneeded: frozenset[str] = frozenset(), allowed: Allowed | None = None) -> LoadedRecipe:
        """Read the recipe that the argument or `--config` names. `allowed`: of a command that starts ranks,
        or checks whether it could.

        Raises: usage error for none or two.
        """
        import fsdp_tune

        if allowed is not None:
            from fsdp_tune.jobs.recipes import load_checked

            return load_checked(self.source(), self.overrides, allowed, name=self.name, unneeded=unneeded)
        return fsdp_tune.load_recipe(self.source(), self.overrides, name=self.name, unneeded=unneeded)

    def source(self) -> str:
        """Return what the argument or `--config` names. Raises: usage error for none or two."""
        if self.recipe is not None and self.config is not None and self.recipe != self.config:
            message = f"two recipes given: `{self.recipe}` and `--config {self.config}`"
            raise usage_error("two-recipes", message, hint="pass only one of them")
        source = self.config if self.config is not None else self.recipe
        if source is None:
            hint = "pass a YAML file or the name of a catalogue recipe, such as `--config gpt2_smoke`"
            raise usage_error("no-recipe", "no recipe given", hint=hint)
        return source


@dataclass(frozen=True, slots=True)
class NamedRecipe(RecipeArgument):
    """The recipe of a command for which the name of the run matters."""

    name: Annotated[str | None, Option("Name of the run; overrides `name:` of the recipe.")] = None
