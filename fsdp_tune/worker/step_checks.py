"""Checks of the numbers of a step: the gradient norm before the optimizer, and events that a curve should not
have, with their rows.

Between backward and optimizer are the norm over all ranks, clipping, the fp16 scale, and the check for NaN
and infinity. Whether a norm is finite is known on the device first. Reading it in every step would make the
host wait until the device's queue is empty, and then the device wait for the host. Torch's fused AdamW reads
`found_inf` (made for GradScaler) on the device and leaves parameters and state unchanged if it is set. The
host reads the norm a step later, when the copy has finished, or before the step is logged, evaluated or
saved. The norm is read at once for fp16, whose scale must be known before the next forward, and for other
optimizers.

Curves are watched for spikes, a gradient of exactly zero and weights that were never loaded. The ranks keep
the loss of each micro-batch since the last line where it is, on the device, and read it only after a spike.
All of them see the same spike: they compare sums over all ranks, and rank 0's gradient norm.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from fsdp_tune.core.errors import ExitCode, FailedError, Problem
from fsdp_tune.core.topology import Topology
from fsdp_tune.model.optim.adamw import AdamW
from fsdp_tune.model.step import LossScale, clip_factor, flat_shard_group, scale_gradients, total_norm
from fsdp_tune.run.event_parts import SpikeRow
from fsdp_tune.run.events import (
    NAMED_ROWS,
    GradientSpike,
    LossScaleBackedOff,
    LossSpike,
    StepSkipped,
    WeightsLookRandom,
    ZeroGradient,
)
from fsdp_tune.run.metrics_event import SpikeEvent
from fsdp_tune.run.metrics_file import MetricsFile
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.rows.batches import Batch
from fsdp_tune.worker.rows.training_rows import TrainingRows
from fsdp_tune.worker.step_observer import LoggedStep, StepObserver

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
    """Since the start of the run, over all attempts."""
    _pending: PendingStep | None = None
    _async_norm: AsyncScalar | None = None

    @functools.cached_property
    def _trained(self) -> list[nn.Parameter]:
        """Cached: walking the modules at each step takes longer than the norm of a small model."""
        return [p for p in self.wrapped.parameters() if p.requires_grad]

    def pass_or_skip(
        self, step: int, max_norm: float | None, optimizer: torch.optim.Optimizer, batches: list[Batch]
    ) -> torch.Tensor:
        """Clip gradients in place and return the norm before clipping, without the fp16 scale.

        A norm that is not finite never reaches the parameters: the step is skipped (fp16's own back-off, or
        `on_nonfinite: skip`) or the run ends with FailedError (exit 4), here, in the next step, or in
        `check_pending`.
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
        """Read the result of the last step; call it before that step is logged, evaluated or saved. Raises:
        FailedError as above."""
        last, self._pending = self._pending, None
        if (
            last is not None
            and self._async_norm is not None
            and not math.isfinite(norm := self._async_norm.read())
        ):
            self._refuse(last.step, norm, last.batches)

    def facts(self, step: LoggedStep) -> dict[str, float]:
        """Return fields for a metrics line."""
        scale = {"loss_scale": self.scale.scale} if self.scale is not None else {}
        return scale | ({"skipped_steps": self.skipped_steps} if self.skipped_steps else {})

    def _refuse(self, step: int, norm: float, batches: list[Batch]) -> None:
        """Record a non-finite step, and raise unless it is skipped. Collective."""
        if self.scale is not None:
            self.scale.update(finite=False)
            self.metrics.event(LossScaleBackedOff(step, self.scale.scale))
            if self.scale.skipped_in_a_row >= FP16_SKIPS_IN_A_ROW:
                overflowed = (
                    f"{FP16_SKIPS_IN_A_ROW} steps in a row overflowed in fp16 (loss scale now "
                    f"{self.scale.scale:g})"
                )
                raise _non_finite(f"step {step}: {overflowed}; {self.locate(batches)}")
        else:
            message = f"step {step}: the gradient norm is {norm}; {self.locate(batches)}"
            if not self.skip_nonfinite:
                raise _non_finite(message)
            self.metrics.event(StepSkipped(step, message))
        self.skipped_steps += 1


def supports_found_inf(optimizer: object) -> TypeGuard[AdamW]:
    """Return whether `optimizer.found_inf` takes effect: in torch's fused kernels, which this package's AdamW
    always uses. Muon's matrices are not updated by such a kernel."""
    return type(optimizer) is AdamW


def _non_finite(message: str) -> FailedError:
    hint = (
        "lower training.learning_rate, check the rows named here, or skip such steps with "
        "training.on_nonfinite: skip"
    )
    return FailedError(Problem("non-finite", message, hint=hint), exit_code=ExitCode.NON_FINITE)


WINDOW_LINES = 50
MIN_LINES = 10
SPIKE_DEVIATIONS = 6.0
SPIKE_RATIO = 3.0
"""Of a gradient norm to the mean: norms scatter more than losses."""
UNTRAINED_SHARE = 0.02
"""A pretrained model's first loss is far below ln(vocabulary); that of a random one is within 2 % of it."""
KEPT_BATCHES = 1024
"""Micro-batches of a rank whose rows can be named: a scalar on the device each."""
Unusual = type[SpikeEvent] | type[ZeroGradient] | type[WeightsLookRandom]


