"""Commands made of functions: a parameter that is a group of options (`jobs/options.py`) becomes one option
for each of its fields.

`Screen` observes the command's job, and `command` is the only error boundary: a problem becomes lines, a JSON
document and an exit code.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from fsdp_tune.cli.completion import COMPLETERS
from fsdp_tune.cli.failures import exit_code_of, problem_of
from fsdp_tune.cli.terminal import Terminal, write_text
from fsdp_tune.cli.terminal_text import printable
from fsdp_tune.core.command import Argument, Bar, Only, Option
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Problem, usage_error
from fsdp_tune.core.limits import is_panic
from fsdp_tune.core.signals import stop_signals_raise
from fsdp_tune.core.refused_variables import refuse_odd_booleans
from fsdp_tune.core.units import MIB
from fsdp_tune.jobs.observer import Observer, PlanStage

if TYPE_CHECKING:
    from fsdp_tune.cli.progress import LiveBar
    from fsdp_tune.cli.step_view import StepView
    from fsdp_tune.jobs.observer import TrainingInputs, TrainResult
    from fsdp_tune.jobs.options import Allowed
    from fsdp_tune.planner.predict.predict import Plan
    from fsdp_tune.recipe.read.loader import LoadedRecipe
    from fsdp_tune.run.directory import RunDir

# ---- The observer and the error boundary


class Screen(Terminal, Observer):
    """The terminal, as the observer of a command's job."""

    def __init__(self, *, json_output: bool) -> None:
        super().__init__(json_output=json_output)
        self.log_directory: Path | None = None
        """Where the traceback of a bug goes; None: a temporary file."""
        self.verbose = False
        """Whether `train` prints every value and kernel that was chosen."""
        self._steps: StepView | None = None
        self._phase: LiveBar | None = None

    def phase(self, name: str) -> None:
        """Show the phase with its time on a terminal; elsewhere print nothing."""
        if not self.is_live:
            return
        if self._phase is None:
            from fsdp_tune.cli.progress import LiveBar

            self._phase = LiveBar(self, name, None, "")
            self._phase.__enter__()
        self._phase.enter(name)

    def end_phase(self) -> None:
        """Remove the phase that is shown, before something else is."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.__exit__(None, None, None)

    def close(self, problems: Sequence[Problem] = ()) -> None:
        self.end_phase()
        super().close(problems)

    @contextmanager
    def progress(self, label: str, total: int | None, unit: str) -> Iterator[Bar]:
        """Open a bar on a terminal; elsewhere print a line every ten seconds. `total` None: unknown. Bytes
        are shown as MiB and GB/s."""
        from fsdp_tune.cli.progress import ByteBar, LiveBar, PlainBar

        self.end_phase()
        kind = LiveBar if self.is_live else PlainBar
        if unit != "bytes":
            with kind(self, label, total, unit) as bar:
                yield bar
        else:
            with kind(self, label, None if total is None else -(-total // MIB), "MiB") as bar:
                yield ByteBar(bar)

    def planned(self, plan: Plan, stage: PlanStage) -> None:
        from fsdp_tune.cli import plan_view

        shows = {
            "recipe": plan_view.show_plan,
            "ranking": plan_view.show_ranking,
            "scaling": plan_view.show_scaling,
            "measured": plan_view.show_measured,
        }
        shows[stage](self, plan)

    def inputs_checked(self, inputs: TrainingInputs) -> None:
        from fsdp_tune.cli.train_view import show_inputs

        show_inputs(self, inputs, verbose=self.verbose)

    def run_opened(self, run: RunDir, log: Path) -> None:
        self.log_directory = run.logs
        self.log_to(log)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Keep a bar below the lines of the steps while ranks run."""
        from fsdp_tune.cli.progress import LiveBar, SilentBar
        from fsdp_tune.cli.step_view import StepView

        self.end_phase()
        self.stop_waiting()
        bar = (LiveBar if self.is_live else SilentBar)(self, "training", None, "steps")
        self._steps = StepView(self, bar)
        with bar:
            yield

    def metrics(self, line: dict[str, object]) -> None:
        if self._steps is not None:
            self._steps.show(line)

    def position(self, step: int, phase: str, done: int, planned: int) -> None:
        if self._steps is not None:
            self._steps.move(step, phase, done, planned)

    def run_ended(self, result: TrainResult) -> None:
        self.document(result.as_dict())


@contextmanager
def command(json_output: bool) -> Iterator[Screen]:
    """Run a command inside its error boundary: every exception becomes a documented exit code."""
    screen = Screen(json_output=json_output)
    try:
        with stop_signals_raise():
            _refuse_bytes_that_are_no_text()
            refuse_odd_booleans(os.environ)
            yield screen
    except typer.Exit:
        _close(screen)
        raise
    except FsdpTuneError as error:
        _close(screen, error.problems)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        _close(screen, [Problem("interrupted", "interrupted")])
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        _close(screen, [problem_of(error, screen.log_directory)])
        raise typer.Exit(exit_code_of(error)) from None
    else:
        if not _close(screen):
            raise typer.Exit(ExitCode.FAILED)


def _close(screen: Screen, problems: Sequence[Problem] = ()) -> bool:
    """End a command. Returns whether its document, if it has one, could be written: a full disk behind
    `> file` refuses it."""
    try:
        screen.close(problems)
    except OSError as error:
        write_text(sys.stderr, f"error: stdout cannot be written ({error.strerror})\n")
        return False
    return True


def _refuse_bytes_that_are_no_text() -> None:
    """Refuse arguments and a working directory that are not UTF-8: recipes, manifests and cards could not
    name them."""
    hint = "rename the file or directory, or use another one"
    for word in sys.argv[1:]:
        if not _is_text(word):
            raise usage_error("usage", f"the argument `{printable(word)}` is not UTF-8", hint=hint)
    with suppress(OSError):
        if not _is_text(folder := str(Path.cwd())):
            raise usage_error("usage", f"the current directory `{printable(folder)}` is not UTF-8", hint=hint)


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- Options


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
