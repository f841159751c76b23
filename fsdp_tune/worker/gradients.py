"""Between backward and optimizer: the norm over all ranks, clipping, the fp16 scale, and the check for NaN and infinity.

Whether a norm is finite is known on the device first. Reading it in every step would make the host wait until the device's queue is
empty, and then the device wait for the host. Torch's fused AdamW reads `found_inf` (made for GradScaler) on the device and leaves
parameters and state unchanged if it is set. The host reads the norm a step later, when the copy has finished, or before the step is logged,
evaluated or saved. The norm is read at once for fp16, whose scale must be known before the next forward, and for other optimizers.
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
from fsdp_tune.model.optim.adamw import AdamW
from fsdp_tune.model.step import LossScale, clip_factor, flat_shard_group, scale_gradients, total_norm
from fsdp_tune.run.metrics_file import LOSS_SCALE_BACKED_OFF, STEP_SKIPPED, MetricsFile
from fsdp_tune.worker.step_observer import LoggedStep, StepObserver

if TYPE_CHECKING:
    from fsdp_tune.worker.rows.training_rows import Batch

FP16_SKIPS_IN_A_ROW = 20


class AsyncScalar:
    """A number that is being copied from the device to the host."""

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
class PendingStep:
    """A step whose norm the host has not read yet."""

    step: int
    batches: list[Batch]


@dataclass
class GradientGate(StepObserver):
    """Decide whether a step is applied. Every rank decides the same, from the global gradient norm."""

    wrapped: nn.Module
    scale: LossScale | None
    skip_nonfinite: bool
    metrics: MetricsFile
    locate: Callable[[list[Batch]], str]
    """Return where in the batches of a step the first non-finite value arose. Collective."""
    norm: torch.Tensor | None = None
    """Gradient norm of the last step, before clipping."""
    skipped_steps: int = 0
    _pending: PendingStep | None = None
    _async_norm: AsyncScalar | None = None

    @functools.cached_property
    def _trained(self) -> list[nn.Parameter]:
        """Cached: walking the modules at each step takes longer than the norm of a small model."""
        return [p for p in self.wrapped.parameters() if p.requires_grad]

    def pass_or_skip(self, step: int, max_norm: float | None, optimizer: Any, batches: list[Batch]) -> torch.Tensor:
        """Clip gradients in place and return the norm before clipping, without the fp16 scale.

        A norm that is not finite never reaches the parameters: the step is skipped (fp16's own back-off, or
        `on_nonfinite: skip`) or the run ends with FailedError (exit 4), here, in the next step, or in `check_pending`.
        """
        self.check_pending()
        parameters = [p for p in self._trained if p.grad is not None]
        norm = total_norm(parameters, flat_shard_group(self.wrapped))
        factor = 1.0
        if self.scale is not None:
            factor = 1.0 / self.scale.scale
            norm = norm * factor
        self.norm = norm
        if self.scale is None and supports_found_inf(optimizer) and norm.device.type in ("cpu", "cuda"):
            optimizer.found_inf = torch.isfinite(norm).logical_not().float()
            self._async_norm = self._async_norm or AsyncScalar(norm.device)
            self._async_norm.send(norm)
            self._pending = PendingStep(step, batches)
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

    def check_pending(self) -> None:
        """Read the result of the last step; call it before that step is logged, evaluated or saved. Raises: FailedError as above."""
        last, self._pending = self._pending, None
        if last is not None and self._async_norm is not None and not math.isfinite(norm := self._async_norm.read()):
            self._refuse(last.step, norm, last.batches)

    def facts(self, step: LoggedStep) -> dict[str, float]:
        """Return fields for a metrics line."""
        scale = {"loss_scale": self.scale.scale} if self.scale is not None else {}
        return scale | ({"skipped_steps": self.skipped_steps} if self.skipped_steps else {})

    def _refuse(self, step: int, norm: float, batches: list[Batch]) -> None:
        """Record a non-finite step, and raise unless it is skipped. Collective."""
        if self.scale is not None:
            self.scale.update(finite=False)
            self.metrics.event(LOSS_SCALE_BACKED_OFF, step, loss_scale=self.scale.scale)
            if self.scale.skipped_in_a_row >= FP16_SKIPS_IN_A_ROW:
                overflowed = f"{FP16_SKIPS_IN_A_ROW} steps in a row overflowed in fp16 (loss scale now {self.scale.scale:g})"
                raise _non_finite(f"step {step}: {overflowed}; {self.locate(batches)}")
        else:
            message = f"step {step}: the gradient norm is {norm}; {self.locate(batches)}"
            if not self.skip_nonfinite:
                raise _non_finite(message)
            self.metrics.event(STEP_SKIPPED, step, reason=message)
        self.skipped_steps += 1


def supports_found_inf(optimizer: object) -> bool:
    """Return whether `optimizer.found_inf` takes effect: in torch's fused kernels, which this package's AdamW always uses. Muon's
    matrices are not updated by such a kernel."""
    return type(optimizer) is AdamW


def _non_finite(message: str) -> FailedError:
    hint = "lower training.learning_rate, check the rows named here, or skip such steps with training.on_nonfinite: skip"
    return FailedError(Problem("non-finite", message, hint=hint), exit_code=ExitCode.NON_FINITE)
