"""Check a recipe before it runs: its inputs without GPUs, all mistakes at once, or a rehearsal on CPU ranks
with a scaled-down model.

A recipe with mistakes is checked as far as they allow (`jobs/unaffected_stages.py`). `train` inspects and
prepares by the same functions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, collected, usage_error
from fsdp_tune.core.hub import download_model
from fsdp_tune.core.ownership import temporary_directory
from fsdp_tune.data.account import SourceSample, sample_sources
from fsdp_tune.data.preparation import Prepared, decoded_rows
from fsdp_tune.data.preparation import prepare as prepare_data
from fsdp_tune.data.report import DecodedExample
from fsdp_tune.data.shortest_length import length_with_targets
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.jobs.answers import CheckAnswer, RehearseAnswer
from fsdp_tune.jobs.checkpoint_scorer import check_evaluation, notices_of_evaluation
from fsdp_tune.jobs.first_rows import FIRST_ROWS, CheckedSource
from fsdp_tune.jobs.inspection import Inspection, inspect
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.plan_session import budget_of, decide_open_keys, visible_gpu
from fsdp_tune.jobs.recipes import check_cache, resolve_recipe
from fsdp_tune.jobs.unaffected_stages import inspect_remaining
from fsdp_tune.model.model_files import ModelFacts, check_vocabulary
from fsdp_tune.planner.search.auto_recomputation import undecided
from fsdp_tune.recipe.read.catalogue import find_recipe
from fsdp_tune.recipe.read.loader import LoadedRecipe, WrongRecipeError, load_recipe
from fsdp_tune.recipe.read.recipe_text import read_text
from fsdp_tune.recipe.resolve import ABSENT, Resolution, UnresolvedError, split_absent
from fsdp_tune.recipe.schema.keys import pinned
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.rehearsal.lifecycle_checks import Check, Rehearsal
from fsdp_tune.rehearsal.parity_checks import make_comparable, parity_checks
from fsdp_tune.rehearsal.scale_down import scale_down_recipe
from fsdp_tune.rehearsal.scaled_data import ReadableInputs
from fsdp_tune.rehearsal.scaled_recipe import ScaledRecipe


@dataclass(frozen=True, slots=True)
class ValidateAnswer(JsonAnswer):
    recipe: str
    """The file."""
    valid: bool
    resolved: dict[str, object]
    """The recipe with every key decided; empty if mistakes prevent that."""
    reasons: dict[str, str]
    """Key → why it has its value."""
    overrides: list[str]
    arithmetic: str
    """Sequences and tokens of a step; empty without `resolved`."""
    rate: str
    """Learning rate at the start, at its peak and at the end; empty without `resolved`."""
    model: dict[str, Any]
    """Empty if the model could not be built."""
    data: list[CheckedSource]
    unchecked: list[str]
    """What could not be checked here, or not yet, a sentence each."""


@dataclass(frozen=True, slots=True)
class PrepareAnswer(JsonAnswer):
    path: str
    """Directory of the cache."""
    key: str
    reused: bool
    train: str
    evals: dict[str, str]
    """Label → directory of the set."""
    report: dict[str, object]
    """The account of rows and tokens."""


@dataclass(frozen=True, slots=True)
class PrepareShownAnswer(PrepareAnswer):
    """With `--show` or `--ids`."""

    shown: list[list[DecodedExample]]
    """Rows, each a list of its examples."""


@dataclass(frozen=True, slots=True)
class Preparation:
    data: Prepared
    """Where the sets are, and the account of rows and tokens."""
    rows: list[list[DecodedExample]]
    """The rows requested by `show`, each a list of decoded examples."""
    samples: list[SourceSample]
    """As many examples of each training source as `samples` requests."""


def prepare(
    recipe: LoadedRecipe,
    *,
    show: int = 0,
    samples: int = 0,
    download: bool = False,
    verify_data: bool = False,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> Preparation:
    """Tokenise and pack the data of a recipe into the cache, or find them there. Needs no GPU.

    `show` decodes so many rows, `samples` so many examples of each training source. `download` fetches the
    model's weights too. `verify_data` hashes all data files instead of trusting sizes and times. A script
    needs `if __name__ == "__main__":` around the call, since tokenising spawns processes.
    Raises: FsdpTuneError, with file and line for what is wrong in the data.
    """
    with session(recipe):
        resolution = resolve_recipe(recipe, allowed, observer)
        check_cache(resolution.recipe)
        if download:
            _download(resolution.recipe, observer)
        encoder = load_encoder(resolution.recipe)
        observer.notices(encoder.notices)
        # The number of rows needed follows from the number of ranks, which is assumed if neither recipe nor
        # machine gives it.
        is_assumed = any(notice.code == "assumed-devices" for notice in resolution.notices)
        with observer.progress("tokenising", None, "rows") as bar:
            data = prepare_data(
                resolution.recipe, encoder, progress=bar, check_rows=not is_assumed, verify=verify_data
            )
        check_evaluation(resolution.recipe, encoder, observer)
        observer.notices(data.as_notices())
        return Preparation(
            data,
            decoded_rows(data.store(), encoder, show) if show else [],
            sample_sources(data.store(), data.report.inputs, encoder, samples) if samples else [],
        )


def _download(recipe: Recipe, observer: Observer) -> None:
    name = recipe.model.name_or_path
    if name is None or Path(name).exists():
        observer.message("the model is local: there are no weights to download")
        return
    observer.message(f"the model is in {download_model(name, recipe.model.revision)}")


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
    """What could not be checked here, or not yet, one sentence each."""

    @property
    def recipe(self) -> Recipe:
        return self.resolution.recipe


class InvalidRecipeError(FsdpTuneError):
    """The mistakes of a recipe that cannot be resolved, with those of model and data that do not depend on
    them.

    `inputs` and `unchecked`: as in `Validation`.
    """

    def __init__(self, found: Inspection, *problems: Problem) -> None:
        self.inputs, self.unchecked = found.inputs, tuple(dict.fromkeys(found.unchecked))
        super().__init__(*problems)

    def answer(self, recipe: str, overrides: Sequence[str]) -> ValidateAnswer:
        """Return the document of `validate --json`."""
        return ValidateAnswer(
            recipe=recipe,
            valid=False,
            resolved={},
            reasons={},
            overrides=list(overrides),
            arithmetic="",
            rate="",
            model={},
            data=self.inputs,
            unchecked=list(self.unchecked),
        )


def validate(
    recipe: LoadedRecipe,
    *,
    strict: bool = False,
    offline: bool = False,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> Validation:
    """Check the recipe's keys for this machine, its model, and the first rows of its data. Writes only to the
    caches: the inspection of the model, and a trace if keys are left to a plan.

    `strict` counts keys that have no effect as problems. `offline` sets HF_HUB_OFFLINE for this process and
    lists as unchecked what needs the hub. Raises: InvalidRecipeError if the recipe cannot be resolved;
    FsdpTuneError if a key is left to a plan and the step cannot be traced. Problems of model and data are in
    the result.
    """
    with session(recipe):
        if offline:
            os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, which is later
        try:
            resolution = resolve_recipe(
                recipe, allowed, observer, starts_ranks=True, strict=strict, elsewhere=recipe.is_imported
            )
        except UnresolvedError as error:
            raise _invalid(error, recipe, offline=offline, observer=observer) from error
        try:
            check_cache(resolution.recipe, writes=False)
        except FsdpTuneError as error:
            unresolved = UnresolvedError(resolution.recipe, *error.problems)
            raise _invalid(unresolved, recipe, offline=offline, observer=observer) from error
        found = _inspect(resolution.recipe, recipe, resolution.notices, offline=offline)
        _compare_vocabulary(resolution.recipe, found)
        if found.model is not None:
            found.notices.extend(notices_of_evaluation(resolution.recipe, found.model))
        resolution = _decide(resolution, found, offline=offline)
        notices = [*recipe.notices, *resolution.notices, *found.notices]
        observer.notices([notice for notice in notices if not (strict and notice.strict)])
        wrong = [
            Problem(each.code, each.message, each.where, each.hint)
            for each in notices
            if strict and each.strict
        ]
        problems = tuple(pinned(problem, recipe.positions) for problem in [*found.problems, *wrong])
        return Validation(resolution, found.model, found.inputs, problems, tuple(found.unchecked))


def validate_file(
    source: str,
    overrides: Sequence[str],
    *,
    name: str | None = None,
    strict: bool = False,
    offline: bool = False,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> tuple[LoadedRecipe, Validation]:
    """Read a recipe and `validate` it.

    Raises: InvalidRecipeError with the mistakes of every stage; FsdpTuneError if too little of the recipe can
    be read.
    """
    try:
        loaded = load_recipe(source, overrides, name=name)
    except WrongRecipeError as error:
        if error.recipe is None:
            raise
        path = find_recipe(source)
        readable = LoadedRecipe(error.recipe, (), path, read_text(path), tuple(overrides), error.positions)
        with session(readable):
            if offline:
                os.environ["HF_HUB_OFFLINE"] = "1"
            unresolved = _with_unresolved(error, readable, allowed, observer)
            raise _invalid(unresolved, readable, offline=offline, observer=observer) from error
    return loaded, validate(loaded, strict=strict, offline=offline, allowed=allowed, observer=observer)


def _with_unresolved(
    error: WrongRecipeError, readable: LoadedRecipe, allowed: Allowed, observer: Observer
) -> UnresolvedError:
    """Return the mistakes of a recipe with what prevents the rest of it from being resolved."""
    try:
        resolution = resolve_recipe(
            readable, allowed, observer, starts_ranks=True, elsewhere=readable.is_imported
        )
        recipe, more, suspects = resolution.recipe, (), error.suspects | _missing_here(resolution.notices)
    except UnresolvedError as unresolved:
        recipe, more, suspects = unresolved.recipe, unresolved.problems, error.suspects | unresolved.suspects
    return UnresolvedError(recipe, *error.problems, *more, suspects=suspects)


def _invalid(
    error: UnresolvedError, loaded: LoadedRecipe, *, offline: bool, observer: Observer
) -> InvalidRecipeError:
    """Check the stages that do not depend on the mistakes of a recipe, and return all that is wrong."""
    found = inspect_remaining(error.recipe, error.suspects, offline=offline)
    if loaded.is_imported:
        _take_absent(found, ())
    with collected(found.problems):
        check_cache(error.recipe, writes=False)
    _compare_vocabulary(error.recipe, found)
    observer.notices(found.notices)
    different = {
        (problem.code, problem.message): problem for problem in reversed([*error.problems, *found.problems])
    }
    return InvalidRecipeError(found, *reversed(different.values()))


def _missing_here(notices: Sequence[Notice]) -> set[str]:
    """Return the keys of model, tokenizer and template whose files are on another machine; the other sources
    of rows are still read."""
    return {str(each.where.key) for each in notices if each.code in ABSENT and each.code != "data-not-found"}


def _inspect(recipe: Recipe, loaded: LoadedRecipe, notices: Sequence[Notice], *, offline: bool) -> Inspection:
    """Inspect a resolved recipe; of an imported one, without what `notices` report to be missing on this
    machine."""
    found = inspect_remaining(recipe, _missing_here(notices) if loaded.is_imported else (), offline=offline)
    if loaded.is_imported:
        _take_absent(found, notices)
    return found


def _take_absent(found: Inspection, known: Sequence[Notice]) -> None:
    """Turn problems about files that are on another machine into notices, unless they are `known`, and list
    them as unchecked."""
    found.problems, absent = split_absent(found.problems)
    messages = {notice.message for notice in known}
    found.notices.extend(notice for notice in absent if notice.message not in messages)
    found.unchecked.extend(
        f"rows or a model that are not on this machine: {notice.message}" for notice in absent
    )


def _compare_vocabulary(recipe: Recipe, found: Inspection) -> None:
    if found.model is None:
        return
    if found.model.packaged:
        name = recipe.model.name_or_path
        found.unchecked.append(
            f"the files of `{name}`: the hub cannot be reached; shapes are those in the package"
        )
    elif found.vocabulary_size is not None:
        try:
            found.notices.extend(check_vocabulary(found.model, recipe, found.vocabulary_size))
        except FsdpTuneError as error:
            found.problems.extend(error.problems)


def _decide(resolution: Resolution, found: Inspection, *, offline: bool) -> Resolution:
    """Decide keys that are left to a plan, if the model is there and this machine has the memory of the
    ranks."""
    recipe = resolution.recipe
    if not (keys := undecided(recipe)) or found.problems or found.model is None:
        return resolution
    budget = budget_of(recipe, visible_gpu(recipe))
    if budget is None:
        left = " and ".join(f"`{key}: auto`" for key in keys)
        found.unchecked.append(
            f"{left}: this machine does not have the run's memory; `fsdp-tune plan --gpu NAME` "
            "decides for a GPU"
        )
        return resolution
    decided = decide_open_keys(recipe, budget, offline=offline)
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
        checks = [
            CheckAnswer(each.name, each.passed, each.detail, round(each.seconds, 1)) for each in self.checks
        ]
        return RehearseAnswer(
            self.failed is None, list(self.changes), checks, str(self.folder) if self.folder else None
        ).as_dict()


def rehearse(
    recipe: LoadedRecipe,
    *,
    num_processes: int | None = None,
    parity: bool = False,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> RehearsalResult:
    """Train a scaled-down recipe, kill a rank, resume, merge, reload and compare; stop at the first check
    that fails.

    `num_processes`: 2, or 4 if the recipe shards in groups or its ranks share rows. `parity` compares a run
    for each switch with a plain loop on one device. Runs on the CPU unless `--set` (an override) gives
    `launch.device`. Raises: FsdpTuneError if model or data cannot be used.
    """
    with session(recipe):
        resolution = resolve_recipe(recipe, allowed, observer, starts_ranks=True)
        observer.notices(resolution.notices)
        wanted = resolution.recipe
        check_cache(wanted)
        position = recipe.positions.get("launch.device")
        device = (
            wanted.launch.device
            if position is not None and str(position.source).startswith("--set")
            else "cpu"
        )
        ranks = num_processes or (
            RANKS_IN_GROUPS if wanted.is_hybrid or wanted.parallelism.of_row.world_size > 1 else RANKS
        )
        checks = list[Check]()
        with temporary_directory(
            "rehearsal-", keep=lambda: not all(check.passed for check in checks)
        ) as folder:
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
                observer.message(
                    f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.detail}  "
                    f"({check.seconds:.0f} s)"
                )
        return RehearsalResult(
            tuple(small.changes), tuple(checks), None if all(check.passed for check in checks) else folder
        )


def _scale_down(recipe: Recipe, folder: Path, ranks: int, device: str, observer: Observer) -> ScaledRecipe:
    """Inspect model and data as `validate` does, and replace unreachable inputs. Raises: FsdpTuneError for
    their errors."""
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
    return scale_down_recipe(
        recipe, found.model.config, folder, ranks=ranks, device=device, steps=STEPS, inputs=inputs
    )
