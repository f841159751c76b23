"""Prepared rows → micro-batches of this rank: the same global batches in the same order on any number of ranks.

The order is cut into global batches first and only then over ranks and micro-batches, so a step sees the same rows
whatever the world size. In the last, short global batch of an epoch a rank that gets no row runs a filler of padding
without labels, because every rank must take part in the collectives; the filler adds exactly nothing.

Under a token budget the micro-batches of a step are as many as its rows need. The Trainer counts in steps of a fixed number, for
resumption, epochs and the end of a step; so a step keeps that number of places, and those that are not needed are empty: the loader
yields `NOTHING` for them, which is skipped. How many there are follows from the rows alone, so every rank has the same.

The training rows of a run on this rank: what the trainer needs of them, whether they were prepared or are streamed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset

from fsdp_tune.core.errors import FailedError, Problem
from fsdp_tune.data.batches import (
    TokenBudget,
    collate,
    cumulative_lengths,
    example_ids,
    rank_micro_batches,
    source_ids,
    token_micro_batches,
)
from fsdp_tune.data.inputs import TRAIN
from fsdp_tune.data.report import InputAccount
from fsdp_tune.data.row_order import RowOrder
from fsdp_tune.data.store import IGNORE_INDEX, Int64, Origin, Row, RowStore
from fsdp_tune.run.manifest import digest
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.rank import ignore_stop_signals
from fsdp_tune.worker.step_observer import LoggedStep, StepObserver

FILLER = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on one rank. `row_ids` identify its rows."""

    tensors: dict[str, torch.Tensor]
    row_ids: tuple[int, ...]
    tokens: int
    """Tokens that are not padding, fillers left out."""
    supervised_tokens: int
    """Targets: labelled tokens that are not the first of their row."""
    attended: int = 0
    """Σ length² over the examples: the attended positions, packed or not."""
    origins: tuple[str, ...] = ()
    """`file:row` of the first example of each row of a stream; prepared rows are looked up."""
    examples: tuple[tuple[tuple[Origin, int], ...], ...] = ()
    """Of each row of a stream, its examples with their tokens; those of prepared rows are looked up."""
    supervised_by_source: tuple[int, ...] = ()
    """`supervised_tokens` of each source, if the batch has `source_ids`."""

    def pin_memory(self) -> Batch:
        """Called by the pinning thread of the loader, which pins custom types only through this method."""
        tensors = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return dataclasses.replace(self, tensors=tensors)


NOTHING = Batch({}, (), 0, 0)
"""A slot of a step that needs no micro-batch on any rank."""


class UnreadableRow(FailedError):
    """A row that cannot be read or made a batch."""

    def __init__(self, message: str) -> None:
        # torch rebuilds an error of a loader process from the text of its traceback.
        message = message.rsplit(f"{type(self).__name__}: ", 1)[-1].strip()
        super().__init__(Problem("row-unreadable", message, hint="the prepared data may be incomplete: `fsdp-tune prepare` rebuilds them"))


