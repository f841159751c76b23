"""The base of callbacks that need the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import TrainerCallback

from fsdp_tune.worker.step_observer import StepObserver

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer


class AttachedCallback(StepObserver, TrainerCallback):
    """An observer of steps that follows the Trainer's events and keeps the trainer."""

    trainer: FsdpTrainer

    def attach(self, trainer: FsdpTrainer) -> None:
        self.trainer = trainer
