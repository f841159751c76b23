"""The screen of a command, which observes its job, and the only error boundary: a problem becomes lines, a
JSON document and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fsdp_tune.cli.failures import exit_code_of, problem_of
from fsdp_tune.cli.terminal import Terminal, write_text
from fsdp_tune.cli.terminal_text import printable
from fsdp_tune.core.command import Bar
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Problem, usage_error
from fsdp_tune.core.limits import is_panic
from fsdp_tune.core.refused_variables import refuse_odd_booleans
from fsdp_tune.core.signals import StoppedBySignal, stop_signals_raise
from fsdp_tune.core.units import MIB
from fsdp_tune.jobs.observer import Observer, PlanStage

if TYPE_CHECKING:
    from fsdp_tune.cli.progress import LiveBar
    from fsdp_tune.cli.step_view import StepView
    from fsdp_tune.jobs.observer import TrainingInputs, TrainResult
    from fsdp_tune.planner.predict.predict import Plan
    from fsdp_tune.run.directory import RunDir


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
    except (FsdpTuneError, StoppedBySignal) as error:
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
