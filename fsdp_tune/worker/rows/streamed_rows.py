"""The rows of a stream on this rank: its lanes, read in turn by loader processes or in the rank itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Problem, usage_error
from fsdp_tune.core.values import is_mapping
from fsdp_tune.data.store import Origin, RowStore
from fsdp_tune.data.stream.lanes import Lane, StreamRow
from fsdp_tune.data.stream.row_stream import Cursor, LaneState, RowStream
from fsdp_tune.run.manifest import digest
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.rows.batches import Batch, Collator, loader_died
from fsdp_tune.worker.rows.training_rows import described
from fsdp_tune.worker.step_observer import LoggedStep, StepObserver
from fsdp_tune.worker.stop_request import ignore_stop_signals

STEPS_AHEAD = 2
"""Steps whose rows a loader process prepares in advance, unless the recipe sets
`training.dataloader_prefetch_factor`."""
NO_ROW = "no row left"


@dataclass(frozen=True, slots=True)
class ReaderFailure:
    """An error of a loader process. torch would pass on its text alone."""

    problems: tuple[Problem, ...]
    exit_code: ExitCode


@dataclass(slots=True)
class StreamedRows(StepObserver):
    """Rows of the lanes r, r + W, … on data rank r of W; the rank takes row n of the run where n mod W is
    r."""

    stream: RowStream
    sample: RowStore
    collator: Collator
    data_rank: int
    data_size: int
    micro_batch: int
    accumulation: int
    max_steps: int
    bad_rows: Path
    """Rows that were skipped are appended to this file."""
    counts: bool = True
    """False on a rank that shares its rows with another, which counts tokens and writes bad rows."""
    states: dict[int, LaneState] = field(default_factory=dict[int, LaneState])
    """State of each lane of this rank, after the last row that was given."""
    given: int = 0
    """Rows that this rank was given since the run began."""
    tokens: list[int] = field(default_factory=list[int])
    """Tokens of each source in the rows that this rank was given, since the run began."""
    listed: set[str] = field(default_factory=set[str])
    """Lines in the files of skipped rows: a row is listed once, however often it is read."""
    first_row: int = 0
    """Number of the first row of this attempt, and below its step: an earlier one may have had another global
    batch."""
    first_step: int = 0
    ended: set[int] = field(default_factory=set[int])
    """Lanes that have no row left."""

    def __post_init__(self) -> None:
        self.states = dict.fromkeys(
            range(self.data_rank, self.stream.lanes, self.data_size), self.stream.first_state()
        )
        self.tokens = [0] * len(self.stream.sources)

    @property
    def global_batch(self) -> int:
        return self.stream.global_batch

    @property
    def order(self) -> None:
        return None

    def batches(self, *, workers: int, pin_memory: bool, prefetch: int | None) -> Iterable[Batch]:
        return _Batches(self, workers, pin_memory, prefetch)

    def set_epoch(self, epoch: int) -> None:
        """Nothing: lanes count their passes."""

    def epochs_after(self, step: int) -> float:
        """Return the complete passes over the source of which the fewest were made, in the lanes of this
        rank."""
        return float(min(cursor.passes for state in self.states.values() for cursor in state.cursors))

    def digest(self) -> str:
        stream = self.stream
        facts = [
            stream.names,
            stream.lanes,
            stream.seed,
            stream.shuffle,
            stream.window_rows,
            stream.shares,
            stream.global_batch,
        ]
        return digest(json.dumps(facts))

    def rows_of_all_ranks(self, step: int) -> list[int]:
        start = self.first_row + (step - self.first_step) * self.global_batch
        return list(range(start, start + self.global_batch))

    def describe(self, batch: Batch) -> str:
        return described(batch.row_ids, list(batch.origins))

    def examples_of(self, batch: Batch) -> list[list[tuple[Origin, int]]]:
        return [list(row) for row in batch.examples]

    def problem_of(self, error: BaseException, step: int) -> Problem | None:
        return loader_died(error, lambda: "the stream", step)

    def count(self, batches: Sequence[Batch]) -> None:
        """Nothing: a row is counted when it is taken."""

    def skip_empty(self, step: int) -> None:
        if not all(gather(len(self.ended) == len(self.states))):
            self.first_row += self.global_batch
            return
        own = [
            (sum(each.read for each in cursors), min(each.passes for each in cursors))
            for cursors in self._cursors()
        ]
        every = [found for found in gather(own if self.counts else []) if found]
        account = "; ".join(
            source.read(sum(rows for rows, _ in found), min(passes for _, passes in found))
            for source, found in zip(self.stream.sources, zip(*every, strict=True), strict=True)
        )
        hint = (
            f"`--resume auto --set training.max_steps={step}` ends the run there; higher `repeats` need "
            "a new run"
        )
        raise usage_error(
            "stream-ended", f"the stream has no row left for step {step + 1}: {account}", hint=hint
        )

    def _cursors(self) -> list[list[Cursor]]:
        """Return the cursors of each source, in the lanes of this rank."""
        return [
            [state.cursors[source] for state in self.states.values()]
            for source in range(len(self.stream.sources))
        ]

    def facts(self, step: LoggedStep) -> dict[str, int | float]:
        """Return tokens and complete passes of each source, and truncated rows, over all ranks.
        Collective."""
        passes = [min(cursor.passes for cursor in cursors) for cursors in self._cursors()]
        truncated = sum(state.rows_truncated for state in self.states.values()) if self.counts else 0
        evaluated = sum(state.rows_evaluated for state in self.states.values()) if self.counts else 0
        every = gather((self.tokens, passes, truncated, evaluated))
        facts: dict[str, int | float] = {"rows_truncated": sum(count for *_, count, _ in every)}
        if len(self.stream.evaluated):
            facts |= {"rows_also_evaluated": sum(count for *_, count in every)}
        for index, source in enumerate(self.stream.sources):
            name = source.opened.entry.label or str(index)
            facts[f"source_{name}_tokens"] = sum(tokens[index] for tokens, *_ in every)
            facts[f"source_{name}_passes"] = min(passes[index] for _, passes, *_ in every)
        return facts

    def state(self) -> dict[str, object]:
        """Return the states of all lanes, the same on every rank. Collective."""
        every = gather(({lane: state.as_list() for lane, state in self.states.items()}, self.tokens))
        lanes = {lane: state for mine, _ in every for lane, state in mine.items()}
        return {
            "version": self.stream.state_version,
            "lanes": lanes,
            "tokens": [sum(counts) for counts in zip(*(tokens for _, tokens in every), strict=True)],
        }

    def restore(self, state: object, step: int) -> None:
        if not is_mapping(state) or state.get("version") != self.stream.state_version:
            message = (
                "the checkpoint is from a version of fsdp-tune that read streams in another order, so "
                "its next rows are not known"
            )
            hint = "continue it with the version in its `launch.json`, or start over with `--overwrite`"
            raise usage_error("stream-state-old", message, hint=hint)
        every = {lane: LaneState.from_list(stored) for lane, stored in state["lanes"].items()}
        self.states = {lane: every[lane] for lane in self.states}
        self.tokens = list(state["tokens"]) if self.data_rank == 0 and self.counts else [0] * len(self.tokens)
        self.listed = self._listed()
        self.given = sum(each.emitted + each.next for each in self.states.values())
        self.first_row, self.first_step = sum(each.emitted + each.next for each in every.values()), step

    def take(self, row: StreamRow) -> StreamRow:
        """Note that a row is given to the trainer."""
        lane = row.row_id % self.stream.lanes
        self.states[lane] = row.after
        self.given += 1
        (self.ended.discard if row.lengths or row.is_skipped else self.ended.add)(lane)
        if not self.counts:
            return row
        for source, tokens in zip(row.sources, row.lengths, strict=True):
            self.tokens[source] += tokens
        if row.bad:
            lines = [
                json.dumps({"file": name, "row": bad.number, "column": bad.column, "reason": bad.reason})
                for name, bad in row.bad
            ]
            new = [line for line in dict.fromkeys(lines) if line not in self.listed]
            self.listed.update(new)
            with open(self.bad_rows, "a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in new)
        return row

    def _listed(self) -> set[str]:
        """Return the lines that all ranks of earlier attempts wrote: steps that are repeated after a
        checkpoint read their rows again."""
        files = self.bad_rows.parent.glob(f"{self.bad_rows.stem.rpartition('-')[0]}-*{self.bad_rows.suffix}")
        return {line for file in files for line in file.read_text(encoding="utf-8").splitlines()}


@dataclass(frozen=True, slots=True)
class _Batches:
    rows: StreamedRows
    workers: int
    pin_memory: bool
    prefetch: int | None

    def __len__(self) -> int:
        return self.rows.max_steps * self.rows.accumulation

    def __iter__(self) -> Iterator[Batch]:
        rows = self.rows
        readers = self._readers()
        while True:
            taken: list[StreamRow] = []
            for _ in range(rows.micro_batch):
                item = next(readers[rows.given % len(rows.states) % len(readers)])
                if isinstance(item, ReaderFailure):
                    raise FsdpTuneError(*item.problems, exit_code=item.exit_code)
                taken.append(rows.take(item))
            batch = rows.collator([row for row in taken if row.lengths] or [None])
            places = tuple((*row.origins, NO_ROW)[0] for row in taken)
            examples = tuple(tuple(zip(map(_origin, row.origins), row.lengths, strict=True)) for row in taken)
            batch = replace(
                batch, row_ids=tuple(row.row_id for row in taken), origins=places, examples=examples
            )
            yield batch.pin_memory() if self.pin_memory else batch

    def _readers(self) -> list[Iterator[StreamRow | ReaderFailure]]:
        """Return iterators over the lanes: number k has every lane whose index is k modulo their number."""
        rows = self.rows
        count = min(max(1, self.workers), len(rows.states))
        # A message for each row would cost a small model more than its step: a process sends its rows of a
        # step together.
        at_once = -(-rows.micro_batch * rows.accumulation // count) if self.workers else 1
        parts = [
            _Part(rows.stream, rows.states, rows.given, count, number, at_once) for number in range(count)
        ]
        if not self.workers:
            return [chain.from_iterable(parts[0])]
        return [chain.from_iterable(self._loader(part)) for part in parts]

    def _loader(self, part: _Part) -> DataLoader[list[StreamRow | ReaderFailure]]:
        """Return the rows of a part, read by a process of its own."""
        return DataLoader(
            part,
            batch_size=None,
            num_workers=1,
            collate_fn=_same,
            worker_init_fn=_start_worker,
            prefetch_factor=self.prefetch or STEPS_AHEAD,
            generator=torch.Generator(),
        )


class _Part(IterableDataset["list[StreamRow | ReaderFailure]"]):
    """The rows of some lanes of a rank, in the order in which the rank takes them, `at_once` together."""

    def __init__(
        self,
        stream: RowStream,
        states: dict[int, LaneState],
        given: int,
        parts: int,
        number: int,
        at_once: int,
    ) -> None:
        self._stream, self._states, self._given = stream, dict(states), given
        self._parts, self._number, self._at_once = parts, number, at_once

    def __iter__(self) -> Iterator[list[StreamRow | ReaderFailure]]:
        lanes = sorted(self._states)
        opened: dict[int, Iterator[StreamRow]] = {}
        at, rows = self._given, list[StreamRow | ReaderFailure]()
        try:
            while True:
                index = at % len(lanes)
                if index % self._parts == self._number:
                    if index not in opened:
                        opened[index] = iter(Lane(self._stream, lanes[index], self._states[lanes[index]]))
                    rows.append(next(opened[index]))
                    if len(rows) == self._at_once:
                        yield rows
                        rows = []
                at += 1
        except FsdpTuneError as error:
            yield [*rows, ReaderFailure(error.problems, error.exit_code)]
        except Exception as error:  # noqa: BLE001  the process would only pass on the text of its traceback
            row = at // len(lanes) * self._stream.lanes + lanes[at % len(lanes)]
            message = f"row {row} of the stream cannot be read: {type(error).__name__}: {error}"
            yield [*rows, ReaderFailure((Problem("row-unreadable", message),), ExitCode.FAILED)]


def _origin(place: str) -> Origin:
    name, _, row = place.rpartition(":")
    return (name, int(row))


def _same(item: object) -> object:
    return item


def _start_worker(number: int) -> None:
    ignore_stop_signals(number)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process, and tokenizers warns of a fork
