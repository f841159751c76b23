"""Check a recipe before it runs: its inputs without GPUs, all mistakes at once, or a rehearsal on CPU ranks with a scaled-down model.

The inspection of the inputs checks that model and data of a resolved recipe exist, and that the first rows of each source can be used. The
model is inspected in a child process, since this one never imports torch. `train` inspects and prepares by the same functions.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp_tune.check.rehearsal.lifecycle_checks import Check, Rehearsal
from fsdp_tune.check.rehearsal.parity_checks import make_comparable, parity_checks
from fsdp_tune.check.rehearsal.scale_down import ReadableInputs, ScaledRecipe, scale_down_recipe
from fsdp_tune.core import processes as children
from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Notice, Problem, usage_error
from fsdp_tune.core.hub import download_model
from fsdp_tune.core.ownership import temporary_directory
from fsdp_tune.core.units import parse_seconds
from fsdp_tune.data.account import SourceSample, sample_sources
from fsdp_tune.data.inputs import open_inputs
from fsdp_tune.data.preparation import Prepared, decoded_rows, length_with_targets
from fsdp_tune.data.preparation import prepare as prepare_data
from fsdp_tune.data.read.sources import find_source
from fsdp_tune.data.report import DecodedExample
from fsdp_tune.data.tokenise.chat import sample_prompts
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.jobs.answers import CheckAnswer, RehearseAnswer
from fsdp_tune.jobs.first_rows import FIRST_ROWS, CheckedSource, bad_first_rows, read_first_rows
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.plan import budget_of, decide, visible_gpu
from fsdp_tune.jobs.recipes import check_cache, resolve_recipe
from fsdp_tune.merge.lora.adapt import merge_problems
from fsdp_tune.model.model_files import ModelFacts, ModelInspection, check_vocabulary
from fsdp_tune.planner.search.search import KEY, is_undecided
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.schema.keys import pinned
from fsdp_tune.recipe.schema.recipe import Recipe

INSPECT = (sys.executable, "-P", "-m", "fsdp_tune.model.loading.inspect")
INSPECT_SECONDS = 300.0
_UNREACHABLE = re.compile(
    r"couldn't connect|offline mode|connection error|could not reach|max retries|timed out|name resolution", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ValidateAnswer(JsonAnswer):
    recipe: str
    """The file."""
    valid: bool
    resolved: dict[str, Any]
    """The recipe with every key decided."""
    reasons: dict[str, str]
    """Key → why it has its value."""
    overrides: list[str]
    arithmetic: str
    """Sequences and tokens of a step."""
    rate: str
    """Learning rate at the start, at its peak and at the end."""
    model: dict[str, Any]
    """Empty if the model could not be built."""
    data: list[CheckedSource]
    unchecked: list[str]
    """What could not be checked here, a sentence each."""


@dataclass(frozen=True, slots=True)
class PrepareAnswer(JsonAnswer):
    path: str
    """Directory of the cache."""
    key: str
    reused: bool
    train: str
    evals: dict[str, str]
    """Label → directory of the set."""
    report: dict[str, Any]
    """The account of rows and tokens."""


@dataclass(frozen=True, slots=True)
class PrepareShownAnswer(PrepareAnswer):
    """With `--show` or `--ids`."""

    shown: list[list[DecodedExample]]
    """Rows, each a list of its examples."""


@dataclass(slots=True)
class Inspection:
    """Findings in the model, in the data, or in both."""

    model: ModelFacts | None = None
    """None if the model could not be built."""
    vocabulary_size: int | None = None
    """Tokens of the tokenizer; None if it could not be loaded."""
    inputs: list[CheckedSource] = field(default_factory=list[CheckedSource])
    problems: list[Problem] = field(default_factory=list[Problem])
    notices: list[Notice] = field(default_factory=list[Notice])
    unchecked: list[str] = field(default_factory=list[str])
    """What could not be inspected without network, one sentence each."""
    is_data_reachable: bool = True

    def add(self, error: FsdpTuneError) -> None:
        """Record the problems of the data. A hub that cannot be reached is not a mistake in the recipe, and a stop signal is raised."""
        if error.exit_code is ExitCode.PREEMPTED:
            raise error
        for problem in error.problems:
            if problem.code == "hub-unreachable":
                self.is_data_reachable = False
                self.unchecked.append(problem.message)
            else:
                self.problems.append(problem)


def inspect(recipe: Recipe, *, offline: bool = False) -> Inspection:
    """Inspect model and data at the same time: each takes seconds to import what it needs."""
    with children.threads(1) as pool:
        running = pool.submit(inspect_model, recipe, offline=offline)
        data = inspect_data(recipe)
        found = running.result()
    return Inspection(
        found.model,
        data.vocabulary_size,
        data.inputs,
        [*found.problems, *data.problems],
        [*found.notices, *data.notices],
        list(dict.fromkeys([*found.unchecked, *data.unchecked])),
        data.is_data_reachable,
    )


def inspect_model(recipe: Recipe, *, offline: bool = False, answer: Callable[[float], str] | None = None) -> Inspection:
    """Return parameters, layer classes, FSDP units and every problem of the model, found on the meta device.

    `answer` waits some seconds for the document of an inspection that has already been started. Empty: there is none. Its process may be
    a rank that hangs, of which the user learns when the ranks start.
    """
    limit_seconds = min(INSPECT_SECONDS, parse_seconds(recipe.launch.hang_timeout))
    text = answer(limit_seconds) if answer is not None else ""
    document = ModelInspection.from_json(text) if text else _inspect_in_child(recipe, offline=offline)
    found = Inspection(document.facts, notices=list(document.notices))
    for problem in document.problems:
        if problem.code == "model-not-found" and (offline or _UNREACHABLE.search(problem.message)):
            found.unchecked.append(
                f"the model `{recipe.model.name_or_path}`: the hub cannot be reached, and its files are not in the cache"
            )
        else:
            found.problems.append(problem)
    if found.model is not None and not found.problems:
        found.problems += merge_problems(recipe, found.model)
    return found


def _inspect_in_child(recipe: Recipe, *, offline: bool) -> ModelInspection:
    """Return the document of `fsdp_tune.model.loading.inspect`, or one with the reason why there is none."""
    environment = os.environ | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    raw = recipe.model_dump_json(by_alias=True)
    child = children.start(INSPECT, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = child.communicate(raw, timeout=INSPECT_SECONDS)
    except subprocess.TimeoutExpired:
        return ModelInspection(None, (Problem("model-not-inspected", f"inspecting the model took more than {INSPECT_SECONDS:.0f} s"),))
    finally:
        children.end(child)
    try:
        return ModelInspection.from_json(output)
    except ValueError:
        return ModelInspection(None, (_crashed(child.returncode, errors),))


def _crashed(exit_code: int, errors: str) -> Problem:
    is_killed = exit_code < 0
    hint = "out of host memory? The kernel then kills a process: see `dmesg`" if is_killed else "`fsdp-tune env` shows the installation"
    return Problem("model-not-inspected", f"the model could not be inspected: {children.describe_failure(exit_code, errors)}", hint=hint)


def inspect_data(recipe: Recipe) -> Inspection:
    """Load the tokenizer, open every source and read its first rows; write nothing."""
    found = Inspection()
    try:
        encoder = load_encoder(recipe)
    except FsdpTuneError as error:
        found.add(error)
        _find_sources(recipe, found)
        return found
    found.vocabulary_size = encoder.vocabulary_size
    found.notices.extend(encoder.notices)
    try:
        sample_prompts(recipe, encoder)
        inputs = open_inputs(recipe, encoder)
    except FsdpTuneError as error:
        found.add(error)
        return found
    first = [read_first_rows(opened, encoder) for opened in inputs]
    for each in first:
        found.inputs.append(each.checked)
        if each.error is not None:
            found.add(each.error)
    bad = bad_first_rows(inputs, first)
    found.problems.extend(bad.problems(recipe.data))
    found.notices.extend(bad.notices(recipe.data))
    return found


def _find_sources(recipe: Recipe, found: Inspection) -> None:
    """Report missing files; without a tokenizer the rows cannot be checked."""
    for key, entry in recipe.data.sources:
        try:
            find_source(entry, key)
        except FsdpTuneError as error:
            found.add(error)


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

    `show` decodes so many rows, `samples` so many examples of each training source. `download` fetches the model's weights too.
    `verify_data` hashes all data files instead of trusting sizes and times. A script needs `if __name__ == "__main__":` around the
    call, since tokenising spawns processes.
    Raises: FsdpTuneError, with file and line for what is wrong in the data.
    """
    with session(recipe):
        resolution = resolve_recipe(recipe, allowed, observer)
        check_cache(resolution.recipe)
        if download:
            _download(resolution.recipe, observer)
        encoder = load_encoder(resolution.recipe)
        observer.notices(encoder.notices)
        # The number of rows needed follows from the number of ranks, which is assumed if neither recipe nor machine gives it.
        is_assumed = any(notice.code == "assumed-devices" for notice in resolution.notices)
        with observer.progress("tokenising", None, "rows") as bar:
            data = prepare_data(resolution.recipe, encoder, progress=bar, check_rows=not is_assumed, verify=verify_data)
        observer.notices(data.as_notices())
        return Preparation(
            data,
            decoded_rows(data.train, encoder, show) if show else [],
            sample_sources(data.train, data.report.inputs, encoder, samples) if samples else [],
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
