"""`evaluation:` on the side of the command: a thread that has each complete checkpoint scored by a child
process, one at a time.

The ranks are not involved: they never wait, and read only which checkpoints a rotation must keep
(`run.checkpoint_scores`). Only with
`evaluation.when: between_steps` they wait for a process of the first rank (`worker.between_steps`), and what
has no scores when they have ended is evaluated here. The scores are in metrics.jsonl alone, so that a
checkpoint without a line there is evaluated, by this command or by the next one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where, usage_error
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.core.units import GIB, format_bytes
from fsdp_tune.data.tokenise.tokenizer import TokenizerEncoder, load_encoder
from fsdp_tune.jobs.evaluated_recipes import options_of_set, recipe_of_run
from fsdp_tune.jobs.evaluated_sets import prepare_set
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.launch.command.inherited import clean
from fsdp_tune.launch.scoring import LOG, WATCH_SECONDS, Outcome, ScoringProcess, evaluation_device
from fsdp_tune.merge.source import newer_checkpoint
from fsdp_tune.model.model_files import ModelFacts
from fsdp_tune.planner.predict.memory import CONTEXT_BYTES
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.checkpoint_scores import (
    CheckpointScores,
    checkpoints_to_evaluate,
    kept_for_scores,
    scratch_of,
)
from fsdp_tune.run.directory import Checkpoint, RunDir, best_so_far, complete_checkpoints
from fsdp_tune.run.evaluation_record import EvaluationRecord
from fsdp_tune.run.metrics_file import append_event
from fsdp_tune.run.rotation import rotate

POLL_SECONDS = 5.0
"""Interval of the search for new checkpoints."""
TRACK = (sys.executable, "-P", "-m", "fsdp_tune.worker.observe.tracked_scores")
TRACKERS_SECONDS = 300.0
"""Limit for trackers, whose servers may not answer."""
_ONLY_SOURCE = "data.train[0]"


def notices_of_evaluation(recipe: Recipe, model: ModelFacts) -> list[Notice]:
    """Return what an evaluation of a checkpoint needs in addition to the ranks: memory of its device, and
    disk for the model."""
    if not recipe.evaluation.is_on:
        return []
    model_bytes = _model_bytes(recipe, model)
    device = evaluation_device(recipe)
    on_gpus = {
        "at_end": "GPUs of the ranks, after them",
        "between_steps": "each GPU of the first machine, next to what its rank keeps between steps",
        "alongside": "GPUs that no rank uses",
    }
    on_host = (
        "host memory, after the ranks"
        if recipe.evaluation.when == "at_end"
        else "host memory, next to the ranks"
    )
    where = on_gpus[recipe.evaluation.when] if device.is_gpu else on_host
    folder = scratch_of(RunDir(Path(recipe.output_dir)), recipe.evaluation)
    disk = next(each for each in folder.absolute().parents if each.is_dir())
    free_bytes = shutil.disk_usage(disk).free
    size, free = format_bytes(model_bytes), format_bytes(free_bytes)
    message = (
        f"an evaluation needs {size} and its activations on {where}, and {size} in {disk} ({free} are free)"
    )
    hint = "`evaluation.scratch_dir` names another disk" if free_bytes < 2 * model_bytes else None
    return [Notice("evaluation-needs", message, Where(key="evaluation"), hint), *_notices_of_rounding(recipe)]


def _notices_of_rounding(recipe: Recipe) -> list[Notice]:
    """Return a notice if scores are of other weights than those that the run computes with."""
    section = recipe.quantised_training
    if section is None or recipe.ships_quantised:
        return []
    message = (
        f"the run computes with rounded weights (`quantization.train: {section.train}`), and its scores "
        "are of weights that are not"
    )
    hint = "`--set merge.quantise=true` writes the rounded model, and scores it"
    return [Notice("evaluation-not-rounded", message, Where(key="merge.quantise"), hint)]


def _model_bytes(recipe: Recipe, model: ModelFacts) -> int:
    """Return the size of a model to be scored, as a merge writes it."""
    wide = recipe.merge.dtype == "fp32" or (recipe.merge.dtype == "auto" and recipe.compute_dtype == "fp32")
    return model.parameters * (4 if wide else 2)


KEPT_BETWEEN_STEPS = ("parameters", "optimizer state")
"""Kinds of memory of a plan that a rank keeps when a step has ended. One that is offloaded is not on the
GPU."""


def refuse_scores_without_room(recipe: Recipe, model: ModelFacts, plan: Plan | None) -> None:
    """Raises: usage error if a GPU has no room for the scored model next to what its rank keeps between
    steps."""
    if (lack := _lack_of_room(recipe, model, plan)) is not None:
        message = f"scores between steps do not fit: {lack}"
        hint = "`--set evaluation.when=at_end`, or `alongside` with a GPU that no rank uses"
        raise usage_error("evaluation-without-room", message, where=Where(key="evaluation.when"), hint=hint)


def scored_where_there_is_room(
    recipe: Recipe, model: ModelFacts, plan: Plan | None
) -> tuple[Recipe, list[Notice]]:
    """Return the recipe of a run that continues on other machines. If a GPU has no room for scores between
    steps there, it evaluates
    after the ranks: the run must not end for its scores."""
    if (lack := _lack_of_room(recipe, model, plan)) is None:
        return recipe, []
    message = f"{lack}. On these machines, checkpoints are kept and evaluated after the ranks (`at_end`)"
    evaluation = recipe.evaluation.model_copy(update={"when": "at_end"})
    return recipe.model_copy(update={"evaluation": evaluation}), [
        Notice("evaluation-at-end", message, Where(key="evaluation.when"))
    ]


def _lack_of_room(recipe: Recipe, model: ModelFacts, plan: Plan | None) -> str | None:
    """Return what scores between steps need and a GPU does not have; None if it has it, if nothing is
    planned, or if there are none."""
    if (
        recipe.evaluation.when != "between_steps"
        or not recipe.evaluation.is_on
        or plan is None
        or not evaluation_device(recipe).is_gpu
    ):
        return None
    # of the rank, with NCCL, and of the evaluation
    contexts_gib = plan.device_gib - plan.peak_reserved_gib + CONTEXT_BYTES / GIB
    kept_gib = sum(plan.components.get(name, 0.0) for name in KEPT_BETWEEN_STEPS) + contexts_gib
    needed_gib, free_gib = _model_bytes(recipe, model) / GIB, plan.usable_gib - kept_gib
    if needed_gib <= free_gib:
        return None
    return (
        f"`evaluation.when: between_steps` needs {needed_gib:.1f} GiB and activations on each GPU, and "
        f"{max(0.0, free_gib):.1f} of {plan.usable_gib:.1f} GiB are free: parameters and optimizer state of "
        f"its rank, and CUDA contexts, take {kept_gib:.1f} GiB"
    )


def check_evaluation(recipe: Recipe, encoder: TokenizerEncoder, observer: Observer) -> EvaluationRecord:
    """Prepare the rows of each set, so that the first evaluation finds no mistake in them. Raises: usage
    error.

    Returns what the scores are computed from, to be written when the run is started.
    """
    rows: dict[str, str] = {}
    for key, entry in recipe.evaluation.sources:
        try:
            rows[entry.set_label] = prepare_set(
                recipe, options_of_set(entry, recipe), entry.set_label, encoder, observer
            ).digest
        except FsdpTuneError as error:
            error.problems = tuple(_of_set(problem, key) for problem in error.problems)
            raise
    if recipe.evaluation.tasks and importlib.util.find_spec("lm_eval") is None:
        message = "`evaluation.tasks` are run by lm_eval, and the package is not installed"
        raise usage_error(
            "lm-eval-not-installed",
            message,
            where=Where(key="evaluation.tasks"),
            hint="`pip install 'fsdp-tune[eval]'`",
        )
    merge = recipe.merge.model_dump(mode="json", include={"base"}, exclude_defaults=True)
    return EvaluationRecord.of(recipe.evaluation, rows, is_rounded=recipe.ships_quantised, merge=merge)


def _check_again(run: RunDir, recipe: Recipe, observer: Observer) -> None:
    """Check the evaluation of a run that has finished, if it has changed or a checkpoint has no scores.
    Raises: usage error."""
    record = EvaluationRecord.read(run.evaluation_json)
    known = CheckpointScores.read(run).evaluated
    is_same = record is not None and record.section == recipe.evaluation
    if not is_same or any(
        each.manifest.identity not in known for each in checkpoints_to_evaluate(run, recipe.evaluation)
    ):
        own = recipe_of_run(run).model_copy(update={"evaluation": recipe.evaluation})
        check_evaluation(own, load_encoder(own), observer).write(run.evaluation_json)


def _of_set(problem: Problem, key: str) -> Problem:
    """Return a problem of the only source of a set's settings as one of the set."""
    named = (problem.where.key or _ONLY_SOURCE).replace(_ONLY_SOURCE, key)
    return replace(
        problem, message=problem.message.replace(_ONLY_SOURCE, key), where=replace(problem.where, key=named)
    )


