"""Check the inputs of a training before anything is written: inspect the model, prepare the data, plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_tune.core import processes as children
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Problem
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.preparation import prepare as prepare_data
from fsdp_tune.data.skipped_rows import NamedRow
from fsdp_tune.data.stream.units import refuse_changed_files
from fsdp_tune.data.tokenise.sample_prompts import sample_prompts
from fsdp_tune.data.tokenise.tokenizer import TokenizerEncoder, load_encoder
from fsdp_tune.jobs.checkpoint_scorer import (
    check_evaluation,
    notices_of_evaluation,
    refuse_scores_without_room,
)
from fsdp_tune.jobs.continued_data import continued_data, steps_of_run
from fsdp_tune.jobs.doctor import check_space
from fsdp_tune.jobs.inspection import Inspection, inspect_model, with_tensors
from fsdp_tune.jobs.machine_plan import MachinePlan, plan_here, refuse_what_cannot_fit
from fsdp_tune.jobs.observer import Observer, TrainingInputs
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.plan_session import decisions
from fsdp_tune.launch.command.resume import Start, refuse_beyond_end
from fsdp_tune.launch.machines.channel import CountedBar
from fsdp_tune.launch.supervise.early_launch import EarlyLaunch
from fsdp_tune.model.model_files import ModelFacts, base_of, check_vocabulary
from fsdp_tune.recipe.continued_adapter import without_adapter
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.references import from_run
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.rules.evaluation import best_is_evaluated
from fsdp_tune.recipe.rules.rates import schedule_of_steps
from fsdp_tune.recipe.schema.keys import as_problem
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import refuse_other_base
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.evaluation_record import EvaluationRecord


def inspected_recipe(recipe: Recipe, start: Start) -> Recipe:
    """Return the recipe of the model to inspect: a resumed run and its checkpoint have what only its start
    reads."""
    if start.checkpoint is None:
        return recipe
    return without_adapter(from_run(recipe, start.checkpoint.path.parent, start.from_run))


@dataclass(frozen=True, slots=True)
class Found:
    """What was found in the inputs of a training."""

    inspection: Inspection
    encoder: TokenizerEncoder
    data: Prepared
    plan: MachinePlan
    evaluation: EvaluationRecord


@dataclass(frozen=True, slots=True)
class InputChecks:
    """The checks of one training. `skipped`: rows that an option names; `advance` counts work."""

    loaded: LoadedRecipe
    resolution: Resolution
    run: RunDir
    options: TrainOptions
    observer: Observer
    skipped: Sequence[NamedRow]
    advance: Callable[[int], None]

    @property
    def recipe(self) -> Recipe:
        return self.resolution.recipe

    def check(self, start: Start, early: EarlyLaunch | None) -> TrainingInputs:
        """Return the inputs. Raises: FsdpTuneError with every problem of the model and the data."""
        recipe, observer = self.recipe, self.observer
        found = self._read(inspected_recipe(recipe, start), early)
        decided, predicted, not_planned = found.plan
        observer.notices([*found.inspection.notices, *found.data.as_notices(), *not_planned])
        model = _required(found.inspection, recipe)
        observer.notices(
            [
                *check_vocabulary(model, recipe, found.data.vocabulary_size),
                *notices_of_evaluation(recipe, model),
            ]
        )
        data = self._continued(start, found.data)
        base = base_of(recipe, model) if recipe.lora is not None else None
        if base is not None and start.checkpoint is not None:
            refuse_other_base(RunDir(start.checkpoint.path.parent).base_json, base)
        steps = self._steps(start, data)
        if not self.options.ignore_plan:
            refuse_what_cannot_fit(predicted)
            refuse_scores_without_room(recipe, model, predicted)
        if self.options.saves:
            space = check_space(
                recipe,
                parameters=model.parameters,
                trained_parameters=model.trained_parameters,
                is_new=start.is_new,
                steps=steps,
                refuses=not self.options.ignore_plan,
            )
            observer.notices(space)
        planned = decided.recipe.model_copy(
            update={"model": recipe.model, "data": recipe.data, "lora": recipe.lora}
        )
        resolution = replace(
            self.resolution, recipe=planned, reasons=self.resolution.reasons | decided.reasons
        )
        return TrainingInputs(
            resolution,
            decisions(decided),
            model,
            found.encoder,
            data,
            predicted,
            base,
            steps,
            found.evaluation,
        )

    def _read(self, here: Recipe, early: EarlyLaunch | None) -> Found:
        """Inspect the model and plan in other processes while the data is prepared. Raises: FsdpTuneError
        with the problems of both."""
        self.observer.phase("loading the tokenizer")
        with children.threads(2) as pool:
            inspecting = pool.submit(
                inspect_model, here, answer=early.inspection if early is not None else None
            )
            planning = pool.submit(plan_here, here)
            try:
                encoder = load_encoder(here)
                self.observer.notices(encoder.notices)
                sample_prompts(self.recipe, encoder)
                with self.observer.progress("tokenising", None, "rows") as bar:
                    progress = CountedBar(bar, self.advance)
                    data = prepare_data(
                        self.recipe,
                        encoder,
                        progress=progress,
                        verify=self.options.verify_data,
                        run=self.run.path,
                    )
                evaluation = check_evaluation(self.recipe, encoder, self.observer)
            except FsdpTuneError as error:
                raise FsdpTuneError(
                    *inspecting.result().problems, *error.problems, exit_code=error.exit_code
                ) from error
            self.observer.phase("inspecting the model")
            model = with_tensors(here, inspecting.result(), self.observer.message)
            self.observer.phase("planning")
            return Found(model, encoder, data, planning.result(), evaluation)

    def _continued(self, start: Start, data: Prepared) -> Prepared:
        """Return the data of this start. Raises: usage error for other files than the earlier steps had."""
        if (
            start.checkpoint is not None
            and (before := Prepared.read(RunDir(start.checkpoint.path.parent).data_json)) is not None
        ):
            refuse_changed_files(before.stamps, data.stamps)
        overwrite = self.options.overwrite
        return continued_data(
            self.recipe, start, data, self.skipped, self.observer, run=self.run, overwrite=overwrite
        )

    def _steps(self, start: Start, data: Prepared) -> int | None:
        """Return the steps of the run. Raises: usage error if the checkpoint, the schedule or the evaluations
        do not fit them."""
        steps = steps_of_run(self.recipe, data)
        refuse_beyond_end(start, steps)
        if steps is not None and (
            wrong := [*schedule_of_steps(self.recipe, steps), *best_is_evaluated(self.recipe, steps)]
        ):
            raise FsdpTuneError(
                *(as_problem(finding, self.loaded.positions) for finding in wrong), exit_code=ExitCode.USAGE
            )
        return steps


def _required(found: Inspection, recipe: Recipe) -> ModelFacts:
    """Return the facts of a model that can be trained. Raises: FsdpTuneError with the problems of another."""
    # The shapes of well-known models in this package are enough for a plan, never for training.
    is_packaged = found.model is not None and found.model.packaged
    packaged = (
        [f"`{recipe.model.name_or_path}` cannot be reached, and is not in the cache"] if is_packaged else []
    )
    if found.problems:  # what is unchecked follows from them
        raise FsdpTuneError(*found.problems)
    if found.model is None or found.unchecked or packaged:
        raise FsdpTuneError(*map(_unreachable, [*found.unchecked, *packaged]))
    return found.model


def _unreachable(what: str) -> Problem:
    return Problem(
        "model-unreachable",
        what,
        hint="give a local directory as `model.name_or_path`, or download it where there is network",
    )
