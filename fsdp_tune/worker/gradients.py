"""Between backward and optimizer: the norm over all ranks, clipping, the fp16 scale, and the refusal of what is not finite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_tune.errors import ExitCode, FailedError, Problem
from fsdp_tune.model.step import LossScale, clip_factor, flat_shard_group, scale_gradients, total_norm
from fsdp_tune.worker.metrics import MetricsFile

FP16_SKIPS_IN_A_ROW = 20


@dataclass
class GradientGate:
    """Lets a step through to the optimizer or not; every rank decides the same, from the one norm of all gradients."""

    wrapped: nn.Module
    scale: LossScale | None
    skip_nonfinite: bool
    metrics: MetricsFile
    locate: Callable[[], str]
    """Says where the first non-finite value arose; collective."""
    skipped_steps: int = 0

    @functools.cached_property
    def _trained(self) -> list[nn.Parameter]:
        """Looked for once: to walk the tree of modules at each step takes longer than the norm of a small model."""
        return [p for p in self.wrapped.parameters() if p.requires_grad]

    def pass_or_skip(self, step: int, max_norm: float | None) -> torch.Tensor:
        """Clips in place and returns the norm before clipping, the fp16 scale taken out.

        A norm that is not finite never reaches the optimizer: the step is skipped (fp16's own back-off, or
        `on_nonfinite: skip`) or the run ends with FailedError (exit 4).
        """
        parameters = [p for p in self._trained if p.grad is not None]
        norm = total_norm(parameters, flat_shard_group(self.wrapped))
        factor = 1.0
        if self.scale is not None:
            factor = 1.0 / self.scale.scale
            norm = norm * factor
        if not bool(torch.isfinite(norm)):
            self._refuse(step, float(norm))
            return norm
        if max_norm is not None:
            scale_gradients(parameters, clip_factor(norm, max_norm) * factor)
        elif self.scale is not None:
            scale_gradients(parameters, factor)
        if self.scale is not None:
            self.scale.update(finite=True)
        return norm

    def _refuse(self, step: int, norm: float) -> None:
        """All ranks come here together. Without gradients an optimizer changes nothing."""
        if self.scale is not None:
            self.scale.update(finite=False)
            self.metrics.event("loss_scale_backed_off", step, loss_scale=self.scale.scale)
            if self.scale.skipped_in_a_row >= FP16_SKIPS_IN_A_ROW:
                overflowed = f"{FP16_SKIPS_IN_A_ROW} steps in a row overflowed in fp16 (loss scale now {self.scale.scale:g})"
                raise _non_finite(f"step {step}: {overflowed}; {self.locate()}")
        else:
            message = f"step {step}: the gradient norm is {norm}; {self.locate()}"
            if not self.skip_nonfinite:
                raise _non_finite(message)
            self.metrics.event("step_skipped", step, reason=message)
        self.skipped_steps += 1
        for parameter in self._trained:
            parameter.grad = None


def _non_finite(message: str) -> FailedError:
    hint = "lower training.learning_rate, look at the rows named here, or go on past such steps with training.on_nonfinite: skip"
    return FailedError(Problem("non-finite", message, hint=hint), exit_code=ExitCode.NON_FINITE)
