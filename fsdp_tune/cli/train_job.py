"""One `train` on one machine: what is checked, what is written, what runs, what is left at the end."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fsdp_tune.cli.output import Screen
from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitCode, ExitReason, FsdpTuneError, Notice, Problem

if TYPE_CHECKING:
    from fsdp_tune.data.preparation import Prepared
    from fsdp_tune.launch.command.accelerate import LaunchPlan
    from fsdp_tune.launch.command.resume import Start
    from fsdp_tune.launch.supervise.verdict import Ended
    from fsdp_tune.planner.predict.predict import Plan
    from fsdp_tune.recipe.read.loader import LoadedRecipe
    from fsdp_tune.recipe.resolve import Resolution
    from fsdp_tune.recipe.schema import Recipe
    from fsdp_tune.run.directory import RunDir
    from fsdp_tune.run.launch_files import ProfiledSteps


@dataclass(frozen=True, slots=True)
class Job:
    """One `train` on one machine."""

    screen: Screen
    loaded: LoadedRecipe
    resolution: Resolution
    plan: LaunchPlan
    ignore_plan: bool = False
    """Starts also what the planner says cannot fit."""
    verify_data: bool = False
    """Hashes every data file instead of trusting sizes and times."""
    profile: ProfiledSteps | None = None
    verbose: bool = False
    """Prints each value and kernel that was chosen, with the reason."""

    @property
    def recipe(self) -> Recipe:
        return self.resolution.recipe

    def lead(self, resume: str | None, *, overwrite: bool, no_start: bool) -> None:
        """On the only machine, or the first: refuses bad input before anything is written, then writes, runs and merges."""
        from fsdp_tune.launch.command.accelerate import check_port
        from fsdp_tune.launch.command.resume import decide, move_aside, refuse_when_continued
        from fsdp_tune.launch.machines.work import WorkCounter
        from fsdp_tune.run.lock import locked

        run = self.plan.run
        with WorkCounter(run, self.recipe.launch.num_machines) as work:
            start = decide(run, self.recipe, resume, overwrite=overwrite, progress=work.advance)
        self.screen.notices([*self.surroundings(), *start.notices])
        for change in start.trajectory_changes:
            self.screen.say(f"from step {start.step} on {change}")
        if start.is_finished:
            self.nothing_to_do()
            return
        if resume is not None:  # a mistyped directory is a new run
            source = start.checkpoint.path.name if start.checkpoint else "step 0"
            self.screen.say(f"{run.path}: {'a new run' if start.is_new else 'going on'} from {source}")
        check_port(self.recipe)
        inputs = self.check_inputs(start)
        job = inputs.job
        if overwrite and run.is_used:
            self.screen.say(f"the old run is now {move_aside(run)}")
        if start.is_new:
            inputs.write()
        with locked(run) as notices:
            self.screen.notices(notices)
            refuse_when_continued(run, start)
            if not start.is_new:
                inputs.write()
            self.screen.log_directory = run.logs
            self.screen.log_to(self.plan.screen_log)
            if no_start:
                job.print_commands()
            else:
                job.conclude(job.supervise())

    def surroundings(self) -> list[Notice]:
        """What lies about on this machine and would have steered a bare `accelerate launch`; it does not steer this one."""
        from fsdp_tune.core.secrets import MASK, mask_text
        from fsdp_tune.diagnose.environment import accelerate_default_config

        notices: list[Notice] = []
        if (default := accelerate_default_config(os.environ)) is not None:
            notices.append(Notice("accelerate-config-ignored", f"{default['path']} is not used: the recipe decides"))
        if self.plan.removed:
            notices.append(Notice("stale-environment", f"variables of another job are kept from the ranks: {', '.join(self.plan.removed)}"))
        if hidden := self.plan.unwritten_variables():
            notices.append(Notice("secret-not-written", f"launch.json lists {', '.join(hidden)} without values, which look like secrets"))
        if mask_text(self.loaded.text) != self.loaded.text:
            message = f"{self.loaded.path} has a comment with what looks like a secret; the run's recipe.yaml gets `{MASK}` instead"
            notices.append(Notice("secret-not-written", message))
        return notices

    def check_inputs(self, start: Start) -> Inputs:
        """Looks at the model in a process of its own while the data is prepared; refuses what is wrong in either, together."""
        from fsdp_tune.cli.model_checks import model_facts
        from fsdp_tune.cli.plan_auto import in_words
        from fsdp_tune.cli.train_plan import plan_of, predicted_line, refuse_what_cannot_fit
        from fsdp_tune.cli.train_view import data_lines, kernels_line, model_line, show_decided
        from fsdp_tune.core.processes import threads
        from fsdp_tune.data.order.token_batches import filling_lines
        from fsdp_tune.data.preparation import prepare
        from fsdp_tune.data.tokenise.tokenizer import load_encoder
        from fsdp_tune.launch.command.resume import check_data, refuse_beyond_end
        from fsdp_tune.launch.machines.work import CountedBar, WorkCounter
        from fsdp_tune.model.build.model_files import check_vocabulary
        from fsdp_tune.planner.predict.totals import total_steps
        from fsdp_tune.recipe.world import batch_arithmetic

        screen, recipe = self.screen, self.recipe
        with threads(2) as pool:
            looking = pool.submit(model_facts, recipe)
            planning = pool.submit(plan_of, screen, recipe)
            try:
                encoder = load_encoder(recipe)
                screen.notices(encoder.notices)
                counter = WorkCounter(self.plan.run, recipe.launch.num_machines)
                with screen.progress("tokenising", None, "rows") as screen_bar, counter as work:
                    bar = CountedBar(screen_bar, work)
                    data = prepare(recipe, encoder, progress=bar, verify=self.verify_data, run=self.plan.run.path)
            except FsdpTuneError as error:
                if error.exit_code is ExitCode.PREEMPTED:  # a signal: nobody waits for what else is wrong
                    raise
                raise FsdpTuneError(*looking.result().problems, *error.problems, exit_code=error.exit_code) from error
            model = looking.result()
            decided, predicted, unplanned = planning.result()
        screen.notices([*model.notices, *data.as_notices(), *unplanned])
        # What the package itself knows of well-known models is good enough to plan with, never to train.
        packaged = [f"`{recipe.model.name_or_path}` is out of reach, and not in the cache"] if model.facts.get("packaged") else []
        if model.problems or model.unchecked or packaged:
            raise FsdpTuneError(*model.problems, *map(_unreachable, [*model.unchecked, *packaged]))
        check_vocabulary(model.facts, recipe.model, data.vocabulary_size)
        check_data(start, data.key)
        refuse_beyond_end(start, total_steps(recipe, data.train_rows))
        refuse_what_cannot_fit(predicted, ignore_plan=self.ignore_plan)
        planned = [*(f"{key}: {what}" for key, what in in_words(decided).items()), *([predicted_line(predicted)] if predicted else [])]
        if self.verbose:
            show_decided(screen, replace(self.resolution, recipe=decided.recipe), model.facts)
        for line in (
            model_line(model.facts),
            kernels_line(model.facts),
            *data_lines(data.report, reused=data.reused),
            batch_arithmetic(recipe),
            *filling_lines(recipe, data),
            *planned,
        ):
            screen.say(line)
        resolution = replace(self.resolution, recipe=decided.recipe, reasons=self.resolution.reasons | decided.reasons)
        return Inputs(replace(self, resolution=resolution), start, model.facts, encoder.tokenizer, data, predicted)

    def supervise(self) -> Ended:
        """Runs the ranks of this machine to their end, restarts included."""
        from fsdp_tune.cli.train_view import StepView
        from fsdp_tune.launch.supervise.attempts import Attempts
        from fsdp_tune.launch.supervise.supervisor import Said
        from fsdp_tune.launch.supervise.verdict import Ended

        plan = self.plan
        ranks = f"ranks {plan.ranks.start} to {plan.ranks.stop - 1}" if len(plan.ranks) > 1 else f"rank {plan.ranks.start}"
        self.screen.say(f"starting {ranks} on {self.recipe.launch.device}; the run is {plan.run.path}")
        attempts = Attempts(plan, self.recipe, partial(rows_of_step, plan.run, self.recipe))
        with self.screen.progress("training", None, "steps", lines=False) as bar, contextlib.closing(attempts.events()) as events:
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
        """Merge a finished run, print the final card, and end the command with the run's exit code."""
        from fsdp_tune.cli.run_card import card, commands_after
        from fsdp_tune.cli.train_view import final_document
        from fsdp_tune.launch.command.resume import ways_on
        from fsdp_tune.run.directory import latest_checkpoint

        run = self.plan.run
        facts = ended.first_outcome.facts if ended.first_outcome else {}
        checkpoint, _ = latest_checkpoint(run)
        facts = facts | {"checkpoint": str(checkpoint.path) if checkpoint else None}
        document = partial(final_document, run.path, facts, step=ended.step)
        self.screen.document(document(reason=ended.reason.value, merged=None))
        if ended.reason is ExitReason.FINISHED:
            self.screen.document(document(reason=ExitReason.FAILED.value, merged=None))  # what stands should the merge fail
            merged = self.merge() if self.recipe.merge.at_end else None
            self.screen.document(document(reason=ended.reason.value, merged=merged))
            self.screen.say(f"finished at step {ended.step}; {_where_the_model_is(run, self.recipe, merged)}")
            for line in card(run, facts, commands_after(run, self.recipe, merged)):
                self.screen.say(line)
            return
        ways = ways_on(run, checkpoint)
        if ended.problem is not None:
            problem = Problem(
                ended.problem.code, ended.problem.message, ended.problem.where, ended.problem.hint, (*ended.problem.ways_out, *ways)
            )
            raise FsdpTuneError(problem, exit_code=ended.exit_code)
        self.screen.say(f"stopped at step {ended.step} ({ended.reason.value})")
        for line in card(run, facts, ways):
            self.screen.say(line)
        raise typer.Exit(EXIT_CODE_OF_REASON[ended.reason])

    def merge(self) -> Path:
        from fsdp_tune.cli.merge_checkpoint import byte_progress
        from fsdp_tune.cli.run_card import takes_best
        from fsdp_tune.merge.merging import MergeOptions, merge_checkpoint

        result = merge_checkpoint(
            self.plan.run.path, MergeOptions(overwrite=True, best=takes_best(self.recipe)), partial(byte_progress, self.screen)
        )
        self.screen.notices(result.notices)
        return result.output

    def nothing_to_do(self) -> None:
        """A finished run, asked for no more steps: its result again, and the merge that a crash may have left out."""
        from fsdp_tune.cli.train_view import final_document
        from fsdp_tune.run.rank_files import read_outcome

        run = self.plan.run
        outcome = read_outcome(run, 0)
        assert outcome is not None, "a run is finished because its first rank said so"
        merged = run.merged if run.merged.is_dir() else None
        if merged is None and self.recipe.merge.at_end:
            merged = self.merge()
        self.screen.document(final_document(run.path, outcome.facts, step=outcome.step, reason=ExitReason.FINISHED.value, merged=merged))
        self.screen.say(f"nothing to do: {run.path} has finished at step {outcome.step}; {_where_the_model_is(run, self.recipe, merged)}")

    def print_commands(self) -> None:
        from fsdp_tune.launch.command.accelerate import by_hand

        lines = by_hand(self.recipe, self.plan.run)
        self.screen.document({"run_dir": str(self.plan.run.path), "commands": list(lines), "exit_reason": "not_started"})
        self.screen.say("the run directory is written; start it with one of")
        for line in lines:
            self.screen.say(f"  {line}")

    def follow(self, resume: str | None) -> None:
        """Run this machine's ranks, on another machine than the first, once that has written the run directory."""
        from fsdp_tune.launch.command.resume import wait_for_run

        self.screen.say(f"machine {self.plan.machine_rank}: waiting for the first machine to write {self.plan.run.path}")
        if not wait_for_run(self.plan.run, self.recipe, resume):
            self._document_end(ExitReason.FINISHED)
            self.screen.say(f"nothing to do: {self.plan.run.path} has finished")
            return
        self.screen.log_directory = self.plan.run.logs
        self.screen.log_to(self.plan.screen_log)
        ended = self.supervise()
        self._document_end(ended.reason)
        if ended.problem is not None:
            raise FsdpTuneError(ended.problem, exit_code=ended.exit_code)
        if ended.exit_code is not ExitCode.OK:
            raise typer.Exit(ended.exit_code)

    def _document_end(self, reason: ExitReason) -> None:
        self.screen.document({"run_dir": str(self.plan.run.path), "machine_rank": self.plan.machine_rank, "exit_reason": reason.value})


