"""Prepared rows → micro-batches of this rank: the same global batches in the same order on any number of
ranks.

The order is cut into global batches first and only then over ranks and micro-batches, so a step sees the same
rows whatever the world size. In the last, short global batch of an epoch a rank that gets no row runs a
filler of padding without labels, because every rank must take part in the collectives; the filler adds
exactly nothing.

Under a token budget the micro-batches of a step are as many as its rows need. The Trainer counts in steps of
a fixed number, for resumption, epochs and the end of a step; so a step keeps that number of places, and those
that are not needed are empty: the loader yields `NOTHING` for them, which is skipped. How many there are
follows from the rows alone, so every rank has the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from fsdp_tune.core.errors import FailedError, Problem
from fsdp_tune.data.batches import rank_micro_batches
from fsdp_tune.data.collate import collate, cumulative_lengths, example_ids, source_ids
from fsdp_tune.data.row_order import RowOrder
from fsdp_tune.data.store import IGNORE_INDEX, Int64, Origin, Row, RowStore
from fsdp_tune.data.token_budget import TokenBudget, token_micro_batches
from fsdp_tune.run.manifest import digest
from fsdp_tune.worker.stop_request import ignore_stop_signals

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
        super().__init__(
            Problem(
                "row-unreadable",
                message,
                hint="the prepared data may be incomplete: `fsdp-tune prepare` rebuilds them",
            )
        )


class Rows(Dataset["Row | None"]):
    def __init__(self, store: RowStore, source_of_file: Int64 | None = None) -> None:
        """Rows have `sources` if `source_of_file` is given, the index of the source of each file of the
        store."""
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
            return dataclasses.replace(
                row, sources=tuple(self._source_of_file[self.store.files_of([index])[0]].tolist())
            )
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
    """Batches have `example_ids` and `example_lengths`: a mixture's load-balancing loss is of each example
    alone."""
    sources: int = 0
    """If not 0, the number of training sources: batches of rows that have `sources` have `source_ids`, for
    the loss of each."""

    def __call__(self, items: Sequence[Row | None]) -> Batch:
        if not items:
            return NOTHING
        rows = [row for row in items if row is not None]
        try:
            arrays = collate(rows, self.pad_token_id, self.multiple_of, max_length=self.max_length)
        except Exception as error:
            named = ", ".join(str(row.row_id) for row in rows)
            raise UnreadableRow(
                f"rows {named} cannot be made a batch: {type(error).__name__}: {error}"
            ) from error
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
        return [
            rows[ranks[data_rank]]
            for ranks in token_micro_batches(self.lengths[rows], self.budget, data_size)
        ]


class MicroBatches(BatchSampler):
    """Row numbers of each micro-batch of one rank, for one epoch; FILLER where the last global batch has too
    few rows.

    Of a global batch that is cut by tokens the first places are empty where it needs fewer micro-batches than
    `accumulation`.
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

        With `by_tokens`, `micro_batch` rows of the greatest length fill its budget, and `accumulation`
        micro-batches of them are enough.
        """
        self.order, self._by_tokens = order, by_tokens
        self._data_rank, self._data_size = data_rank, data_size
        self.micro_batch, self._accumulation = micro_batch, accumulation
        self.epoch = 0

    @property
    def global_batch(self) -> int:
        return self.order.global_batch

    def digest(self, epoch: int = 0) -> str:
        """Return a digest of an epoch's order, equal on every rank and for every world size with the same
        global batches."""
        found = self.order.epoch(epoch)
        cut = [repr(found.parts)] if len(found.parts) > 1 else []
        return digest(np.ascontiguousarray(found.rows, dtype=np.int64).tobytes(), *cut)

    def rows_of_step(self, step: int) -> list[int]:
        """Return this rank's rows in step `step` (from 0) of the current epoch."""
        batches = list(self)[step * self._accumulation : (step + 1) * self._accumulation]
        return [row for batch in batches for row in batch if row != FILLER]

    def epochs_after(self, step: int) -> float:
        """Return the epochs trained after `step` steps (rows over rows per epoch), the same on any number of
        ranks."""
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
        # The Trainer skips the steps that earlier attempts trained, and counts as many places for each as for
        # a step of this one.
        trained = epoch.parts[-1].step
        yield from [[]] * (trained * self._accumulation)
        for step in range(trained, epoch.steps):
            yield from self._split(epoch.batch(step))

    def _split(self, rows: Int64) -> Iterator[list[int]]:
        if self._by_tokens is not None:
            cut = self._by_tokens.cut(rows, self._data_rank, self._data_size)
            return iter(
                [[]] * (self._places(len(rows)) - len(cut)) + [taken.tolist() or [FILLER] for taken in cut]
            )
        micro_batches = rank_micro_batches(
            rows, dp_rank=self._data_rank, dp_size=self._data_size, micro_batch_size=self.micro_batch
        )
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
    """`workers` processes read ahead `prefetch` micro-batches each; 0 reads in the training process.
    `source_of_file`: see `Rows`.

    Iterating draws a seed for the processes, from a generator of its own. From the global one, which dropout
    draws from, it would be drawn once per epoch without processes and once per launch with them, so that a
    resume at the start of an epoch drew other masks.
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
        f"a process of the data loader is gone while rows were read for step {step + 1} and later, from "
        f"{next_rows()} on: {first_line}"
    )
    hint = (
        "out of host memory, or /dev/shm full? `training.dataloader_num_workers: 0` reads in the rank itself"
    )
    return Problem("loader-died", message, hint=hint)


def eval_batches(rows: int, *, data_rank: int, data_size: int, micro_batch: int) -> list[list[int]]:
    """Split rows over the ranks, each row once, with as many batches on each rank: fillers instead of
    repeated rows."""
    count = math.ceil(rows / (data_size * micro_batch))
    mine = list(range(data_rank, rows, data_size))
    batches = [mine[start : start + micro_batch] for start in range(0, len(mine), micro_batch)]
    return batches + [[FILLER]] * (count - len(batches))
