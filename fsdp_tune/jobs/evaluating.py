"""`evaluation:` on the side of the command: a thread that has each complete checkpoint scored by a child process, one at a time.

The ranks are not involved: they never wait, and read only which checkpoints a rotation must keep (`run.checkpoint_scores`). The scores are
in metrics.jsonl alone, so that a checkpoint without a line there is evaluated, by this command or by the next one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core import processes as children
from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.devices import visible_devices
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where, usage_error
from fsdp_tune.core.processes import QUIET_LIBRARIES, StoppedBySignal
from fsdp_tune.core.units import format_bytes, format_seconds, parse_seconds
from fsdp_tune.data.tokenise.tokenizer import TokenizerEncoder
from fsdp_tune.jobs.checkpoint_scores import options_of_set, scratch_of
from fsdp_tune.jobs.evaluate import prepare_set
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.model.model_files import ModelFacts
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.checkpoint_scores import CheckpointScores, kept_for_scores
from fsdp_tune.run.directory import Checkpoint, RunDir, best_so_far, complete_checkpoints
from fsdp_tune.run.event_parts import CheckpointScore
from fsdp_tune.run.events import CheckpointEvaluated, CheckpointEvaluationFailed
from fsdp_tune.run.metrics_file import append_event
from fsdp_tune.run.rotation import rotate

POLL_SECONDS = 5.0
"""Interval of the search for new checkpoints."""
WATCH_SECONDS = 0.2
"""Interval of the checks of a process."""
SCORE = (sys.executable, "-P", "-m", "fsdp_tune.jobs.checkpoint_scores")
TRACK = (sys.executable, "-P", "-m", "fsdp_tune.worker.observe.tracked_scores")
TRACKERS_SECONDS = 300.0
"""Limit for trackers, whose servers may not answer."""
LOG = "evaluation.log"
_ONLY_SOURCE = "data.train[0]"
Outcome = CheckpointEvaluated | CheckpointEvaluationFailed


@dataclass(frozen=True, slots=True)
class EvaluationDevice:
    """Where checkpoints are scored: `--device` of `evaluate`, and the variables that show it only those GPUs."""

    kind: str
    variables: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"


def evaluation_device(recipe: Recipe) -> EvaluationDevice:
    """Return the GPUs of the first machine that no rank uses, else its CPU; at the end, the devices of the ranks."""
    if recipe.launch.device == "cpu":
        return EvaluationDevice("cpu")
    if recipe.evaluation.when == "at_end":
        return EvaluationDevice("auto")
    visible = len(visible_devices(os.environ))
    if recipe.launch.device != "cuda" or visible <= recipe.local_world_size:
        return EvaluationDevice("cpu")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = named.split(",") if named else list(map(str, range(visible)))
    return EvaluationDevice("cuda", {"CUDA_VISIBLE_DEVICES": ",".join(numbers[recipe.local_world_size : visible])})


def notices_of_evaluation(recipe: Recipe, model: ModelFacts) -> list[Notice]:
    """Return what an evaluation of a checkpoint needs in addition to the ranks: memory of its device, and disk for the model."""
    if not recipe.evaluation.is_on:
        return []
    wide = recipe.merge.dtype == "fp32" or (recipe.merge.dtype == "auto" and recipe.compute_dtype == "fp32")
    model_bytes = model.parameters * (4 if wide else 2)
    device = evaluation_device(recipe)
    where = "GPUs of the ranks, after them" if recipe.evaluation.when == "at_end" else "GPUs that no rank uses"
    where = where if device.is_gpu else "host memory, next to the ranks" if recipe.evaluation.when == "alongside" else "host memory"
    folder = scratch_of(RunDir(Path(recipe.output_dir)), recipe.evaluation)
    disk = next(each for each in folder.absolute().parents if each.is_dir())
    free_bytes = shutil.disk_usage(disk).free
    size, free = format_bytes(model_bytes), format_bytes(free_bytes)
    message = f"an evaluation needs {size} and its activations on {where}, and {size} in {disk} ({free} are free)"
    hint = "`evaluation.scratch_dir` names another disk" if free_bytes < 2 * model_bytes else None
    return [Notice("evaluation-needs", message, Where(key="evaluation"), hint)]


def check_evaluation(recipe: Recipe, encoder: TokenizerEncoder, observer: Observer) -> None:
    """Prepare the rows of each set, so that the first evaluation finds no mistake in them. Raises: usage error."""
    for key, entry in recipe.evaluation.sources:
        try:
            prepare_set(recipe, options_of_set(entry, recipe), entry.set_label, encoder, observer)
        except FsdpTuneError as error:
            error.problems = tuple(_of_set(problem, key) for problem in error.problems)
            raise
    if recipe.evaluation.tasks and importlib.util.find_spec("lm_eval") is None:
        message = "`evaluation.tasks` are run by lm_eval, and the package is not installed"
        raise usage_error("lm-eval-not-installed", message, where=Where(key="evaluation.tasks"), hint="`pip install 'fsdp-tune[eval]'`")


def _of_set(problem: Problem, key: str) -> Problem:
    """Return a problem of the only source of a set's settings as one of the set."""
    named = (problem.where.key or _ONLY_SOURCE).replace(_ONLY_SOURCE, key)
    return replace(problem, message=problem.message.replace(_ONLY_SOURCE, key), where=replace(problem.where, key=named))