@dataclass
class RecentValues:
    """The last values of a number."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_LINES))

    def spike(self, value: float, least_ratio: float = 1.0) -> str | None:
        """Return the values so far as text if `value` is far above them. Take it into account from now on,
        unless it is not finite."""
        mean = sum(self.values) / max(len(self.values), 1)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in self.values) / max(len(self.values), 1))
        is_spike = len(self.values) >= MIN_LINES and value > max(
            mean + SPIKE_DEVIATIONS * deviation + 1e-6 * abs(mean), least_ratio * mean
        )
        described = (
            f"the last {len(self.values)} lines had {mean:.4f} ± {deviation:.4f}" if is_spike else None
        )
        if math.isfinite(value):
            self.values.append(value)
        return described


@dataclass
class CurveWatch:
    """`vocabulary` is given only if the model should be pretrained."""

    vocabulary: int | None
    _losses: RecentValues = field(default_factory=RecentValues)
    _norms: RecentValues = field(default_factory=RecentValues)
    _first: bool = True

    def watch(self, loss: float, grad_norm: float | None) -> list[tuple[Unusual, str]]:
        """Return an event and its sentence for each thing that is wrong in a line of metrics."""
        found: list[tuple[Unusual, str]] = []
        if self._first and self.vocabulary is not None:
            blind = math.log(self.vocabulary)
            if abs(loss - blind) < UNTRAINED_SHARE * blind:
                sentence = (
                    f"the first loss is {loss:.3f}, that of an untrained model (ln of the vocabulary = "
                    f"{blind:.3f})"
                )
                found.append((WeightsLookRandom, f"{sentence}: were the weights loaded?"))
        self._first = False
        if grad_norm == 0.0:
            found.append((ZeroGradient, "the gradient norm is exactly zero: nothing is being trained"))
        losses = self._losses.spike(loss)
        norms = None if grad_norm is None else self._norms.spike(grad_norm, SPIKE_RATIO)
        if losses is not None:
            also = "" if norms is None else f"; the gradient norm is {grad_norm:.4f}, and {norms}"
            found.append((LossSpike, f"the loss is {loss:.4f}; {losses}{also}"))
        elif norms is not None:
            found.append((GradientSpike, f"the gradient norm is {grad_norm:.4f}; {norms}"))
        return found


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """A micro-batch of this rank that has been trained."""

    step: int
    number: int
    """In its step, from 1."""
    batch: Batch
    """Without its tensors."""
    loss_sum: torch.Tensor


@dataclass(slots=True)
class RecentBatches:
    """The micro-batches of this rank since the last line."""

    rows: TrainingRows
    topology: Topology
    _batches: deque[TrainedBatch] = field(default_factory=lambda: deque(maxlen=KEPT_BATCHES))

    def add(self, step: int, number: int, batch: Batch, loss_sum: torch.Tensor) -> None:
        self._batches.append(TrainedBatch(step, number, dataclasses.replace(batch, tensors={}), loss_sum))

    def clear(self) -> None:
        self._batches.clear()

    def rows_of(self, step: int | None) -> tuple[list[SpikeRow], int]:
        """Return the named rows of a step, or of all steps since the last line, on all ranks, and the number
        of all rows.

        The micro-batches with the highest losses come first. Collective.
        """
        rank = dist.get_rank()
        mine = [each for each in self._batches if step in (None, each.step)]
        losses = torch.stack([each.loss_sum.double() for each in mine]).tolist() if mine else []
        counts_rows, counts_loss = self.topology.counts_rows(rank), self.topology.counts_loss(rank)
        examples = [list(self._examples(each, rank)) if counts_rows else [] for each in mine]
        own = [
            (
                each.step,
                each.number,
                loss if counts_loss else 0.0,
                each.batch.supervised_tokens if counts_rows else 0,
                len(rows),
            )
            for each, loss, rows in zip(mine, losses, examples, strict=True)
        ]
        means, total = self._means(gather(own))
        order = {key: at for at, (key, _) in enumerate(means[:NAMED_ROWS])}
        place = self.topology.data_rank(rank)
        named: list[tuple[int, SpikeRow]] = []
        for each, rows in zip(mine, examples, strict=True):
            at = order.get((place, each.step, each.number))
            if at is not None:
                named += [(at, dataclasses.replace(row, loss=means[at][1])) for row in rows[:NAMED_ROWS]]
        every = sorted((row for rows in gather(named) for row in rows), key=lambda each: each[0])
        return [row for _, row in every[:NAMED_ROWS]], total

    def _examples(self, trained: TrainedBatch, rank: int) -> Iterator[SpikeRow]:
        """Yield the rows of a micro-batch, without its loss."""
        for sequence, examples in zip(
            trained.batch.row_ids, self.rows.examples_of(trained.batch), strict=True
        ):
            for (file, row), tokens in examples:
                yield SpikeRow(file, row, tokens, trained.step, rank, trained.number, sequence, loss=None)

    def _means(
        self, every: list[list[tuple[int, int, float, int, int]]]
    ) -> tuple[list[tuple[tuple[int, int, int], float | None]], int]:
        """Return the mean token loss of each micro-batch with rows, by (data rank, step, number), the highest
        first, and all rows."""
        sums: dict[tuple[int, int, int], list[float]] = {}
        for rank, batches in enumerate(every):
            for step, number, loss, tokens, rows in batches:
                into = sums.setdefault((self.topology.data_rank(rank), step, number), [0.0, 0, 0])
                into[:] = [into[0] + loss, into[1] + tokens, into[2] + rows]
        means = [
            (key, loss / tokens if tokens else None) for key, (loss, tokens, rows) in sums.items() if rows
        ]

        def height(mean: float | None) -> float:
            return -math.inf if mean is None else math.inf if math.isnan(mean) else mean

        return sorted(means, key=lambda each: (-height(each[1]), each[0])), int(
            sum(rows for *_, rows in sums.values())
        )
