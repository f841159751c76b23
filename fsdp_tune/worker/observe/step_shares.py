"""Shares of the step time: communication and the optimizer.

They are of one step of each line, the last, so that the others do not pay for them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.model.shard.wrap import fsdp_groups
from fsdp_tune.worker.step_observer import LoggedStep, RankTimes, StepObserver, is_logged

P = ParamSpec("P")
R = TypeVar("R")

STEP, OPTIMIZER, COMMUNICATION = "step", "optimizer", "communication"
# What FSDP2 runs on the compute stream. On CUDA an all-gather runs on another stream, and only the wait for
# it is in these; on a CPU the call itself is.
_COMMUNICATING = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")

Moment = float | torch.cuda.Event


class Stopwatch:
    """Moments of the current stream on CUDA, which cost no synchronisation until they are compared; of the
    host elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def now(self) -> Moment:
        if not self._is_cuda:
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def seconds(self, begin: Moment, end: Moment) -> float:
        """Return the measured seconds. The device must have passed `end`."""
        if not isinstance(begin, torch.cuda.Event):
            assert isinstance(end, float)
            return end - begin
        assert isinstance(end, torch.cuda.Event)
        return begin.elapsed_time(end) / 1000


class StepShares(StepObserver, TrainerCallback):
    """Measure the logged steps; `facts` returns and resets. On a CPU, the collectives of all steps are
    counted as waits."""

    _times: RankTimes | None = None

    def __init__(self, wrapped: nn.Module, device: torch.device) -> None:
        self._watch = Stopwatch(device)
        self.has_device_clock = device.type == "cuda"
        self.on_device: tuple[float, float] | None = None
        """Seconds of the last logged step on the device, and of them in communication; None: not measured."""
        self._spans: dict[str, list[tuple[Moment, Moment]]] = defaultdict(list)
        self._is_measuring = False
        self._step_began: Moment | None = None
        self._optimizer_began: Moment | None = None
        groups = fsdp_groups(wrapped)
        self.sees_communication = bool(groups)
        for group in groups:
            for name in _COMMUNICATING:
                setattr(group, name, self._timed(getattr(group, name)))

    def attach(self, trainer: Any) -> None:
        self._times = None if self.has_device_clock else trainer.times

    def _timed(self, call: Callable[P, R]) -> Callable[P, R]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._times.waiting() if self._times is not None else nullcontext():
                if not self._is_measuring:
                    return call(*args, **kwargs)
                with self._span(COMMUNICATION):
                    return call(*args, **kwargs)

        return timed

    @contextmanager
    def _span(self, kind: str) -> Iterator[None]:
        begin = self._watch.now()
        yield
        self._spans[kind].append((begin, self._watch.now()))

    def facts(self, step: LoggedStep) -> dict[str, float | None]:
        """Return the seconds of the last measured step; None if not measured. The device must have passed
        it."""
        self._is_measuring = False
        sums = {
            kind: sum(self._watch.seconds(*span) for span in spans) for kind, spans in self._spans.items()
        }
        self._spans.clear()
        step_seconds = sums.get(STEP)
        self.on_device = (
            None
            if step_seconds is None or not self.has_device_clock
            else (step_seconds, sums.get(COMMUNICATION, 0.0))
        )
        return {
            "last_step_seconds": step_seconds,
            "optimizer_seconds": sums.get(OPTIMIZER),
            "exposed_communication_seconds": sums.get(COMMUNICATION) if self.sees_communication else None,
        }

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._is_measuring = is_logged(args, state)
        self._step_began = self._watch.now() if self._is_measuring else None

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._optimizer_began = self._watch.now() if self._is_measuring else None

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._optimizer_began is not None and self._step_began is not None:
            ended = self._watch.now()
            self._spans[OPTIMIZER].append((self._optimizer_began, ended))
            self._spans[STEP].append((self._step_began, ended))
            self._step_began = self._optimizer_began = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._is_measuring = False  # an evaluation gathers too
