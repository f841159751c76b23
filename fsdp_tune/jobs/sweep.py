"""Train a recipe once for each combination of some values of its keys, one run after another, and compare the
ends."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import (
    EXIT_CODE_OF_REASON,
    STOP_CODES,
    ExitCode,
    ExitReason,
    FsdpTuneError,
    Problem,
    Where,
    usage_error,
)
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.train import Preview, preview, train
from fsdp_tune.launch.command.resume import is_unused_since, read_resolved, takes_best
from fsdp_tune.merge.best_checkpoint import best_checkpoint
from fsdp_tune.recipe.read.catalogue import find_recipe
from fsdp_tune.recipe.read.loader import LoadedRecipe, parse_recipe
from fsdp_tune.recipe.read.overrides import OptionOverride
from fsdp_tune.recipe.read.recipe_text import read_text
from fsdp_tune.recipe.references import output_directory
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import RunDir, complete_checkpoints
from fsdp_tune.run.metrics_file import read_metrics, seconds_in_steps

LONGEST_NAME = 100
OWN_KEYS = ("output_dir", "name")
"""Keys that the sweep sets itself."""


@dataclass(frozen=True, slots=True)
class SweptKey:
    """A key and the values that `--sweep` gives it."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A combination of values."""

    name: str
    """Of its directory: `learning_rate=1e-5,seed=1`."""
    values: dict[str, str]


@dataclass(frozen=True, slots=True)
class SweptRun(JsonAnswer):
    """A run of a sweep."""

    values: dict[str, str]
    """Key → value as typed."""
    run_dir: str
    state: str
    """How the run ended; `not started`, or `stopped` at a step if the sweep did not get to it."""
    steps: int
    loss: float | None
    """Of the last line."""
    eval_loss: float | None
    """Of the last evaluation; with `load_best_model_at_end` that of the best step by `metric_for_best_model`,
    whose model is merged."""
    seconds: float
    """In its steps, those of earlier starts included."""
    exit_code: int | None
    """Null: the sweep did not get to it."""
    problem: str | None


@dataclass(frozen=True, slots=True)
class SweepAnswer(JsonAnswer):
    """The runs of a sweep; the answer of `train --sweep`."""

    runs: list[SweptRun]
    best: str | None
    """Directory of the finished run with the lowest `metric`."""
    metric: str
    """`eval_loss`, or `loss` where not every finished run has one."""
    report: str
    """The command that compares the runs."""

    @property
    def exit_code(self) -> int:
        """That of the run that stopped the sweep, else of the first failed one, else 0."""
        codes = [run.exit_code for run in self.runs if run.exit_code]
        return next((code for code in codes if code in STOP_CODES), codes[0] if codes else ExitCode.OK)


def parse_sweep(texts: Sequence[str]) -> list[SweptKey]:
    """Parse `KEY=VALUE,VALUE…` of each option. Raises: usage error for all that are wrong."""
    found: list[SweptKey] = []
    problems: list[Problem] = []
    for text in texts:
        key, separator, raw = (part.strip() for part in text.partition("="))
        values = tuple(value.strip() for value in _split(raw))
        wrong = None
        if not separator or not key or not all(values):
            wrong = "is not `KEY=VALUE,VALUE`"
        elif key.split(".")[0] in OWN_KEYS:
            wrong = f"sets `{key}`, which differs in each run of a sweep anyway"
        elif any(key == other.key for other in found):
            wrong = f"gives `{key}` a second time"
        elif repeated := sorted({value for value in values if values.count(value) > 1}):
            wrong = f"names `{repeated[0]}` twice"
        if wrong is not None:
            hint = "write it as `--sweep training.learning_rate=1e-5,2e-5`, once for each key"
            problems.append(Problem("bad-sweep", f"`--sweep {text}` {wrong}", hint=hint))
        found.append(SweptKey(key, values))
    if problems:
        raise FsdpTuneError(*problems)
    return found


def _split(text: str) -> Iterator[str]:
    """Split at commas that are not inside brackets or quotes."""
    depth, quote, start = 0, "", 0
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    yield text[start:]


def sweep_points(keys: Sequence[SweptKey]) -> list[SweepPoint]:
    """Return all combinations, the last key varying fastest, each with a name that no other has."""
    last = [each.key.rpartition(".")[2] for each in keys]
    shown = [each.key if last.count(name) > 1 else name for each, name in zip(keys, last, strict=True)]
    points: list[SweepPoint] = []
    for values in itertools.product(*(each.values for each in keys)):
        name = ",".join(
            f"{key}={re.sub(r'[^A-Za-z0-9._+-]+', '-', value)}"
            for key, value in zip(shown, values, strict=True)
        )
        points.append(SweepPoint(name, dict(zip((each.key for each in keys), values, strict=True))))
    folded = [point.name.casefold() for point in points]  # file systems that ignore case
    return [
        point
        if len(point.name) <= LONGEST_NAME and folded.count(at) == 1
        else replace(point, name=_hashed(point))
        for point, at in zip(points, folded, strict=True)
    ]