class Rows(Dataset["Row | None"]):
    def __init__(self, store: RowStore, source_of_file: Int64 | None = None) -> None:
        """Rows have `sources` if `source_of_file` is given, the index of the source of each file of the store."""
        self.store, self._source_of_file = store, source_of_file

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Row | None:
        if index == FILLER:
            return None
        try:
            row = self.store[index]
            if self._source_of_file is None:
                return row
            return dataclasses.replace(row, sources=tuple(self._source_of_file[self.store.files_of([index])[0]].tolist()))
        except Exception as error:  # any error must name its row
            raise UnreadableRow(f"row {index} cannot be read: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Collator:
    pad_token_id: int
    multiple_of: int
    max_length: int | None = None
    """Rounding up to `multiple_of` stops here: a model may have no positions beyond."""
    variable_lengths: bool = False
    """Batches have `cu_seq_lens`, by which the attention kernel separates packed examples."""
    names_examples: bool = False
    """Batches have `example_ids` and `example_lengths`: a mixture's load-balancing loss is of each example alone."""
    sources: int = 0
    """If not 0, the number of training sources: batches of rows that have `sources` have `source_ids`, for the loss of each."""

    def __call__(self, items: Sequence[Row | None]) -> Batch:
        if not items:
            return NOTHING
        rows = [row for row in items if row is not None]
        try:
            arrays = collate(rows, self.pad_token_id, self.multiple_of, max_length=self.max_length)
        except Exception as error:
            named = ", ".join(str(row.row_id) for row in rows)
            raise UnreadableRow(f"rows {named} cannot be made a batch: {type(error).__name__}: {error}") from error
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.variable_lengths:
            tensors["cu_seq_lens"] = torch.from_numpy(cumulative_lengths(rows, arrays["input_ids"].shape[1]))
        if self.names_examples:
            ids, lengths = example_ids(rows, arrays["input_ids"].shape[1])
            tensors |= {"example_ids": torch.from_numpy(ids), "example_lengths": torch.from_numpy(lengths)}
        supervised, by_source = arrays["labels"][:, 1:] != IGNORE_INDEX, tuple[int, ...]()
        if self.sources and any(row.sources for row in rows):
            ids = source_ids(rows, supervised.shape[1] + 1)
            tensors["source_ids"] = torch.from_numpy(ids)
            by_source = tuple(np.bincount(ids[:, 1:][supervised], minlength=self.sources).tolist())
        return Batch(
            tensors,
            tuple(row.row_id for row in rows),
            sum(len(row.input_ids) for row in rows),
            int(np.count_nonzero(supervised)),
            sum(length * length for row in rows for length in row.lengths),
            supervised_by_source=by_source,
        )


@dataclass(frozen=True, slots=True)
class ByTokens:
    """Global batches are cut by the token slots of a micro-batch, not by its rows."""

    budget: TokenBudget
    lengths: Int64
    """Of all rows."""

    def cut(self, rows: Int64, data_rank: int, data_size: int) -> list[Int64]:
        return [rows[ranks[data_rank]] for ranks in token_micro_batches(self.lengths[rows], self.budget, data_size)]


class MicroBatches(BatchSampler):
    """Row numbers of each micro-batch of one rank, for one epoch; FILLER where the last global batch has too few rows.

    Of a global batch that is cut by tokens the first places are empty where it needs fewer micro-batches than `accumulation`.
    """

    def __init__(
        self,
        order: RowOrder,
        *,
        data_rank: int,
        data_size: int,
        micro_batch: int,
        accumulation: int,
        by_tokens: ByTokens | None = None,
    ) -> None:
        """`data_rank` of `data_size`: see `Topology`.

        With `by_tokens`, `micro_batch` rows of the greatest length fill its budget, and `accumulation` micro-batches of them are enough.
        """
        self.order, self._by_tokens = order, by_tokens
        self._data_rank, self._data_size = data_rank, data_size
        self.micro_batch, self._accumulation = micro_batch, accumulation
        self.epoch = 0

    @property
    def global_batch(self) -> int:
        return self.order.global_batch

    def digest(self, epoch: int = 0) -> str:
        """Return a digest of an epoch's order, equal on every rank and for every world size with the same global batches."""
        found = self.order.epoch(epoch)
        cut = [repr(found.parts)] if len(found.parts) > 1 else []
        return digest(np.ascontiguousarray(found.rows, dtype=np.int64).tobytes(), *cut)

    def rows_of_step(self, step: int) -> list[int]:
        """Return this rank's rows in step `step` (from 0) of the current epoch."""
        batches = list(self)[step * self._accumulation : (step + 1) * self._accumulation]
        return [row for batch in batches for row in batch if row != FILLER]

    def epochs_after(self, step: int) -> float:
        """Return the epochs trained after `step` steps (rows over rows per epoch), the same on any number of ranks."""
        return self.order.epochs_after(step)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        epoch = self.order.epoch(self.epoch)
        last = epoch.steps - 1
        return last * self._accumulation + self._places(len(epoch.batch(last)))

    def _places(self, rows: int) -> int:
        return math.ceil(rows / (self._data_size * self.micro_batch))

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.order.epoch(self.epoch)
        # The Trainer skips the steps that earlier attempts trained, and counts as many places for each as for a step of this one.
        trained = epoch.parts[-1].step
        yield from [[]] * (trained * self._accumulation)
        for step in range(trained, epoch.steps):
            yield from self._split(epoch.batch(step))

    def _split(self, rows: Int64) -> Iterator[list[int]]:
        if self._by_tokens is not None:
            cut = self._by_tokens.cut(rows, self._data_rank, self._data_size)
            return iter([[]] * (self._places(len(rows)) - len(cut)) + [taken.tolist() or [FILLER] for taken in cut])
        micro_batches = rank_micro_batches(rows, dp_rank=self._data_rank, dp_size=self._data_size, micro_batch_size=self.micro_batch)
        return ([int(row) for row in micro_batch] or [FILLER] for micro_batch in micro_batches)


def loader(
    store: RowStore,
    sampler: BatchSampler,
    collator: Collator,
    *,
    workers: int,
    pin_memory: bool,
    prefetch: int | None = None,
    source_of_file: Int64 | None = None,
) -> DataLoader[Batch]:
    """`workers` processes read ahead `prefetch` micro-batches each; 0 reads in the training process. `source_of_file`: see `Rows`.

    Iterating draws a seed for the processes, from a generator of its own. From the global one, which dropout draws from, it would be
    drawn once per epoch without processes and once per launch with them, so that a resume at the start of an epoch drew other masks.
    """
    # The collator turns rows into batches; torch types a loader by the items of its data set.
    rows: Any = Rows(store, source_of_file)
    return DataLoader(
        rows,
        batch_sampler=sampler,
        collate_fn=collator,
        num_workers=workers,
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
        generator=torch.Generator(),
        prefetch_factor=prefetch if workers else None,
        worker_init_fn=ignore_stop_signals,
    )


def loader_died(error: BaseException, next_rows: Callable[[], str], step: int) -> Problem | None:
    """Return the problem if a loader process died after `step` steps; None for any other error.

    torch raises it from a signal handler, in whatever the training process is doing.
    """
    first_line = str(error).partition("\n")[0]
    if not isinstance(error, RuntimeError) or not first_line.startswith("DataLoader worker"):
        return None
    message = (
        f"a process of the data loader is gone while rows were read for step {step + 1} and later, from {next_rows()} on: {first_line}"
    )
    hint = "out of host memory, or /dev/shm full? `training.dataloader_num_workers: 0` reads in the rank itself"
    return Problem("loader-died", message, hint=hint)


def eval_batches(rows: int, *, data_rank: int, data_size: int, micro_batch: int) -> list[list[int]]:
    """Split rows over the ranks, each row once, with as many batches on each rank: fillers instead of repeated rows."""
    count = math.ceil(rows / (data_size * micro_batch))
    mine = list(range(data_rank, rows, data_size))
    batches = [mine[start : start + micro_batch] for start in range(0, len(mine), micro_batch)]
    return batches + [[FILLER]] * (count - len(batches))


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
        """Count the tokens of each source in batches that are trained, on one of the ranks that share their rows."""
        ...

    def skip_empty(self, step: int) -> None:
        """Leave out a global batch without rows after `step` steps. Collective. Raises: usage error if no more rows follow."""
        ...

    def state(self) -> Any:
        """Return what a checkpoint needs beyond the step, in plain values. Collective."""
        ...

    def restore(self, state: object, step: int) -> None:
        """Go on after `step` steps with what `state` returned, on any number of ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """A training source of prepared rows."""

    index: int
    """Among all sources, those of eval sets included."""
    name: str
    """Its label, or its number."""
    passes_per_token: float


@dataclass(slots=True)
class SourceTokens:
    """Tokens that were trained of each source of prepared rows."""

    sources: tuple[Source, ...]
    of_file: Int64
    """Index of the source of each file of the store."""
    counts: Int64 | None
    """By this rank, for each source, since the run started. None for a single source, whose tokens are those of the run, and after a
    checkpoint without such counts."""

    @classmethod
    def of(cls, inputs: Sequence[InputAccount]) -> SourceTokens:
        """`inputs` are the accounts of all sources in the report of the preparation."""
        trained = [(index, account) for index, account in enumerate(inputs) if account.set == TRAIN]
        sources = [
            Source(index, account.label or str(number), account.repeats / max(account.tokens, 1))
            for number, (index, account) in enumerate(trained)
        ]
        of_file = [index for index, account in enumerate(inputs) for _ in range(account.files)]
        counts = np.zeros(len(inputs), np.int64) if len(sources) > 1 else None
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
        for source in self.sources:
            tokens = every[source.index]
            facts |= {f"source_{source.name}_tokens": tokens, f"source_{source.name}_passes": tokens * source.passes_per_token}
        return facts

    def state(self) -> list[int] | None:
        """Return the counts over all ranks, or None on all of them. Collective."""
        if self.counts is None:
            return None
        return [sum(counts) for counts in zip(*gather(self.counts.tolist()), strict=True)]

    def restore(self, state: list[int] | None) -> None:
        """Continue with what `state` returned."""
        if self.counts is None or state is None or len(state) != len(self.counts):
            self.counts = None
        else:
            self.counts = np.array(state if dist.get_rank() == 0 else [0] * len(state), np.int64)


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
        return loader(*parts, workers=workers, pin_memory=pin_memory, prefetch=prefetch, source_of_file=of_file)

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
        return [list(zip(self.sample.origins(row), self.sample[row].lengths, strict=True)) for row in batch.row_ids]

    def problem_of(self, error: BaseException, step: int) -> Problem | None:
        return loader_died(error, lambda: self.sample.describe_rows(self.sampler.rows_of_step(self.sampler.order.locate(step)[1])), step)

    def count(self, batches: Sequence[Batch]) -> None:
        self.sources.add(self.sample, [row for batch in batches for row in batch.row_ids])

    def skip_empty(self, step: int) -> None:
        raise AssertionError("an epoch ends after its last row")

    def facts(self, step: LoggedStep) -> dict[str, int | float]:
        return self.sources.facts()

    def state(self) -> Any:
        return self.sources.state()

    def restore(self, state: Any, step: int) -> None:
        """Restore the counts alone: the Trainer skips the batches of the epoch that were trained."""
        self.sources.restore(state)


def described(row_ids: tuple[int, ...], places: list[str]) -> str:
    """`places` are those of the first rows."""
    named = [f"{row} ({place})" for row, place in zip(row_ids, places[:DESCRIBED_ROWS], strict=False)]
    rest = f" and {len(row_ids) - len(named)} more" if len(row_ids) > len(named) else ""
    return f"rows {', '.join(named)}{rest}" if named else "no rows"
