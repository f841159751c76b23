"""How evenly a mixture of experts uses its experts, for the lines of metrics.jsonl.

An expert that gets no tokens is not trained, and one that gets many makes its layer slow. The indices of the chosen experts are counted
where transformers passes them to the stacked experts of a layer. Padding counts too: experts compute it.

Shares of the step time: the optimizer, and the wait for parameters and gradients of other ranks.

One step of each line is measured, the last, so that the others do not pay for it.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.core.families import EXPERT_INDEX_ARGUMENTS
from fsdp_tune.model.internals.torch_internals import GRAPH_TASK
from fsdp_tune.model.shard.local import plain_name
from fsdp_tune.model.shard.wrap import fsdp_groups
from fsdp_tune.worker.step_observer import LoggedStep, StepObserver

_NO_BACKWARD = -1


class ExpertLoads(StepObserver, TrainerCallback):
    """Counts tokens by expert in the steps that are logged. Without layers that it recognises it adds nothing to the lines."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._layers: dict[str, torch.Tensor] = {}
        """Tokens of each expert by layer, on this rank, int64 on the device; one more for indices that stand for no expert."""
        self._is_counting = self._is_counted = False
        self._backward: Any = GRAPH_TASK.get()
        for name, module in model.named_modules() if self._backward is not None else ():
            parameters = list(inspect.signature(type(module).forward).parameters)[1:]
            argument = next((index for index, each in enumerate(parameters) if each in EXPERT_INDEX_ARGUMENTS), None)
            experts = getattr(module, "num_experts", None)
            if argument is not None and isinstance(experts, int):
                self._layers[plain_name(name)] = counts = torch.zeros(experts + 1, dtype=torch.int64, device=device)
                self._count_calls(module, argument, parameters[argument], counts)

    def _count_calls(self, module: nn.Module, position: int, name: str, counts: torch.Tensor) -> None:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A layer that is recomputed runs a second time, inside the backward.
            if not self._is_counting or not module.training or self._backward() != _NO_BACKWARD:
                return
            indices = (kwargs[name] if name in kwargs else args[position]).detach().reshape(-1)
            counts.scatter_add_(0, indices.long(), torch.ones_like(indices, dtype=torch.int64))

        module.register_forward_pre_hook(count, with_kwargs=True)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step + 1
        is_first = step == 1 and bool(args.logging_first_step)
        self._is_counting = self._is_counted = is_first or step % max(int(args.logging_steps), 1) == 0 or step == state.max_steps
        if self._is_counting:
            for counts in self._layers.values():
                counts.zero_()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_counting = False

    def facts(self, step: LoggedStep) -> dict[str, Any]:
        """Return the fields of the line of the step that has ended. Collective: tokens are summed over all ranks."""
        if not self._layers or not self._is_counted:
            return {}
        counts = torch.cat(list(self._layers.values()))
        dist.all_reduce(counts)
        parts = counts.cpu().split([each.numel() for each in self._layers.values()])
        by_layer = {name: part[:-1] for name, part in zip(self._layers, parts, strict=True)}
        loads = {name: each.double() / each.double().mean().clamp(min=1e-9) for name, each in by_layer.items()}
        worst = max(loads, key=lambda name: float(loads[name].max()))
        return {
            "expert_load_max": float(loads[worst].max()),
            "expert_load_min": min(float(each.min()) for each in loads.values()),
            "experts_unused": sum(int((each == 0).sum()) for each in by_layer.values()),
            "expert_tokens": by_layer[worst].tolist(),
            "expert_layer": worst,
        }


STEP, OPTIMIZER, COMMUNICATION = "step", "optimizer", "communication"
# What FSDP2 runs on the compute stream. On CUDA an all-gather runs on another stream, and only the wait for it is in these;
# on a CPU the call itself is.
_COMMUNICATING = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")

Moment = float | torch.cuda.Event


class Stopwatch:
    """Moments of the current stream on CUDA, which cost no synchronisation until they are compared; of the host elsewhere."""

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
    """Measure the logged steps; `facts` returns and resets."""

    def __init__(self, wrapped: nn.Module, device: torch.device) -> None:
        self._watch = Stopwatch(device)
        self._spans: dict[str, list[tuple[Moment, Moment]]] = defaultdict(list)
        self._is_measuring = False
        self._step_began: Moment | None = None
        self._optimizer_began: Moment | None = None
        groups = fsdp_groups(wrapped)
        self._sees_communication = bool(groups)
        for group in groups:
            for name in _COMMUNICATING:
                setattr(group, name, self._timed(getattr(group, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
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
        """Return the seconds of the last measured step; None if not measured. The device must have passed it."""
        self._is_measuring = False
        sums = {kind: sum(self._watch.seconds(*span) for span in spans) for kind, spans in self._spans.items()}
        self._spans.clear()
        return {
            "last_step_seconds": sums.get(STEP),
            "optimizer_seconds": sums.get(OPTIMIZER),
            "exposed_communication_seconds": sums.get(COMMUNICATION) if self._sees_communication else None,
        }

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step + 1
        self._is_measuring = step % max(int(args.logging_steps), 1) == 0 or step == state.max_steps
        self._step_began = self._watch.now() if self._is_measuring else None

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._optimizer_began = self._watch.now() if self._is_measuring else None

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._optimizer_began is not None and self._step_began is not None:
            ended = self._watch.now()
            self._spans[OPTIMIZER].append((self._optimizer_began, ended))
            self._spans[STEP].append((self._step_began, ended))
            self._step_began = self._optimizer_began = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_measuring = False  # an evaluation gathers too
