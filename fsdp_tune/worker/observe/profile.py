"""`train --profile steps=10:13`: a Chrome trace of each rank, and its steps broken down into compute,
collectives and idle time."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import ParamSpec, TypeVar

from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.core.atomic import write_json
from fsdp_tune.core.command import ProfiledSteps
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import Profiled
from fsdp_tune.worker.observe.step_phases import AttachedCallback
from fsdp_tune.worker.observe.trace_breakdown import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    PHASE_PREFIX,
    STEP,
    breakdown,
)

P = ParamSpec("P")
R = TypeVar("R")


class Profile(AttachedCallback):
    """Record the requested steps; the event `profiled` in metrics.jsonl has the breakdown of rank 0."""

    def __init__(self, run: RunDir, steps: ProfiledSteps, rank: int) -> None:
        self._steps = steps
        self._trace = (
            run.path / "profile" / f"steps-{steps.first}-{steps.last}" / f"rank-{rank:04d}.trace.json.gz"
        )
        self._profiler: profile | None = None
        self._first = steps.first
        """The first recorded step: later than the requested one if the run resumes between."""
        self._phase: record_function | None = None
        self._step: record_function | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        wrapped = self.trainer.wrapped
        wrapped.register_forward_pre_hook(lambda *_: self._enter(FORWARD), prepend=True)
        wrapped.register_forward_hook(lambda *_: self._enter(BACKWARD))
        self.trainer.training_step = _followed_by(self.trainer.training_step, self._leave)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        step = state.global_step + 1
        if self._profiler is None and self._steps.first <= step <= self._steps.last:
            on_cuda = args.device.type == "cuda"
            self._profiler = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
            )
            self._first = step
            self._profiler.start()
        if self._profiler is not None:
            self._step = record_function(f"{PHASE_PREFIX}{STEP}")
            self._step.__enter__()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._enter(OPTIMIZER)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._leave()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self._profiler is not None and state.global_step >= min(self._steps.last, state.max_steps):
            self._finish(self._profiler, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._profiler is not None:  # stopped in the middle
            self._finish(self._profiler, state.global_step)

    def _enter(self, phase: str) -> None:
        self._leave()
        if self._profiler is not None:
            self._phase = record_function(f"{PHASE_PREFIX}{phase}")
            self._phase.__enter__()

    def _leave(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _finish(self, profiler: profile, step: int) -> None:
        started = time.monotonic()
        profiler.stop()
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._trace))
        self._profiler = None
        with gzip.open(self._trace, "rt", encoding="utf-8") as file:
            shares = breakdown(json.load(file)["traceEvents"])
        steps = step - self._first + 1
        seconds = {phase: asdict(share) for phase, share in shares.items()}
        write_json(_breakdown_path(self._trace), {"steps": steps, "seconds": seconds})
        self.trainer.parts.metrics.event(Profiled(step, str(self._trace), steps, seconds))
        self.trainer.lines.leave_out(time.monotonic() - started)


def _followed_by(call: Callable[P, R], after: Callable[[], None]) -> Callable[P, R]:
    def both(*args: P.args, **kwargs: P.kwargs) -> R:
        result = call(*args, **kwargs)
        after()
        return result

    return both


def _breakdown_path(trace: Path) -> Path:
    return trace.with_name(trace.name.replace(".trace.json.gz", ".breakdown.json"))
