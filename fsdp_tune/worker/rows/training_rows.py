"""The training rows of a run on this rank: what the trainer needs of them, whether they were prepared or are
streamed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch.distributed as dist

from fsdp_tune.core.errors import Problem
from fsdp_tune.core.values import as_list
from fsdp_tune.data.inputs import TRAIN
from fsdp_tune.data.report import InputAccount
from fsdp_tune.data.row_order import RowOrder
from fsdp_tune.data.store import Int64, Origin, RowStore
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.rows.batches import Batch, Collator, MicroBatches, loader, loader_died
from fsdp_tune.worker.step_observer import LoggedStep, StepObserver

DESCRIBED_ROWS = 4


class TrainingRows(StepObserver, Protocol):
    """Global batch b is the same rows on any number of ranks."""

    @property
    def global_batch(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def order(self) -> RowOrder | None:
        """The global batches of the epochs; None for a stream, which counts passes itself."""
        ...

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

    def examples_of(self, batch: Batch) -> list[list[tuple[Origin, int]]]:
        """Return the examples of each row of a batch, each with its number of tokens."""
        ...

    def problem_of(self, error: BaseException, step: int) -> Problem | None:
        """Return the problem if a loader process died after `step` steps; None for any other error."""
        ...

    def count(self, batches: Sequence[Batch]) -> None:
        """Count the tokens of each source in batches that are trained, on one of the ranks that share their
        rows."""
        ...

    def skip_empty(self, step: int) -> None:
        """Leave out a global batch without rows after `step` steps. Collective. Raises: usage error if no
        more rows follow."""
        ...

    def state(self) -> object:
        """Return what a checkpoint needs beyond the step, in plain values. Collective."""
        ...

    def restore(self, state: object, step: int) -> None:
        """Go on after `step` steps with what `state` returned, on any number of ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """A training source of prepared rows."""

    name: str
    """Its label, or its number."""
    passes_per_token: float


@dataclass(slots=True)
class SourceTokens:
    """Tokens that were trained of each source of prepared rows."""

    sources: tuple[Source, ...]
    of_file: Int64
    """Index of the source of each file of the store. Training sources are the first, so that the counts do
    not depend on the eval sets."""
    counts: Int64 | None
    """By this rank, for each training source, since the run started. None for a single one, whose tokens are
    those of the run, and after a checkpoint without such counts."""

    @classmethod
    def of(cls, inputs: Sequence[InputAccount]) -> SourceTokens:
        """`inputs` are the accounts of all sources in the report of the preparation, those of `data.train`
        first."""
        trained = [account for account in inputs if account.set == TRAIN]
        sources = [
            Source(account.label or str(number), account.repeats / max(account.tokens, 1))
            for number, account in enumerate(trained)
        ]
        of_file = [index for index, account in enumerate(inputs) for _ in range(account.files)]
        counts = np.zeros(len(sources), np.int64) if len(sources) > 1 else None
        return cls(tuple(sources), np.array(of_file, np.int64), counts)

    def add(self, store: RowStore, rows: Sequence[int]) -> None:
        if self.counts is not None and rows:
            files, tokens = store.files_of(rows)
            np.add.at(self.counts, self.of_file[files], tokens)

    def facts(self) -> dict[str, int | float]:
        """Return tokens and passes of each source over all ranks; nothing for a single one. Collective."""
        every = self.state()
        if every is None:
            return {}
        facts: dict[str, int | float] = {}
        for source, tokens in zip(self.sources, every, strict=True):
            facts |= {
                f"source_{source.name}_tokens": tokens,
                f"source_{source.name}_passes": tokens * source.passes_per_token,
            }
        return facts

    def state(self) -> list[int] | None:
        """Return the counts over all ranks, or None on all of them. Collective."""
        if self.counts is None:
            return None
        return [sum(counts) for counts in zip(*gather(self.counts.tolist()), strict=True)]

    def restore(self, state: object) -> None:
        """Continue with what `state` returned. Earlier versions also stored a 0 for each source of the eval
        sets of that time."""
        if self.counts is None:
            return
        stored = [count for count in as_list(state) if isinstance(count, int)][: len(self.counts)]
        if len(stored) < len(self.counts):
            self.counts = None
        else:
            self.counts = np.array(stored if dist.get_rank() == 0 else [0] * len(stored), np.int64)


@dataclass(frozen=True, slots=True)
class PreparedRows(StepObserver):
    """Rows of a store, in an order that follows from seed and epoch."""

    sample: RowStore
    sampler: MicroBatches
    collator: Collator
    sources: SourceTokens

    @property
    def global_batch(self) -> int:
        return self.sampler.global_batch

    @property
    def micro_batch(self) -> int:
        return self.sampler.micro_batch

    @property
    def order(self) -> RowOrder:
        return self.sampler.order

    def batches(self, *, workers: int, pin_memory: bool, prefetch: int | None) -> Iterable[Batch]:
        of_file = self.sources.of_file if self.collator.sources else None
        parts = (self.sample, self.sampler, self.collator)
        return loader(
            *parts, workers=workers, pin_memory=pin_memory, prefetch=prefetch, source_of_file=of_file
        )

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def epochs_after(self, step: int) -> float:
        return self.sampler.epochs_after(step)

    def digest(self) -> str:
        return self.sampler.digest()

    def rows_of_all_ranks(self, step: int) -> list[int]:
        return self.sampler.order.batch_after(step).tolist()

    def describe(self, batch: Batch) -> str:
        places = ["{}:{}".format(*self.sample.origins(row)[0]) for row in batch.row_ids[:DESCRIBED_ROWS]]
        return described(batch.row_ids, places)

    def examples_of(self, batch: Batch) -> list[list[tuple[Origin, int]]]:
        return [
            list(zip(self.sample.origins(row), self.sample[row].lengths, strict=True))
            for row in batch.row_ids
        ]

    def problem_of(self, error: BaseException, step: int) -> Problem | None:
        return loader_died(
            error,
            lambda: self.sample.describe_rows(self.sampler.rows_of_step(self.sampler.order.locate(step)[1])),
            step,
        )

    def count(self, batches: Sequence[Batch]) -> None:
        self.sources.add(self.sample, [row for batch in batches for row in batch.row_ids])

    def skip_empty(self, step: int) -> None:
        raise AssertionError("an epoch ends after its last row")

    def facts(self, step: LoggedStep) -> dict[str, int | float]:
        return self.sources.facts()

    def state(self) -> list[int] | None:
        return self.sources.state()

    def restore(self, state: object, step: int) -> None:
        """Restore the counts alone: the Trainer skips the batches of the epoch that were trained."""
        self.sources.restore(state)


def described(row_ids: tuple[int, ...], places: list[str]) -> str:
    """`places` are those of the first rows."""
    named = [f"{row} ({place})" for row, place in zip(row_ids, places[:DESCRIBED_ROWS], strict=False)]
    rest = f" and {len(row_ids) - len(named)} more" if len(row_ids) > len(named) else ""
    return f"rows {', '.join(named)}{rest}" if named else "no rows"
