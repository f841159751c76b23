"""transformers.Trainer, overridden where DESIGN §7 says that it is wrong or slow, and nowhere else.

Its loop, callbacks, schedules and early stopping are kept. Ours are: how the model is prepared (it arrives wrapped),
the batches, the loss, the gradient norm, evaluation, what is logged, and checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from fsdp_tune.data.store import RowStore
from fsdp_tune.errors import ExitCode, FailedError, Problem
from fsdp_tune.model.load import Loaded
from fsdp_tune.model.loss import auxiliary_loss_weight, micro_batch_loss
from fsdp_tune.model.step import LossScale, clip_factor, compute_context, flat_shard_group, parameter_groups, scale_gradients, total_norm
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.worker.checkpoint import Checkpointer
from fsdp_tune.worker.dataset import Batch, Collator, MicroBatches, eval_batches, loader
from fsdp_tune.worker.heartbeat import Heartbeat
from fsdp_tune.worker.metrics import MetricsFile, Sums, memory
from fsdp_tune.worker.resume import restore_model, restore_optimizer, restore_own, restore_rng, restore_schedule, trainer_state_json

FP16_SKIPS_IN_A_ROW = 20


@dataclass(frozen=True, slots=True)
class Parts:
    """What the trainer needs beside TrainingArguments."""

    recipe: Recipe
    loaded: Loaded
    train: RowStore
    evals: dict[str, RowStore]
    sampler: MicroBatches
    collator: Collator
    metrics: MetricsFile
    heartbeat: Heartbeat
    scale: LossScale | None


class FsdpTrainer(Trainer):
    """One run of a resolved recipe on this rank."""

    checkpointer: Checkpointer

    def __init__(self, parts: Parts, args: TrainingArguments, callbacks: list[TrainerCallback]) -> None:
        self.parts = parts
        super().__init__(
            model=parts.loaded.model, args=args, train_dataset=_Sized(parts.train), eval_dataset=_Sized(parts.train), callbacks=callbacks
        )
        self.remove_callback(PrinterCallback)
        self.wrapped = parts.loaded.wrapped
        self.sums = Sums(args.device)
        self.tokens_seen = 0
        self.last_loss: float | None = None
        self.last_eval_loss: float | None = None
        self._waited_seconds = 0.0
        self._line_time = time.monotonic()
        self._line_step = 0
        self._skipped_steps = 0
        self._auxiliary_weight = auxiliary_loss_weight(parts.loaded.model)

    # ---- Preparation: the model is wrapped and the batches are this rank's already, so Accelerate has nothing to prepare.

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> tuple[nn.Module, Any]:
        self.model_wrapped = self.wrapped
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            restore_model(self.checkpointer.live, resume_from_checkpoint)
            restore_optimizer(self.checkpointer.live, resume_from_checkpoint)
            restore_schedule(self.lr_scheduler, self.state.global_step)
            self.tokens_seen = int(self.state.num_input_tokens_seen)
            own = restore_own(resume_from_checkpoint)
            self.sums.load(own["sums"])
            if self.parts.scale is not None and own["loss_scale"] is not None:
                self.parts.scale.load_state_dict(own["loss_scale"])
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._line_step, self._line_time = self.state.global_step, time.monotonic()
        return self.wrapped, train_dataloader

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, self.parts.loaded.model)
            self.optimizer = optimizer_class(parameter_groups(self.wrapped, self.args.weight_decay), **options)
        return self.optimizer

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        result = super()._init_training_state(max_steps, *args, **kwargs)
        # A resumed state carries the old recipe's intervals; those of the recipe in force count.
        self.state.compute_steps(self.args, max_steps)
        return result

    # ---- Data

    def get_train_dataloader(self) -> DataLoader[Batch]:
        pin = self.args.dataloader_pin_memory
        return loader(self.parts.train, self.parts.sampler, self.parts.collator, workers=self.args.dataloader_num_workers, pin_memory=pin)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self.parts.sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], torch.Tensor]:
        """The micro-batches of one step, and the supervised tokens of that step over all ranks."""
        started = time.monotonic()
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        waited = time.monotonic() - started
        mine = sum(batch.supervised_tokens for batch in batches)
        self.sums.add_batch(sum(batch.tokens for batch in batches), mine, waited)
        # On the host: the batches are there, so neither the device nor its queue is asked.
        total = torch.tensor(float(mine), dtype=torch.float64)
        dist.all_reduce(total)
        if total.item() == 0:
            raise _failed(
                "step-without-targets",
                f"step {self.state.global_step + 1}: no token of the global batch is supervised, so there is no loss",
            )
        self._micro_batches_left = len(batches)
        return batches, total

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # the Trainer counts parameters at each micro-batch for this; our MFU is computed once a line

    # ---- The step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        batch: Batch = inputs
        model.train()
        self._micro_batches_left -= 1
        self._reduce_between_replicas(last=self._micro_batches_left == 0)
        tensors = {name: tensor.to(self.args.device, non_blocking=True) for name, tensor in batch.tensors.items()}
        with compute_context(self.parts.recipe, self.args.device.type):
            loss_sum, auxiliary = micro_batch_loss(model, tensors)
        # Ranks average their gradients, so the share of one rank is multiplied by their number.
        loss = loss_sum * (dist.get_world_size() / float(num_items_in_batch))
        if self._auxiliary_weight:
            loss = loss + self._auxiliary_weight * auxiliary * (batch.supervised_tokens * dist.get_world_size() / float(num_items_in_batch))
        if self.parts.scale is not None:
            loss = loss * self.parts.scale.scale
        loss.backward()
        self.sums.add(loss_sum.detach())
        return loss.detach()

    def _reduce_between_replicas(self, *, last: bool) -> None:
        """Under HSDP every micro-batch reduces inside a replica; only the last one crosses between replicas."""
        if isinstance(self.wrapped, FSDPModule) and self.parts.recipe.is_hybrid:
            self.wrapped.set_requires_all_reduce(last)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._norm_and_clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm_and_clip(None) if grad_norm is None else grad_norm

    def _norm_and_clip(self, max_norm: float | None) -> torch.Tensor:
        """The norm before clipping, over all ranks. A norm that is not finite never reaches the optimizer."""
        parameters = [p for p in self.wrapped.parameters() if p.grad is not None]
        norm = total_norm(parameters, flat_shard_group(self.wrapped))
        scale = self.parts.scale
        if scale is not None:
            norm = norm / scale.scale
        if not bool(torch.isfinite(norm)):
            self._skip_step(norm)
            return norm
        factor = 1.0 / scale.scale if scale is not None else 1.0
        if max_norm is not None:
            scale_gradients(parameters, clip_factor(norm, max_norm) * factor)
        elif scale is not None:
            scale_gradients(parameters, factor)
        if scale is not None:
            scale.update(finite=True)
        return norm

    def _skip_step(self, norm: torch.Tensor) -> None:
        """All ranks come here together, since the norm is the same on each. Without gradients an optimizer changes nothing."""
        step = self.state.global_step + 1
        scale = self.parts.scale
        if scale is not None:
            scale.update(finite=False)
            self.parts.metrics.event("loss_scale_backed_off", step, loss_scale=scale.scale)
            if scale.skipped_in_a_row >= FP16_SKIPS_IN_A_ROW:
                raise _non_finite(f"step {step}: {FP16_SKIPS_IN_A_ROW} steps in a row overflowed in fp16 (loss scale now {scale.scale:g})")
        elif self.parts.recipe.training.on_nonfinite == "stop":
            raise _non_finite(f"step {step}: the gradient norm is {float(norm)}")
        else:
            self._skipped_steps += 1
            self.parts.metrics.event("step_skipped", step, reason=f"the gradient norm is {float(norm)}")
        for parameter in self.wrapped.parameters():
            parameter.grad = None

    # ---- Logging, evaluation, saving

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, model: nn.Module, trial: Any, epoch: float, *args: Any, **kwargs: Any
    ) -> None:
        step = self.state.global_step
        tr_loss.zero_()  # the Trainer's own sum; ours is weighted by tokens
        self.parts.heartbeat.beat("training", step)
        if self.control.should_log and step > self._globalstep_last_logged:
            self._globalstep_last_logged = step
            self.log(self._line(grad_norm, kwargs.get("learning_rate")))
        if self.control.should_evaluate:
            is_best = self._determine_best_metric(metrics=self._evaluate(trial, None), trial=trial)
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        if self.control.should_save:
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _line(self, grad_norm: Any, learning_rate: float | None) -> dict[str, Any]:
        now, step = time.monotonic(), self.state.global_step
        seconds = (now - self._line_time) / max(1, step - self._line_step)
        totals = self.sums.reduced()
        self.tokens_seen += int(totals["tokens"])
        self.state.num_input_tokens_seen = self.tokens_seen
        self.last_loss = totals["loss_sum"] / totals["supervised_tokens"]
        line: dict[str, Any] = {
            "loss": self.last_loss,
            "grad_norm": float(grad_norm) if grad_norm is not None else None,
            "learning_rate": learning_rate,
            "tokens": self.tokens_seen,
            "supervised_tokens": int(totals["supervised_tokens"]),
            "tokens_per_second_per_device": totals["tokens"] / (now - self._line_time) / dist.get_world_size(),
            "step_seconds": seconds,
            "data_wait_seconds": totals["data_wait_seconds"] / max(1, step - self._line_step),
            "mfu": None,
            **memory(self.args.device),
        }
        if self.parts.scale is not None:
            line |= {"loss_scale": self.parts.scale.scale, "skipped_steps": self.parts.scale.skipped_steps}
        self.sums.reset()
        self._line_time, self._line_step = now, step
        return line

    def restart_line_clock(self) -> None:
        """What was not training since the last line is not counted into its seconds."""
        self._line_time, self._line_step = time.monotonic(), self.state.global_step

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if "train_runtime" in logs:
            return  # the Trainer's summary averages losses by step; ours are in the lines
        self.parts.metrics.write({"step": self.state.global_step, "epoch": self.state.epoch, "time": time.time(), **logs})
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, numbers)

    @torch.no_grad()
    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Token-weighted loss of every eval set: each row once, whatever the number of ranks."""
        self.parts.heartbeat.beat("evaluating", self.state.global_step)
        started = time.monotonic()
        self.wrapped.eval()
        sums = {label: self._eval_sums(store) for label, store in self.parts.evals.items()}
        self.wrapped.train()
        metrics = {f"eval_{label}_loss": loss / tokens for label, (loss, tokens) in sums.items() if len(sums) > 1}
        metrics["eval_loss"] = sum(loss for loss, _ in sums.values()) / sum(tokens for _, tokens in sums.values())
        self.last_eval_loss = metrics["eval_loss"]
        self.log({**metrics, "eval_seconds": time.monotonic() - started})
        self._line_time += time.monotonic() - started  # evaluation is no part of a step
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _eval_sums(self, store: RowStore) -> tuple[float, float]:
        """(sum of token losses, supervised tokens) of one set over all ranks."""
        micro_batch = self.args.per_device_eval_batch_size
        batches = eval_batches(len(store), rank=dist.get_rank(), world_size=dist.get_world_size(), micro_batch=micro_batch)
        total = torch.zeros(2, dtype=torch.float64)
        for batch in loader(store, _Fixed(batches), self.parts.collator, workers=0, pin_memory=False):
            tensors = {name: tensor.to(self.args.device) for name, tensor in batch.tensors.items()}
            with compute_context(self.parts.recipe, self.args.device.type):
                loss_sum, _ = micro_batch_loss(self.wrapped, tensors)
            total += torch.tensor([float(loss_sum), batch.supervised_tokens], dtype=torch.float64)
        dist.all_reduce(total)
        return total[0].item(), total[1].item()

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        step = self.state.global_step
        if self.checkpointer.last_step == step:
            return  # the end of an epoch and the last step ask for the same checkpoint
        self.parts.heartbeat.beat("saving", step)
        started = time.monotonic()
        self.checkpointer.best_step = self.state.best_global_step
        if self.state.best_global_step is not None:
            self.state.best_model_checkpoint = str(self.checkpointer.run.checkpoint(self.state.best_global_step))
        self.checkpointer.save(step, trainer_state_json(self), self.own_state())
        self._line_time += time.monotonic() - started

    def _load_best_model(self) -> None:
        self.checkpointer.wait()
        if self.state.best_global_step is not None:
            restore_model(self.checkpointer.live, str(self.checkpointer.run.checkpoint(self.state.best_global_step)))

    def own_state(self) -> dict[str, Any]:
        """What only this rank knows, for its file in a checkpoint."""
        return {"sums": self.sums.state(), "loss_scale": self.parts.scale.state_dict() if self.parts.scale is not None else None}

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # The Trainer calls this last, after skipping batches, so nothing draws from the generators in between.
        assert checkpoint is not None
        restore_rng(checkpoint, self.parts.recipe.training.seed, self.state.global_step, self.args.device.type)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: `_prepare_for_training` loads, once the model is wrapped."""

    def _load_callback_state(self) -> None:
        """Gives callbacks back what they counted; what they are set to comes from the recipe in force."""
        for callback in self.callback_handler.callbacks:
            stored = (self.state.stateful_callbacks or {}).get(type(callback).__name__)
            if isinstance(stored, dict):
                for name, value in stored.get("attributes", {}).items():
                    setattr(callback, name, value)


class _Sized:
    """Satisfies the Trainer's questions about its data set; the batches come from `get_train_dataloader`."""

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)


class _Fixed(torch.utils.data.BatchSampler):
    def __init__(self, batches: list[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _failed(code: str, message: str, hint: str | None = None) -> FailedError:
    return FailedError(Problem(code, message, hint=hint))


def _non_finite(message: str) -> FailedError:
    hint = "lower training.learning_rate, check the rows of this step, or continue past such steps with training.on_nonfinite: skip"
    return FailedError(Problem("non-finite", message, hint=hint), exit_code=ExitCode.NON_FINITE)
