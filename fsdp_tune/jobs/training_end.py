"""The end of a training: evaluate, merge and push its model, or name the next commands of a failed one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fsdp_tune.core.errors import ExitReason, FsdpTuneError
from fsdp_tune.jobs.checkpoint_scorer import Evaluating
from fsdp_tune.jobs.observer import Observer, TrainResult
from fsdp_tune.jobs.results import merge_checkpoint, missing_outputs, outputs_at_end, push
from fsdp_tune.launch.command.next_commands import commands_to_resume
from fsdp_tune.launch.command.resume import Start, takes_best
from fsdp_tune.merge.merge_options import MergeOptions, hints_with_command
from fsdp_tune.merge.source import newer_checkpoint
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir, latest_checkpoint
from fsdp_tune.run.rank_files import Verdict, read_outcome


def conclude(
    run: RunDir, recipe: Recipe, observer: Observer, ended: Verdict, evaluations: Evaluating | None
) -> TrainResult:
    """Evaluate and merge a finished run. Raises: FsdpTuneError with the problem of a failed one and the next
    commands."""
    outcome = ended.first_outcome.facts if ended.first_outcome else {}
    checkpoint, _ = latest_checkpoint(run, elsewhere=None)
    result = TrainResult(run, recipe, ended.reason, ended.step, outcome, checkpoint, signal=ended.signal)
    if ended.problem is not None:
        observer.run_ended(result)
        ways_out = (*ended.problem.ways_out, *commands_to_resume(run, checkpoint))
        raise FsdpTuneError(replace(ended.problem, ways_out=ways_out), exit_code=ended.exit_code)
    if ended.reason is ExitReason.FINISHED and evaluations is not None:
        evaluations.finish(ended.signal)
    if ended.reason is ExitReason.FINISHED and recipe.merge.at_end:
        observer.run_ended(replace(result, exit_reason=ExitReason.FAILED))
        result = replace(result, merged=merge(run, recipe, observer))
        if recipe.training.push_to_hub:
            result = replace(result, pushed=_push(run, recipe, observer))
    return result


def merge(
    run: RunDir,
    recipe: Recipe,
    observer: Observer,
    *,
    overwrite: bool = True,
    adapter: bool | None = None,
) -> Path:
    """Return the directory of the merged model, or of the adapter. `adapter`: as of `MergeOptions`."""
    options = MergeOptions(overwrite=overwrite, best=takes_best(recipe), adapter=adapter)
    with hints_with_command(run.path):
        return merge_checkpoint(run.path, options, observer=observer).output


def _push(run: RunDir, recipe: Recipe, observer: Observer) -> str:
    """Upload the adapter if the run has no merged model, else that."""
    alone = recipe.lora is not None and recipe.merge.adapter == "adapter"
    return push(run.path, adapter=alone, observer=observer).url


def finished(
    run: RunDir, recipe: Recipe, observer: Observer, start: Start, evaluations: Evaluating | None = None
) -> TrainResult:
    """Return the result of a run that has finished, after the evaluations, the merge and the push if a crash
    prevented them."""
    if evaluations is not None:
        evaluations.finish()
    outcome = read_outcome(run, 0)
    assert outcome is not None, "the outcome of the first rank is what makes a run finished"
    lacks_model = recipe.merge.at_end and bool(missing_outputs(run, recipe))
    merged = _model_of_finished(run, recipe, observer)
    pushed = _push(run, recipe, observer) if lacks_model and recipe.training.push_to_hub else None
    return TrainResult(
        run,
        recipe,
        ExitReason.FINISHED,
        outcome.step,
        outcome.facts,
        start.checkpoint,
        merged,
        pushed,
        had_finished=True,
    )


def _model_of_finished(run: RunDir, recipe: Recipe, observer: Observer) -> Path | None:
    """Return the model of a run that had finished, after merging what is missing, or of an earlier end.

    None for a run without a merge at its end that nobody has merged.
    """
    outputs = outputs_at_end(run, recipe)
    if not recipe.merge.at_end:
        observer.notices(newer_checkpoint(run, outputs[-1]))
        return outputs[-1] if outputs[-1].is_dir() else None
    if any(newer_checkpoint(run, output) for output in outputs):
        return merge(run, recipe, observer)
    for output in missing_outputs(run, recipe):
        merge(run, recipe, observer, overwrite=False, adapter=output == run.adapter)
    return outputs[-1]
