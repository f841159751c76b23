"""The base of callbacks that need the trainer.

One of them records in the heartbeat which part of a step a rank is in, and in metrics.jsonl which rank the others wait for.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.run.metrics_file import SLOW_RANK, MetricsFile
from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter
from fsdp_tune.worker.step_observer import StepObserver

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer


class AttachedCallback(StepObserver, TrainerCallback):
    """An observer of steps that follows the Trainer's events and keeps the trainer."""

    trainer: FsdpTrainer

    def attach(self, trainer: FsdpTrainer) -> None:
        self.trainer = trainer


WINDOW_SECONDS = 2.0
"""Shorter spans hold too few samples of `HeartbeatWriter.waited_seconds`."""
SLOW_RATIO = 1.5
RECOVERED_RATIO = 1.2
NOTICED_SECONDS = 0.05
"""Seconds a step that a slow rank must lose at least: less is noise on busy cores."""


@dataclass(frozen=True, slots=True)
class Slowest:
    rank: int
    ratio: float
    """Its working time over the median of the others'."""
    behind_seconds: float
    """A step, more than the others' median."""


def slowest(working_seconds: list[float], steps: int) -> Slowest:
    """Return the rank with the longest working time over the same `steps`, for which the others wait."""
    rank = max(range(len(working_seconds)), key=lambda each: working_seconds[each])
    others = statistics.median(seconds for other, seconds in enumerate(working_seconds) if other != rank)
    ratio = working_seconds[rank] / others if others > 0 else float("inf")
    return Slowest(rank, ratio, (working_seconds[rank] - others) / max(steps, 1))


class StepProgress(StepObserver, TrainerCallback):
    """Mark the parts of a step, and compare the ranks' working time when a line is logged.

    Only time that a host spends outside torch.distributed can be attributed to a rank: slow data, a busy CPU, a slow disk, a
    process that sleeps. A GPU that computes slowly makes every host wait for its own device, and is not detected here.
    """

    def __init__(self, heartbeat: HeartbeatWriter, metrics: MetricsFile) -> None:
        self._heartbeat, self._metrics = heartbeat, metrics
        self._since: tuple[float, float, int] | None = None
        self._reported_rank: int | None = None

    def attach(self, trainer: FsdpTrainer) -> None:
        """Install hooks on the wrapped model: a forward is progress, also in evaluation; in training a backward follows it."""
        model = trainer.wrapped

        def before(*_: Any) -> None:
            self._heartbeat.mark("forward") if model.training else self._heartbeat.tick()

        def after(*_: Any) -> None:
            if model.training:
                self._heartbeat.mark("backward")

        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._heartbeat.mark("optimizer step")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if "loss" not in (logs or {}) or dist.get_world_size() == 1:
            return
        now = (time.monotonic(), self._heartbeat.waited_seconds, state.global_step)
        if self._since is None:  # the first steps compile, allocate and read ahead
            self._since = now
            return
        mine = torch.tensor([now[0] - self._since[0], now[1] - self._since[1]], dtype=torch.float64)
        every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        if min(float(each[0]) for each in every) < WINDOW_SECONDS:
            return
        found = slowest([max(0.0, float(each[0] - each[1])) for each in every], state.global_step - self._since[2])
        self._since = now
        self._tell(found, state.global_step)

    def _tell(self, found: Slowest, step: int) -> None:
        """Once when a rank falls behind, and again only after it had recovered or when it is another one."""
        if found.ratio < RECOVERED_RATIO:
            self._reported_rank = None
        if found.ratio < SLOW_RATIO or found.behind_seconds < NOTICED_SECONDS or found.rank == self._reported_rank:
            return
        self._reported_rank = found.rank
        ratio = round(min(found.ratio, 1000.0), 2)
        behind = round(found.behind_seconds, 3)
        message = f"rank {found.rank} works {ratio} times as long as the others, which wait {behind} s for it in each step"
        self._metrics.event(SLOW_RANK, step, rank=found.rank, ratio=ratio, behind_seconds=behind, message=message)
