"""The Typer app: one verb a file. Importing this module must stay cheap; engines are imported inside the verbs."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fsdp_tune import __version__
from fsdp_tune.cli.cache import cache
from fsdp_tune.cli.env import env
from fsdp_tune.cli.merge_checkpoint import merge_checkpoint
from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.plan import plan
from fsdp_tune.cli.prepare import prepare
from fsdp_tune.cli.recipes import recipes
from fsdp_tune.cli.rehearse import rehearse
from fsdp_tune.cli.status import status
from fsdp_tune.cli.train import train
from fsdp_tune.cli.validate import validate
from fsdp_tune.core.errors import ExitCode, Problem


class Commands(TyperGroup):
    """Typer prints its own usage errors, in its own way and as text even under `--json`; here they look like all others."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except typer.TyperException as error:
            arguments = list(extra.get("args") or sys.argv[1:])
            Screen(json_output="--json" in arguments).close([_usage_problem(error)])
            code = ExitCode.USAGE
        except (typer.Abort, KeyboardInterrupt):
            code = ExitCode.INTERRUPTED
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


class LaunchingCommand(TyperCommand):
    """Keeps what follows `--` apart from the command's own words: it is for accelerate, and RECIPE is optional."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            split = args.index("--")
            ctx.meta["launcher_arguments"] = tuple(args[split + 1 :])
            args = args[:split]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ACCELERATE ARGS]"]


def _usage_problem(error: typer.TyperException) -> Problem:
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path} --help`" if context is not None else None
    message = error.format_message().rstrip(".")
    return Problem("usage", message[:1].lower() + message[1:], hint=hint)


app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fsdp-tune {__version__}")
        raise typer.Exit


@app.callback()
def fsdp_tune(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Fine-tune causal language models with PyTorch FSDP: one YAML recipe, and proof that the run is what it says.

    \b
    Example: train the embedded recipe on two CPU ranks, without network:
        fsdp-tune train --config gpt2_smoke
    """


app.command(cls=LaunchingCommand, short_help="Train as a recipe says, then merge.")(train)
app.command(short_help="Check a recipe without GPUs; all mistakes at once.")(validate)
app.command(short_help="Memory, time and the best recipe, before the first GPU-hour.")(plan)
app.command(short_help="Tokenise and pack once; show what is trained.")(prepare)
app.command(short_help="The whole of a run on CPU ranks, with the model shrunk.")(rehearse)
app.command(short_help="Sharded checkpoint → ordinary model directory.")(merge_checkpoint)
app.command(short_help="How a run stands.")(status)
app.command(short_help="Versions, devices, known-bad combinations.")(env)
app.add_typer(cache, no_args_is_help=False)
app.add_typer(recipes, no_args_is_help=False)  # a missing command is an error like any other, also under --json


def main() -> None:
    # Children take modules from the installation alone. Processes that multiprocessing spawns (tokenising, its resource tracker) would
    # otherwise import a `selectors.py` or `pickle.py` of the working directory.
    os.environ["PYTHONSAFEPATH"] = "1"
    app()
