"""Name the rank for which all others wait, and what it spends the time on: data, computing or saving.

All ranks take the same time for a step, since each waits in its collectives for the slowest. They differ in
their own time: that of a step without these waits. Nothing is synchronised for it:

- Data: the host's time for the batches of a step, and its wait in the sum of their tokens, the first
  collective of a step.
- Computing: on a CPU, the step without the time in FSDP2's collectives, which the host runs. On CUDA, the
  same of the compute stream in logged steps, from events that are read when the line is written. The host
  runs ahead of a GPU, so there data cost at most the time in which the GPU had nothing to do.
- Saving: writing this rank's part of a checkpoint, as far as training waited for it.

Not seen: under DDP and FSDP1, which rank computes slowly, since their waits cannot be observed; on CUDA, what
is slow only in steps that are not logged; a slow link, for which both of its ends wait.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from fsdp_tune.run.events import RankRecovered, RankSlowed
from fsdp_tune.run.metrics_file import MetricsFile
from fsdp_tune.worker.observe.step_shares import StepShares
from fsdp_tune.worker.step_observer import LoggedStep, RankTimes, StepObserver

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer

WINDOW_SECONDS = 20.0
"""Least time between two comparisons, each of which is a collective of small tensors."""
SUSTAINED_SECONDS = 60.0
"""A rank is named once it has been the slowest, by `COST_SHARE` at least, in consecutive comparisons over
this time."""
COST_SHARE = 0.05
"""Share of a step."""
LEAST_SECONDS = 0.005
"""Of a step that a slow rank must cost: less is noise, also of a clock."""


class OwnTimes(NamedTuple):
    """Seconds of one rank in a step, without its waits for others."""

    step: float
    """The complete step and its share of the saves, with all waits."""
    data: float
    computing: float
    saving: float


@dataclass(frozen=True, slots=True)
class Slowest:
    rank: int
    part: str
    """What it takes longer for than the others: `data`, `computing` or `saving`."""
    behind_seconds: float
    """A step, more than the median of the others."""
    share: float
    """Of a step."""

    @property
    def is_costly(self) -> bool:
        return self.share > COST_SHARE and self.behind_seconds > LEAST_SECONDS


def slowest(ranks: Sequence[OwnTimes]) -> Slowest:
    """Return the rank with the longest own time, for which the others wait."""
    own = [each.data + each.computing + each.saving for each in ranks]
    rank = max(range(len(ranks)), key=own.__getitem__)

    def behind(values: Sequence[float]) -> float:
        return values[rank] - statistics.median(value for other, value in enumerate(values) if other != rank)

    parts = {
        name: behind([getattr(each, name) for each in ranks]) for name in ("data", "computing", "saving")
    }
    step_seconds = max(each.step for each in ranks)
    return Slowest(
        rank,
        max(parts, key=parts.__getitem__),
        behind(own),
        behind(own) / step_seconds if step_seconds > 0 else 0.0,
    )


@dataclass
class Sustained:
    """The rank that is slowest for a while. Pure; the same on all ranks."""

    named: Slowest | None = None
    _rank: int | None = None
    _seconds: float = 0.0

    def add(self, found: Slowest, seconds: float) -> bool:
        """Count a comparison over `seconds`. Returns whether another rank is named now, or none any more."""
        before = self.named.rank if self.named is not None else None
        if not found.is_costly or found.rank != self._rank:
            self._seconds = 0.0
        self._rank = found.rank if found.is_costly else None
        if self._rank is not None:
            self._seconds += seconds
        if self._rank != before:
            self.named = None
        if self._rank is not None and self._seconds >= SUSTAINED_SECONDS:
            self.named = found
        return (self.named.rank if self.named is not None else None) != before


class Stragglers(StepObserver):
    """Compare the ranks' own times every `WINDOW_SECONDS`, and add the slow rank to the lines."""

    times: RankTimes

    def __init__(self, shares: StepShares, metrics: MetricsFile) -> None:
        self._shares, self._metrics = shares, metrics
        self._sustained = Sustained()
        self._since: tuple[RankTimes, int] | None = None
        self._began = 0.0
        self._due = 0
        """The step of the next comparison, the same on all ranks."""
        self._device: list[tuple[float, float]] = []
        """Of the logged steps since the last comparison, on a device with a clock of its own: seconds, and of
        them in communication."""

    def attach(self, trainer: FsdpTrainer) -> None:
        self.times = trainer.times

    def facts(self, step: LoggedStep) -> dict[str, object]:
        """Return the slow rank, if there is one. Collective when a comparison is due."""
        if dist.get_world_size() == 1:
            return {}
        if (measured := self._shares.on_device) is not None:
            self._device.append(measured)
        if self._since is None:  # the first steps compile, allocate and read ahead
            self._start(step.step)
            self._due = step.step + 1
        elif step.step >= self._due:
            self._compare(step.step, step.step - self._since[1])
        named = self._sustained.named
        if named is None:
            return {}
        return {
            "slow_rank": named.rank,
            "slow_rank_part": named.part,
            "slow_rank_share": round(named.share, 4),
        }

    def _start(self, step: int) -> None:
        self._since, self._began = (self.times.copy(), step), time.monotonic()
        self._device.clear()

    def _compare(self, step: int, steps: int) -> None:
        mine = torch.tensor([time.monotonic() - self._began, *self._own_times(steps)], dtype=torch.float64)
        every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        seconds = float(every[0][0])
        self._due = step + max(1, math.ceil(WINDOW_SECONDS * steps / max(seconds, 1e-6)))
        if seconds < WINDOW_SECONDS:
            self._due -= steps
            return
        before = self._sustained.named
        if self._sustained.add(slowest([OwnTimes(*each.tolist()[1:]) for each in every]), seconds):
            self._report(step, before)
        self._start(step)

    def _own_times(self, steps: int) -> OwnTimes:
        assert self._since is not None
        spent = self.times.since(self._since[0])
        data, saving = spent.data / steps, min(spent.written, spent.stalled) / steps
        step_seconds = (spent.in_steps + spent.stalled) / steps
        if not self._shares.has_device_clock:
            observed = spent.in_steps - spent.waited if self._shares.sees_communication else spent.data
            return OwnTimes(step_seconds, data, observed / steps - data, saving)
        device_seconds = statistics.fmean(seconds for seconds, _ in self._device) if self._device else 0.0
        own_seconds = (
            statistics.fmean(seconds - waited for seconds, waited in self._device) if self._device else 0.0
        )
        idle_seconds = max(0.0, spent.in_steps / steps - device_seconds)
        return OwnTimes(
            step_seconds,
            min(data, idle_seconds),
            own_seconds if self._shares.sees_communication else 0.0,
            saving,
        )

    def _report(self, step: int, before: Slowest | None) -> None:
        found = self._sustained.named
        if found is None:
            assert before is not None, "something changed"
            self._metrics.event(
                RankRecovered(step, before.rank, f"the others no longer wait for rank {before.rank}")
            )
            return
        behind, share = round(found.behind_seconds, 4), round(found.share, 4)
        message = (
            f"rank {found.rank} costs {share:.0%} of each step: the others wait {behind:.3g} s for its "
            f"{found.part}"
        )
        self._metrics.event(
            RankSlowed(step, found.rank, found.part, share=share, behind_seconds=behind, message=message)
        )
