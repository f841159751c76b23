"""Check a recipe before it runs: without GPUs and with all mistakes at once, or in a rehearsal on CPU ranks with a scaled-down model."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_tune.check.rehearsal.lifecycle_checks import Check, Rehearsal
from fsdp_tune.check.rehearsal.parity_checks import make_comparable, parity_checks
from fsdp_tune.check.rehearsal.scale_down import ReadableInputs, ScaledRecipe, scale_down_recipe
from fsdp_tune.core.errors import FsdpTuneError, Problem, usage_error
from fsdp_tune.core.ownership import temporary_directory
from fsdp_tune.data.preparation import length_with_targets
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.jobs.answers import CheckAnswer, CheckedSource, RehearseAnswer
from fsdp_tune.jobs.inspection import FIRST_ROWS, Inspection, inspect
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.plan import budget_of, decide, visible_gpu
from fsdp_tune.jobs.session import check_cache, resolve_recipe, session
from fsdp_tune.model.loading.model_files import ModelFacts, check_vocabulary
from fsdp_tune.planner.search.search import KEY, is_undecided
from fsdp_tune.recipe.findings import pinned
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.schema.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Validation:
    """The verdict on a recipe. It is valid if there are no `problems`."""

    resolution: Resolution
    """The recipe with every key decided, and the reasons."""
    model: ModelFacts | None
    """None if the model could not be built."""
    inputs: list[CheckedSource]
    problems: tuple[Problem, ...]
    unchecked: tuple[str, ...]
    """What could not be checked here, one sentence each."""

    @property
    def recipe(self) -> Recipe:
        return self.resolution.recipe


def validate(
    recipe: LoadedRecipe,
    *,
    strict: bool = False,
    offline: bool = False,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> Validation:
    """Check the recipe's keys for this machine, its model, and the first rows of its data. Starts and writes nothing.

    `strict` counts keys that have no effect as problems. `offline` sets HF_HUB_OFFLINE for this process and lists as unchecked what
    needs the hub. Raises: FsdpTuneError if the recipe cannot be resolved; problems of model and data are in the result.
    """
    with session(recipe):
        resolution = resolve_recipe(recipe, allowed, observer, starts_ranks=True, strict=strict)
        check_cache(resolution.recipe, writes=False)
        if offline:
            os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, which is later
        found = inspect(resolution.recipe, offline=offline)
        _compare_vocabulary(resolution.recipe, found)
        resolution = _decide(resolution, found, offline=offline)
        notices = [*recipe.notices, *resolution.notices, *found.notices]
        observer.notices([notice for notice in notices if not (strict and notice.strict)])
        wrong = [Problem(each.code, each.message, each.where, each.hint) for each in notices if strict and each.strict]
        problems = tuple(pinned(problem, recipe.positions) for problem in [*found.problems, *wrong])
        return Validation(resolution, found.model, found.inputs, problems, tuple(found.unchecked))


def _compare_vocabulary(recipe: Recipe, found: Inspection) -> None:
    if found.model is None:
        return
    if found.model.packaged:
        name = recipe.model.name_or_path
        found.unchecked.append(f"the files of `{name}`: the hub cannot be reached; shapes are those in the package")
    elif found.vocabulary_size is not None:
        try:
            found.notices.extend(check_vocabulary(found.model, recipe, found.vocabulary_size))
        except FsdpTuneError as error:
            found.problems.extend(error.problems)


def _decide(resolution: Resolution, found: Inspection, *, offline: bool) -> Resolution:
    """Decide keys that are left to a plan, if the model is there and this machine has the memory of the ranks."""
    recipe = resolution.recipe
    if not is_undecided(recipe) or found.problems or found.model is None:
        return resolution
    budget = budget_of(recipe, visible_gpu(recipe))
    if budget is None:
        found.unchecked.append(f"`{KEY}: auto`: this machine does not have the run's memory; `fsdp-tune plan --gpu NAME` decides for a GPU")
        return resolution
    decided = decide(recipe, budget, offline=offline)
    found.notices.extend(decided.notices)
    return replace(resolution, recipe=decided.recipe, reasons=resolution.reasons | decided.reasons)


STEPS = 24
RANKS_IN_GROUPS = 4
RANKS = 2


@dataclass(frozen=True, slots=True)
class RehearsalResult:
    """`folder` is where everything that was written is kept; None if all checks passed."""

    changes: tuple[str, ...]
    """How the rehearsed recipe differs from the user's."""
    checks: tuple[Check, ...]
    folder: Path | None

    @property
    def failed(self) -> Check | None:
        return next((check for check in self.checks if not check.passed), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the document of `rehearse --json`."""
        checks = [CheckAnswer(each.name, each.passed, each.detail, round(each.seconds, 1)) for each in self.checks]
        return RehearseAnswer(self.failed is None, list(self.changes), checks, str(self.folder) if self.folder else None).as_dict()


def rehearse(
    recipe: LoadedRecipe,
    *,
    num_processes: int | None = None,
    parity: bool = False,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> RehearsalResult:
    """Train a scaled-down recipe, kill a rank, resume, merge, reload and compare; stop at the first check that fails.

    `num_processes`: 2, or 4 if the recipe shards in groups or its ranks share rows. `parity` compares a run for each switch with a plain
    loop on one device. Runs on the CPU unless `--set` (an override) gives `launch.device`. Raises: FsdpTuneError if model or data cannot
    be used.
    """
    with session(recipe):
        resolution = resolve_recipe(recipe, allowed, observer, starts_ranks=True)
        observer.notices(resolution.notices)
        wanted = resolution.recipe
        check_cache(wanted)
        position = recipe.positions.get("launch.device")
        device = wanted.launch.device if position is not None and str(position.source).startswith("--set") else "cpu"
        ranks = num_processes or (RANKS_IN_GROUPS if wanted.is_hybrid or wanted.parallelism.of_row.world_size > 1 else RANKS)
        checks = list[Check]()
        with temporary_directory("rehearsal-", keep=lambda: not all(check.passed for check in checks)) as folder:
            compared = wanted.model_copy(update={"lora": None}) if parity else wanted
            small = _scale_down(compared, folder, ranks, device, observer)
            small = make_comparable(small) if parity else small
            if compared.lora is not wanted.lora:
                small.changes.append("lora: none, since the reference trains all parameters")
            for line in small.changes:
                observer.message(f"  {line}")
            options = allowed.options()
            results = (
                Rehearsal(small.write(folder), folder, ranks, STEPS, options).checks()
                if not parity
                else parity_checks(small, folder, options)
            )
            for check in results:
                checks.append(check)
                observer.message(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.detail}  ({check.seconds:.0f} s)")
        return RehearsalResult(tuple(small.changes), tuple(checks), None if all(check.passed for check in checks) else folder)


def _scale_down(recipe: Recipe, folder: Path, ranks: int, device: str, observer: Observer) -> ScaledRecipe:
    """Inspect model and data as `validate` does, and replace unreachable inputs. Raises: FsdpTuneError for their errors."""
    found = inspect(recipe)
    observer.notices(found.notices)
    if found.problems:
        raise FsdpTuneError(*found.problems)
    if found.model is None:
        raise usage_error(
            "model-unreachable",
            f"{found.unchecked[0]}, and the package does not have its shape",
            hint="its config.json is enough: `--set model.name_or_path=null --set model.from_config=PATH`",
        )
    inputs = ReadableInputs(tokenizer=found.vocabulary_size is not None, data=found.is_data_reachable)
    if inputs.tokenizer and inputs.data:
        inputs = replace(inputs, tokens=length_with_targets(recipe, load_encoder(recipe), rows=FIRST_ROWS))
    return scale_down_recipe(recipe, found.model.config, folder, ranks=ranks, device=device, steps=STEPS, inputs=inputs)