class Evaluating:
    """The evaluations of one command."""

    def __init__(self, run: RunDir, recipe: Recipe, observer: Observer) -> None:
        self._run, self._recipe, self._observer = run, recipe, observer
        self._device = evaluation_device(recipe)
        self._outcomes: dict[str, Outcome] = {}
        """Of this command, by the identity of the checkpoint: written again if rank 0 removes the line while it cuts the file back."""
        self._is_stopping, self._is_last, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="evaluations", daemon=True)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Evaluate the checkpoints of the run in this context. At its end no process of an evaluation is left, finished or not."""
        shutil.rmtree(scratch_of(self._run, self._recipe.evaluation), ignore_errors=True)  # of a command that was killed
        if self._recipe.evaluation.when == "alongside":
            self._thread.start()
        try:
            yield
        finally:
            self._is_stopping.set()
            self._wake.set()
            if self._thread.ident is not None:
                self._thread.join()

    def finish(self, signal_number: int | None = None) -> None:
        """Wait until every checkpoint is evaluated; the ranks have ended. A signal ends the wait, and the next start continues.

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
        self._rotate()
        self._send_to_trackers()
        for identity, outcome in self._outcomes.items():
            for line in outcome.shown() if identity not in shown else ():  # the others were read from metrics.jsonl
                self._observer.message(line)

    def _send_to_trackers(self) -> None:
        """Send the scores that rank 0 had not yet when it ended, in a process that loads the trackers."""
        if not self._recipe.training.report_to:
            return
        with DISK.open_private(self._run.logs / LOG, "ab") as log:
            child = children.start([*TRACK, str(self._run.path)], dict(os.environ), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            limit = LIVED.now() + TRACKERS_SECONDS
            while child.poll() is None and LIVED.now() < limit:
                time.sleep(WATCH_SECONDS)
            if child.returncode != 0:
                message = f"the last scores are not in {', '.join(self._recipe.training.report_to)}; see {self._run.logs / LOG}"
                self._observer.notices([Notice("scores-not-tracked", message, hint="metrics.jsonl has them")])
        finally:
            children.end(child)

    def _rotate(self) -> None:
        """Delete the checkpoints beyond `training.save_total_limit` that were kept for their evaluation."""
        complete, _ = complete_checkpoints(self._run, elsewhere=None)
        if complete:
            best = best_so_far(complete[0].path)
            protected = {complete[0].step, *kept_for_scores(self._run, self._recipe), *([best.step] if best is not None else [])}
            rotate(self._run, self._recipe.training.save_total_limit, protected=protected)

    def _waiting(self) -> list[Checkpoint]:
        """Return the complete checkpoints to evaluate, oldest first, after writing the lines of those that this command has evaluated."""
        with suppress(OSError, FsdpTuneError):
            complete, _ = complete_checkpoints(self._run, elsewhere=None)
            due = [each for each in reversed(complete) if self._recipe.evaluation.evaluates(each.step)]
            known = CheckpointScores.read(self._run)
            for each in due:
                outcome, is_written = self._outcomes.get(each.manifest.identity), each.manifest.identity in known.evaluated
                if isinstance(outcome, CheckpointEvaluated) and not is_written and threading.current_thread() is self._thread:
                    append_event(self._run, outcome)
            return [each for each in due if each.manifest.identity not in known.evaluated.keys() | self._outcomes.keys()]
        return []

    def _follow(self) -> None:
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
        started = time.time()
        found = self._score(checkpoint)
        if found is None:  # stopped
            return
        identity = checkpoint.manifest.identity
        if isinstance(found, Problem):
            outcome: Outcome = CheckpointEvaluationFailed(checkpoint.step, identity, found.code, found.message)
        else:
            outcome = CheckpointEvaluated(checkpoint.step, identity, time.time() - started, found)
        self._outcomes[identity] = outcome
        with suppress(OSError):  # a full disk: `_waiting` writes it again
            append_event(self._run, outcome)

    def _score(self, checkpoint: Checkpoint) -> dict[str, CheckpointScore] | Problem | None:
        """Return the scores, or why there are none; None if the command is stopping. No process is left."""
        limit_seconds = parse_seconds(self._recipe.evaluation.timeout)
        variables = {**os.environ, **QUIET_LIBRARIES, **self._device.variables}
        command = [*SCORE, str(self._run.path), str(checkpoint.step), self._device.kind]
        log = self._run.logs / LOG
        try:
            with DISK.open_private(log, "ab") as errors:
                child = children.start(command, variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            return Problem("evaluation-failed", f"its process could not be started: {error}")
        began = LIVED.now()
        try:
            while child.poll() is None:
                if self._is_stopping.wait(WATCH_SECONDS):
                    return None
                if LIVED.now() - began > limit_seconds:
                    message = f"it took more than {format_seconds(limit_seconds)} (`evaluation.timeout`)"
                    return Problem("evaluation-timeout", message)
            assert child.stdout is not None
            return _outcome(child.stdout.read(), child.returncode, log)
        finally:
            children.end(child)
            if child.stdout is not None:
                child.stdout.close()
            shutil.rmtree(scratch_of(self._run, self._recipe.evaluation), ignore_errors=True)  # of a process that was killed


@contextmanager
def evaluating(run: RunDir, recipe: Recipe, observer: Observer) -> Iterator[Evaluating | None]:
    """Evaluate the checkpoints of a run in this context. Yields None without `evaluation:`."""
    if not recipe.evaluation.is_on:
        yield None
        return
    evaluations = Evaluating(run, recipe, observer)
    with evaluations.following():
        yield evaluations


def _outcome(text: str, code: int, log: Path) -> dict[str, CheckpointScore] | Problem:
    try:
        line: dict[str, Any] = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        why = children.describe_failure(code, "") if code < 0 else f"its process ended with exit code {code}, see {log}"
        return Problem("evaluation-failed", why)
    if "problem" in line:
        return Problem.from_dict(line["problem"])
    return {name: CheckpointScore(**score) for name, score in line["scores"].items()}
