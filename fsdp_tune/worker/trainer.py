"""transformers.Trainer, overridden only where it is wrong or slow (docs/evidence/numerics.md, Faults of the
stack).

Its loop, callbacks, schedules and early stopping are kept. Overridden are: preparing the model (it is already
wrapped), the batches (both in `prepared_trainer.py`), the loss, the gradient norm, evaluation, logging, and
checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from fsdp_tune.model.shard.recomputation_check import RecomputationCheck
from fsdp_tune.model.shard.wrap import begin_micro_batch
from fsdp_tune.model.step import auxiliary_loss_weight, forward_backward, loss_options
from fsdp_tune.run.events import EarlyStopped, GradientSpike, PrecisionWarning
from fsdp_tune.run.metrics_event import SpikeEvent
from fsdp_tune.run.records import ReadBack
from fsdp_tune.worker.agreement import gather, stop_on
from fsdp_tune.worker.checkpoint.restore import trainer_state_json
from fsdp_tune.worker.eval_sets import evaluate_sets
from fsdp_tune.worker.prepared_trainer import Parts, PreparedTrainer
from fsdp_tune.worker.readback.dtype_audit import DtypeAudit, warnings_of, why_not_audited
from fsdp_tune.worker.rows.batches import Batch
from fsdp_tune.worker.step_checks import CurveWatch, RecentBatches
from fsdp_tune.worker.step_observer import LoggedStep, StepObserver


class FsdpTrainer(PreparedTrainer):
    """One run of a resolved recipe on this rank."""

    def __init__(
        self,
        parts: Parts,
        args: TrainingArguments,
        callbacks: Sequence[TrainerCallback],
        observers: Sequence[StepObserver],
    ) -> None:
        super().__init__(parts, args, callbacks, observers)
        self._watch = CurveWatch(
            parts.loaded.model.config.get_text_config().vocab_size
            if parts.recipe.model.from_config is None
            else None
        )
        self._recent = RecentBatches(parts.rows, parts.recipe.topology)
        self._audited = False
        self._auxiliary_weight = auxiliary_loss_weight(parts.loaded.model)

    def floating_point_ops(self, inputs: object) -> int:
        return (
            0  # the Trainer counts parameters at each micro-batch for this; our MFU is computed once a line
        )

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        batch: Batch = inputs
        if not batch.tensors:
            return torch.zeros((), device=self.args.device)
        if not model.training:
            model.train()
        self.batches_done += 1
        begin_micro_batch(self.parts.recipe, self.wrapped, is_last=self.batches_done == len(self.batches))
        tensors = {
            name: tensor.to(self.args.device, non_blocking=True) for name, tensor in batch.tensors.items()
        }
        if self._audited:
            return self._forward_backward(model, batch, tensors, float(num_items_in_batch))
        self._audited = True
        recipe, check = self.parts.recipe, RecomputationCheck()
        why_not = why_not_audited(recipe)
        is_checked = (
            why_not is None
            and recipe.training.witness != "off"
            and recipe.fsdp.activation_checkpointing != "none"
        )
        with DtypeAudit(why_not) as audit, check if is_checked else nullcontext():
            loss = self._forward_backward(model, batch, tensors, float(num_items_in_batch))
        self._write_audit(audit.report())
        if is_checked:
            found = [
                f"rank {rank}: {each}" for rank, own in enumerate(gather(check.differences())) for each in own
            ]
            stop_on(found, self.state.global_step, self.parts.run)
        return loss

    def _forward_backward(
        self, model: nn.Module, batch: Batch, tensors: dict[str, torch.Tensor], step_targets: float
    ) -> torch.Tensor:
        """`step_targets`: supervised tokens of the step over all ranks and micro-batches."""
        # Ranks average their gradients, so the share of one rank is multiplied by their number.
        topology, sums = self.parts.recipe.topology, self.lines.sums
        ranks, is_counted = topology.gradient_size, topology.counts_loss(dist.get_rank())
        share = ranks / step_targets
        auxiliary = self._auxiliary_weight * ranks / self.step_tokens
        scale = self.parts.scale.scale if self.parts.scale is not None else None
        loss, loss_sum = forward_backward(
            *(self.parts.recipe, model, tensors, share),
            auxiliary=auxiliary,
            loss_scale=scale,
            source_losses=sums.source_losses if is_counted else None,
            **loss_options(self.parts.recipe),
        )
        if is_counted:
            sums.add(loss_sum)
        self._recent.add(self.state.global_step + 1, self.batches_done, batch, loss_sum)
        return loss

    def _write_audit(self, report: dict[str, dict[str, int]]) -> None:
        """Complete readback.json with the dtypes in which the first micro-batch ran."""
        if self.is_world_process_zero():
            warnings = warnings_of(self.parts.recipe, report)
            ReadBack.complete(self.parts.run.readback_json, ran_in=report, warnings=warnings)
            for warning in warnings:
                self.parts.metrics.event(PrecisionWarning(self.state.global_step, warning))

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._checked_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return self._checked_norm(None) if grad_norm is None else grad_norm

    def _checked_norm(self, max_norm: float | None) -> torch.Tensor:
        self.correct_schedule()
        return self.gate.pass_or_skip(self.state.global_step + 1, max_norm, self.live_optimizer, self.batches)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        model: nn.Module,
        trial: object,
        epoch: float,
        ignore_keys_for_eval: object,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        step = self.state.global_step
        self.times.end_step()
        # The Trainer's own counts micro-batches of this rank, of which a short last step has fewer on more
        # ranks.
        self.state.epoch = self.parts.rows.epochs_after(step)
        tr_loss.zero_()  # the Trainer's own sum; ours is weighted by tokens
        self.parts.heartbeat.beat("training", step)
        if self.control.should_log or self.control.should_evaluate:
            self.gate.check_pending()
        if self.control.should_log and step > self.last_line_step:
            self.last_line_step = step
            self._log_line(step, None if grad_norm is None else float(grad_norm), learning_rate)
        if self.control.should_evaluate:
            was_ending = self.control.should_training_stop
            is_best = self._determine_best_metric(metrics=self._evaluate(None, None), trial=None)
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
            if self.control.should_training_stop and not was_ending:
                self._end_early(step, grad_norm, learning_rate)
        if self.control.should_save:
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _end_early(
        self, step: int, grad_norm: torch.Tensor | float | None, learning_rate: float | None
    ) -> None:
        """Write the line of the last steps, which no later one would count, and why the run ends here."""
        if step > self.last_line_step:
            self.last_line_step = step
            self._log_line(step, None if grad_norm is None else float(grad_norm), learning_rate)
        stopping = self.parts.recipe.training.early_stopping
        best, at = self.state.best_metric, self.state.best_global_step
        message = (
            f"{self.args.metric_for_best_model} has not improved in {stopping.patience} evaluations; the "
            f"best is {best:.6g} of step {at}"
            if stopping is not None
            else "a callback ended the training after the evaluation"
        )
        self.parts.metrics.event(EarlyStopped(step, message))

    def _log_line(self, step: int, grad_norm: float | None, learning_rate: float | None) -> None:
        logged = LoggedStep(step, grad_norm, learning_rate)
        line = {name: value for each in self.observers for name, value in each.facts(logged).items()}
        self.state.num_input_tokens_seen = self.lines.tokens
        self.log(line)
        assert self.lines.last_loss is not None  # of `facts`
        for kind, message in self._watch.watch(self.lines.last_loss, self.lines.last_grad_norm):
            if issubclass(kind, SpikeEvent):
                self.parts.metrics.event(
                    kind(step, message, *self._recent.rows_of(step if kind is GradientSpike else None))
                )
            else:
                self.parts.metrics.event(kind(step, message))
        self._recent.clear()

    def log(self, logs: Mapping[str, object], start_time: float | None = None) -> None:
        if "train_runtime" in logs:
            return  # the Trainer's summary averages losses by step; ours are in the lines
        self.parts.metrics.write(
            {"step": self.state.global_step, "epoch": self.state.epoch, "time": time.time(), **logs}
        )
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, numbers)

    def _evaluate(
        self,
        trial: Any,
        ignore_keys_for_eval: Any,
        skip_scheduler: bool = False,  # noqa: FBT001, FBT002
    ) -> dict[str, float]:
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        step = self.state.global_step
        if skip_scheduler and step > 0:  # before the first step of a resumed run
            is_best, is_last = (
                self._determine_best_metric(metrics=metrics, trial=None),
                step >= self.state.max_steps,
            )
            if is_last and is_best:
                self.checkpointer.last_step = (
                    None  # so that it is saved again, with its own value as the best
                )
            if self.control.should_training_stop and not is_last:
                self._end_early(step, None, None)
        return metrics

    def evaluate(
        self, eval_dataset: object = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        started = time.monotonic()
        with self.parts.heartbeat.during("evaluating", self.state.global_step):
            parts = self.parts
            metrics = evaluate_sets(
                parts.recipe,
                self.wrapped,
                parts.evals,
                parts.collator,
                self.args.device,
                parts.user_metrics,
                parts.heartbeat.count,
            )
        seconds = time.monotonic() - started
        self.last_eval_loss, self.evaluated_step = metrics["eval_loss"], self.state.global_step
        if self.evaluates_again:
            self.evaluates_again = False
            parts.metrics.remove_evaluation(self.state.global_step)
        self.log({**metrics, "eval_seconds": seconds})
        self.lines.leave_out(seconds)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: object = None) -> None:
        step = self.state.global_step
        if self.checkpointer.newest_step == step:
            return  # the end of an epoch and the last step request the same checkpoint
        started = time.monotonic()
        if self.state.best_global_step is not None:
            self.state.best_model_checkpoint = str(
                self.checkpointer.run.checkpoint(self.state.best_global_step)
            )
        self.checkpointer.save(
            step, trainer_state_json(self), self.own_state(), best_step=self.state.best_global_step
        )
        seconds = time.monotonic() - started
        self.times.stalled += seconds
        self.times.written = self.checkpointer.written_seconds
        self.lines.leave_out(seconds)

    def _load_best_model(self) -> None:
        """Nothing: the merge reads the best checkpoint, and the last step may still have to be saved with its
        own weights."""
