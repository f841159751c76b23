"""`evaluation.when: between_steps`: after a save the ranks wait while a child of the first rank scores the checkpoint on their devices.

The ranks compute nothing meanwhile, and give unused memory back to the device, so the run is the same without evaluations. A request to
stop ends the wait on all ranks and the child; the checkpoint is then scored by the command, when the ranks have ended or at its next start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from transformers import TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.launch.scoring import EvaluationDevice, ScoringProcess
from fsdp_tune.run.checkpoint_scores import checkpoints_to_evaluate
from fsdp_tune.worker.observe.step_phases import AttachedCallback
from fsdp_tune.worker.stop_request import StopRequest

WATCH_SECONDS = 0.2
"""Interval at which the ranks look for the end of the child and for requests to stop."""


class ScoresBetweenSteps(AttachedCallback):
    """`say` prints a plain line on rank 0."""

    def __init__(self, stop_request: StopRequest, say: Callable[[str], None]) -> None:
        self._stop_request, self._say = stop_request, say
        self._step = 0
        """The last one that was scored: the end of an epoch may request the save of a step again."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        step, trainer = state.global_step, self.trainer
        is_ending = control.should_training_stop or step >= state.max_steps  # the command scores it after the ranks
        if is_ending or step == self._step or not trainer.parts.recipe.evaluation.evaluates(step):
            return
        self._step, began = step, time.monotonic()
        trainer.checkpointer.wait()
        if trainer.checkpointer.last_step == step:  # else its save has failed, on all ranks
            with trainer.parts.heartbeat.during("evaluating a checkpoint", step):
                self._wait(step)
        trainer.lines.leave_out(time.monotonic() - began)

    def _wait(self, step: int) -> None:
        """Collective: all ranks leave together, with no process of the evaluation left."""
        if self.trainer.args.device.type != "cpu":
            getattr(torch, self.trainer.args.device.type).empty_cache()
        _meet(0)  # before the child allocates
        is_first = dist.get_rank() == 0
        scoring = self._start(step) if is_first else None
        try:
            while not _meet(max(self._stop_request.code(), int(is_first and (scoring is None or scoring.has_ended())))):
                self.trainer.parts.heartbeat.tick()
                time.sleep(WATCH_SECONDS)
            if scoring is not None and scoring.has_ended():
                with suppress(OSError, FsdpTuneError):
                    self.trainer.parts.metrics.event(scoring.outcome())
        finally:
            if scoring is not None:
                scoring.end()
        _meet(0)  # no rank allocates before the child is gone

    def _start(self, step: int) -> ScoringProcess | None:
        """Return None if the checkpoint cannot be read now: it is evaluated after the ranks."""
        parts = self.trainer.parts
        with suppress(OSError, FsdpTuneError):
            found = next((each for each in checkpoints_to_evaluate(parts.run, parts.recipe.evaluation) if each.step == step), None)
            if found is not None:
                self._say(f"the ranks wait while checkpoint-{step} is evaluated")
                device = "cpu" if self.trainer.args.device.type == "cpu" else "auto"
                return ScoringProcess(parts.run, parts.recipe, found, EvaluationDevice(device))
        return None


def _meet(mine: int) -> int:
    """Return the largest number of any rank, on the host."""
    number = torch.tensor([mine], dtype=torch.int32)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return int(number.item())
