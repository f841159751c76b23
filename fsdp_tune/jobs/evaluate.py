"""Evaluate a finished model on rows of data, and compare it with another one on the same rows."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fsdp_tune.answer.examples import AnswerReader
from fsdp_tune.answer.find_model import ModelToEvaluate, find_model, run_of_model
from fsdp_tune.answer.model_requests import Request, RowScore
from fsdp_tune.core.atomic import check_output_file, write_file
from fsdp_tune.core.command import Bar, JsonAnswer
from fsdp_tune.core.devices import this_machine
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Notice, Problem, Where, failed_error, usage_error
from fsdp_tune.core.library_errors import first_line
from fsdp_tune.core.processes import QUIET_LIBRARIES, JsonChild, threads
from fsdp_tune.data.tokenise.tokenizer import TokenizerEncoder, load_encoder, open_tokenizer
from fsdp_tune.jobs.evaluated_recipes import recipe_of_model, recipe_of_run, recipe_of_set
from fsdp_tune.jobs.evaluated_sets import (
    EXACT_MATCH,
    PERPLEXITY,
    PreparedSet,
    SetResult,
    prepare_set,
    prepared_rows,
)
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.jobs.options import DeviceKind, EvaluateOptions
from fsdp_tune.jobs.recipes import check_cache, refuse_code, resolve_recipe
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.merge.card_metadata import hub_id
from fsdp_tune.merge.model_card import CARD_NAME, without_folders
from fsdp_tune.merge.publish import CardResult, add_results
from fsdp_tune.merge.quantised import rounding_notices
from fsdp_tune.merge.source import newer_checkpoint
from fsdp_tune.recipe.extensions import Extension, find_extension
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir

SCORE = (sys.executable, "-P", "-m", "fsdp_tune.answer.score")


@dataclass(frozen=True, slots=True)
class Evaluation(JsonAnswer):
    """The result, and the document of `evaluate --json`."""

    model: str
    base: str | None
    metric: str
    interval: str
    """The method of the intervals."""
    test: str | None
    """The method of the comparison."""
    sets: dict[str, SetResult]
    seconds: float
    device: str
    processes: int
    """Of this machine, which shared the rows."""
    card: str | None
    """The model card of the run's model, which has the result now; None if MODEL is not the model of a
    run."""


def evaluate(
    model: str | Path,
    options: EvaluateOptions = EvaluateOptions(),
    *,
    recipe: LoadedRecipe | None = None,
    observer: Observer = Observer(),
) -> Evaluation:
    """Evaluate a model on rows that are formatted and tokenised as in training.

    `model` is a Hugging Face directory, a run (its merged model), RUN/adapter or a hub id. Data settings come
    from `recipe`, else from the run that wrote the model, else they are the defaults. A script needs
    `if __name__ == "__main__":` around the call.
    Raises: FsdpTuneError, with exit code 1 for a model that cannot be run and 4 for a score that is NaN or
    infinity.
    """
    with session(recipe):
        started = time.monotonic()
        device_of(options.device)
        if options.out is not None:
            check_output_file(options.out, replaces=True)
        models = [find_model(str(name)) for name in (model, options.base) if name is not None]
        metric = _extension(options)
        settings = _recipe(models[0], options, recipe, observer)
        scored, request = _score(models, settings, options, metric, observer)
        observer.notices(
            [notice for each in scored.values() for notice in (*each.few_rows, *each.cut_answers(models))]
        )
        if options.out is not None:
            lines = [
                line for each in scored.values() for line in each.lines([model.name for model in models])
            ]
            write_file(options.out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        is_match = options.metric == EXACT_MATCH
        results = {label: each.result() for label, each in scored.items()}
        return Evaluation(
            model=models[0].name,
            base=options.base,
            metric=options.metric,
            interval="Wilson, 95 %" if is_match else "bootstrap over rows, 95 %",
            test=None
            if options.base is None
            else "McNemar, exact"
            if is_match
            else "paired bootstrap over rows",
            sets=results,
            seconds=time.monotonic() - started,
            device=request.device,
            processes=request.parts,
            card=_put_on_card(models[0], options, settings, results, observer),
        )


@dataclass(frozen=True, slots=True)
class CheckpointResults:
    """The results of the sets of `evaluation:` by label."""

    sets: dict[str, SetResult]
    rows: dict[str, str]
    """The digest of the rows of each set (`PreparedSet.digest`)."""
    notices: list[Notice]


def evaluate_checkpoint(run: RunDir, model: Path, sets: Mapping[str, EvaluateOptions]) -> CheckpointResults:
    """Evaluate the model of a checkpoint, a Hugging Face directory or an adapter, on the rows that each
    `data` names, read as by its run.

    The model is loaded once for all sets, which have the same `device` and `batch_size`. Raises:
    FsdpTuneError.
    """
    recipe, models, observer = recipe_of_run(run), [find_model(str(model))], Observer()
    encoder, options = load_encoder(recipe), next(iter(sets.values()))
    _check_models(models, encoder, options, observer)
    scored = {label: prepare_set(recipe, each, label, encoder, observer) for label, each in sets.items()}
    request = _request(models, scored, options, encoder, None)
    _run(replace(request, is_of_run=True), scored, observer)
    return CheckpointResults(
        sets={label: each.result() for label, each in scored.items()},
        rows={label: each.digest for label, each in scored.items()},
        notices=[
            notice for each in scored.values() for notice in (*each.few_rows, *each.cut_answers(models))
        ],
    )


def _score(
    models: Sequence[ModelToEvaluate],
    settings: Recipe,
    options: EvaluateOptions,
    metric: Extension | None,
    observer: Observer,
) -> tuple[dict[str, PreparedSet], Request]:
    """Run the models on the rows of the settings. Returns the scores of each set, and how they were computed.
    Raises: FsdpTuneError."""
    check_cache(settings)
    encoder = load_encoder(settings)
    _check_models(models, encoder, options, observer)
    reader = AnswerReader(encoder, options.answer)
    sets = prepared_rows(settings, options, encoder, observer)
    scored = {label: PreparedSet(label, rows, options, reader) for label, rows in sets.items()}
    request = _request(models, scored, options, encoder, metric)
    _run(request, scored, observer)
    return scored, request


def _request(
    models: Sequence[ModelToEvaluate],
    scored: Mapping[str, PreparedSet],
    options: EvaluateOptions,
    encoder: TokenizerEncoder,
    metric: Extension | None,
) -> Request:
    device = device_of(options.device)
    return Request(
        models=list(models),
        sets={label: each.request for label, each in scored.items()},
        vocabulary_size=encoder.vocabulary_size,
        pad_id=encoder.pad_id,
        batch_size=options.batch_size,
        device=device,
        dtype=options.dtype,
        metric=None if metric is None else metric.as_dict(),
        trust_remote_code=options.allowed.remote_code,
        parts=processes_of(options, device),
    )


def _put_on_card(
    model: ModelToEvaluate,
    options: EvaluateOptions,
    recipe: Recipe,
    results: Mapping[str, SetResult],
    observer: Observer,
) -> str | None:
    """Write the results into the card of a run's model, and return its path. A card that cannot be written is
    a notice."""
    folder = Path(model.adapter or model.weights)
    if run_of_model(model) is None or not (folder / CARD_NAME).is_file():
        return None
    rows = [
        CardResult(
            **_origin(recipe, label, is_only=options.data is not None),
            metric=options.metric,
            value=result.metric.value,
            interval=(result.metric.low, result.metric.high),
            rows=result.rows,
            base=None if result.base is None or options.base is None else (options.base, result.base.value),
        )
        for label, result in results.items()
    ]
    try:
        add_results(folder / CARD_NAME, rows)
    except (OSError, ValueError, yaml.YAMLError) as error:
        message = f"the result is not in the model card: {first_line(error)}"
        observer.notices(
            [
                Notice(
                    "card-not-written",
                    message,
                    Where(str(folder / CARD_NAME)),
                    "`--out FILE` and `--json` have the result",
                )
            ]
        )
        return None
    return str(folder / CARD_NAME)


def _origin(recipe: Recipe, label: str, *, is_only: bool) -> dict[str, Any]:
    """Return name, data, configuration and split of a set of the recipe; `is_only`: its rows are those of the
    only training source."""
    data, labels = recipe.data, recipe.data.eval_labels
    if isinstance(data.eval, list):
        sources, name = [data.eval[labels.index(label)]], label
    else:
        sources = data.train if len(labels) < 2 else [data.train[labels.index(label)]]
        name = sources[0].path if is_only else label
    configs, splits, revisions = (
        {each.name for each in sources},
        {each.split for each in sources},
        {each.revision for each in sources},
    )
    return {
        "name": name,
        "data": ", ".join(
            dict.fromkeys(hub_id(each.path) or str(without_folders(each.path)) for each in sources)
        ),
        "revision": revisions.pop() if len(revisions) == 1 else None,
        "config": configs.pop() if len(configs) == 1 else None,
        "split": f"{'' if is_only or isinstance(data.eval, list) else 'held out of '}{', '.join(sorted(splits))}",  # noqa: E501
    }


def _check_models(
    models: Sequence[ModelToEvaluate], encoder: TokenizerEncoder, options: EvaluateOptions, observer: Observer
) -> None:
    """Refuse models with another tokenizer, for which the ids of the rows are other words; report a merged
    model that is out of date."""
    own: dict[str, int] = encoder.tokenizer.get_vocab()
    for model in models:
        if (run := run_of_model(model)) is not None:
            folder = Path(model.adapter or model.weights)
            observer.notices(
                [*newer_checkpoint(run, folder), *rounding_notices(read_resolved(run), folder, run)]
            )
        try:
            other = open_tokenizer(recipe_of_model(model, options.allowed)).tokenizer.get_vocab()
        except FsdpTuneError:  # it has no tokenizer of its own, or none that can be trained with
            continue
        shared = own.keys() & other.keys()
        # some special tokens may be renumbered
        if 2 * sum(own[token] == other[token] for token in shared) < len(shared):
            message = (
                f"the tokenizer of `{model.name}` gives other ids than that of the rows, so its scores "
                "would mean nothing"
            )
            hint = "evaluate models of one tokenizer; without `--config`, the rows are tokenised for MODEL"
            raise usage_error("tokenizer-differs", message, hint=hint)


def device_of(kind: DeviceKind) -> str:
    """Return the device to run on; `auto` is this machine's accelerator, else the CPU. Raises: usage error if
    it is not there."""
    found = this_machine("auto").device or "cpu"
    if kind not in ("auto", "cpu", found):
        shows = "no accelerator" if found == "cpu" else found
        raise usage_error("no-device", f"`--device {kind}`: this machine shows {shows}", hint="--device auto")
    return found if kind == "auto" else kind


def processes_of(options: EvaluateOptions, device: str) -> int:
    """Return the number of processes. Raises: usage error if there are more than GPUs."""
    if device == "cpu":
        return options.num_processes or 1
    count = this_machine("auto").device_count
    if (options.num_processes or 1) > count:
        message = f"`--num-processes {options.num_processes}`: this machine shows {count} of {device}"
        raise usage_error("no-device", message, hint=f"--num-processes {count}")
    return options.num_processes or count


def _extension(options: EvaluateOptions) -> Extension | None:
    """Return the entry point that is the metric, or None for a metric of this package. Raises: usage
    error."""
    if options.answer is not None and options.metric != EXACT_MATCH:
        message = f"`--answer` extracts what exact_match compares, and the metric is {options.metric}"
        raise usage_error("answer-pattern", message, hint="--metric exact_match")
    if options.metric in (EXACT_MATCH, PERPLEXITY):
        return None
    try:
        found = find_extension("metrics", options.metric)
    except FsdpTuneError as error:
        (problem,) = error.problems
        hint = f"this package has {EXACT_MATCH} and {PERPLEXITY}; {problem.hint}"
        raise usage_error(
            problem.code, f"`--metric {options.metric}`: {problem.message}", hint=hint
        ) from error
    if not options.allowed.extensions:
        message = f"`--metric` names the installed extension {found}"
        raise usage_error(
            "extension-not-allowed", message, hint="read its code; if you trust it, add `--allow-extensions`"
        )
    return found


def _recipe(
    model: ModelToEvaluate, options: EvaluateOptions, loaded: LoadedRecipe | None, observer: Observer
) -> Recipe:
    """Return the settings of the data: of the given recipe, of the run that wrote the model, or the defaults
    with its tokenizer."""
    run = run_of_model(model)
    if loaded is not None:
        recipe = resolve_recipe(loaded, options.allowed, observer).recipe
    elif run is not None:
        recipe = recipe_of_run(run)
    else:
        recipe = recipe_of_model(model, options.allowed)
    recipe = recipe_of_set(recipe, options)
    refuse_code(recipe, options.allowed, starts_ranks=False)
    return recipe


def _run(request: Request, scored: Mapping[str, PreparedSet], observer: Observer) -> None:
    """Run the models in child processes and add their scores. Raises: FsdpTuneError with the problems of the
    first child that fails."""
    total = len(request.models) * sum(len(each.examples) for each in scored.values())
    most = max(-(-len(each.examples) // request.batch_size) for each in scored.values())
    request.parts = min(request.parts, most)  # a process without a batch would load the models for nothing
    added = threading.Lock()
    with observer.progress("evaluating", total, "rows") as bar, threads(request.parts) as pool:
        parts = [pool.submit(_run_part, request, part, scored, bar, added) for part in range(request.parts)]
        for done in as_completed(parts):
            done.result()


def _run_part(
    request: Request, part: int, scored: Mapping[str, PreparedSet], bar: Bar, added: threading.Lock
) -> None:
    """Run the models on the batches of one part, in a process with a share of the cores or on a GPU of its
    own."""
    environment = os.environ | QUIET_LIBRARIES
    is_alone, on_cpu = request.parts == 1, request.device == "cpu"
    if on_cpu and not is_alone:
        environment = {
            "OMP_NUM_THREADS": str(max(1, this_machine("auto").cores // request.parts))
        } | environment
    device = request.device if on_cpu or is_alone else f"{request.device}:{part}"
    with JsonChild(SCORE, environment) as child:
        child.send(replace(request, part=part, device=device).as_json(), is_last=True)
        for line in lines_of(child):
            with added:
                scored[line["set"]].add(line["model"], [RowScore(**row) for row in line["rows"]])
            bar.advance(len(line["rows"]))
        if child.wait():
            message = f"the model could not be run: {child.failure()}"
            raise failed_error("evaluation-failed", message, hint="`fsdp-tune env` shows the installation")


def lines_of(child: JsonChild) -> Iterator[dict[str, Any]]:
    """Yield the lines of a child that runs models, until it ends. Raises: FsdpTuneError with the problems
    that it reports."""
    while (line := child.receive()) is not None:
        if "problems" in line:
            raise FsdpTuneError(
                *map(Problem.from_dict, line["problems"]), exit_code=ExitCode(line["exit_code"])
            )
        yield line
