"""The trainer before a step: its inputs, preparation, resuming, and the batches of the step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from fsdp_tune.core.errors import failed_error
from fsdp_tune.core.values import as_mapping
from fsdp_tune.data.store import RowStore
from fsdp_tune.model.internals.transformers_internals import require_trainer_hooks
from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.model.optim.optimizer import build_optimizer
from fsdp_tune.model.step import LossScale
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import BestRestarted
from fsdp_tune.run.metrics_file import MetricsFile
from fsdp_tune.worker.agreement import from_rank0
from fsdp_tune.worker.best import chosen_by, start_anew
from fsdp_tune.worker.checkpoint.restore import (
    restore_model,
    restore_optimizer,
    restore_own,
    restore_rng,
    restore_schedule,
)
from fsdp_tune.worker.checkpoint.save import Checkpointer
from fsdp_tune.worker.checkpoint.state import OwnState, seed_for_rank
from fsdp_tune.worker.eval_sets import Metric
from fsdp_tune.worker.observe import metrics
from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter
from fsdp_tune.worker.observe.metrics import Lines, device_peak_flops, model_size
from fsdp_tune.worker.rows.batches import Batch, Collator
from fsdp_tune.worker.rows.training_rows import TrainingRows
from fsdp_tune.worker.step_checks import GradientGate
from fsdp_tune.worker.step_observer import RankTimes, StepObserver


@dataclass(frozen=True, slots=True)
class Parts:
    """Inputs of the trainer in addition to TrainingArguments."""

    recipe: Recipe
    loaded: Loaded
    rows: TrainingRows
    evals: dict[str, RowStore]
    collator: Collator
    metrics: MetricsFile
    heartbeat: HeartbeatWriter
    scale: LossScale | None
    run: RunDir
    user_metrics: Mapping[str, Metric]


class PreparedTrainer(Trainer):
    """The trainer without its steps: what it is made of, where it starts or resumes, and its batches."""

    checkpointer: Checkpointer
    optimizer: torch.optim.Optimizer | None

    def __init__(
        self,
        parts: Parts,
        args: TrainingArguments,
        callbacks: Sequence[TrainerCallback],
        observers: Sequence[StepObserver],
    ) -> None:
        """`callbacks` are called before those of the `observers`, which come in this order in a line of
        metrics.jsonl too."""
        require_trainer_hooks()
        self.parts = parts
        super().__init__(
            model=parts.loaded.model,
            args=args,
            train_dataset=_Sized(parts.rows.sample),
            eval_dataset=_Sized(parts.rows.sample),
            callbacks=[*callbacks, *(each for each in observers if isinstance(each, TrainerCallback))],
        )
        self.remove_callback(PrinterCallback)
        self.wrapped = parts.loaded.wrapped
        devices, sources = (
            parts.recipe.topology.world_size,
            parts.recipe.data.train_names[: parts.collator.sources],
        )
        self.lines = Lines(
            args.device,
            model_size(parts.loaded),
            device_peak_flops(args.device),
            devices=devices,
            sources=sources,
        )
        self.last_eval_loss: float | None = None
        self.times = RankTimes()
        self.gate = GradientGate(
            self.wrapped,
            parts.scale,
            parts.recipe.training.on_nonfinite == "skip",
            parts.metrics,
            self._locate_nonfinite,
        )
        self.batches: list[Batch] = []
        self.batches_done = 0
        self.step_tokens = 0  # over all ranks, padding left out
        self.last_line_step = 0
        self._best_by: str | None = None
        self.evaluated_step: int | None = None
        self.evaluates_again = False
        """Whether the next evaluation is one that a resume makes up, maybe not for the first time."""
        self.observers = [self.lines, self.gate, parts.rows, *observers]
        for each in self.observers:
            each.attach(self)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Iterable[Batch], resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Iterable[Batch]]:
        """Prepare without Accelerate: the model is wrapped, and the batches are this rank's already."""
        # Trainer.__init__ gives every rank the same seed (`set_seed`), so each rank gets its own stream only
        # now.
        torch.manual_seed(seed_for_rank(self.parts.recipe.training.seed, self.state.global_step))
        self.model_wrapped = self.wrapped
        optimizer = self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self._best_by = from_rank0(
            lambda: chosen_by(self.args, self.parts.evals, self.parts.user_metrics),
            "reading the evaluation rows",
        )
        if resume_from_checkpoint is not None:
            restore_model(self.checkpointer.live, resume_from_checkpoint)
            restore_optimizer(self.checkpointer.live, resume_from_checkpoint)
            self.lines.tokens = int(self.state.num_input_tokens_seen)
            own = restore_own(resume_from_checkpoint)
            self.lines.sums.load(own["sums"])
            self.parts.rows.restore(own.get("rows"), self.state.global_step)
            self.parts.metrics.write_missing(own["unwritten"])
            if self.parts.scale is not None and own["loss_scale"] is not None:
                self.parts.scale.load_state_dict(own["loss_scale"])
            # a checkpoint of an earlier version has none
            self.gate.skipped_steps = int(own.get("skipped_steps", 0))
            restore_schedule(self.lr_scheduler, self._updates)
            is_same = self._compare_best(own.get("best_by"))
            self.evaluated_step = self.state.global_step if own.get("evaluated", True) and is_same else None
            self.args.eval_on_start = self._owes_evaluation()  # what the recipe has is for step 0
            self.evaluates_again = self.args.eval_on_start
            if self.state.global_step >= max_steps:
                self._load_rng_state(resume_from_checkpoint)  # which the first step would do
                if not Path(resume_from_checkpoint).parent.samefile(self.parts.run.path):
                    self.checkpointer.last_step = (
                        None  # so that the run, which ends here, has the checkpoint in its own directory
                    )
        given = {
            "model": self.model,
            "optimizer": optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": train_dataloader,
        }
        for name, value in given.items():
            setattr(self.callback_handler, name, value)
        self.wrapped.train()
        # The Trainer zeroes through the model, which walks all modules at each step; the optimizer has a
        # list.
        self.wrapped.zero_grad = optimizer.zero_grad
        self.lines.start(self.state.global_step)
        self.last_line_step = self.state.global_step
        return self.wrapped, train_dataloader

    def _compare_best(self, before: str | None) -> bool:
        """Start the best anew if it was chosen `before` by another metric, or on other rows. A run that
        chooses none keeps it. Returns whether it goes on."""
        if before is None or before == self._best_by:
            return True
        if self._best_by is None:
            self._best_by = before
            return True
        if message := start_anew(self.state, self.callback_handler.callbacks, before, self._best_by):
            self.parts.metrics.event(BestRestarted(self.state.global_step, message))
        return False

    def _owes_evaluation(self) -> bool:
        """Whether the last step of the run so far has to be evaluated, and was not: a stop leaves it out, or
        the recipe has changed."""
        args, state, order = self.args, self.state, self.parts.rows.order
        if not self.parts.evals or args.eval_strategy == "no" or self.evaluated_step == state.global_step:
            return False
        if state.global_step >= state.max_steps:
            return True
        if args.eval_strategy == "steps":
            return state.global_step % state.eval_steps == 0 and args.eval_delay <= state.global_step
        return (
            order is not None
            and order.locate(state.global_step)[1] == 0
            and args.eval_delay <= (state.epoch or 0.0)
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.parts.recipe, self.wrapped, self.parts.loaded.size.decayed)
        return self.optimizer

    @property
    def live_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, once it is created."""
        assert self.optimizer is not None
        return self.optimizer

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        values = super().set_initial_training_values(args, dataloader)
        order = self.parts.rows.order
        if order is None:
            return values
        # The Trainer multiplies the steps of one epoch, and epochs differ where rows are skipped.
        _, steps, *counts, _ = values
        total = args.max_steps if args.max_steps > 0 else order.total_steps(args.num_train_epochs)
        return order.locate(total - 1)[0] + 1, steps, *counts, total

    def _init_training_state(self, max_steps: int, *args: object, **kwargs: object) -> tuple[int, int]:
        result = super()._init_training_state(max_steps, *args, **kwargs)
        if (order := self.parts.rows.order) is not None:
            epoch, steps = order.locate(self.state.global_step)
            result = epoch, steps * self.args.gradient_accumulation_steps
            self.state.epoch = order.epochs_after(self.state.global_step)
        # A resumed state carries the old recipe's intervals and micro-batch; those of the recipe in force
        # count.
        self.state.compute_steps(self.args, max_steps)
        self.state.train_batch_size = self.args.train_batch_size
        return result

    @property
    def _updates(self) -> int:
        """Finished steps without those that overflowed in fp16: the position of the schedule, as in the
        Trainer."""
        return self.state.global_step - (self.gate.skipped_steps if self.parts.scale is not None else 0)

    def correct_schedule(self) -> None:
        """Take from the schedule a step that fp16 has skipped: the Trainer steps it after each one, since no
        optimizer of Accelerate reports that."""
        schedule = self.lr_scheduler
        if isinstance(schedule, LRScheduler) and schedule.last_epoch != self._updates:
            restore_schedule(schedule, self._updates)

    def _locate_nonfinite(self, batches: list[Batch]) -> str:
        return metrics.describe(
            self.parts.recipe, self.parts.loaded, batches, self.parts.rows, self.args.device
        )

    def own_state(self) -> OwnState:
        """Return the state of this rank for its file in a checkpoint; called last before a save."""
        self.gate.check_pending()
        scale = self.parts.scale.state_dict() if self.parts.scale else None
        return {
            "sums": self.lines.sums.state(),
            "loss_scale": scale,
            "skipped_steps": self.gate.skipped_steps,
            "unwritten": list(self.parts.metrics.unwritten),
            "rows": self.parts.rows.state(),
            "best_by": self._best_by,
            "evaluated": self.evaluated_step == self.state.global_step,
        }

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # The Trainer calls this last, after skipping batches, so nothing draws from the generators in
        # between.
        assert checkpoint is not None
        restore_rng(
            checkpoint, self.parts.recipe.training.seed, self.state.global_step, self.args.device.type
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        """Nothing: `_prepare_for_training` loads, once the model is wrapped."""

    def _load_callback_state(self) -> None:
        """Restore the counters of callbacks; their settings come from the current recipe."""
        every = as_mapping(self.state.stateful_callbacks)
        for callback in self.callback_handler.callbacks:
            stored = as_mapping(every.get(type(callback).__name__))
            for name, value in as_mapping(stored.get("attributes")).items():
                setattr(callback, name, value)

    def get_train_dataloader(self) -> Any:
        pin, prefetch, workers = (
            self.args.dataloader_pin_memory,
            self.args.dataloader_prefetch_factor,
            self.args.dataloader_num_workers,
        )
        return self.parts.rows.batches(workers=workers, pin_memory=pin, prefetch=prefetch)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = (
                True  # the Trainer looks at neither before it has trained a step
            )
            return
        epoch, order = kwargs["epoch"], self.parts.rows.order
        self.parts.rows.set_epoch(epoch)
        if order is not None:
            kwargs |= {
                "steps_in_epoch": len(kwargs["train_dataloader"]),
                "num_update_steps_per_epoch": order.steps(epoch),
            }
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], int]:
        """Return the slots of one step (a micro-batch each, or `NOTHING`), and the supervised tokens of the
        step over all ranks."""
        self.times.begin_step()
        batches, total = self._global_batch(epoch_iterator, num_batches)
        while self.step_tokens == 0:  # the lanes of a stream end one by one
            self.parts.rows.skip_empty(self.state.global_step)
            batches, total = self._global_batch(epoch_iterator, num_batches)
        if total == 0:
            raise failed_error(
                "step-without-targets",
                f"step {self.state.global_step + 1}: no token of the global batch is trained, so "
                "there is no loss",
            )
        self.batches, self.batches_done = [batch for batch in batches if batch.tensors], 0
        return batches, total

    def _global_batch(self, epoch_iterator: Iterator[Batch], num_batches: int) -> tuple[list[Batch], int]:
        started = time.monotonic()
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        waited = time.monotonic() - started
        counted = batches if self.parts.recipe.topology.counts_rows(dist.get_rank()) else []
        mine, tokens = (
            sum(batch.supervised_tokens for batch in counted),
            sum(batch.tokens for batch in counted),
        )
        self.parts.rows.count(counted)
        self.times.data += waited
        self.lines.sums.add_batch(tokens, mine, waited, sum(batch.attended for batch in counted))
        self.lines.sums.add_sources(batch.supervised_by_source for batch in counted)
        # On the host, where the batches are: the device and its queue are not involved.
        summed = torch.tensor([mine, tokens], dtype=torch.float64)
        with self.times.waiting():
            dist.all_reduce(summed)
        total, self.step_tokens = int(summed[0].item()), int(summed[1].item())
        return batches, total


class _Sized(Dataset[object]):
    """The data set that the Trainer requires; batches come from `get_train_dataloader`."""

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)