def _hashed(point: SweepPoint) -> str:
    digest = hashlib.sha256(repr(sorted(point.values.items())).encode()).hexdigest()[:8]
    return f"{point.name[:LONGEST_NAME]}-{digest}"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a sweep before it starts."""

    point: SweepPoint
    loaded: LoadedRecipe
    options: TrainOptions
    preview: Preview

    @property
    def run(self) -> RunDir:
        return self.preview.plan.run


def plan_sweep(
    source: str,
    overrides: Sequence[str],
    sweep: Sequence[str],
    options: TrainOptions,
    *,
    name: str | None = None,
) -> list[PlannedRun]:
    """Read and resolve the recipe of every run. Raises: usage error with the problems of all of them."""
    if options.resume not in (None, "auto"):
        raise usage_error(
            "bad-sweep",
            "`--resume PATH` names the checkpoint of one run",
            hint="a sweep continues its runs by itself",
        )
    if options.overwrite and options.resume is not None:
        raise usage_error(
            "bad-sweep",
            "`--overwrite` starts all runs over and `--resume auto` continues them",
            hint="pass only one of them",
        )
    points = sweep_points(parse_sweep(sweep))
    path = find_recipe(source)
    text = read_text(path)
    planned: list[PlannedRun] = []
    found: dict[tuple[str, Where], list[tuple[str, Problem]]] = {}
    for point in points:
        try:
            planned.append(_planned(text, path, overrides, point, options, name))
        except FsdpTuneError as error:
            for problem in error.problems:
                found.setdefault((problem.message, problem.where), []).append((point.name, problem))
    if found:
        raise FsdpTuneError(*(_of_points(each, len(points)) for each in found.values()))
    return planned


def _of_points(found: Sequence[tuple[str, Problem]], points: int) -> Problem:
    """Return a problem with the first point that has it, unless the problem names its value or all points
    have it."""
    name, problem = found[0]
    if len(found) == points or str(problem.where.source).startswith("--sweep"):
        return problem
    return replace(
        problem,
        message=f"{problem.message} ({name}{f' and {len(found) - 1} more' if len(found) > 1 else ''})",
    )


def _planned(
    text: str,
    path: Path,
    overrides: Sequence[str],
    point: SweepPoint,
    options: TrainOptions,
    name: str | None,
) -> PlannedRun:
    own = [f"{key}={value}" for key, value in point.values.items()]
    loaded = parse_recipe(
        text, path, overrides, name=name, options=[OptionOverride(f"--sweep {each}", each) for each in own]
    )
    recipe = loaded.recipe
    if recipe.launch.num_machines > 1:
        raise usage_error(
            "bad-sweep",
            "a sweep runs on one machine",
            where=Where(key="launch.num_machines"),
            hint="start its runs yourself",
        )
    if recipe.training.push_to_hub:
        message = "`training.push_to_hub` would upload every run of the sweep"
        raise usage_error("bad-sweep", message, hint="leave it out, and `fsdp-tune push` the best one")
    folder = output_directory(recipe, Path.cwd())[0] / point.name
    changed = recipe.model_copy(
        update={"output_dir": str(folder), "name": f"{recipe.name}-{re.sub('[=,]', '-', point.name)}"}
    )
    loaded = replace(loaded, recipe=changed, overrides=(*overrides, *own, f"output_dir={folder}"))
    own_options = replace(
        options,
        resume=None if options.overwrite else "auto",
        command=_command(options.command, [*own, f"output_dir={folder}"]),
    )
    return PlannedRun(point, loaded, own_options, preview(loaded, own_options))


def _command(words: Sequence[str], settings: Sequence[str]) -> tuple[str, ...]:
    """Return the command that trains one run: `--set` in place of `--sweep`, and of a `--set` of the same key
    (`output_dir`, which each run has below that of the sweep)."""
    end = words.index("--") if "--" in words else len(words)
    replaced = {_key_of(each) for each in settings}
    kept: list[str] = []
    rest = iter(words[:end])
    for word in rest:
        if word == "--sweep":
            next(rest, None)
        elif word == "--set":
            value = next(rest, "")
            kept += [] if _key_of(value) in replaced else [word, value]
        elif word.startswith("--set="):
            kept += [] if _key_of(word.removeprefix("--set=")) in replaced else [word]
        elif not word.startswith("--sweep="):
            kept.append(word)
    if not kept:
        return ()
    return (*kept, *(part for each in settings for part in ("--set", each)), *words[end:])


def _key_of(setting: str) -> str:
    return setting.partition("=")[0]


def run_sweep(
    planned: Sequence[PlannedRun],
    *,
    observer: Observer = Observer(),
    next_run: Callable[[], None] = lambda: None,
) -> SweepAnswer:
    """Train the runs one after another. One that fails is reported, and the next one starts.

    A signal saves the current one and ends the sweep. `next_run` is called before each of them.
    """
    done: list[SweptRun] = []
    for number, each in enumerate(planned, 1):
        next_run()
        observer.message(f"sweep: run {number} of {len(planned)}, {each.point.name}")
        try:
            result = train(each.loaded, each.options, observer=observer)
            code, problem, state = EXIT_CODE_OF_REASON[result.exit_reason], None, result.exit_reason.value
            if result.stop_code is not None and number < len(planned):
                code = result.stop_code  # a signal in its last step: it finished, and no other run starts
        except (FsdpTuneError, StoppedBySignal) as error:
            is_stop = error.exit_code is ExitCode.PREEMPTED
            state = (ExitReason.PREEMPTED if is_stop else ExitReason.FAILED).value
            code, problem = error.exit_code, error.problems[0]
            for told in error.problems:
                where = f"{told.where}: " if told.where.source else ""
                observer.message(f"error: {where}{told.message}")
                for hint in [told.hint, *told.ways_out] if told.hint else told.ways_out:
                    observer.message(f"hint: {hint}")
        done.append(_described(each, state, code, problem))
        if code in STOP_CODES:
            break
    next_run()
    return answer_of([*done, *(waiting(each) for each in planned[len(done) :])])


def _described(planned: PlannedRun, state: str, code: int | None, problem: Problem | None = None) -> SweptRun:
    """Return a run with the figures of its metrics: those of its own start, or of the one it continues."""
    lines = read_metrics(planned.run) if planned.run.is_used and not _is_of_another(planned) else []
    losses = [line for line in lines if "loss" in line and isinstance(line.get("step"), int)]
    return SweptRun(
        values=planned.point.values,
        run_dir=str(planned.run.path),
        state=state,
        steps=losses[-1]["step"] if losses else 0,
        loss=_finite(losses[-1]["loss"]) if losses else None,
        eval_loss=_eval_loss(planned, [line for line in lines if "eval_loss" in line]),
        seconds=seconds_in_steps(losses),
        exit_code=None if code is None else int(code),
        problem=problem.message if problem is not None else None,
    )


def _is_of_another(planned: PlannedRun) -> bool:
    """Return whether the directory still has the run that this one replaces (`--overwrite`)."""
    start = planned.preview.start
    continues = start.is_new or start.checkpoint is not None or start.is_finished
    return not continues and is_unused_since(planned.run, start)


def _eval_loss(planned: PlannedRun, lines: Sequence[dict[str, Any]]) -> float | None:
    """Return the evaluation loss of the model that the run ships."""
    recipe, values = planned.loaded.recipe, [line["eval_loss"] for line in lines]
    if not takes_best(recipe):
        return _finite(values[-1]) if values else None
    if training_value(recipe.training, "metric_for_best_model") in (None, "loss", "eval_loss"):
        return min((found for value in values if (found := _finite(value)) is not None), default=None)
    complete = complete_checkpoints(planned.run, elsewhere=None)[0] if values else []
    try:
        step = (
            best_checkpoint(planned.run, read_resolved(planned.run), complete)[0].step if complete else None
        )
    except FsdpTuneError:  # its evaluation has failed
        return None
    return next((_finite(line["eval_loss"]) for line in reversed(lines) if line.get("step") == step), None)


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def waiting(planned: PlannedRun) -> SweptRun:
    """Return the state of a run that the sweep has not come to."""
    start = planned.preview.start
    state = (
        ExitReason.FINISHED.value
        if start.is_finished
        else f"stopped at step {start.step}"
        if start.checkpoint
        else "not started"
    )
    return _described(planned, state, None)


def answer_of(runs: Sequence[SweptRun]) -> SweepAnswer:
    finished = [run for run in runs if run.state == ExitReason.FINISHED.value]
    metric = "eval_loss" if finished and all(run.eval_loss is not None for run in finished) else "loss"
    values = {
        run.run_dir: value
        for run in finished
        if (value := run.eval_loss if metric == "eval_loss" else run.loss) is not None
    }
    best = min(values, key=values.__getitem__, default=None)
    report = shlex.join(["fsdp-tune", "report", *(run.run_dir for run in runs if run.steps)])
    return SweepAnswer(list(runs), best, metric, report)
