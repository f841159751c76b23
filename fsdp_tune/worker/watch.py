"""Events that a loss curve should not have: spikes, a gradient of exactly zero, weights that were never loaded."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

WINDOW_LINES = 50
MIN_LINES = 10
SPIKE_DEVIATIONS = 6.0
UNTRAINED_SHARE = 0.02
"""A pretrained model's first loss is far below ln(vocabulary); a random one's lies within 2 % of it."""


@dataclass
class CurveWatch:
    """`vocabulary` is given only where the model should be pretrained."""

    vocabulary: int | None
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_LINES))
    _first: bool = True

    def events(self, loss: float, grad_norm: float | None) -> list[tuple[str, str]]:
        """(event, sentence) for one line of metrics."""
        found: list[tuple[str, str]] = []
        if self._first and self.vocabulary is not None:
            blind = math.log(self.vocabulary)
            if abs(loss - blind) < UNTRAINED_SHARE * blind:
                sentence = f"the first loss is {loss:.3f}, that of a model that knows nothing (ln of the vocabulary = {blind:.3f})"
                found.append(("weights_look_random", f"{sentence}: were the weights loaded?"))
        self._first = False
        if grad_norm == 0.0:
            found.append(("zero_gradient", "the gradient norm is exactly zero: nothing is being trained"))
        if len(self._losses) >= MIN_LINES:
            mean = sum(self._losses) / len(self._losses)
            deviation = math.sqrt(sum((value - mean) ** 2 for value in self._losses) / len(self._losses))
            if loss > mean + SPIKE_DEVIATIONS * deviation + 1e-6 * abs(mean):
                found.append(("loss_spike", f"the loss is {loss:.4f}; the last {len(self._losses)} lines had {mean:.4f} ± {deviation:.4f}"))
        self._losses.append(loss)
        return found
