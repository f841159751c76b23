"""`evaluation.when: between_steps`: after a save the ranks wait while a child of the first rank scores the
checkpoint on their devices.

The ranks compute nothing meanwhile, and give unused memory back to the device, so the run is the same without
evaluations. A request to stop ends the wait on all ranks and the child; the checkpoint is then scored after
the next save, or by the command after the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.launch.scoring import WATCH_SECONDS, ScoringProcess, evaluation_device
from fsdp_tune.run.checkpoint_scores import CheckpointScores, checkpoints_to_evaluate
from fsdp_tune.run.directory import Checkpoint
from fsdp_tune.worker.observe.step_phases import AttachedCallback
from fsdp_tune.worker.stop_request import StopRequest

if TYPE_CHECKING:
    from fsdp_tune.worker.prepared_trainer import Parts


class ScoresBetweenSteps(AttachedCallback):
    """`say` prints a plain line on rank 0."""

    def __init__(self, stop_request: StopRequest, say: Callable[[str], None]) -> None:
        self._stop_request, self._say = stop_request, say
        self._step = 0
        """The last one after which ranks waited: the end of an epoch may request the save of a step again."""

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        step, trainer = state.global_step, self.trainer
        # the command scores it after the ranks
        is_ending = control.should_training_stop or step >= state.max_steps
        if is_ending or step == self._step or not trainer.parts.recipe.evaluation.evaluates(step):
            return
        self._step, began = step, time.monotonic()
        trainer.checkpointer.wait()
        if trainer.checkpointer.last_step == step:  # else its save has failed, on all ranks
            with trainer.parts.heartbeat.during("evaluating a checkpoint", step):
                self._wait()
        trainer.lines.leave_out(time.monotonic() - began)

    def _wait(self) -> None:
        """Collective: all ranks leave together, with no process of the evaluation left."""
        if self.trainer.args.device.type != "cpu":
            getattr(torch, self.trainer.args.device.type).empty_cache()
        _meet(0)  # before a child allocates
        waiting = _Waiting(self.trainer.parts, self._say) if dist.get_rank() == 0 else None
        try:
            while not _meet(
                max(self._stop_request.code(), int(waiting is not None and waiting.are_scored()))
            ):
                self.trainer.parts.heartbeat.tick()
                time.sleep(WATCH_SECONDS)
        finally:
            if waiting is not None:
                waiting.end()
        _meet(0)  # no rank allocates before the child is gone


class _Waiting:
    """Of the first rank: the checkpoints that have no scores, such as that of a wait that a signal ended, are
    scored one at a time."""

    def __init__(self, parts: Parts, say: Callable[[str], None]) -> None:
        self._parts, self._say = parts, say
        self._left: list[Checkpoint] = []
        """The oldest first; without those that cannot be read now, which are evaluated after the ranks."""
        self._scoring: ScoringProcess | None = None
        with suppress(OSError, FsdpTuneError):
            settled = CheckpointScores.read(parts.run).settled
            due = checkpoints_to_evaluate(parts.run, parts.recipe.evaluation)
            self._left = [each for each in due if each.manifest.identity not in settled]

    def are_scored(self) -> bool:
        """Return whether no checkpoint is left; writes the event of one that has been scored, and starts the
        next."""
        if self._scoring is not None and self._scoring.has_ended():
            with suppress(OSError, FsdpTuneError):
                self._parts.metrics.event(self._scoring.outcome())
            self.end()
        while self._scoring is None and self._left:
            checkpoint, recipe = self._left.pop(0), self._parts.recipe
            self._say(f"the ranks wait while checkpoint-{checkpoint.step} is evaluated")
            with suppress(OSError, FsdpTuneError):
                device = evaluation_device(recipe)
                self._scoring = ScoringProcess(self._parts.run, recipe, checkpoint, device, from_rank=True)
        return self._scoring is None

    def end(self) -> None:
        if self._scoring is not None:
            self._scoring.end()
        self._scoring = None


def _meet(mine: int) -> int:
    """Return the largest number of any rank, on the host."""
    number = torch.tensor([mine], dtype=torch.int32)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return int(number.item())
