"""The training rows of a run on this rank: what the trainer needs of them, whether they were prepared or are streamed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from fsdp_tune.core.errors import Problem
from fsdp_tune.data.store import RowStore
from fsdp_tune.worker.rows.dataset import Batch, Collator, MicroBatches, loader, loader_died

DESCRIBED_ROWS = 4


class TrainingRows(Protocol):
    """Global batch b is the same rows on any number of ranks."""

    @property
    def global_batch(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def sample(self) -> RowStore:
        """Rows to check the model with before step 1."""
        ...

    def batches(self, *, workers: int, pin_memory: bool, prefetch: int | None) -> Iterable[Batch]:
        """Return the micro-batches of this rank, with a length. `workers` processes read ahead."""
        ...

    def set_epoch(self, epoch: int) -> None: ...
    def epochs_after(self, step: int) -> float: ...
    def digest(self) -> str:
        """Return a digest of the order, equal on all ranks."""
        ...

    def rows_of_all_ranks(self, step: int) -> list[int]:
        """Return the rows that all ranks together read after `step` steps."""
        ...

    def describe(self, batch: Batch) -> str:
        """Return `rows 3 (train.jsonl:17), 9 (train.jsonl:40)`."""
        ...

    def problem_of(self, error: BaseException, step: int) -> Problem | None:
        """Return the problem if a loader process died after `step` steps; None for any other error."""
        ...

    def facts(self) -> dict[str, int]:
        """Return metrics of a logged line. Collective."""
        ...

    def state(self) -> Any:
        """Return what a checkpoint needs beyond the step, in plain values. Collective."""
        ...

    def restore(self, state: Any, step: int) -> None:
        """Go on after `step` steps with what `state` returned, on any number of ranks."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Rows of a store, in an order that follows from seed and epoch."""

    sample: RowStore
    sampler: MicroBatches
    collator: Collator

    @property
    def global_batch(self) -> int:
        return self.sampler.global_batch

    @property
    def micro_batch(self) -> int:
        return self.sampler.micro_batch

    def batches(self, *, workers: int, pin_memory: bool, prefetch: int | None) -> Iterable[Batch]:
        return loader(self.sample, self.sampler, self.collator, workers=workers, pin_memory=pin_memory, prefetch=prefetch)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def epochs_after(self, step: int) -> float:
        return self.sampler.epochs_after(step)

    def digest(self) -> str:
        return self.sampler.digest()

    def rows_of_all_ranks(self, step: int) -> list[int]:
        return self.sampler.rows_of_all_ranks(step)

    def describe(self, batch: Batch) -> str:
        places = ["{}:{}".format(*self.sample.origins(row)[0]) for row in batch.row_ids[:DESCRIBED_ROWS]]
        return described(batch.row_ids, places)

    def problem_of(self, error: BaseException, step: int) -> Problem | None:
        return loader_died(error, lambda: self.sample.describe_rows(self.sampler.rows_of_step(step % self.sampler.steps)), step)

    def facts(self) -> dict[str, int]:
        return {}

    def state(self) -> Any:
        return None

    def restore(self, state: Any, step: int) -> None:
        """Nothing: the Trainer skips the batches of the epoch that were trained."""


def described(row_ids: tuple[int, ...], places: list[str]) -> str:
    """`places` are those of the first rows."""
    named = [f"{row} ({place})" for row, place in zip(row_ids, places[:DESCRIBED_ROWS], strict=False)]
    rest = f" and {len(row_ids) - len(named)} more" if len(row_ids) > len(named) else ""
    return f"rows {', '.join(named)}{rest}" if named else "no rows"
