"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_tune.core.errors import usage_error

ConfigArg = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe: a YAML file, or the name of one in the catalogue (`fsdp-tune recipes list`).",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    str | None, typer.Option("--config", "-c", metavar="RECIPE", help="Same as the argument RECIPE.", show_default=False)
]
SettingsOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="RECIPE",
        help="Take data format, chat template and eval sets from this recipe: a YAML file or a name of the catalogue "
        "[default: those of the run that wrote the model].",
        show_default=False,
    ),
]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the run; overrides `name:` of the recipe.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key: `--set training.learning_rate=1e-4`. Repeatable.",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print exactly one JSON document on stdout, on failure too; everything else goes to stderr.")
]


def chosen_recipe(argument: str | None, option: str | None) -> str:
    """Return the recipe named by the argument or by `--config`. Raises: usage error for none or two."""
    if argument is not None and option is not None and argument != option:
        raise usage_error("two-recipes", f"two recipes are given: `{argument}` and `--config {option}`", hint="give one")
    source = option if option is not None else argument
    if source is None:
        hint = "give a YAML file or a name of the catalogue, such as `--config gpt2_smoke`"
        raise usage_error("no-recipe", "no recipe is given", hint=hint)
    return source


VerifyDataOption = Annotated[
    bool,
    typer.Option("--verify-data", help="Hash all data files, even if their size and times have not changed."),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Honour `model.trust_remote_code` and kernels from the hub: run code from their repositories."
    ),
]
AllowExtensionsOption = Annotated[
    bool,
    typer.Option(
        "--allow-extensions", help="Honour `extensions` and `loader` of the recipe: run code of the installed packages that they name."
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
