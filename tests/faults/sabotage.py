"""Faults inside a step: each patches the worker on one rank from a given step on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import torch

from fsdp_tune.data.store import RowStore
from fsdp_tune.run import metrics_file
from fsdp_tune.worker.observe import trackers
from fsdp_tune.worker.trainer import FsdpTrainer


@contextlib.contextmanager
def before(method: str, step: int, act: Callable[[Any], None]) -> Iterator[None]:
    """Calls `act(trainer)` once, before a method of the trainer, when so many steps have been taken."""
    original, armed = getattr(FsdpTrainer, method), [True]

    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        if armed and self.state.global_step >= step:
            armed.clear()
            act(self)
        return original(self, *arguments, **options)

    with patch.object(FsdpTrainer, method, wrapped):
        yield


def _raise(error: BaseException) -> Callable[[Any], None]:
    def act(trainer: Any) -> None:
        raise error

    return act


def _spoil(value: float, what: str) -> Callable[[Any], None]:
    def act(trainer: Any) -> None:
        for parameter in trainer.wrapped.parameters():
            tensor = parameter.grad if what == "gradient" else parameter
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if local.numel():
                with torch.no_grad():
                    local.view(-1)[0] = value
                return

    return act


@contextlib.contextmanager
def clock(seconds: float) -> Iterator[None]:
    real = time.time
    with patch("time.time", lambda: real() + seconds):
        yield


@contextlib.contextmanager
def metrics_full(step: int) -> Iterator[None]:
    """The disk of metrics.jsonl takes half of the line of that step, and nothing after it."""
    original = metrics_file._write_all

    def write(file: IO[bytes], data: bytes) -> None:
        if json.loads(data).get("step", 0) >= step:
            file.write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file, data)

    with patch.object(metrics_file, "_write_all", write):
        yield


def _lose_server() -> None:
    raise ConnectionError("the tracker's server is gone")


@contextlib.contextmanager
def tracker(act: Callable[[], None]) -> Iterator[None]:
    from transformers.integrations import TensorBoardCallback

    def on_log(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        act()

    with patch.object(TensorBoardCallback, "on_log", on_log), patch.object(trackers, "LIMIT_SECONDS", 2.0):
        yield


@contextlib.contextmanager
def loader(act: Callable[[], None]) -> Iterator[None]:
    """In a worker process of the data loader, at the fifth row that it reads."""
    original, calls, parent = RowStore.__getitem__, [0], os.getpid()

    def read(self: Any, index: int) -> Any:
        if os.getpid() != parent:
            calls[0] += 1
            if calls[0] == 5:
                act()
        return original(self, index)

    with patch.object(RowStore, "__getitem__", read):
        yield


def _loader_raises() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _loader_dies() -> None:
    os.kill(os.getpid(), 9)


def _loader_hangs() -> None:
    time.sleep(3600)


def _move_away(trainer: Any) -> None:
    path: Path = trainer.parts.run.path
    path.rename(path.with_name(f"{path.name}-moved"))
    (path / "logs").mkdir(parents=True)  # another directory in its place


def _remove(trainer: Any) -> None:
    path: Path = trainer.parts.run.path
    while path.exists():  # heartbeats are written meanwhile
        shutil.rmtree(path, ignore_errors=True)


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."
SABOTAGE: dict[str, Callable[[int], contextlib.AbstractContextManager[None]]] = {
    "NaN in a gradient": lambda step: before("_clip_grad_norm", step, _spoil(float("nan"), "gradient")),
    "infinite gradient": lambda step: before("_clip_grad_norm", step, _spoil(float("inf"), "gradient")),
    "infinite weight": lambda step: before("training_step", step, _spoil(float("inf"), "weight")),
    "device out of memory": lambda step: before("training_step", step, _raise(torch.OutOfMemoryError(OUT_OF_MEMORY))),
    "device out of memory in evaluation": lambda step: before("evaluate", step, _raise(torch.OutOfMemoryError(OUT_OF_MEMORY))),
    "device out of memory in a save": lambda step: before("_save_checkpoint", step, _raise(torch.OutOfMemoryError(OUT_OF_MEMORY))),
    "host out of memory": lambda step: before("training_step", step, _raise(MemoryError())),
    "a day back": lambda step: clock(-86_400.0),
    "ten years on": lambda step: clock(86_400.0 * 3650),
    "metrics full": metrics_full,
    "tracker fails": lambda step: tracker(_lose_server),
    "tracker hangs": lambda step: tracker(lambda: time.sleep(3600)),
    "loader raises": lambda step: loader(_loader_raises),
    "loader dies": lambda step: loader(_loader_dies),
    "run directory moved": lambda step: before("training_step", step, _move_away),
    "run directory removed": lambda step: before("training_step", step, _remove),
}
