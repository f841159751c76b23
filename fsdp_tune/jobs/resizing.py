"""Continue a run on fewer machines, or on more of them again: its recipe, launch and files for each number (`launch.min_machines`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.plan import keep_prediction, plan_here, refuse_what_cannot_fit
from fsdp_tune.jobs.session import resolve_recipe
from fsdp_tune.launch.command.accelerate import LaunchPlan, launch_plan
from fsdp_tune.launch.command.resume import check, compare
from fsdp_tune.launch.command.run_files import write_resized
from fsdp_tune.launch.supervise.attempts import Resized
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import recipe_for_machines, smaller_sizes
from fsdp_tune.run.directory import RunDir, checkpoint_step
from fsdp_tune.run.launch_files import ResumeRequest


@dataclass(frozen=True)
class Resizing:
    """The sizes of a run on one of its machines."""

    loaded: LoadedRecipe
    resolved: Recipe
    """For all machines, as the run started."""
    run: RunDir
    machine: int
    options: TrainOptions
    observer: Observer

    @classmethod
    def of(
        cls, loaded: LoadedRecipe, resolved: Recipe, run: RunDir, machine: int, options: TrainOptions, observer: Observer
    ) -> Resizing | None:
        """Return None if the run needs all of its machines."""
        resizing = cls(loaded, resolved, run, machine, options, observer)
        return resizing if len(resizing._sizes) > 1 else None

    @cached_property
    def _sizes(self) -> frozenset[int]:
        smaller = smaller_sizes(self.loaded.recipe, self.resolved).items()
        return frozenset({self.resolved.launch.num_machines, *(machines for machines, reason in smaller if reason is None)})

    def allows(self, machines: int) -> bool:
        """Return whether the run can continue on this number of machines."""
        return machines in self._sizes

    def plan(self, members: Sequence[int]) -> LaunchPlan:
        """Return the launch of this machine. Its files are named by its own number, which its ranks do not depend on."""
        return self._plan(self._resolve(len(members)).recipe, members)

    def _plan(self, recipe: Recipe, members: Sequence[int]) -> LaunchPlan:
        made = launch_plan(recipe, self.run, machine_rank=members.index(self.machine), extra=self.options.launcher_arguments)
        return replace(made, machine_rank=self.machine)

    def resize(self, members: Sequence[int]) -> Resized:
        """Write the files of the run for these machines.

        Raises: FsdpTuneError if the recipe does not fit their memory, or would not continue the same training.
        """
        self.observer.phase(f"planning for {len(members)} of {self.resolved.launch.num_machines} machines")
        resolution = self._resolve(len(members))
        decided, predicted, notices = plan_here(resolution.recipe)
        self.observer.notices(notices)
        if not self.options.ignore_plan:
            refuse_what_cannot_fit(predicted)
        recipe = decided.recipe.model_copy(update={"model": self.resolved.model, "data": self.resolved.data, "lora": self.resolved.lora})
        if changed := check(compare(self.resolved, recipe)):
            raise AssertionError(f"another number of machines changes {', '.join(map(str, changed))}")
        plan = self._plan(recipe, members)
        write_resized(self.run, recipe, resolution.reasons | decided.reasons, plan)
        keep_prediction(self.run, predicted)
        return Resized(plan, self._start_step(), recipe.world_size, recipe.training.gradient_accumulation_steps or 1)

    def _resolve(self, machines: int) -> Resolution:
        recipe = self.loaded.recipe
        if machines != self.resolved.launch.num_machines:
            recipe = recipe_for_machines(recipe, self.resolved, machines)
        sized = replace(self.loaded, recipe=recipe)
        return resolve_recipe(sized, self.options.allowed, Observer(), starts_ranks=True, starts_here=True, resume=self.options.resume)

    def _start_step(self) -> int:
        request = ResumeRequest.read(self.run.resume_json)
        return (checkpoint_step(Path(request.resume_from)) or 0) if request is not None and request.resume_from is not None else 0
