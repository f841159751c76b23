"""Events that a curve should not have (spikes, a gradient of exactly zero, weights that were never loaded), and the rows behind a spike.

The ranks keep the loss of each micro-batch since the last line where it is, on the device, and read it only after a spike. All of them
see the same spike: they compare sums over all ranks, and rank 0's gradient norm.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdp_tune.core.topology import Topology
from fsdp_tune.run.metrics_file import GRADIENT_SPIKE, LOSS_SPIKE, NAMED_ROWS, WEIGHTS_LOOK_RANDOM, ZERO_GRADIENT, EventKind
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.rows.training_rows import Batch, TrainingRows

WINDOW_LINES = 50
MIN_LINES = 10
SPIKE_DEVIATIONS = 6.0
SPIKE_RATIO = 3.0
"""Of a gradient norm to the mean: norms scatter more than losses."""
UNTRAINED_SHARE = 0.02
"""A pretrained model's first loss is far below ln(vocabulary); that of a random one is within 2 % of it."""
KEPT_BATCHES = 1024
"""Micro-batches of a rank whose rows can be named: a scalar on the device each."""
IN_SPIKES = (LOSS_SPIKE, GRADIENT_SPIKE)


@dataclass
class RecentValues:
    """The last values of a number."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_LINES))

    def spike(self, value: float, least_ratio: float = 1.0) -> str | None:
        """Return the values so far as text if `value` is far above them. Take it into account from now on, unless it is not finite."""
        mean = sum(self.values) / max(len(self.values), 1)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in self.values) / max(len(self.values), 1))
        is_spike = len(self.values) >= MIN_LINES and value > max(mean + SPIKE_DEVIATIONS * deviation + 1e-6 * abs(mean), least_ratio * mean)
        described = f"the last {len(self.values)} lines had {mean:.4f} ± {deviation:.4f}" if is_spike else None
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

    def watch(self, loss: float, grad_norm: float | None) -> list[tuple[EventKind, str]]:
        """Return an event and its sentence for each thing that is wrong in a line of metrics."""
        found: list[tuple[EventKind, str]] = []
        if self._first and self.vocabulary is not None:
            blind = math.log(self.vocabulary)
            if abs(loss - blind) < UNTRAINED_SHARE * blind:
                sentence = f"the first loss is {loss:.3f}, that of an untrained model (ln of the vocabulary = {blind:.3f})"
                found.append((WEIGHTS_LOOK_RANDOM, f"{sentence}: were the weights loaded?"))
        self._first = False
        if grad_norm == 0.0:
            found.append((ZERO_GRADIENT, "the gradient norm is exactly zero: nothing is being trained"))
        losses = self._losses.spike(loss)
        norms = None if grad_norm is None else self._norms.spike(grad_norm, SPIKE_RATIO)
        if losses is not None:
            also = "" if norms is None else f"; the gradient norm is {grad_norm:.4f}, and {norms}"
            found.append((LOSS_SPIKE, f"the loss is {loss:.4f}; {losses}{also}"))
        elif norms is not None:
            found.append((GRADIENT_SPIKE, f"the gradient norm is {grad_norm:.4f}; {norms}"))
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

    def rows_of(self, step: int | None) -> dict[str, Any]:
        """Return the fields `rows` and `rows_total` of an event: the rows of a step, or of all steps since the last line, on all ranks.

        The micro-batches with the highest losses come first. Collective.
        """
        rank = dist.get_rank()
        mine = [each for each in self._batches if step in (None, each.step)]
        losses = torch.stack([each.loss_sum.double() for each in mine]).tolist() if mine else []
        counts_rows, counts_loss = self.topology.counts_rows(rank), self.topology.counts_loss(rank)
        examples = [list(self._examples(each, rank)) if counts_rows else [] for each in mine]
        own = [
            (each.step, each.number, loss if counts_loss else 0.0, each.batch.supervised_tokens if counts_rows else 0, len(rows))
            for each, loss, rows in zip(mine, losses, examples, strict=True)
        ]
        means, total = self._means(gather(own))
        order = {key: at for at, (key, _) in enumerate(means[:NAMED_ROWS])}
        place = self.topology.data_rank(rank)
        named: list[tuple[int, dict[str, Any]]] = []
        for each, rows in zip(mine, examples, strict=True):
            at = order.get((place, each.step, each.number))
            if at is not None:
                named += [(at, row | {"loss": means[at][1]}) for row in rows[:NAMED_ROWS]]
        every = sorted((row for rows in gather(named) for row in rows), key=lambda each: each[0])
        return {"rows": [row for _, row in every[:NAMED_ROWS]], "rows_total": total}

    def _examples(self, trained: TrainedBatch, rank: int) -> Iterator[dict[str, Any]]:
        for sequence, examples in zip(trained.batch.row_ids, self.rows.examples_of(trained.batch), strict=True):
            for (file, row), tokens in examples:
                place = {"step": trained.step, "rank": rank, "micro_batch": trained.number, "sequence": sequence}
                yield {"file": file, "row": row, "tokens": tokens, **place}

    def _means(self, every: list[list[tuple[int, int, float, int, int]]]) -> tuple[list[tuple[tuple[int, int, int], float | None]], int]:
        """Return the mean token loss of each micro-batch with rows, by (data rank, step, number), the highest first, and all rows."""
        sums: dict[tuple[int, int, int], list[float]] = {}
        for rank, batches in enumerate(every):
            for step, number, loss, tokens, rows in batches:
                into = sums.setdefault((self.topology.data_rank(rank), step, number), [0.0, 0, 0])
                into[:] = [into[0] + loss, into[1] + tokens, into[2] + rows]
        means = [(key, loss / tokens if tokens else None) for key, (loss, tokens, rows) in sums.items() if rows]

        def height(mean: float | None) -> float:
            return -math.inf if mean is None else math.inf if math.isnan(mean) else mean

        return sorted(means, key=lambda each: (-height(each[1]), each[0])), int(sum(rows for *_, rows in sums.values()))