def _where_the_model_is(run: RunDir, recipe: Recipe, merged: Path | None) -> str:
    from fsdp_tune.cli.run_card import merge_command

    return f"the model is in {merged}" if merged else f"`{merge_command(str(run.path), recipe)}` merges it"


def _unreachable(what: str) -> Problem:
    return Problem("model-unreachable", what, hint="give a local directory as `model.name_or_path`, or download it where there is network")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that was checked, ready to be written."""

    job: Job
    """With a recipe that leaves nothing open any more."""
    start: Start
    facts: dict[str, Any]
    tokenizer: Any
    data: Prepared
    predicted: Plan | None

    def write(self) -> None:
        from fsdp_tune.cli.train_plan import keep_plan
        from fsdp_tune.core.devices import visible_devices
        from fsdp_tune.diagnose.environment import host, versions
        from fsdp_tune.launch.command.run_files import RunFiles, write_run
        from fsdp_tune.model.build.model_files import save_model_files

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
            profile=job.profile,
        )
        write_run(job.plan.run, files)
        keep_plan(job.plan.run, self.predicted)


# ---- Which rows a step trains on, said for people: the order of the data depends on seed and epoch alone.

SHOWN = 8


def rows_of_step(run: RunDir, recipe: Recipe, step: int) -> str | None:
    """`12 (train.jsonl:17), 3 (train.jsonl:5) and 6 more` for a step counted from 1; None where the data cannot be read."""
    from fsdp_tune.core.errors import FsdpTuneError
    from fsdp_tune.data.order.permutation import order_of
    from fsdp_tune.data.preparation import Prepared
    from fsdp_tune.data.store import RowStore

    try:
        store = RowStore(Prepared.from_json(run.data_json.read_text(encoding="utf-8")).train)
    except (OSError, ValueError, FsdpTuneError):
        return None
    size = recipe.global_batch_size
    epoch, index = divmod(step - 1, max(math.ceil(len(store) / size), 1))
    order = order_of(recipe, store.lengths, epoch)
    rows = [int(row) for row in order[index * size : (index + 1) * size]]
    named = [f"{row} ({file}:{line})" for row in rows[:SHOWN] for file, line in store.origins(row)[:1]]
    return ", ".join(named) + (f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else "")
