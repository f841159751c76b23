"""The real worker on emulated devices, with every allocation of a steady step: what rank 0 held, and which
operation asked for it."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest.mock import patch

from tests.cuda.memory_step import MemoryChange, MemoryStep
from tests.parity import runs
from tests.ranks import Leaves, Ranks

STEADY_STEP = 3
"""The first step creates the state of the optimizer, and after the second nothing is new."""
VOCABULARY = 4099
SLICE_TOKENS = 160
"""Tokens of a slice of the chunked loss, on both sides: a model of this size would need no slices."""
_QUIET = ("/torch/", "/tests/cuda/", "<string>")


Recorded = Callable[[str], MemoryStep | dict[str, Any]]


class RunRefused(Exception):
    """The worker ended before the steady step: its problem, as the outcome has it."""

    def __init__(self, outcome: dict[str, Any]) -> None:
        problem = outcome["problem"] or {}
        super().__init__(
            f"[{problem.get('code')}] {problem.get('message')}\n{(outcome['traceback'] or '')[-1500:]}"
        )
        self.problem = problem


def live_memory(on_ranks: Ranks, ranks: int, path: str, run: Recorded | None = None) -> MemoryStep:
    """Train to the steady step on `ranks` devices, by `recorded_run` unless given. Raises: RunRefused."""
    answers = on_ranks.run(ranks, run or recorded_run, path)
    for answer in answers:
        if isinstance(answer, dict):
            raise RunRefused(answer)
    return answers[0]


def recorded_run(path: str) -> MemoryStep | dict[str, Any]:
    """On a rank: the memory of the steady step, or the outcome of a run that did not reach it."""
    recording = _Recording()
    try:
        with recording.installed(), smaller_slices(), _fused_formula():
            outcome = runs.run_worker(path)
    except Leaves as left:
        if not recording.is_complete:
            raise
        outcome = left.value
    return recording.result() if recording.is_complete else outcome


@contextlib.contextmanager
def smaller_slices() -> Iterator[None]:
    """Let the chunked loss take several slices. `install` copies the constant, by which `auto` decides, and
    keeps the true one."""
    import fsdp_tune.model.kernels.install  # noqa: F401

    with patch("fsdp_tune.model.kernels.head.SLICE_ELEMENTS", SLICE_TOKENS * VOCABULARY):
        yield


@contextlib.contextmanager
def _fused_formula() -> Iterator[None]:
    """Make weights of 4 bits in one kernel, as Inductor does, which the emulated device does not have."""
    import emulated_cuda as native  # type: ignore[import-not-found]

    from fsdp_tune.model.adapters.nf4 import in_one_formula

    def in_one_kernel(blocks: Any, scales: Any, values: Any, dtype: Any) -> Any:
        return native.to_device(
            in_one_formula(*map(native.on_cpu, (blocks, scales, values)), dtype), blocks.device.index
        )

    with patch("fsdp_tune.model.adapters.nf4._compiled", lambda: in_one_kernel):
        yield


class _SteadyStepDone(BaseException):
    """Ends the worker: nothing is saved."""


@dataclass
class _Recording:
    changes: list[MemoryChange] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Number of changes after each step of the optimizer."""
    _addresses: dict[int, int] = field(default_factory=dict)
    _optimizer: int | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.steps) >= STEADY_STEP

    def result(self) -> MemoryStep:
        changes, self.changes = self.changes[: self.steps[STEADY_STEP - 1]], []
        return MemoryStep(changes, self.steps[STEADY_STEP - 2])

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        import emulated_cuda as native  # type: ignore[import-not-found]
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        gc.unfreeze()  # a rank freezes what is left of its last run, perhaps with the model
        gc.collect()
        device = torch.cuda.current_device()
        native.on_memory_change(functools.partial(self._changed, device, native.running_operation))
        hook = register_optimizer_step_post_hook(self._stepped)
        try:
            yield
        finally:
            native.on_memory_change(None)
            hook.remove()

    def _changed(
        self, device: int, operation: Any, of_device: int, address: int, _size: int, requested: int
    ) -> None:
        if of_device != device:
            return
        if requested > 0:
            self._addresses[address] = len(self.changes)
            self.changes.append(
                MemoryChange(len(self.changes), requested, f"{operation() or 'aten::empty'}, {_place()}")
            )
        elif (
            block := self._addresses.pop(address, None)
        ) is not None:  # else of an earlier run in this process
            self.changes.append(MemoryChange(block, requested, ""))

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        # the device keeps this object alive, which must not keep a model
        self._optimizer = self._optimizer or id(optimizer)
        if id(optimizer) != self._optimizer:  # the read-back repeats the first step on a sample
            return
        self.steps.append(len(self.changes))
        if self.is_complete:
            raise _SteadyStepDone


def _place() -> str:
    """The innermost line of Python that is neither torch's nor the emulation's; the backward has none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in _QUIET):
            short = path.rpartition("site-packages/")[2].rpartition("/fsdp_tune/")[2]
            return (
                "backward"
                if "/tests/ranks.py" in path
                else f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
            )
        frame = frame.f_back
    return "backward"
