"""Tokens by expert, in the steps that are logged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.core.expert_names import EXPERT_INDEX_ARGUMENTS
from fsdp_tune.model.internals.torch_internals import GRAPH_TASK
from fsdp_tune.model.shard.local import plain_name
from fsdp_tune.worker.step_observer import LoggedStep, StepObserver, is_logged

_NO_BACKWARD = -1


class ExpertLoads(StepObserver, TrainerCallback):
    """Counts tokens by expert in the steps that are logged. Without layers that it recognises it adds nothing
    to the lines."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._layers: dict[str, torch.Tensor] = {}
        """Tokens of each expert by layer, on this rank, int64 on the device; one more for indices that stand
        for no expert."""
        self._is_counting = self._is_counted = False
        backward: Callable[[], int] | None = GRAPH_TASK.get()
        if backward is None:
            return
        for name, module in model.named_modules():
            parameters = list(inspect.signature(type(module).forward).parameters)[1:]
            argument = next(
                (index for index, each in enumerate(parameters) if each in EXPERT_INDEX_ARGUMENTS), None
            )
            experts = getattr(module, "num_experts", None)
            if argument is not None and isinstance(experts, int):
                self._layers[plain_name(name)] = counts = torch.zeros(
                    experts + 1, dtype=torch.int64, device=device
                )
                self._count_calls(module, argument, parameters[argument], counts, backward)

    def _count_calls(
        self, module: nn.Module, position: int, name: str, counts: torch.Tensor, backward: Callable[[], int]
    ) -> None:
        """Count when `module` is called. Its indices are the argument at `position`, or of this `name`;
        `backward` returns the number of the running one, or `_NO_BACKWARD`."""

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A layer that is recomputed runs a second time, inside the backward.
            if not self._is_counting or not module.training or backward() != _NO_BACKWARD:
                return
            indices = (kwargs[name] if name in kwargs else args[position]).detach().reshape(-1)
            counts.scatter_add_(0, indices.long(), torch.ones_like(indices, dtype=torch.int64))

        module.register_forward_pre_hook(count, with_kwargs=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._is_counting = self._is_counted = is_logged(args, state)
        if self._is_counting:
            for counts in self._layers.values():
                counts.zero_()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._is_counting = False

    def facts(self, step: LoggedStep) -> dict[str, object]:
        """Return the fields of the line of the step that has ended. Collective: tokens are summed over all
        ranks."""
        if not self._layers or not self._is_counted:
            return {}
        counts = torch.cat(list(self._layers.values()))
        dist.all_reduce(counts)
        parts = counts.cpu().split([each.numel() for each in self._layers.values()])
        by_layer = {name: part[:-1] for name, part in zip(self._layers, parts, strict=True)}
        loads = {
            name: each.double() / each.double().mean().clamp(min=1e-9) for name, each in by_layer.items()
        }
        worst = max(loads, key=lambda name: float(loads[name].max()))
        return {
            "expert_load_max": float(loads[worst].max()),
            "expert_load_min": min(float(each.min()) for each in loads.values()),
            "experts_unused": sum(int((each == 0).sum()) for each in by_layer.values()),
            "expert_tokens": by_layer[worst].tolist(),
            "expert_layer": worst,
        }
