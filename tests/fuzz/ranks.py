"""What runs on the ranks of a trial: the real worker, with the first gradient recorded, a NaN planted, or
killed after a step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from transformers import TrainerCallback

from tests.model.flash import flash_stand_in
from tests.parity.runs import run_with_kernels, run_worker

GRADIENTS = "first-gradients.pt"


@dataclass(frozen=True)
class Orders:
    """`bad_step`: a value of its gradient becomes NaN. `killed_after`: the worker ends there without
    saving."""

    bad_step: int | None = None
    killed_after: int | None = None
    uses_kernels: bool = False
    uses_flash: bool = False
    plant: str | None = None


class Killed(BaseException):
    """End a rank as a signal would: nothing is saved or reported."""


def run(path: str, orders: dict[str, Any]) -> dict[str, Any]:
    """The outcome of this rank."""
    from tests.fuzz.plants import PLANTS

    asked = Orders(**orders)
    planted: AbstractContextManager[Any] = (
        PLANTS[asked.plant].install() if asked.plant else contextlib.nullcontext()
    )
    flash = flash_stand_in() if asked.uses_flash else contextlib.nullcontext()
    with planted, flash, _changed_trainer(asked):
        return (run_with_kernels if asked.uses_kernels else run_worker)(path)


@contextlib.contextmanager
def _changed_trainer(orders: Orders) -> Iterator[None]:
    from fsdp_tune.worker import setup

    original = setup.build_trainer

    def build(*arguments: Any) -> Any:
        trainer, callback, resume = original(*arguments)
        if resume is None:
            _record_first_gradient(trainer)
        if orders.bad_step is not None:
            _plant_nan(trainer, orders.bad_step)
        if orders.killed_after is not None:
            trainer.add_callback(_Killer(trainer, orders.killed_after))
        return trainer, callback, resume

    with patch.object(setup, "build_trainer", build):
        yield


def _record_first_gradient(trainer: Any) -> None:
    recorded = False

    def record(optimizer: Any, *_: Any) -> None:
        nonlocal recorded
        if recorded:
            return
        recorded = True
        import torch.distributed as dist
        from torch.distributed.fsdp import FullyShardedDataParallel

        from fsdp_tune.model.shard.local import plain_name

        if isinstance(trainer.wrapped, FullyShardedDataParallel):
            return  # its flat parameters have no gradient by name
        found = {}
        for name, parameter in trainer.wrapped.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                found[plain_name(name)] = (
                    (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
                    .float()
                    .cpu()
                    .clone()
                )
        if dist.get_rank() == 0:
            torch.save(found, trainer.parts.run.path / GRADIENTS)

    trainer.optimizer.register_step_pre_hook(record)


def _plant_nan(trainer: Any, bad_step: int) -> None:
    """In the first shard, on every rank that holds a replica of it: gradients have been reduced."""
    original: Callable[..., Any] = trainer.gate.pass_or_skip
    mesh = trainer.parts.loaded.mesh
    holds_first_shard = mesh is None or mesh.get_local_rank(mesh.ndim - 1) == 0

    def poisoned(step: int, *arguments: Any) -> Any:
        if step == bad_step and holds_first_shard:
            parameter = next(
                p for p in trainer.wrapped.parameters() if p.grad is not None and _local(p.grad).numel()
            )
            _local(parameter.grad).view(-1)[0] = torch.nan
        return original(step, *arguments)

    trainer.gate.pass_or_skip = poisoned


def _local(gradient: Any) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


class _Killer(TrainerCallback):
    def __init__(self, trainer: Any, step: int) -> None:
        self._trainer, self._step = trainer, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            # the save that is resumed from is there; what came after it is lost
            self._trainer.checkpointer.wait()
            raise Killed


def orders_of(**fields: Any) -> dict[str, Any]:
    return dataclasses.asdict(Orders(**fields))
