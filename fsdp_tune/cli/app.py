"""The Typer app: one function a command. Importing this module must stay cheap; commands import their jobs
when they run."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fsdp_tune.cli.chat import chat, generate
from fsdp_tune.cli.compare import compare
from fsdp_tune.cli.completion import split_words
from fsdp_tune.cli.env import cache, doctor, env
from fsdp_tune.cli.explain import explain
from fsdp_tune.cli.prepare import prepare
from fsdp_tune.cli.recipes import import_config, recipes, templates
from fsdp_tune.cli.runs import evaluate, merge_checkpoint, push, report, status
from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.submit import submit
from fsdp_tune.cli.train import plan, rehearse, train, validate
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Problem, usage_error
from fsdp_tune.core.import_path import leave_out_working_directory
from fsdp_tune.core.inherited_state import continue_in_utf8, open_standard_streams, reset_inherited
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.core.units import shown
from fsdp_tune.core.version import __version__

INTERRUPT_AGAIN_SECONDS = 0.01
"""Until a dropped signal is repeated. `sys.unraisablehook` still runs in the finaliser, where an exception
would be dropped again."""
_LONG_WORD = re.compile(r"\S{200,}")
MISSING_COMMAND = "Missing command."
"""Typer's message for `fsdp-tune`, `fsdp-tune cache` and other groups without a command."""


MAY_BE_EMPTY = ("--system",)
"""Options whose value is a text, not a name or a path."""


class Commands(TyperGroup):
    """Prints usage errors like all other errors. Typer itself prints them as text, even with `--json`."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> object:
        arguments = list(extra.get("args") or sys.argv[1:])
        try:
            _refuse_empty_words(arguments)
            code = super().main(*args, standalone_mode=False, **extra)
        except typer.TyperException as error:
            context = getattr(error, "ctx", None)
            if (
                context is not None
                and error.format_message() == MISSING_COMMAND
                and "--json" not in arguments
            ):
                is_bare = context.parent is None  # a first look at the program
                typer.echo(context.get_help(), err=not is_bare)
                code = 0 if is_bare else ExitCode.USAGE
            else:
                Screen(json_output="--json" in arguments).close([_usage_problem(error)])
                code = ExitCode.USAGE
        except (FsdpTuneError, StoppedBySignal) as error:
            Screen(json_output="--json" in arguments).close(error.problems)
            code = error.exit_code
        except (typer.Abort, KeyboardInterrupt):
            code = ExitCode.INTERRUPTED
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def _refuse_empty_words(arguments: Sequence[str]) -> None:
    """Refuse an empty word: mostly an unset variable of a script, and as a path the current directory.
    Raises: usage error.

    Words after `--` are for accelerate.
    """
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for before, word in zip(["", *words], words, strict=False):
        is_option = re.fullmatch(r"--[a-z-]+=", word) is not None
        option = word[:-1] if is_option else before if before.startswith("-") else None
        if (is_option or not word) and option not in MAY_BE_EMPTY:
            message = f"the value of `{option}` is empty" if option is not None else "an argument is empty"
            raise usage_error(
                "usage", message, hint="give a value; a variable of the shell that is not set is empty"
            )


class LaunchingCommand(TyperCommand):
    """Keeps the arguments as typed, and separates those after `--`, which are for accelerate."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        split = args.index("--") if "--" in args else len(args)
        ctx.meta["arguments"] = {
            "command": (ctx.info_name, *args),
            "launcher_arguments": tuple(args[split + 1 :]),
        }
        return super().parse_args(ctx, args[:split])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ACCELERATE ARGS]"]


def _usage_problem(error: typer.TyperException) -> Problem:
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path} --help`" if context is not None else None
    message = _LONG_WORD.sub(lambda match: shown(match[0]), error.format_message().rstrip("."))
    return Problem("usage", message[:1].lower() + message[1:], hint=hint)


app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"fsdp-tune {__version__}")
        raise typer.Exit


@app.callback()
def fsdp_tune(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Fine-tune causal language models with PyTorch FSDP from one YAML recipe, and check that the run matches
    it.

    \b
    Example: train a small GPT-2 on two CPU ranks, without GPU or network:
        fsdp-tune train --config gpt2_smoke
    """


app.command(cls=LaunchingCommand, short_help="Train a recipe, then merge the result.")(train)
app.command(short_help="Check a recipe without GPUs and report all mistakes.")(validate)
app.command("import", short_help="Convert a configuration of another trainer into a recipe.")(import_config)
app.command("migrate", hidden=True, short_help="Same as `import`.")(import_config)
app.command(short_help="Predict memory and time, and rank recipes.")(plan)
app.command(short_help="Tokenise and pack the data; show what is trained.")(prepare)
app.command(short_help="Rehearse a full run on CPU ranks with a scaled-down model.")(rehearse)
app.command(short_help="Merge a sharded checkpoint into a model directory.")(merge_checkpoint)
app.command(short_help="Upload the model of a run to the Hugging Face hub.")(push)
app.command(short_help="Score a model on rows of data, and compare it with its base.")(evaluate)
app.command(short_help="Talk to the model of a run.")(chat)
app.command(short_help="Answer the prompts of a file with a model.")(generate)
app.command(short_help="Find the first difference between two recipes or runs, and its cause.")(compare)
app.command(short_help="Show the status of a run.")(status)
app.command(short_help="Write a page about one or several runs: curves, events, samples, recipe.")(report)
app.command(short_help="Explain a recipe key or an error code.")(explain)
app.command(short_help="Show versions, devices and known-bad combinations.")(env)
app.command(short_help="Check the machines before a run.")(doctor)
app.add_typer(submit, no_args_is_help=False)
app.add_typer(cache, no_args_is_help=False)
app.add_typer(templates, no_args_is_help=False)
# a missing command is reported like any other error, also with --json
app.add_typer(recipes, no_args_is_help=False)


OBJECTS_UNTIL_COLLECTION = (200_000, 20, 10)
"""`gc.set_threshold` of the commands. At Python's own 700 objects, the collections while libraries are
imported take a tenth of a second, and find nothing. Ranks keep Python's own."""


def main() -> None:
    gc.set_threshold(*OBJECTS_UNTIL_COLLECTION)
    continue_in_utf8()
    reset_inherited()
    open_standard_streams()
    leave_out_working_directory()
    sys.unraisablehook = _interrupt_again
    with split_words(os.environ):
        app()


def _interrupt_again(dropped: sys.UnraisableHookArgs) -> None:
    """Repeat a signal that arrived while Python ran a finaliser, whose exceptions are dropped."""
    if isinstance(dropped.exc_value, StoppedBySignal):
        number = dropped.exc_value.number
    elif dropped.exc_type is KeyboardInterrupt:
        number = signal.SIGINT
    else:
        sys.__unraisablehook__(dropped)
        return
    threading.Timer(
        INTERRUPT_AGAIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, number)
    ).start()
