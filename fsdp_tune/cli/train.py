"""`train`: validate → prepare → write the run directory → launch → merge. Each step is an engine's; this file is their order."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_tune.cli.options import ConfigArg, ConfigOption, JsonOption, NameOption, SetOption, TrustOption, check_trust, chosen_recipe
from fsdp_tune.cli.output import Screen, command
from fsdp_tune.errors import EXIT_CODE_OF_REASON, ExitCode, ExitReason, FsdpTuneError, Problem

if TYPE_CHECKING:
    from fsdp_tune.data.prepare import Prepared
    from fsdp_tune.launch.accelerate import LaunchPlan
    from fsdp_tune.launch.resume import Start
    from fsdp_tune.launch.verdict import Ended
    from fsdp_tune.recipe.loader import Loaded
    from fsdp_tune.recipe.resolve import Resolution
    from fsdp_tune.recipe.schema import Recipe

ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|never|PATH",
        help="auto: the newest complete checkpoint of the run. PATH: that checkpoint.",
        show_default=False,
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Move a used run directory aside and begin anew.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved recipe, the command and the environment; start and write nothing.")
]
NoStartOption = Annotated[bool, typer.Option("--no-start", help="Write the run directory and print the commands that start it.")]
MachineRankOption = Annotated[
    int | None,
    typer.Option(
        "--machine-rank", metavar="N", help="Which machine this is, 0 being the first; inside `srun` Slurm says it.", show_default=False
    ),
]


def train(
    context: typer.Context,
    recipe: ConfigArg = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    name: NameOption = None,
    resume: ResumeOption = None,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    no_start: NoStartOption = False,
    machine_rank: MachineRankOption = None,
    trust_remote_code: TrustOption = False,
    json_output: JsonOption = False,
) -> None:
    """Fine-tune a model as a recipe says, and merge the result into an ordinary model directory.

    Exit codes: 0 finished, 1 failed, 2 recipe or usage, 3 out of device memory, 4 non-finite, 5 hang or lost rank,
    130 Ctrl-C after saving, 143 saved and stopped. Arguments after `--` go to `accelerate launch`.

    \b
    Examples:
        fsdp-tune train --config gpt2_smoke
        fsdp-tune train my.yaml --set training.learning_rate=1e-4 --resume auto
        fsdp-tune train llama7b_full_shard --dry-run
    """
    with command(json_output) as screen, stopping_cleanly():
        from fsdp_tune.launch.accelerate import launch_plan, machine_rank_of
        from fsdp_tune.run_dir import RunDir

        loaded, resolution = resolved_recipe(screen, chosen_recipe(recipe, config), overrides or [], name, assume=dry_run or no_start)
        check_trust(resolution.recipe, trust_remote_code)
        run = RunDir(Path(resolution.recipe.output_dir))
        starts_here = not (dry_run or no_start)
        rank = machine_rank_of(resolution.recipe, machine_rank, os.environ) if starts_here else machine_rank or 0
        plan = launch_plan(
            resolution.recipe,
            run,
            machine_rank=rank,
            extra=context.meta.get("launcher_arguments", ()),
            unknown_address=None if starts_here else "FIRST_MACHINE",
        )
        if dry_run:
            from fsdp_tune.cli.train_view import show_dry_run

            show_dry_run(screen, resolution, plan)
            return
        job = Job(screen, loaded, resolution, plan)
        if rank > 0:
            job.follow()
        else:
            job.lead(resume, overwrite=overwrite, no_start=no_start)


def resolved_recipe(screen: Screen, source: str, overrides: list[str], name: str | None, *, assume: bool) -> tuple[Loaded, Resolution]:
    """Loads and resolves; `assume` stands in a GPU where this machine has none, for commands that start nothing here."""
    from fsdp_tune.bridge.devices import this_machine
    from fsdp_tune.recipe.loader import load_recipe
    from fsdp_tune.recipe.resolve import resolve

    loaded = load_recipe(source, overrides, name=name)
    screen.notices(loaded.notices)
    machine = this_machine(loaded.recipe.launch.device)
    resolution = resolve(loaded.recipe, machine, cwd=Path.cwd(), assume="cuda" if assume else None, positions=loaded.positions)
    screen.notices(resolution.notices)
    return loaded, resolution


@contextlib.contextmanager
def stopping_cleanly() -> Iterator[None]:
    """A scheduler's signal while no ranks run ends the command through its error boundary; the supervisor has handlers of its own."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  the shape of a handler
        name = signal.Signals(number).name
        raise FsdpTuneError(Problem("stopped", f"stopped by {name} while no rank was running"), exit_code=ExitCode.PREEMPTED)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Job:
    """One `train` on one machine."""

    screen: Screen
    loaded: Loaded
    resolution: Resolution
    plan: LaunchPlan

    @property
    def recipe(self) -> Recipe:
        return self.resolution.recipe

    def lead(self, resume: str | None, *, overwrite: bool, no_start: bool) -> None:
        """On the only machine, or the first: refuses bad input before anything is written, then writes, runs and merges."""
        from fsdp_tune.launch.accelerate import check_port
        from fsdp_tune.launch.lock import locked
        from fsdp_tune.launch.resume import decide, move_aside

        run = self.plan.run
        start = decide(run, self.recipe, resume, overwrite=overwrite)
        self.screen.notices(start.notices)
        if start.is_finished:
            self.nothing_to_do()
            return
        check_port(self.recipe)
        inputs = self.check_inputs(start)
        if overwrite and run.is_used:
            self.screen.say(f"the old run is now {move_aside(run)}")
        if start.is_new:
            inputs.write()
        with locked(run) as notices:
            self.screen.notices(notices)
            if not start.is_new:
                inputs.write()
            self.screen.log_directory = run.logs
            if no_start:
                self.print_commands()
            else:
                self.conclude(self.supervise())

    def check_inputs(self, start: Start) -> Inputs:
        """Looks at the model in a process of its own while the data is prepared, and refuses what does not fit together."""
        from fsdp_tune.bridge.model_files import check_vocabulary
        from fsdp_tune.bridge.tokenizer import load_tokenizer
        from fsdp_tune.cli.model_facts import ModelInspection, notices_of, raise_problems
        from fsdp_tune.cli.prepare import prepared_data, show_data
        from fsdp_tune.cli.train_view import model_line
        from fsdp_tune.launch.resume import check_data
        from fsdp_tune.recipe.world import batch_arithmetic

        with ModelInspection(self.recipe) as inspection:
            tokenizer = load_tokenizer(self.recipe)
            data = prepared_data(self.screen, self.recipe, tokenizer)
            facts = inspection.facts()
        raise_problems(facts)
        self.screen.notices(notices_of(facts))
        check_vocabulary(facts, self.recipe.model.tokenizer, len(tokenizer), may_grow=self.recipe.model.resize_embeddings)
        check_data(start, data.key, rows=data.train_rows, global_batch_size=self.recipe.global_batch_size)
        self.screen.say(model_line(facts))
        show_data(self.screen, data)
        self.screen.say(batch_arithmetic(self.recipe))
        return Inputs(self, start, facts, tokenizer, data)

    def supervise(self) -> Ended:
        from fsdp_tune.cli.train_view import StepView
        from fsdp_tune.launch.supervise import Said, Supervisor
        from fsdp_tune.launch.verdict import Ended
        from fsdp_tune.units import parse_seconds

        plan = self.plan
        ranks = f"ranks {plan.ranks.start} to {plan.ranks.stop - 1}" if len(plan.ranks) > 1 else f"rank {plan.ranks.start}"
        self.screen.say(f"starting {ranks} on {self.recipe.launch.device}; the run is {plan.run.path}")
        supervisor = Supervisor(plan, hang_timeout_seconds=parse_seconds(self.recipe.launch.hang_timeout))
        with self.screen.progress("training", None, "steps") as bar, contextlib.closing(supervisor.events()) as events:
            view = StepView(self.screen, bar)
            for event in events:
                if isinstance(event, Ended):
                    return event
                if isinstance(event, Said):
                    self.screen.say(event.text)
                elif plan.machine_rank == 0:
                    view.show(event.line)
        raise AssertionError("the supervisor ends with a verdict")

    def conclude(self, ended: Ended) -> None:
        """Merges a finished run; tells the next command for any other. Ends the command with the run's exit code."""
        from fsdp_tune.cli.train_view import final_document
        from fsdp_tune.run_dir import latest_checkpoint

        run = self.plan.run
        facts = ended.first_outcome.facts if ended.first_outcome else {}
        checkpoint, _ = latest_checkpoint(run)
        facts = facts | {"checkpoint": str(checkpoint.path) if checkpoint else None}
        document = partial(final_document, run.path, facts, step=ended.step, reason=ended.reason.value)
        self.screen.document(document(merged=None))
        if ended.reason is ExitReason.FINISHED:
            merged = self.merge() if self.recipe.merge.at_end else None
            self.screen.document(document(merged=merged))
            self.screen.say(
                f"finished at step {ended.step}"
                + (f"; the model is in {merged}" if merged else f"; `fsdp-tune merge-checkpoint {run.path}` merges it")
            )
            return
        ways = self.ways_on(checkpoint.path if checkpoint else None)
        if ended.problem is not None:
            problem = Problem(
                ended.problem.code, ended.problem.message, ended.problem.where, ended.problem.hint, (*ended.problem.ways_out, *ways)
            )
            raise FsdpTuneError(problem, exit_code=ended.exit_code)
        self.screen.say(f"stopped at step {ended.step} ({ended.reason.value})")
        for way in ways:
            self.screen.say(f"  {way}")
        raise typer.Exit(EXIT_CODE_OF_REASON[ended.reason])

    def ways_on(self, checkpoint: Path | None) -> tuple[str, ...]:
        run = self.plan.run.path
        if checkpoint is None:
            return (f"`fsdp-tune train … --resume auto` begins again at step 0 in {run}",)
        return (
            f"`fsdp-tune train … --resume auto` goes on from {checkpoint.name}",
            f"`fsdp-tune merge-checkpoint {run}` makes a model of {checkpoint.name}",
        )

    def merge(self) -> Path:
        from fsdp_tune.cli.merge_checkpoint import byte_progress
        from fsdp_tune.merge.run import MergeOptions, merge_checkpoint

        result = merge_checkpoint(self.plan.run.path, MergeOptions(overwrite=True), partial(byte_progress, self.screen))
        self.screen.notices(result.notices)
        return result.output

    def nothing_to_do(self) -> None:
        """A finished run, asked for no more steps: its result again, and the merge that a crash may have left out."""
        from fsdp_tune.cli.train_view import final_document
        from fsdp_tune.launch.ranks import read_outcome

        run = self.plan.run
        outcome = read_outcome(run, 0)
        assert outcome is not None, "a run is finished because its first rank said so"
        merged = run.merged if run.merged.is_dir() else None
        if merged is None and self.recipe.merge.at_end:
            merged = self.merge()
        self.screen.document(final_document(run.path, outcome.facts, step=outcome.step, reason=ExitReason.FINISHED.value, merged=merged))
        self.screen.say(f"nothing to do: {run.path} has finished at step {outcome.step}")

    def print_commands(self) -> None:
        from fsdp_tune.launch.accelerate import by_hand

        lines = by_hand(self.recipe, self.plan.run)
        self.screen.document({"run_dir": str(self.plan.run.path), "commands": list(lines), "exit_reason": "not_started"})
        self.screen.say("the run directory is written; start it with one of")
        for line in lines:
            self.screen.say(f"  {line}")

    def follow(self) -> None:
        """On another machine of the run: waits for the first one to write the directory, then runs this machine's ranks."""
        from fsdp_tune.launch.resume import wait_for_run

        self.screen.say(f"machine {self.plan.machine_rank}: waiting for the first machine to write {self.plan.run.path}")
        wait_for_run(self.plan.run, self.recipe)
        self.screen.log_directory = self.plan.run.logs
        ended = self.supervise()
        self.screen.document(
            {"run_dir": str(self.plan.run.path), "machine_rank": self.plan.machine_rank, "exit_reason": ended.reason.value}
        )
        if ended.problem is not None:
            raise FsdpTuneError(ended.problem, exit_code=ended.exit_code)
        if ended.exit_code is not ExitCode.OK:
            raise typer.Exit(ended.exit_code)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that was checked, ready to be written."""

    job: Job
    start: Start
    facts: dict[str, Any]
    tokenizer: Any
    data: Prepared

    def write(self) -> None:
        from fsdp_tune.bridge.devices import visible_devices
        from fsdp_tune.bridge.model_files import save_model_files
        from fsdp_tune.diagnose.environment import host, versions
        from fsdp_tune.launch.run_files import RunFiles, write_run

        devices = [
            {"kind": device.kind, "name": device.name, "memory_bytes": device.memory_bytes} for device in visible_devices(os.environ)
        ]
        job = self.job
        files = RunFiles(
            recipe_text=job.loaded.text,
            overrides=job.loaded.overrides,
            recipe=job.recipe,
            reasons=job.resolution.reasons,
            plan=job.plan,
            environment={"versions": versions(), "host": host(), "devices": devices},
            data=self.data.to_json(),
            start=self.start,
            save_model=lambda directory: save_model_files(directory, self.facts, self.tokenizer),
        )
        write_run(job.plan.run, files)