class Evaluating:
    """The evaluations of one command."""

    def __init__(
        self, run: RunDir, recipe: Recipe, observer: Observer, *, had_finished: bool = False
    ) -> None:
        """`had_finished`: no rank is started, so that all evaluations come after the ranks."""
        self._run, self._recipe, self._observer = run, recipe, observer
        self._outcomes: dict[str, Outcome] = {}
        """Of this command, by the identity of the checkpoint: written again if rank 0 removes the line while
        it cuts the file back."""
        self._failure: str | None = None
        """Of the thread, which has ended with it."""
        self._is_stopping, self._is_last, self._wake = threading.Event(), threading.Event(), threading.Event()
        if had_finished:
            self._is_last.set()
        self._thread = threading.Thread(target=self._follow, name="evaluations", daemon=True)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Evaluate the checkpoints of the run in this context. At its end no process of an evaluation is
        left, finished or not."""
        scratch = scratch_of(self._run, self._recipe.evaluation)
        shutil.rmtree(scratch, ignore_errors=True)  # of a command that was killed
        if self._recipe.evaluation.when == "alongside" and not self._is_last.is_set():
            self._thread.start()
        try:
            yield
        finally:
            self._is_stopping.set()
            self._wake.set()
            if self._thread.ident is not None:
                self._thread.join()
            shutil.rmtree(scratch, ignore_errors=True)  # of a process of ranks that were killed

    def finish(self, signal_number: int | None = None) -> None:
        """Wait until every checkpoint is evaluated; the ranks have ended. A signal ends the wait, and the
        next start continues.

        `signal_number`: a signal that was received before, at a step that was the last one anyway.
        Raises: StoppedBySignal or KeyboardInterrupt for it, if there is something to wait for.
        """
        waiting, shown = self._waiting(), set(self._outcomes)
        if waiting and signal_number is not None:
            raise KeyboardInterrupt if signal_number == signal.SIGINT else StoppedBySignal(signal_number)
        self._is_last.set()
        self._wake.set()
        if self._thread.ident is None:
            self._thread.start()
        if waiting:
            with self._observer.progress("evaluating", len(waiting), "checkpoints") as bar:
                while self._thread.is_alive():
                    self._thread.join(1.0)
                    now = self._waiting()
                    bar.advance(len(waiting) - len(now))
                    waiting = now
        self._thread.join()
        if self._failure is not None:
            message = f"the evaluations have stopped: {self._failure}; see {self._run.logs / LOG}"
            self._notice(
                "evaluations-stopped", message, "start the run again: it evaluates what has no scores"
            )
        self._rotate()
        self._send_to_trackers()
        for identity, outcome in self._outcomes.items():
            # the others were read from metrics.jsonl
            for line in outcome.shown() if identity not in shown else ():
                self._observer.message(line)

    def _send_to_trackers(self) -> None:
        """Send the scores that rank 0 had not yet when it ended, in a process that loads the trackers."""
        if not self._recipe.training.report_to:
            return
        names, variables = ", ".join(self._recipe.training.report_to), clean(os.environ)[0]
        try:
            with DISK.open_private(self._run.logs / LOG, "ab") as log:
                child = children.start(
                    [*TRACK, str(self._run.path)], variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        except OSError as error:
            self._notice(
                "scores-not-tracked", f"the last scores are not in {names}: {error}", "metrics.jsonl has them"
            )
            return
        try:
            limit = LIVED.now() + TRACKERS_SECONDS
            while child.poll() is None and LIVED.now() < limit:
                time.sleep(WATCH_SECONDS)
            if child.returncode != 0:
                message = f"the last scores are not in {names}; see {self._run.logs / LOG}"
                self._notice("scores-not-tracked", message, "metrics.jsonl has them")
        finally:
            children.end(child)

    def _rotate(self) -> None:
        """Delete the checkpoints beyond `training.save_total_limit` that were kept for their evaluation, as
        far as the disk lets it."""
        try:
            complete, _ = complete_checkpoints(self._run, elsewhere=None)
            if complete:
                best = best_so_far(complete[0].path)
                protected = {
                    complete[0].step,
                    *kept_for_scores(self._run, self._recipe),
                    *([best.step] if best is not None else []),
                }
                rotate(self._run, self._recipe.training.save_total_limit, protected=protected)
        except OSError as error:
            self._notice(
                "rotation-failed",
                f"checkpoints beyond `training.save_total_limit` are not removed: {error}",
                "remove them manually",
            )

    def _notice(self, code: str, message: str, hint: str) -> None:
        self._observer.notices([Notice(code, message, hint=hint)])

    def _waiting(self) -> list[Checkpoint]:
        """Return the complete checkpoints to evaluate, oldest first, after writing the lines of those that
        this command has evaluated."""
        try:
            due, known = (
                checkpoints_to_evaluate(self._run, self._recipe.evaluation),
                CheckpointScores.read(self._run),
            )
            written = known.evaluated.keys() | known.failed.keys()
            for each in due:
                outcome = self._outcomes.get(each.manifest.identity)
                if (
                    outcome is not None
                    and each.manifest.identity not in written
                    and threading.current_thread() is self._thread
                ):
                    append_event(self._run, outcome)
            settled = known.settled | self._outcomes.keys()
            return [each for each in due if each.manifest.identity not in settled]
        except (OSError, FsdpTuneError):
            # While ranks run, the thread tries again. Later it would leave checkpoints without a message.
            if threading.current_thread() is self._thread and self._is_last.is_set():
                raise
            return []

    def _follow(self) -> None:
        """The thread: it hurts neither the ranks nor the end of the command, and does not end without a
        word."""
        try:
            self._evaluate_all()
        except Exception as error:  # noqa: BLE001  said at the end, by `finish`
            self._failure = f"{type(error).__name__}: {error}"
            with suppress(OSError), DISK.open_private(self._run.logs / LOG, "ab") as log:
                log.write(traceback.format_exc().encode())

    def _evaluate_all(self) -> None:
        while not self._is_stopping.is_set():
            is_last = self._is_last.is_set()  # before looking: what was complete then is evaluated
            waiting = self._waiting()
            if waiting:
                self._evaluate(waiting[0])
            elif is_last:
                return
            else:
                self._wake.wait(POLL_SECONDS)

    def _evaluate(self, checkpoint: Checkpoint) -> None:
        if (outcome := self._score(checkpoint)) is None:  # stopped
            return
        self._outcomes[checkpoint.manifest.identity] = outcome
        with suppress(OSError):  # a full disk: `_waiting` writes it again
            append_event(self._run, outcome)

    def _score(self, checkpoint: Checkpoint) -> Outcome | None:
        """Return the scores, or why there are none; None if the command is stopping. No process is left."""
        device = evaluation_device(self._recipe, after_ranks=self._is_last.is_set())
        scoring = ScoringProcess(self._run, self._recipe, checkpoint, device)
        try:
            while not scoring.has_ended():
                if self._is_stopping.wait(WATCH_SECONDS):
                    return None
            return scoring.outcome()
        finally:
            scoring.end()


@contextmanager
def evaluating(
    run: RunDir, recipe: Recipe, observer: Observer, *, had_finished: bool = False
) -> Iterator[Evaluating | None]:
    """Evaluate the checkpoints of a run in this context. Yields None without `evaluation:`.

    `had_finished`: the inputs were not checked, since no rank is started. Raises: usage error.
    """
    if not recipe.evaluation.is_on:
        yield None
        return
    if had_finished:
        _check_again(run, recipe, observer)
    evaluations = Evaluating(run, recipe, observer, had_finished=had_finished)
    with evaluations.following():
        yield evaluations
    if had_finished:  # a checkpoint whose evaluation had failed may be the best now
        observer.notices(newer_checkpoint(run, run.merged))
