"""Options that several verbs share, so that one word means one thing everywhere, and the recipe that they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, usage_error

if TYPE_CHECKING:
    from fsdp_tune.cli.output import Screen
    from fsdp_tune.core.devices import Machine
    from fsdp_tune.recipe.read.loader import LoadedRecipe
    from fsdp_tune.recipe.read.overrides import OptionSays
    from fsdp_tune.recipe.resolve import Resolution
    from fsdp_tune.recipe.schema import Recipe

ConfigArg = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe: a YAML file, or the name of one in the catalogue (`fsdp-tune recipes list`).",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    str | None, typer.Option("--config", "-c", metavar="RECIPE", help="The same as the argument RECIPE.", show_default=False)
]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the run; overrides `name:` of the recipe.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Overrides one key, by the recipe's own rules: `--set training.learning_rate=1e-4`. Repeatable.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print exactly one JSON document on stdout, on failure too; all talk goes to stderr.")
]


def chosen_recipe(argument: str | None, option: str | None) -> str:
    """The recipe that was named, by the argument or by `--config`; naming none or two is exit 2."""
    if argument is not None and option is not None and argument != option:
        raise usage_error("two-recipes", f"two recipes are named: `{argument}` and `--config {option}`", hint="name one")
    source = option if option is not None else argument
    if source is None:
        raise usage_error(
            "no-recipe", "no recipe is named", hint="give a YAML file or a name of the catalogue, such as `--config gpt2_smoke`"
        )
    return source


VerifyDataOption = Annotated[
    bool,
    typer.Option("--verify-data", help="Hash all data files, also those whose size and times have not changed since they were hashed."),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Honour `model.trust_remote_code`, and kernels from the hub: run code from their repositories."
    ),
]
AllowEnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-env",
        metavar="NAME",
        help="Let `launch.env` set this variable, which is not known to be a plain setting. Repeatable.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the command line lets a recipe run."""

    remote_code: bool = False
    variables: Sequence[str] | None = None
    """Names in `launch.env`; None: the command starts no rank, so that they have no effect."""


def refuse_code(loaded: LoadedRecipe, allowed: Allowed) -> None:
    """A recipe on its own runs no code: the person at the command line has to allow it. Raises: usage error listing everything to allow."""
    from fsdp_tune.recipe.rules.launch import variables_to_allow

    model = loaded.recipe.model
    kernel = model.attn_implementation
    found: list[Problem] = []
    trust = "read that code; if you trust it, add `--trust-remote-code`"
    if model.trust_remote_code and not allowed.remote_code:
        message = f"the recipe wants to run Python code from the repository of {model.name_or_path} (`model.trust_remote_code`)"
        found.append(Problem("remote-code-not-trusted", message, Where(key="model.trust_remote_code"), trust))
    if "/" in kernel and not allowed.remote_code:
        message = f"the recipe wants to run an attention kernel from the hub, `{kernel}` (`model.attn_implementation`)"
        found.append(Problem("remote-code-not-trusted", message, Where(key="model.attn_implementation"), trust))
    for name in variables_to_allow(loaded.recipe.launch.env):
        if allowed.variables is not None and name not in allowed.variables:
            message = f"`launch.env.{name}` is not known to be a plain setting, and a variable can make the ranks run code"
            hint = f"read what it does; if you trust it, add `--allow-env {name}`"
            found.append(Problem("variable-not-allowed", message, Where(key=f"launch.env.{name}"), hint))
    if found:
        raise FsdpTuneError(*found)


@dataclass(frozen=True, slots=True)
class Asked:
    """The recipe that a command was given: as it is written, and as it is for this machine, with nothing left open."""

    loaded: LoadedRecipe
    resolution: Resolution
    machine: Machine

    @property
    def recipe(self) -> Recipe:
        return self.resolution.recipe


def asked_recipe(
    screen: Screen,
    source: str,
    overrides: Sequence[str] | None = None,
    *,
    name: str | None = None,
    options: Sequence[OptionSays] = (),
    starts_here: bool = False,
    needs_trackers: bool = False,
    strict: bool = False,
    unneeded: frozenset[str] = frozenset(),
    allowed: Allowed = Allowed(),
) -> Asked:
    """Loads and resolves. Shows what loading has to say, less what `strict` makes errors of; the resolution's notices are the caller's.
    Refuses a recipe that runs code which the command line does not allow (`refuse_code`).

    A command that `starts_here` needs the devices that the recipe names, and asks torch for those that nothing else shows. Any other
    has a GPU assumed where this machine shows none, and does not wait for torch. `needs_trackers` is for commands that judge whether
    a recipe can train here: `validate` and `train` in all its forms return one verdict.
    """
    from fsdp_tune.core.devices import this_machine
    from fsdp_tune.recipe.read.loader import load_recipe
    from fsdp_tune.recipe.resolve import resolve

    loaded = load_recipe(source, overrides or (), name=name, options=options, unneeded=unneeded)
    screen.positions = loaded.positions
    screen.notices([notice for notice in loaded.notices if not (strict and notice.strict)])
    refuse_code(loaded, allowed)
    wanted = loaded.recipe.launch.device
    machine = this_machine(wanted if starts_here or wanted == "cpu" else "auto")
    assume = None if starts_here else "cuda"
    resolution = resolve(loaded.recipe, machine, cwd=Path.cwd(), assume=assume, needs_trackers=needs_trackers, positions=loaded.positions)
    return Asked(loaded, resolution, machine)
