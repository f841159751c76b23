"""Between backward and optimizer: the norm over all ranks, clipping, the fp16 scale, and the refusal of NaN and infinity.

Whether a norm is finite is known on the device first. To ask for it would have the host wait in every step until the device's queue is
empty, and the device then wait for the host. Torch's fused AdamW takes the answer on the device (`found_inf`, made for GradScaler) and
leaves parameters and state as they are; the host learns it a step later, when the number has long arrived, or before anything tells or
keeps that step. What cannot be done so is asked at once: fp16, whose scale must be known before the next forward, and other optimizers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_tune.core.errors import ExitCode, FailedError, Problem
from fsdp_tune.model.optim.optimizer import AdamW
from fsdp_tune.model.step import LossScale, clip_factor, flat_shard_group, scale_gradients, total_norm
from fsdp_tune.run.metrics_file import MetricsFile

if TYPE_CHECKING:
    from fsdp_tune.worker.dataset import Batch

FP16_SKIPS_IN_A_ROW = 20


class AsyncScalar:
    """A number on its way from the device to the host."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._memory = torch.empty((), dtype=torch.float32, pin_memory=on_cuda)
        self._view = self._memory.numpy()
        self._arrived = torch.cuda.Event() if on_cuda else None

    def send(self, number: torch.Tensor) -> None:
        self._memory.copy_(number, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> float:
        """Wait for the copied value only, not for later work."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._view)


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A step that the device has decided on and the host has not heard of yet."""

    step: int
    batches: list[Batch]


@dataclass
class GradientGate:
    """Lets a step through to the optimizer or not; every rank decides the same, from the one norm of all gradients."""

    wrapped: nn.Module
    scale: LossScale | None
    skip_nonfinite: bool
    metrics: MetricsFile
    locate: Callable[[list[Batch]], str]
    """Return where in the batches of a step the first non-finite value arose. Collective."""
    norm: torch.Tensor | None = None
    """Gradient norm of the last step, before clipping."""
    skipped_steps: int = 0
    _unsettled: Unsettled | None = None
    _async_norm: AsyncScalar | None = None

    @functools.cached_property
    def _trained(self) -> list[nn.Parameter]:
        """Cached: walking the modules at each step takes longer than the norm of a small model."""
        return [p for p in self.wrapped.parameters() if p.requires_grad]

    def pass_or_skip(self, step: int, max_norm: float | None, optimizer: Any, batches: list[Batch]) -> torch.Tensor:
        """Clips in place and returns the norm before clipping, the fp16 scale taken out.

        A norm that is not finite never reaches the parameters: the step is skipped (fp16's own back-off, or
        `on_nonfinite: skip`) or the run ends with FailedError (exit 4), here, in the next step, or by `settle`.
        """
        self.settle()
        parameters = [p for p in self._trained if p.grad is not None]
        norm = total_norm(parameters, flat_shard_group(self.wrapped))
        factor = 1.0
        if self.scale is not None:
            factor = 1.0 / self.scale.scale
            norm = norm * factor
        self.norm = norm
        if self.scale is None and leaves_bad_steps_out(optimizer) and norm.device.type in ("cpu", "cuda"):
            optimizer.found_inf = torch.isfinite(norm).logical_not().float()
            self._async_norm = self._async_norm or AsyncScalar(norm.device)
            self._async_norm.send(norm)
            self._unsettled = Unsettled(step, batches)
        elif not bool(torch.isfinite(norm)):
            self._refuse(step, float(norm), batches)
            for parameter in self._trained:  # without gradients an optimizer changes nothing
                parameter.grad = None
            return norm
        if max_norm is not None:
            scale_gradients(parameters, clip_factor(norm, max_norm) * factor)
        elif self.scale is not None:
            scale_gradients(parameters, factor)
        if self.scale is not None:
            self.scale.update(finite=True)
        return norm

    def settle(self) -> None:
        """Read the result of the last step; call it before that step is logged, evaluated or saved. Raises: FailedError as above."""
        last, self._unsettled = self._unsettled, None
        if last is not None and self._async_norm is not None and not math.isfinite(norm := self._async_norm.read()):
            self._refuse(last.step, norm, last.batches)

    def facts(self) -> dict[str, float]:
        """For a line of the metrics."""
        scale = {"loss_scale": self.scale.scale} if self.scale is not None else {}
        return scale | ({"skipped_steps": self.skipped_steps} if self.skipped_steps else {})

    def _refuse(self, step: int, norm: float, batches: list[Batch]) -> None:
        """Collective."""
        if self.scale is not None:
            self.scale.update(finite=False)
            self.metrics.event("loss_scale_backed_off", step, loss_scale=self.scale.scale)
            if self.scale.skipped_in_a_row >= FP16_SKIPS_IN_A_ROW:
                overflowed = f"{FP16_SKIPS_IN_A_ROW} steps in a row overflowed in fp16 (loss scale now {self.scale.scale:g})"
                raise _non_finite(f"step {step}: {overflowed}; {self.locate(batches)}")
        else:
            message = f"step {step}: the gradient norm is {norm}; {self.locate(batches)}"
            if not self.skip_nonfinite:
                raise _non_finite(message)
            self.metrics.event("step_skipped", step, reason=message)
        self.skipped_steps += 1


def leaves_bad_steps_out(optimizer: Any) -> bool:
    """Return whether `optimizer.found_inf` takes effect: in the fused kernels of torch, which our class of this name always uses."""
    return isinstance(optimizer, AdamW)


def _non_finite(message: str) -> FailedError:
    hint = "lower training.learning_rate, check the rows named here, or skip such steps with training.on_nonfinite: skip"
    return FailedError(Problem("non-finite", message, hint=hint), exit_code=ExitCode.NON_FINITE)
