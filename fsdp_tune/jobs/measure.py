"""Train the best recipes of a ranking for a few steps on the machines of the recipe, and set what they took
beside the prediction."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_tune.core.atomic import check_output_file, write_file
from fsdp_tune.core.devices import nvidia_driver
from fsdp_tune.core.errors import STOP_CODES, ExitCode, FsdpTuneError, failed_error, usage_error
from fsdp_tune.core.gpus import CPU
from fsdp_tune.core.package_versions import installed_versions
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.core.units import format_figure
from fsdp_tune.jobs.measuring_machines import calling, follow, machine_of
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.plan import PlannedHere, planned_here
from fsdp_tune.jobs.plan_options import MEASURED_STEPS
from fsdp_tune.jobs.plan_session import PlanSession, decisions
from fsdp_tune.jobs.ranked_recipe import recipe_body, recipe_text
from fsdp_tune.jobs.trial import Trial, TrialSettings, folder_of_trials
from fsdp_tune.launch.machines.calls import FirstMachine
from fsdp_tune.planner.predict.predict import MeasuredPlan, Plan
from fsdp_tune.planner.search.search import Ranking
from fsdp_tune.recipe.read.loader import LoadedRecipe, parse_recipe


def measure(
    recipe: LoadedRecipe,
    *,
    count: int = 3,
    steps: int = MEASURED_STEPS,
    minutes: float | None = None,
    exact: bool = False,
    write: Path | None = None,
    machine_rank: int | None = None,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> Plan:
    """Rank recipes as `plan` does, train the `count` fastest and the requested one for a few steps on the
    machines of the recipe, and rank what ran. With several machines, call it on each of them.

    `steps` are counted after the first two. No measurement begins that would end after `minutes`. Full rows
    on a GPU calibrate its later plans. `write` is a file for the fastest. The first machine ranks and
    writes; the others return its plan without the ranking. `machine_rank`: as for `train`. Call it where
    `train` may be called. Raises: FsdpTuneError, also if nothing was measured.
    """
    with session(recipe):
        settings = TrialSettings(steps, minutes, allowed, machine_rank)
        if machine_of(recipe.recipe, machine_rank) > 0:
            return follow(recipe, settings, observer)
        if write is not None:
            check_output_file(write)
        # the runs are removed when the other machines have read the end
        with ExitStack() as disk, calling(recipe.recipe, settings, observer) as caller:
            made = _Measuring(recipe, settings, caller, observer, disk, exact=exact, write=write).measure(
                count
            )
            if caller is not None:
                caller.succeed({"plan": made.as_dict()})
            return made


@dataclass
class _Measuring:
    """The ranking and its trials, on the first machine."""

    loaded: LoadedRecipe
    settings: TrialSettings
    caller: FirstMachine | None
    """None on a single machine."""
    observer: Observer
    disk: ExitStack
    """Ends with the command."""
    exact: bool
    write: Path | None
    trials: list[Trial] = field(default_factory=list[Trial])

    def measure(self, count: int) -> Plan:
        """Raises: FsdpTuneError, after the results are reported and written."""
        planned = self._planned()
        folder = self.disk.enter_context(folder_of_trials(Path(str(planned.recipe.output_dir))))
        with PlanSession(planned.recipe, planned.hardware, exact=self.exact) as plans:
            made, found = self._ranked(plans, planned)
        chosen = found.to_measure(count)
        if not chosen:
            message = f"no recipe fits {made.num_processes} × {made.gpu}, so there is none to measure"
            raise usage_error("nothing-fits", message)
        for number, each in enumerate(chosen, 1):
            loaded = parse_recipe(recipe_body(plans.recipe, planned.written, each), self.loaded.path)
            self.trials.append(Trial(each, loaded, folder / str(number)))
        stop = self._run()
        ranked = tuple(each.plan for each in found.ranked)
        measured = tuple(each.figures for each in self._fastest_first())
        made = replace(made, alternatives=ranked, best_because=found.because, measured=measured)
        self.observer.planned(made, "measured")
        fastest = self._fastest_first()[0]
        if fastest.figures.step_seconds is not None:
            with PlanSession(plans.recipe, planned.hardware, exact=self.exact) as plans:
                if self.write is not None:
                    why = _why(made, fastest.figures)
                    text = recipe_text(plans, self.write, planned.written, fastest.planned, why)
                    write_file(self.write, text)
                    self.observer.message(f"the fastest recipe is {self.write}")
                self._calibrate(plans, fastest)
        if stop is not None:
            raise stop
        if fastest.figures.step_seconds is None:
            message = f"none of {len(chosen)} recipes was measured; the first: {fastest.figures.problem}"
            hint = "`fsdp-tune train` on this machine shows the complete error"
            raise failed_error("nothing-measured", message, hint=hint)
        return made

    def _planned(self) -> PlannedHere:
        try:
            return planned_here(self.loaded, None, None, self.settings.allowed, self.observer)
        except FsdpTuneError as error:
            if [problem.code for problem in error.problems] == ["no-gpu-named"]:
                hint = "--set launch.device=cpu, or name a GPU by `--gpu` and leave out `--measure`"
                message = f"`--measure` trains on GPUs of the table, and {error.problems[0].message}"
                raise usage_error("no-gpu-to-measure", message, hint=hint) from error
            raise

    def _ranked(self, plans: PlanSession, planned: PlannedHere) -> tuple[Plan, Ranking]:
        """Return the plan of the recipe, and the ranking."""
        decided = plans.decide()
        self.observer.notices(decided.notices)
        made = replace(plans.plan(), decided=planned.forced | decisions(decided))
        self.observer.planned(made, "recipe")
        with self.observer.progress("trying recipes", None, "recipes") as bar:
            return made, plans.search("fastest", lambda _changes: bar.advance())

    def _run(self) -> FsdpTuneError | StoppedBySignal | None:
        """Train each recipe for a few steps. Return the error that ends the measurement, that of a signal or
        of another machine; the other trials are then not started."""
        began, longest, minutes = time.monotonic(), 0.0, self.settings.minutes
        for number, trial in enumerate(self.trials, 1):
            start, plan = time.monotonic(), trial.planned.plan
            if minutes is not None and number > 1 and start - began + longest > 60 * minutes:
                trial.ended("not started", f"it would have ended after {minutes:g} minutes")
                continue
            changes = (
                ", ".join(f"{key}: {value}" for key, value in plan.recipe_changes.items())
                or "the requested recipe"
            )
            self.observer.message(f"measuring {number} of {len(self.trials)}: {changes}")
            try:
                self._train(trial)
            except (FsdpTuneError, StoppedBySignal) as stop:
                return stop
            seconds = trial.figures.step_seconds
            said = trial.figures.problem if seconds is None else f"{format_figure(seconds)} s a step"
            self.observer.message(f"{trial.figures.outcome}: {said}")
            longest = max(longest, time.monotonic() - start)
        return None

    def _train(self, trial: Trial) -> None:
        """Raises: FsdpTuneError or StoppedBySignal if a signal asks to stop; FsdpTuneError if another machine
        does not follow."""
        if self.caller is not None:
            self.caller.call(f"{trial.folder.parent.name}/{trial.folder.name}")
        try:
            trial.read(self.settings.train(trial.loaded, trial.folder))
        except FsdpTuneError as error:
            if error.exit_code in STOP_CODES:
                raise
            outcome = "out of memory" if error.exit_code is ExitCode.OUT_OF_MEMORY else "failed"
            trial.ended(outcome, error.problems[0].message)

    def _fastest_first(self) -> list[Trial]:
        """Return the trials by their tokens a second over all devices, and last what was not measured."""
        return sorted(
            self.trials,
            key=lambda trial: (trial.figures.step_seconds is None, -trial.figures.tokens_per_second),
        )

    def _calibrate(self, plans: PlanSession, fastest: Trial) -> None:
        """Learn this GPU's speed from the fastest trial, and its reserved memory from all, if their rows were
        full."""
        if plans.hardware.name == CPU:
            return
        if fastest.measured is None:
            share = fastest.share_of_full_rows
            self.observer.message(
                f"plans are not calibrated: a step computed {share:.0%} of the tokens of full rows"
            )
            return
        torch, driver = installed_versions(["torch"])["torch"], nvidia_driver()
        runs = [
            replace(each.measured, torch=torch, driver=driver)
            for each in self._fastest_first()
            if each.measured is not None
        ]
        gpu = plans.hardware.name
        try:
            factor = plans.learn(runs[0])
            self.observer.message(f"{gpu} took {factor:.2f} of the predicted time; kept for later plans")
        except FsdpTuneError as error:
            self.observer.message(f"the time of plans is not calibrated: {error.problems[0].message}")
        try:
            memory = plans.learn_memory(runs)
        except FsdpTuneError as error:
            self.observer.message(f"the memory of plans is not calibrated: {error.problems[0].message}")
            return
        if memory is not None:
            self.observer.message(
                f"{gpu} reserved at most {memory:.2f} of the predicted memory; kept for later plans"
            )


def _why(made: Plan, figures: MeasuredPlan) -> list[str]:
    trained = sum(each.step_seconds is not None for each in made.measured)
    speed = (
        f"{figures.step_seconds:.3g} s a step, {figures.tokens_per_second_per_device:,.0f} tokens a "
        "second and device"
    )
    return [
        f"# {made.recipe} for {made.num_processes} × {made.gpu}: the fastest of {trained} that "
        "`fsdp-tune plan --measure` trained.",
        f"# Measured: {speed}.",
    ]
