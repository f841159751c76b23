"""The phase of a step that a rank is in, for its heartbeat."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter
from fsdp_tune.worker.step_observer import StepObserver

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer


class AttachedCallback(StepObserver, TrainerCallback):
    """An observer of steps that follows the Trainer's events and keeps the trainer."""

    trainer: FsdpTrainer

    def attach(self, trainer: FsdpTrainer) -> None:
        self.trainer = trainer


class StepProgress(StepObserver, TrainerCallback):
    """Record in the heartbeat which part of a step this rank is in."""

    def __init__(self, heartbeat: HeartbeatWriter) -> None:
        self._heartbeat = heartbeat

    def attach(self, trainer: FsdpTrainer) -> None:
        """Install hooks on the wrapped model: a forward is progress, also in evaluation; in training a
        backward follows it."""
        model = trainer.wrapped

        def before(*_: object) -> None:
            self._heartbeat.mark("forward") if model.training else self._heartbeat.tick()

        def after(*_: object) -> None:
            if model.training:
                self._heartbeat.mark("backward")

        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._heartbeat.mark("optimizer step")
